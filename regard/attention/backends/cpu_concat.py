"""Backend "concat_cpu": the score `Concat` on the blockwise CPU kernel `kernels.cpu.concat`."""

from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention.backends.call import Call, disable_compile
from regard.attention.reference import repeat_heads
from regard.attention.scores import Concat
from regard.kernels.cpu import concat


def supports(call: Call) -> bool:
    return type(call.score) is Concat and call.bias is None and concat.supports(call.q, call.v)


@disable_compile
def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    assert isinstance(call.score, Concat)
    H, parts = call.q.shape[1], call.mask_parts

    def block_mask(b: slice, p: Tensor, s: Tensor) -> Bool[Tensor, "..."] | None:
        mask = parts.select_sequences(b).mask
        return None if mask is None else mask(p, s)

    q, k, _ = call.transform(repeat_heads(call.k, H))
    v, w = repeat_heads(call.v, H), call.score.weight_a.to(q.dtype)
    return concat.concat_attention(q, k, v, w, parts.causal, parts.window, block_mask)
