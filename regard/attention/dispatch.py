"""Dispatch of attention calls: `attend` checks its inputs, chooses a kernel and runs it.

Context managers around a call set its `DispatchState`: force a kernel, list the choices, observe or change calls.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from regard.attention import exact
from regard.attention.bias import Bias
from regard.attention.kernels import Call, chunked, concat, concat_cpu, sdpa, sentences, short, unpacked, varlen
from regard.attention.masks import Form, Mask
from regard.attention.offsets import Offsets
from regard.attention.reference import reference, reference_packed
from regard.attention.scores import Location, ScaledDot, Score, too_many_keys
from regard.errors import RegardError

# In order of preference; chunked takes everything. Packed calls that no PACKED kernel takes are unpacked.
PACKED = {"sentences": sentences, "varlen": varlen, "concat": concat}
PADDED = {
    "short": short,
    "sentences": sentences,
    "sdpa": sdpa,
    "concat": concat,
    "concat_cpu": concat_cpu,
    "chunked": chunked,
}
KERNELS = (*dict.fromkeys((*PACKED, *PADDED)), "reference")
# Plain operations, which round scores to the dtype of the inputs. The other kernels accumulate in float32.
PLAIN = ("short", "chunked", "reference")

Observer = Callable[[Call, Tensor], None]
"""Called with each call as the kernel received it, and its output."""


@runtime_checkable
class Intervention(Protocol):
    """Changes calls of `attend`: the inputs of the kernel, and its output."""

    def before(self, call: Call) -> Call: ...

    def after(self, call: Call, out: Tensor) -> Tensor: ...


class Choice(NamedTuple):
    """The kernel that ran a call, and the shapes of the call."""

    kernel: str
    q: tuple[int, ...]
    k: tuple[int, ...]


class DispatchState(NamedTuple):
    """What the context managers around a call of `attend` have set, each for its own thread."""

    kernel: str | None = None
    """the kernel that `use` forces"""
    choices: tuple[list[Choice], ...] = ()
    interventions: tuple[Intervention, ...] = ()
    observers: tuple[Observer, ...] = ()
    """these see the calls as the interventions leave them"""


class _Thread(threading.local):
    state = DispatchState()


_thread = _Thread()
# All that compiled code reads of the state, for torch.compile does not guard thread-local objects: set by `use` in any
# thread.
_traced_kernel: str | None = None
_scaled_dot = ScaledDot()


class _ForceEager:
    """Run compiled models eagerly while any thread is inside: torch's stance is one for the whole process."""

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


@contextmanager
def explain() -> Iterator[list[Choice]]:
    """List which kernel each call of `attend` inside takes, compiled code excepted.

    >>> with explain() as choices:
    ...     _ = attend(*torch.zeros(3, 1, 1, 1, 8))
    >>> choices[0].kernel
    'sdpa'
    """
    choices: list[Choice] = []
    state = _thread.state
    with _enter(state._replace(choices=(*state.choices, choices))):
        yield choices


