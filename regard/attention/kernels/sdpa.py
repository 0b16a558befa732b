"""torch's scaled_dot_product_attention, for every score that is a dot product after folding.

On a CPU torch leaves its fused kernel, silently and for a quadratic one, when tensors are 3-d, when q, k and v differ
in width, when a bias wants gradients, or when the last axis is not contiguous; none of this happens here. Nor does it
take a mask beside `is_causal`, or align a causal mask to the last key; what follows says how they are expressed.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.attention.kernels import Call
from regard.attention.masks import Keys
from regard.attention.reference import repeat_heads
from regard.attention.scores import DotLike
from regard.attention.triton_here import contiguous_rows


def takes(call: Call) -> bool:
    form = call.form
    if not isinstance(call.score, DotLike) or call.bias is not None or form.rest is not None or form.window is not None:
        return False
    if not form.causal:
        return True
    # Fewer queries than keys are filled up to a square (see below): not worth it when few of many.
    T, S = call.q.shape[2], call.k.shape[2]
    return T == 1 or 2 * T >= S


def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    q, k, scale = call.fold(call.k)
    v, form = call.v, call.form
    (_, H, T, _), (_, G, S, _), width = q.shape, k.shape, v.shape[-1]
    causal = form.causal and T > 1  # a single query stands at the last key and sees them all
    keys = None if form.lengths is None else Keys.of(form.lengths, S, q.device, q.dtype)
    cudnn = causal and keys is not None and cudnn_takes(q, k, v)
    if causal and keys is not None and not cudnn:
        q, k = _mask_as_width(q, k, ~keys.allowed)
    # Location makes a key for each head of q, whatever the heads of k.
    q, k, v = _equal_widths(q, k, repeat_heads(v, G))
    # Causal, T < S: rows are put before the queries to make a square, and dropped again.
    # Causal, T > S: the first T − S queries see nothing.
    if causal and T != S:
        q = pad(q, (0, 0, S - T, 0)) if T < S else q[:, :, T - S :]
    if cudnn:
        assert keys is not None
        k, v = (repeat_heads(x, H) for x in (k, v))
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, keys.bias, torch.is_grad_enabled(), is_causal=True, scale=scale
        )[0]
    else:
        # (B, 1, 1, S), not expanded: torch turns truth values into numbers, and would do so with all T×S.
        mask = None if keys is None or causal else keys.allowed if keys.bias is None else keys.bias
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=H != G)
    if causal and T != S:
        out = out[:, :, S - T :] if T < S else pad(out, (0, 0, T - S, 0))
    if out.shape[-1] != width:
        out = out[..., :width]
    return out if keys is None or keys.seeing is None else out * keys.seeing


def cudnn_takes(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S Dv"]) -> bool:
    """Whether cuDNN's kernel can be asked by itself: it takes a bias beside `is_causal`, SDPA does not.

    What it demands is in torch's `can_use_cudnn_attention`, which cannot be compiled.
    """
    return (
        q.is_cuda
        and torch.version.hip is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and max(q.shape[-1], v.shape[-1]) <= 128
        and max(q.shape[:2]) < 1 << 16
        and k.shape[2] > 1
        and torch._C._get_cudnn_sdp_enabled()  # torch.backends.cuda.cudnn_sdp_enabled cannot be compiled either
        and not torch.are_deterministic_algorithms_enabled()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)  # measured there; before, flash is preferred
    )


def _mask_as_width(q: Tensor, k: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of keys written into q and k themselves: one more axis, in which q is large and a masked k is −large.

    Their product puts the masked scores so low that exp gives exactly 0, while is_causal stays free.
    """
    large = 1e4 if q.dtype == torch.float16 else 1e15
    column = masked.mT.to(k.dtype) * -large
    k = torch.cat((k, column.expand(*k.shape[:3], 1)), dim=-1)
    return pad(q, (0, 1), value=large), k


def _equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three of one width (on a GPU a multiple of 8), with zeros, which change no dot product."""
    of_q, of_v = q.shape[-1], v.shape[-1]
    width = max(of_q, of_v)
    if q.is_cuda:
        width = -(-width // 8) * 8
    if of_q != width:
        q, k = pad(q, (0, width - of_q)), pad(k, (0, width - of_q))
    if of_v != width:
        v = pad(v, (0, width - of_v))
    return contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
