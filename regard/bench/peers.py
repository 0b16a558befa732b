"""Peer implementations of attention: the formula, SDPA and its backends, FlexAttention."""

import functools
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from regard.attention import Dot, Mask, ScaledDot, Score
from regard.attention.masks import MaskParts
from regard.attention.reference import reference
from regard.bench.measurement import Unsupported

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PACKAGES = {"transformers": "transformers", "x-transformers": "x_transformers", "CTranslate2": "ctranslate2"}


def is_installed(peer: str) -> bool:
    """Whether the package of a peer library is installed."""
    return importlib.util.find_spec(PACKAGES[peer]) is not None


def formula(score: Score, mask: Mask | None) -> Attention:
    """The definition of attention, which builds the T×S matrix."""
    return lambda q, k, v: reference(q, k, v, score, mask)


def compiled_formula(score: Score, mask: Mask | None, dynamic: bool = False) -> Attention:
    """The definition, compiled: for one shape or, if `dynamic`, for all shapes."""
    torch.compiler.reset()  # otherwise earlier shapes would affect the compilation of this case
    return torch.compile(formula(score, mask), dynamic=dynamic)


def sdpa(score: Score, mask: Mask | None, backend: str | None = None) -> Attention:
    """torch's scaled_dot_product_attention, with the mask in its cheapest supported form."""
    form, scale = MaskParts.from_mask(mask), _scale(score)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        allowed = _attn_mask(form, q, k)
        causal = form.causal and allowed is None
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, scale=scale)

    if backend is None:
        return attention

    def with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return attention(q, k, v)

    return with_backend


def _scale(score: Score) -> float | None:
    if type(score) not in (Dot, ScaledDot):
        raise Unsupported("supports dot products only")
    return 1.0 if type(score) is Dot else None


def _attn_mask(form: MaskParts, q: Tensor, k: Tensor) -> Tensor | None:
    """None for a causal mask, which is a flag; (B, 1, 1, S) for lengths; (B, 1, T, S) for both."""
    if form.lengths is None:
        return None
    T, S = q.shape[2], k.shape[2]
    s = torch.arange(S, device=q.device)
    allowed = s < form.lengths[:, None, None, None]
    return allowed & (s <= torch.arange(T, device=q.device)[:, None]) if form.causal else allowed


def flex(score: Score, mask: Mask | None, q: Tensor, k: Tensor) -> Attention:
    """FlexAttention, compiled, with a precomputed block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    form, scale = MaskParts.from_mask(mask), _scale(score)
    (B, _, T, _), S = q.shape, k.shape[2]
    block_mask = None
    if mask is not None:
        lengths = form.lengths

        def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            allowed = s <= t if form.causal else s >= 0
            return allowed if lengths is None else allowed & (s < lengths[b])

        block_mask = create_block_mask(mask_mod, B if lengths is not None else None, None, T, S, device=q.device.type)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=block_mask, scale=scale)


def peer_attentions(
    score: Score, mask: Mask | None, q: Tensor, k: Tensor, compiled: bool
) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Names and factories of all peers of one call; `compiled` includes those that take seconds to compile."""
    is_dot_product = type(score) in (Dot, ScaledDot)
    yield "formula, eager", lambda: formula(score, mask)
    if compiled:
        yield "formula, compiled", lambda: compiled_formula(score, mask)
    if is_dot_product:
        yield "SDPA", lambda: sdpa(score, mask)
        if q.is_cuda:
            for backend in BACKENDS:
                yield f"SDPA, {backend}", functools.partial(sdpa, score, mask, backend)
        if compiled:
            yield "FlexAttention", lambda: flex(score, mask, q, k)
