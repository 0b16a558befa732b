"""Dispatch of attention calls: `attend` checks its inputs, chooses a backend and runs it.

Context managers around a call set its `DispatchState`: force a backend, list the choices, observe or change calls.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from regard.attention.backends import (
    batched_matmul,
    chunked,
    concat,
    cpu_concat,
    disentangled,
    padded,
    sdpa,
    varlen,
    varlen_short,
)
from regard.attention.backends.call import Call, disable_autocast
from regard.attention.bias import Bias
from regard.attention.exact_weights import compute_weights
from regard.attention.masks import Mask, MaskParts, Matrix
from regard.attention.offsets import Offsets
from regard.attention.reference import reference, reference_packed
from regard.attention.scores import (
    Concat,
    Disentangled,
    DotLike,
    Location,
    ScaledDot,
    Score,
    is_computed_as,
    too_many_keys_error,
)
from regard.errors import RegardError
from regard.kernels.derivatives import check_first_derivative, is_transformed
from regard.kernels.triton.support import is_interpreted
from regard.ranges import format_value

# In order of preference; chunked supports everything. Packed calls without a PACKED backend are padded.
PACKED = {"varlen_short": varlen_short, "varlen": varlen, "concat": concat}
PADDED = {
    "batched_matmul": batched_matmul,
    "varlen_short": varlen_short,
    "sdpa": sdpa,
    "concat": concat,
    "concat_cpu": cpu_concat,
    "disentangled": disentangled,
    "chunked": chunked,
}
BACKENDS = (*dict.fromkeys((*PACKED, *PADDED)), "reference")
# Backends of plain torch operations, which round scores to the dtype of the inputs. The others accumulate in float32.
UNFUSED = ("batched_matmul", "chunked", "reference")
# The scores that each kernel computes, and the parts of a call that it ignores: such calls cannot be forced to it.
LIMITS: dict[str, tuple[type[Score], tuple[str, ...]]] = {
    "batched_matmul": (DotLike, ()),
    "sdpa": (DotLike, ("window", "distance", "rest")),
    "varlen_short": (DotLike, ("window", "distance", "lengths", "rest", "bias")),
    "varlen": (DotLike, ("lengths", "rest", "bias")),
    "concat": (Concat, ("distance", "rest", "bias")),
    "concat_cpu": (Concat, ("bias",)),
    "disentangled": (Disentangled, ("bias",)),
}
TRITON = ("varlen_short", "concat")
# Backends on torch's kernels, whose own error for second derivatives names only the kernel.
ONCE_DIFFERENTIABLE = ("sdpa", "varlen")

Observer = Callable[[Call, Tensor], None]
"""Called with each call as the backend received it, and its output."""


@runtime_checkable
class AttendInterceptor(Protocol):
    """Changes calls of `attend`: the inputs of the backend, and its output."""

    def before(self, call: Call) -> Call: ...

    def after(self, call: Call, out: Tensor) -> Tensor: ...


class Choice(NamedTuple):
    """The backend that ran a call, and the shapes of the call."""

    backend: str  # name of the backend
    q: tuple[int, ...]
    k: tuple[int, ...]


class DispatchState(NamedTuple):
    """Settings of the context managers around a call of `attend`, separate for each thread."""

    forced_backend: str | None = None
    """the backend that `use` forces"""
    choices: tuple[list[Choice], ...] = ()
    interceptors: tuple[AttendInterceptor, ...] = ()
    observers: tuple[Observer, ...] = ()
    """called after the interceptors have changed a call"""


class _Thread(threading.local):
    state = DispatchState()


_thread = _Thread()
# The only part of the state that compiled code reads, because torch.compile does not guard thread-local objects. `use`
# sets it from any thread.
_traced_backend: str | None = None
_scaled_dot = ScaledDot()


class _ForceEager:
    """Run compiled models eagerly while any thread is inside: torch's stance is global to the process."""

    def __init__(self) -> None:
        self.lock, self.inside, self.stance = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.stance.enter_context(torch.compiler.set_stance("force_eager"))
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.stance.close()


_force_eager = _ForceEager()


@contextmanager
def _enter(state: DispatchState) -> Iterator[None]:
    previous = _thread.state
    _thread.state = state
    try:
        yield
    finally:
        _thread.state = previous


def has_context() -> bool:
    """Whether this thread is inside a context manager that forces, lists, observes or changes calls of `attend`."""
    return _thread.state != DispatchState()


