"""torch's scaled_dot_product_attention, for every score that is a dot product of transformed queries and keys.

On a CPU torch silently falls back from its fused kernel to one with quadratic memory if tensors are 3-d, if q, k and v
differ in width, if a bias requires gradients, or if the last axis is not contiguous; this backend avoids all four. SDPA
supports neither a mask together with `is_causal` nor a causal mask aligned to the last key; `run` expresses both.

A bias without gradients is passed as a mask of floats. That is a T×S matrix, so only up to a fixed number of elements.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.attention.backends.call import Call
from regard.attention.masks import KeyPadding
from regard.attention.reference import repeat_heads
from regard.attention.scores import DotLike, is_computed_as
from regard.kernels.triton.support import contiguous_rows

MAX_BIAS_ELEMENTS = 1 << 24


def supports(call: Call) -> bool:
    parts = call.mask_parts
    if not is_computed_as(call.score, DotLike):
        return False
    if call.bias is not None:
        return _supports_bias(call)
    if parts.rest is not None or parts.window is not None or parts.distance is not None:
        return False
    if not parts.causal:
        return True
    # Causal: `run` pads the queries to as many as there are keys, which is too slow for a few queries over many keys.
    T, S = call.q.shape[2], call.k.shape[2]
    return T == 1 or 2 * T >= S


def _supports_bias(call: Call) -> bool:
    (B, H, T, _), S, parts = call.q.shape, call.k.shape[2], call.mask_parts
    needs_grad = torch.is_grad_enabled() and any(p.requires_grad for p in call.bias.parameters())  # type: ignore[union-attr]
    elements = H * T * S * (1 if parts.lengths is None else B)
    return elements <= MAX_BIAS_ELEMENTS and not needs_grad and not parts.is_relative and parts.rest is None


def run(call: Call) -> Float[Tensor, "B H T Dv"]:
    q, k, scale = call.transform(call.k)
    v, parts = call.v, call.mask_parts
    (_, H, T, _), (_, G, S, _), width = q.shape, k.shape, v.shape[-1]
    causal = parts.causal and T > 1  # a single query is at the last key and attends to all of them
    keys = None if parts.lengths is None else KeyPadding.from_lengths(parts.lengths, S, q.device, q.dtype)
    uses_cudnn = causal and keys is not None and cudnn_supports(q, k, v)
    if causal and keys is not None and not uses_cudnn:
        q, k = _append_mask_column(q, k, ~keys.allowed)
    # Location has keys for every head of q, whatever the number of heads of k.
    q, k, v = _pad_to_equal_widths(q, k, repeat_heads(v, G))
    # Causal, T < S: pad the queries at the front to S rows, and drop these rows from the output.
    # Causal, T > S: the first T − S queries have no allowed key.
    if causal and T != S:
        q = pad(q, (0, 0, S - T, 0)) if T < S else q[:, :, T - S :]
    if uses_cudnn:
        assert keys is not None
        k, v = (repeat_heads(x, H) for x in (k, v))
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, keys.bias, torch.is_grad_enabled(), is_causal=True, scale=scale
        )[0]
    else:
        # (B, 1, 1, S), not expanded: torch converts a boolean mask to floats, and would do so for all T×S elements.
        mask = None if keys is None or causal else keys.allowed if keys.bias is None else keys.bias
        if call.bias is not None:
            p, s = torch.arange(S - T, S, device=q.device), torch.arange(S, device=q.device)
            bias = call.bias(p, s).to(q.dtype)[None].contiguous()  # torch's fused kernels need contiguous rows
            mask = bias if keys is None else bias.masked_fill(~keys.allowed, float("-inf"))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=H != G)
    if causal and T != S:
        out = out[:, :, S - T :] if T < S else pad(out, (0, 0, T - S, 0))
    if out.shape[-1] != width:
        out = out[..., :width]
    return out if keys is None or keys.has_keys is None else out * keys.has_keys


def cudnn_supports(q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S Dv"]) -> bool:
    """Whether cuDNN's kernel can be called directly: unlike SDPA it supports a bias together with `is_causal`.

    These are the conditions of torch's `can_use_cudnn_attention`, which cannot be compiled.
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
        and torch.cuda.get_device_capability(q.device) >= (9, 0)  # on older GPUs flash attention is preferred
    )


def _append_mask_column(q: Tensor, k: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Encode a key mask in q and k: append a column that is large in q, and −large in masked keys.

    Their product lowers the masked scores so far that exp gives exactly 0, and `is_causal` remains available.
    """
    large = 1e4 if q.dtype == torch.float16 else 1e15
    column = masked.mT.to(k.dtype) * -large
    k = torch.cat((k, column.expand(*k.shape[:3], 1)), dim=-1)
    return pad(q, (0, 1), value=large), k


def _pad_to_equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad all three with zeros to the same width (on a GPU a multiple of 8), which changes no dot product."""
    q_width, v_width = q.shape[-1], v.shape[-1]
    width = max(q_width, v_width)
    if q.is_cuda:
        width = -(-width // 8) * 8
    if q_width != width:
        q, k = pad(q, (0, width - q_width)), pad(k, (0, width - q_width))
    if v_width != width:
        v = pad(v, (0, width - v_width))
    return contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