@contextmanager
def use(kernel: str) -> Iterator[None]:
    """Force this kernel for every call of `attend` inside: for tests and for timing.

    >>> with use("reference"):
    ...     attend(*torch.zeros(3, 1, 1, 1, 2))
    tensor([[[[0., 0.]]]])
    """
    if kernel not in KERNELS:
        raise RegardError(f"Unknown kernel {kernel!r}.", f"Choose one of {', '.join(KERNELS)}.")
    global _traced_kernel
    previous = _thread.state
    _traced_kernel = kernel
    try:
        with _enter(previous._replace(kernel=kernel)):
            yield
    finally:
        _traced_kernel = previous.kernel


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer` after each call of `attend` inside; compiled models run eagerly.

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
def intervene(intervention: Intervention) -> Iterator[None]:
    """Let `intervention` change each call of `attend` inside; compiled models run eagerly."""
    state = _thread.state
    with _force_eager, _enter(state._replace(interventions=(*state.interventions, intervention))):
        yield


def attend(
    q: Float[Tensor, "*BH T D"],
    k: Float[Tensor, "*BG S C"],
    v: Float[Tensor, "*BG S Dv"],
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    q_offsets: Int[Tensor, "B1"] | Offsets | None = None,
    k_offsets: Int[Tensor, "B1"] | Offsets | None = None,
) -> Float[Tensor, "*BH T Dv"]:
    """Attention: per query the mean of the values, weighted by softmax(score(q, k) + bias) over the allowed keys.

    Tensors are (B, T, D) or (B, H, T, D); q may have a multiple of the heads of k and v. With offsets they are packed,
    (N, H, D). The default score is the scaled dot product. `bias` adds a number per head, query position and key
    position (see `Bias`). A query without an allowed key gets zeros. No T×S matrix is built, forward or backward.

    >>> from regard.attention import causal
    >>> q = k = v = torch.eye(3)[None]
    >>> attend(q, k, v, mask=causal())[0, 0]
    tensor([1., 0., 0.])
    """
    call = _call(q, k, v, score, mask, bias, q_offsets, k_offsets)
    state = DispatchState(_traced_kernel) if is_dynamo_compiling() else _thread.state
    for intervention in state.interventions:
        call = intervention.before(call)
    packed = call.q_offsets is not None
    out = _packed(call, state) if packed else _padded(call, state)
    for intervention in state.interventions:
        out = intervention.after(call, out)
    for observer in state.observers:
        observer(call, out)
    return out if packed or q.dim() == 4 else out.squeeze(1)


def weights(
    q: Float[Tensor, "*queries D"],
    k: Float[Tensor, "*keys C"],
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    q_offsets: Int[Tensor, "B1"] | Offsets | None = None,
    k_offsets: Int[Tensor, "B1"] | Offsets | None = None,
) -> Float[Tensor, "B H T S"]:
    """The exact weights of `attend`, which never builds them: (B, H, T, S), also of packed input, at least float32.

    >>> weights(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2))
    tensor([[[[0.2500, 0.2500, 0.2500, 0.2500]]]])
    """
    return exact.weights(_call(q, k, k, score, mask, bias, q_offsets, k_offsets))


def _padded(call: Call, state: DispatchState) -> Tensor:
    forced = state.kernel
    # The reference defines attention without queries or keys.
    if forced == "reference" or not (call.q.numel() and call.k.numel()):
        return _run("reference", _reference, call, state)
    for name, kernel in PADDED.items():
        if forced == name if forced else kernel.takes(call):
            return _run(name, kernel.run, call, state)
    raise RegardError(f"The kernel {forced} takes packed sequences only.", "Pass offsets.")


def _packed(call: Call, state: DispatchState) -> Tensor:
    forced = state.kernel
    if forced == "reference" or not (call.q.numel() and call.k.numel()):
        return _run("reference", _reference, call, state)
    for name, kernel in PACKED.items():
        if forced == name if forced else kernel.takes(call):
            return _run(name, kernel.run, call, state)
    return unpacked.run(call, partial(_padded, state=state))


def _reference(call: Call) -> Tensor:
    q, k, v, score, form, bias, q_offsets, k_offsets, _ = call
    if q_offsets is None or k_offsets is None:
        return reference(q, k, v, score, form.mask, bias)
    return reference_packed(q, k, v, score, form.mask, bias, q_offsets, k_offsets)


def _run(name: str, kernel: Callable[[Call], Tensor], call: Call, state: DispatchState) -> Tensor:
    """The output of a kernel.

    A float16 score may exceed the largest float16, 65504: kernels that round their scores to float16, and all kernels
    on a CPU, compute in float32 instead.
    """
    for choices in state.choices:
        choices.append(Choice(name, tuple(call.q.shape), tuple(call.k.shape)))
    device, dtype = call.q.device.type, call.v.dtype
    if dtype != torch.float16 or not (name in PLAIN or device == "cpu"):
        return kernel(call)
    with torch.autocast(device, enabled=False):
        return kernel(call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())).to(dtype)


def _call(q, k, v, score, mask, bias, q_offsets, k_offsets) -> Call:
    """Check shapes and bring (B, T, D) to (B, 1, T, D)."""
    score = score or _scaled_dot
    form = Form.of(mask)
    if q_offsets is None and k_offsets is None:
        if q.dim() == 3 and k.dim() == 3:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        # Shapes are read once: reading takes longer than all the comparisons.
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        if not (
            len(q_shape) == len(k_shape) == len(v_shape) == 4
            and q_shape[0] == k_shape[0]
            and _same_but_width(k_shape, v_shape)
        ):
            raise _shape_error(q, k, v, "Give (B, T, D) or (B, H, T, D), k and v alike but for their width.")
        if form.lengths is not None and form.lengths.shape != q_shape[:1]:
            raise _shape_error(
                q, k, v, f"padding() was given {tuple(form.lengths.shape)} lengths: give one a sequence."
            )
    else:
        if q_offsets is None or k_offsets is None:
            raise RegardError(
                "Packed attention needs both q_offsets and k_offsets.", "Give the same twice for self-attention."
            )
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        if not (len(q_shape) == len(k_shape) == len(v_shape) == 3 and _same_but_width(k_shape, v_shape)):
            raise _shape_error(q, k, v, "With offsets give (N, H, D), k and v alike but for their width.")
        same = q_offsets is k_offsets
        q_offsets = Offsets.of(q_offsets)
        k_offsets = q_offsets if same else Offsets.of(k_offsets)
        if q_offsets.total != len(q) or k_offsets.total != len(k) or len(q_offsets.starts) != len(k_offsets.starts):
            raise _shape_error(
                q,
                k,
                v,
                f"The offsets end at {q_offsets.total} and {k_offsets.total}, "
                f"for {len(q_offsets.starts) - 1} and {len(k_offsets.starts) - 1} sequences.",
            )
        if (form.relative or bias is not None) and not same:
            if not _equal_offsets(q_offsets, k_offsets):
                raise RegardError(
                    "Packed, a causal mask, a window or a bias needs the same offsets for queries and keys.",
                    "Use padding() alone, or give (B, H, T, D).",
                )
            k_offsets = q_offsets
        if isinstance(score, Location) and k_offsets.starts.device.type == "cpu" and not torch.compiler.is_compiling():
            longest = int(k_offsets.lengths.max()) if len(k_offsets.starts) > 1 else 0
            if longest > score.max_keys:
                raise too_many_keys(longest, score.max_keys)
    heads, group = q_shape[1], k_shape[1]
    if heads != group and (group == 0 or heads % group):
        raise _shape_error(q, k, v, "The heads of q must be a multiple of those of k.")
    if score.heads is not None and score.heads != heads:
        raise _shape_error(q, k, v, f"The score has {score.heads} heads.")
    if score.one_width and q_shape[-1] != k_shape[-1]:
        raise _shape_error(q, k, v, "This score needs q and k of one width; General and Concat do not.")
    return Call(q, k, v, score, form, bias, q_offsets, k_offsets)


def _same_but_width(k_shape: torch.Size, v_shape: torch.Size) -> bool:
    """Whether two shapes are equal except for their last axis."""
    return k_shape == v_shape or k_shape[:-1] == v_shape[:-1]


def _equal_offsets(a: Offsets, b: Offsets) -> bool:
    if a.starts is b.starts:
        return True
    # On a GPU the comparison synchronizes: pass one Offsets for both to avoid that.
    return a.max_len == b.max_len and torch.equal(a.starts, b.starts)


def _shape_error(q: Tensor, k: Tensor, v: Tensor, hint: str) -> RegardError:
    return RegardError(f"These do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}.", hint)