@contextmanager
def explain() -> Iterator[list[Choice]]:
    """List the backend of each call of `attend` inside the with block, except in compiled code.

    >>> with explain() as choices:
    ...     _ = attend(*torch.zeros(3, 1, 1, 1, 8))
    >>> choices[0].backend
    'sdpa'
    """
    choices: list[Choice] = []
    state = _thread.state
    with _enter(state._replace(choices=(*state.choices, choices))):
        yield choices


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Force a backend for every call of `attend` inside the with block: for tests and benchmarks.

    A call whose score, mask or bias the backend does not compute is an error.

    >>> with use("reference"):
    ...     attend(*torch.zeros(3, 1, 1, 1, 2))
    tensor([[[[0., 0.]]]])
    """
    if backend not in BACKENDS:
        raise RegardError(f"Unknown backend {backend!r}.", f"Choose one of {', '.join(BACKENDS)}.")
    global _traced_backend
    previous = _thread.state
    _traced_backend = backend
    try:
        with _enter(previous._replace(forced_backend=backend)):
            yield
    finally:
        _traced_backend = previous.forced_backend


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer` after each call of `attend` inside the with block; compiled models run eagerly.

    >>> shapes = []
    >>> with observe(lambda call, out: shapes.append(tuple(out.shape))):
    ...     _ = attend(*torch.zeros(3, 1, 1, 1, 8))
    >>> shapes
    [(1, 1, 1, 8)]
    """
    state = _thread.state
    with _force_eager, _enter(state._replace(observers=(*state.observers, observer))):
        yield


@contextmanager
def intercept(interceptor: AttendInterceptor) -> Iterator[None]:
    """Apply `interceptor` to each call of `attend` inside the with block; compiled models run eagerly."""
    state = _thread.state
    with _force_eager, _enter(state._replace(interceptors=(*state.interceptors, interceptor))):
        yield


def attend(
    q: Float[Tensor, "*BH T D"],
    k: Float[Tensor, "*BG S C"],
    v: Float[Tensor, "*BG S Dv"],
    *,
    score: Score | None = None,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | None = None,
    q_offsets: Int[Tensor, "B1"] | Offsets | None = None,
    k_offsets: Int[Tensor, "B1"] | Offsets | None = None,
) -> Float[Tensor, "*BH T Dv"]:
    """Attention: per query the mean of the values, weighted by softmax(score(q, k) + bias) over the allowed keys.

    Tensors are (B, T, D) or (B, H, T, D); q may have a multiple of the heads of k and v. With offsets they are packed,
    (N, H, D). The default score is the scaled dot product. `bias` adds a term per head, query position and key
    position (see `Bias`). A mask may be a boolean tensor of the shape of the weights, True where a query may attend. A
    query without an allowed key gets zeros. No T×S matrix is built, forward or backward.

    >>> from regard.attention import causal
    >>> q = k = v = torch.eye(3)[None]
    >>> attend(q, k, v, mask=causal())[0, 0]
    tensor([1., 0., 0.])
    """
    call = _make_call(q, k, v, score, mask, bias, q_offsets, k_offsets)
    state = DispatchState(_traced_backend) if is_dynamo_compiling() else _thread.state
    if is_transformed():
        state = state._replace(forced_backend="reference")
    for interceptor in state.interceptors:
        call = interceptor.before(call)
    out = _run_first(call, state)
    for interceptor in state.interceptors:
        out = interceptor.after(call, out)
    for observer in state.observers:
        observer(call, out)
    return out if call.q_offsets is not None or q.dim() == 4 else out.squeeze(1)


def weights(
    q: Float[Tensor, "*queries D"],
    k: Float[Tensor, "*keys C"],
    *,
    score: Score | None = None,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | None = None,
    q_offsets: Int[Tensor, "B1"] | Offsets | None = None,
    k_offsets: Int[Tensor, "B1"] | Offsets | None = None,
) -> Float[Tensor, "*BH T S"]:
    """The exact weights of `attend`, in float32 or wider: (B, T, S) or (B, H, T, S), as the inputs.

    For packed inputs they are (B, H, T, S), zero beyond the lengths.

    >>> weights(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2))
    tensor([[[[0.2500, 0.2500, 0.2500, 0.2500]]]])
    >>> weights(torch.zeros(1, 1, 2), torch.zeros(1, 4, 2))
    tensor([[[0.2500, 0.2500, 0.2500, 0.2500]]])
    """
    call = _make_call(q, k, k, score, mask, bias, q_offsets, k_offsets)
    result = compute_weights(call)
    return result if call.q_offsets is not None or q.dim() == 4 else result.squeeze(1)


