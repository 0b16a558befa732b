"""Who else computes attention here: the same call as `attend`'s, made with what others offer."""

import functools
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from regard.attention import Dot, Mask, ScaledDot, Score
from regard.attention.masks import Form
from regard.attention.reference import reference
from regard.bench.measurement import Cannot

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PACKAGES = {"transformers": "transformers", "x-transformers": "x_transformers", "CTranslate2": "ctranslate2"}


def installed(peer: str) -> bool:
    """Whether a peer's package is there."""
    return importlib.util.find_spec(PACKAGES[peer]) is not None


def formula(score: Score, mask: Mask | None) -> Attention:
    """The definition, as a user would write it down: it builds the T×S matrix."""
    return lambda q, k, v: reference(q, k, v, score, mask)


def compiled_formula(score: Score, mask: Mask | None, dynamic: bool = False) -> Attention:
    """The same, compiled: for one shape, or (dynamic) once for all of them."""
    torch.compiler.reset()  # each case is compiled for itself, not for whatever shapes came before
    return torch.compile(formula(score, mask), dynamic=dynamic)


def sdpa(score: Score, mask: Mask | None, backend: str | None = None) -> Attention:
    """torch's scaled_dot_product_attention, with the mask in the cheapest form that it takes."""
    form, scale = Form.of(mask), _scale(score)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        allowed = _allowed(form, q, k)
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
        raise Cannot("knows dot products alone")
    return 1.0 if type(score) is Dot else None


def _allowed(form: Form, q: Tensor, k: Tensor) -> Tensor | None:
    """A causal mask alone has a flag of its own; lengths are a row of keys; both are the whole square."""
    if form.lengths is None:
        return None
    T, S = q.shape[2], k.shape[2]
    s = torch.arange(S, device=q.device)
    allowed = s < form.lengths[:, None, None, None]
    return allowed & (s <= torch.arange(T, device=q.device)[:, None]) if form.causal else allowed


def flex(score: Score, mask: Mask | None, q: Tensor, k: Tensor) -> Attention:
    """FlexAttention, compiled, with a mask of blocks made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    form, scale = Form.of(mask), _scale(score)
    (B, _, T, _), S = q.shape, k.shape[2]
    block_mask = None
    if mask is not None:
        lengths = form.lengths

        def may_look(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            allowed = s <= t if form.causal else s >= 0
            return allowed if lengths is None else allowed & (s < lengths[b])

        block_mask = create_block_mask(may_look, B if lengths is not None else None, None, T, S, device=q.device.type)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=block_mask, scale=scale)


def attentions(
    score: Score, mask: Mask | None, q: Tensor, k: Tensor, compiled: bool
) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Every peer of one call by its name; with `compiled`, those too that take seconds to compile."""
    dot_product = type(score) in (Dot, ScaledDot)
    yield "formula, eager", lambda: formula(score, mask)
    if compiled:
        yield "formula, compiled", lambda: compiled_formula(score, mask)
    if dot_product:
        yield "SDPA", lambda: sdpa(score, mask)
        if q.is_cuda:
            for backend in BACKENDS:
                yield f"SDPA, {backend}", functools.partial(sdpa, score, mask, backend)
        if compiled:
            yield "FlexAttention", lambda: flex(score, mask, q, k)
