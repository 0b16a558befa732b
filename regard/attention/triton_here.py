"""Kernels in Triton: whether they can run here, and what their launches share.

They run with a GPU and, so that they are tested without one, in its interpreter.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Plain constants, which a compiler of the caller reads without running anything. CPU and Mac users have no Triton.
FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = FOUND and os.environ.get("TRITON_INTERPRET") == "1"


def can_run(x: Tensor) -> bool:
    """Whether a kernel could take tensors that lie where `x` does."""
    return FOUND and (INTERPRETED or x.is_cuda)


def contiguous_rows(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """The numbers of each row side by side, as a kernel reads them; a copy only where they are not.

    >>> contiguous_rows(torch.zeros(2, 3).T).stride()
    (2, 1)
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def power_of_two(number: int, least: int = 1) -> int:
    """The least power of two that is no less than either: a tile has such sides.

    >>> power_of_two(33), power_of_two(3, least=16)
    (64, 16)
    """
    return max(least, 1 << (number - 1).bit_length())


class Operator:
    """A function on tensors that compilers see as one operator, and everybody else calls as it is.

    Going through torch's dispatcher, as compilers need it, takes a processor about 50 µs longer for a call and its
    gradients: more than a small kernel runs.

    >>> @operator("regard::doubled_for_this_example")
    ... def double(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> double.register_fake(torch.empty_like)
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.operator = torch.library.custom_op(name, function, mutates_args=())
        self.plain = function

    def register_fake(self, shapes: Callable[..., Any]) -> None:
        """What tensors come out, not yet filled in."""
        self.operator.register_fake(shapes)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """As with torch's own: `setup_context` keeps what `backward` needs."""
        self.operator.register_autograd(backward, setup_context=setup_context)
        forward = self.plain

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(*inputs):  # type: ignore[override]
                return forward(*inputs)

            @staticmethod
            def setup_context(ctx, inputs, output):
                setup_context(ctx, inputs, output)

            @staticmethod
            def backward(ctx, *grads):
                return backward(ctx, *grads)

        self.plain = Differentiable.apply

    def __call__(self, *inputs: Any) -> Any:
        # Tensors of other classes have no numbers, or something else to say.
        plain = type(inputs[0]) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
        return (self.plain if plain else self.operator)(*inputs)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Makes an `Operator` of a function, whose types say what it takes and gives."""
    return lambda function: Operator(name, function)