def _run_first(call: Call, state: DispatchState) -> Tensor:
    """Run the first backend that supports a call, or the forced one."""
    forced, is_packed = state.forced_backend, call.q_offsets is not None
    # Only the reference handles calls without queries or keys.
    if forced == "reference" or not (call.q.numel() and call.k.numel()):
        return _run("reference", _reference, call, state)
    for name, backend in (PACKED if is_packed else PADDED).items():
        if _is_forced(name, call) if name == forced else not forced and backend.supports(call):
            return _run(name, backend.run, call, state)
    if is_packed:
        return padded.run(call, partial(_run_first, state=state))
    raise RegardError(f"The backend {forced} supports packed sequences only.", "Pass q_offsets and k_offsets.")


def _is_forced(name: str, call: Call) -> bool:
    """True; an error if the backend that is forced would ignore a part of the call."""
    kind, ignored = LIMITS.get(name, (Score, ()))
    problem = "" if kind is Score or is_computed_as(call.score, kind) else f"the score {type(call.score).__name__}"
    for part in ignored:
        if getattr(call if part == "bias" else call.mask_parts, part) is not None:
            problem = problem or ("the bias" if part == "bias" else "this mask")
    if name == "sdpa" and call.bias is not None and call.mask_parts.causal:
        problem = problem or "a bias with a causal mask"
    if name in TRITON and call.q.device.type == "cpu" and not is_interpreted():
        problem = problem or "tensors on a CPU"
    if problem:
        raise RegardError(f"The backend {name} does not compute {problem}.", "Force chunked, reference or none.")
    return True


def _reference(call: Call) -> Tensor:
    q, k, v, score, parts, bias, q_offsets, k_offsets, _ = call
    if q_offsets is None or k_offsets is None:
        return reference(q, k, v, score, parts.mask, bias)
    return reference_packed(q, k, v, score, parts.mask, bias, q_offsets, k_offsets)


def _run(name: str, backend: Callable[[Call], Tensor], call: Call, state: DispatchState) -> Tensor:
    """Run a backend and note the choice for `explain`.

    Under autocast the output of all backends has its dtype. A score may exceed the largest float16, 65504: backends
    that round scores to float16, and all backends on a CPU, compute in float32 instead.
    """
    for choices in state.choices:
        choices.append(Choice(name, tuple(call.q.shape), tuple(call.k.shape)))
    device, dtype = call.q.device.type, call.v.dtype
    if dtype == torch.float16 and (name in UNFUSED or device == "cpu"):
        with disable_autocast(call.q):
            return backend(call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())).to(dtype)
    out = backend(call)
    if name in ONCE_DIFFERENTIABLE and out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(check_first_derivative)
    if out.dtype == torch.float32 and not out.is_meta and torch.is_autocast_enabled(device):
        out = out.to(torch.get_autocast_dtype(device))
    return out


