"""One call of `attend` as backends receive it."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.bias import Bias
from regard.attention.masks import MaskParts
from regard.attention.offsets import Offsets
from regard.attention.scores import Score


class Call(NamedTuple):
    """Inputs of a backend: (B, H, T, D) tensors, or packed (N, H, D) tensors with offsets.

    k and v may have fewer heads than q, a divisor of H.
    """

    q: Float[Tensor, "..."]
    k: Float[Tensor, "..."]
    v: Float[Tensor, "..."]
    score: Score
    mask_parts: MaskParts  # the mask as conjuncts
    bias: Bias | None = None
    q_offsets: Offsets | None = None
    k_offsets: Offsets | None = None
    # Padded from packed sequences: keys may be padding, so Score.transform needs their positions.
    is_padded: bool = False

    def transform(self, k: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], float]:
        """Queries and keys transformed by the score, in the dtype of the values (autocast may return another), and the
        scale."""
        positions = torch.arange(k.shape[-2], device=k.device) if self.is_padded else None
        q, k, scale = self.score.transform(self.q, k, positions)
        dtype = self.v.dtype
        if q.dtype != dtype or k.dtype != dtype:
            q, k = q.to(dtype), k.to(dtype)
        return q, k, scale


def disable_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on the device of x, where there is one: tensors on the device "meta" have none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def disable_compile(run: Callable[[Call], Tensor]) -> Callable[[Call], Tensor]:
    """`torch.compiler.disable`, applied only while compiling: importing the compiler takes a second or more."""

    @functools.wraps(run)
    def wrapper(call: Call) -> Tensor:
        if not torch.compiler.is_compiling():
            return run(call)
        # With fullgraph=True this is an error, which quotes the message.
        torch._dynamo.graph_break(
            msg=f"The attention score {type(call.score).__name__} runs block by block, outside of compiled code. "
            'Compile without fullgraph=True, or compile and run inside `with regard.attention.use("reference")`.'
        )
        return torch.compiler.disable(run)(call)

    return wrapper