def _make_call(q, k, v, score, mask, bias, q_offsets, k_offsets) -> Call:
    """Check the inputs; (B, T, D) tensors become (B, 1, T, D)."""
    if score is None:
        score = _scaled_dot
    elif not isinstance(score, Score):
        raise RegardError(
            f"A score is an object such as Cosine(10.0) (got {format_value(score)}).",
            'Create one from its class, or by its name: make_score("cosine", width, width).',
        )
    parts = MaskParts.from_mask(_as_matrix(mask, q, k, q_offsets) if isinstance(mask, Tensor) else mask)
    if q_offsets is None and k_offsets is None:
        if q.dim() == 3 and k.dim() == 3:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        # Read shapes once: that takes longer than all the comparisons.
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        if not (
            len(q_shape) == len(k_shape) == len(v_shape) == 4
            and q_shape[0] == k_shape[0]
            and _equal_except_last_axis(k_shape, v_shape)
        ):
            raise _shape_error(
                q, k, v, "Pass (B, T, D) or (B, H, T, D) tensors; k and v may differ only in their last axis."
            )
        if parts.lengths is not None and parts.lengths.shape != q_shape[:1]:
            raise _shape_error(
                q, k, v, f"The lengths of padding() have shape {tuple(parts.lengths.shape)}: pass one per sequence."
            )
    else:
        if q_offsets is None or k_offsets is None:
            raise RegardError(
                "Packed attention needs both q_offsets and k_offsets.",
                "For self-attention pass the same offsets twice.",
            )
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        if not (len(q_shape) == len(k_shape) == len(v_shape) == 3 and _equal_except_last_axis(k_shape, v_shape)):
            raise _shape_error(
                q, k, v, "With offsets pass (N, H, D) tensors; k and v may differ only in their last axis."
            )
        is_self_attention = q_offsets is k_offsets
        q_offsets = Offsets.from_starts(q_offsets)
        k_offsets = q_offsets if is_self_attention else Offsets.from_starts(k_offsets)
        if q_offsets.total != len(q) or k_offsets.total != len(k) or len(q_offsets.starts) != len(k_offsets.starts):
            raise _shape_error(
                q,
                k,
                v,
                f"The offsets end at {q_offsets.total} and {k_offsets.total}, "
                f"for {len(q_offsets.starts) - 1} and {len(k_offsets.starts) - 1} sequences.",
            )
        if (parts.is_relative or bias is not None) and not is_self_attention:
            if not _equal_offsets(q_offsets, k_offsets):
                raise RegardError(
                    "Packed attention with a causal mask, window or bias needs the same offsets for queries and keys.",
                    "Use padding() only, or pass (B, H, T, D) tensors.",
                )
            k_offsets = q_offsets
        if isinstance(score, Location) and k_offsets.starts.device.type == "cpu" and not torch.compiler.is_compiling():
            max_len = int(k_offsets.lengths.max()) if len(k_offsets.starts) > 1 else 0
            if max_len > score.max_keys:
                raise too_many_keys_error(max_len, score.max_keys)
    heads, k_heads = q_shape[1], k_shape[1]
    if heads != k_heads and (k_heads == 0 or heads % k_heads):
        raise _shape_error(q, k, v, "The number of heads of q must be a multiple of that of k.")
    if score.heads is not None and score.heads != heads:
        raise _shape_error(q, k, v, f"The score has parameters for {score.heads} heads.")
    if score.needs_equal_widths and q_shape[-1] != k_shape[-1]:
        raise _shape_error(q, k, v, "This score needs q and k of the same width; General and Concat do not.")
    return Call(q, k, v, score, parts, bias, q_offsets, k_offsets)


def _as_matrix(mask: Tensor, q: Tensor, k: Tensor, offsets: Tensor | Offsets | None) -> Matrix:
    """A boolean tensor as a mask, with an axis of heads."""
    if mask.dtype != torch.bool:
        raise RegardError(
            f"A mask must be boolean (got a tensor of {mask.dtype}).",
            "Pass True where a query may attend to a key; a term that is added to the scores is a bias.",
        )
    if offsets is not None:
        raise RegardError(
            "A tensor as mask has no meaning for packed sequences.", "Pass (B, H, T, D) tensors, or subclass Mask."
        )
    shape = (*q.shape[:-1], k.shape[-2])
    if not 2 <= mask.dim() <= len(shape) or any(size not in (1, n) for size, n in zip(mask.shape[::-1], shape[::-1])):
        raise RegardError(
            f"The mask has shape {tuple(mask.shape)}, the weights have shape {shape}.",
            "Pass a mask of that shape, or one that broadcasts to it.",
        )
    mask = mask.expand(*mask.shape[:-1], k.shape[-2])
    return Matrix(mask.unsqueeze(1) if q.dim() == mask.dim() == 3 else mask)


def _equal_except_last_axis(k_shape: torch.Size, v_shape: torch.Size) -> bool:
    """Whether two shapes are equal except for their last axis."""
    return k_shape == v_shape or k_shape[:-1] == v_shape[:-1]


def _equal_offsets(a: Offsets, b: Offsets) -> bool:
    if a.starts is b.starts:
        return True
    # On a GPU the comparison synchronizes: pass the same Offsets for both to avoid that.
    return a.max_len == b.max_len and torch.equal(a.starts, b.starts)


def _shape_error(q: Tensor, k: Tensor, v: Tensor, hint: str) -> RegardError:
    return RegardError(f"Incompatible shapes: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}.", hint)
