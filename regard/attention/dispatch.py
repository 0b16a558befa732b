"""The one door: takes queries, keys and values, picks a kernel, and says which when asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention import exact
from regard.attention.bias import Bias
from regard.attention.kernels import Call, chunked, concat, concat_cpu, sdpa, sentences, short, unpacked, varlen
from regard.attention.masks import Form, Mask
from regard.attention.offsets import Offsets
from regard.attention.reference import reference, reference_packed
from regard.attention.scores import Location, ScaledDot, Score, too_many_keys
from regard.errors import RegardError

# In order of preference; chunked takes everything. What none of the first takes is unpacked for the others.
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
# Made of plain operations: their scores are rounded to the dtype of the inputs. The others accumulate in float32.
PLAIN = ("short", "chunked", "reference")

watchers: list[Callable[[Call, Tensor], None]] = []
"""Who wants to see each call as `attend` received it, and its output. Empty unless somebody looks."""


class Changer(Protocol):
    """Who changes calls of `attend` from outside: what a kernel is given, and what came out of it."""

    def before(self, call: Call) -> Call: ...

    def after(self, call: Call, out: Tensor) -> Tensor: ...


changers: list[Changer] = []
"""Empty unless somebody tries something out; watchers see what these leave."""

_choices: "list[list[Choice]]" = []
_forced: list[str] = []
_scaled_dot = ScaledDot()


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
    """For each query the mean of the values, weighted by softmax of score(q, k) + bias over the keys it may look at.

    Tensors are (B, T, D) or (B, H, T, D); q may have a multiple of the heads of k and v. With offsets they are packed,
    (N, H, D). The score is the scaled dot product unless another is given. `bias` adds numbers for where a query and a
    key stand (see `Bias`). A query that may look at nothing gets zeros. There is never a T×S matrix, forward or back.

    >>> from regard.attention import causal
    >>> q = k = v = torch.eye(3)[None]
    >>> attend(q, k, v, mask=causal())[0, 0]
    tensor([1., 0., 0.])
    """
    call = _call(q, k, v, score, mask, bias, q_offsets, k_offsets)
    for changer in changers:
        call = changer.before(call)
    packed = call.q_offsets is not None
    out = _packed(call) if packed else _padded(call)
    for changer in changers:
        out = changer.after(call, out)
    for watch in watchers:
        watch(call, out)
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
    """The exact weights that `attend` uses and never builds, float32 at least: (B, H, T, S), also of packed input.

    >>> weights(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2))
    tensor([[[[0.2500, 0.2500, 0.2500, 0.2500]]]])
    """
    return exact.weights(_call(q, k, k, score, mask, bias, q_offsets, k_offsets))


class Choice(NamedTuple):
    """Which kernel took a call, and the call's shapes."""

    kernel: str
    q: tuple[int, ...]
    k: tuple[int, ...]


@contextmanager
def explain() -> Iterator[list[Choice]]:
    """Says which kernel each call of `attend` inside took.

    >>> with explain() as choices:
    ...     _ = attend(*torch.zeros(3, 1, 1, 1, 8))
    >>> choices[0].kernel
    'sdpa'
    """
    choices: list[Choice] = []
    _choices.append(choices)
    try:
        yield choices
    finally:
        _choices.remove(choices)


@contextmanager
def use(kernel: str) -> Iterator[None]:
    """Every call of `attend` inside takes this kernel, which must be able to: for tests and for timing.

    >>> with use("reference"):
    ...     attend(*torch.zeros(3, 1, 1, 1, 2))
    tensor([[[[0., 0.]]]])
    """
    if kernel not in KERNELS:
        raise RegardError(f"No kernel is called {kernel!r}.", f"Choose one of {', '.join(KERNELS)}.")
    _forced.append(kernel)
    try:
        yield
    finally:
        _forced.pop()


def _padded(call: Call) -> Tensor:
    q, k = call.q, call.k
    forced = _forced[-1] if _forced else None
    # Nobody asks, or nobody is asked: the definition knows what that means.
    if forced == "reference" or not (q.numel() and k.numel()):
        return _run("reference", lambda one: reference(one.q, one.k, one.v, one.score, one.form.mask, one.bias), call)
    for name, kernel in PADDED.items():
        if forced == name if forced else kernel.takes(call):
            return _run(name, kernel.run, call)
    raise RegardError(f"The kernel {forced} takes packed sequences only.", "Give offsets.")


def _packed(call: Call) -> Tensor:
    assert call.q_offsets is not None
    assert call.k_offsets is not None
    forced = _forced[-1] if _forced else None
    if forced == "reference" or not (call.q.numel() and call.k.numel()):
        offsets = call.q_offsets, call.k_offsets
        return _run(
            "reference",
            lambda one: reference_packed(one.q, one.k, one.v, one.score, one.form.mask, one.bias, *offsets),
            call,
        )
    for name, kernel in PACKED.items():
        if forced == name if forced else kernel.takes(call):
            return _run(name, kernel.run, call)
    return unpacked.run(call, _padded)


def _run(name: str, kernel: Callable[[Call], Tensor], call: Call) -> Tensor:
    """The output of a kernel. In float16 a score may exceed the largest number, 65504: where a kernel would round its
    scores to that, and everywhere on a CPU, it computes in float32.
    """
    for choices in _choices:
        choices.append(Choice(name, tuple(call.q.shape), tuple(call.k.shape)))
    device, dtype = call.q.device.type, call.v.dtype
    if dtype != torch.float16 or not (name in PLAIN or device == "cpu"):
        return kernel(call)
    with torch.autocast(device, enabled=False):
        return kernel(call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())).to(dtype)


def _call(q, k, v, score, mask, bias, q_offsets, k_offsets) -> Call:
    """Checks shapes and brings (B, T, D) to (B, 1, T, D)."""
    score = score or _scaled_dot
    form = Form.of(mask)
    if q_offsets is None and k_offsets is None:
        if q.dim() == 3 and k.dim() == 3:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        # Each is asked for its shape once: that takes longer than all that is done with it.
        of_q, of_k, of_v = q.shape, k.shape, v.shape
        if not (len(of_q) == len(of_k) == len(of_v) == 4 and of_q[0] == of_k[0] and _alike(of_k, of_v)):
            raise _wrong(q, k, v, "Give (B, T, D) or (B, H, T, D), k and v alike but for their width.")
        if form.lengths is not None and form.lengths.shape != of_q[:1]:
            raise _wrong(q, k, v, f"padding() was given {tuple(form.lengths.shape)} lengths: give one a sequence.")
    else:
        if q_offsets is None or k_offsets is None:
            raise RegardError(
                "Packed attention needs both q_offsets and k_offsets.", "Give the same twice for self-attention."
            )
        of_q, of_k, of_v = q.shape, k.shape, v.shape
        if not (len(of_q) == len(of_k) == len(of_v) == 3 and _alike(of_k, of_v)):
            raise _wrong(q, k, v, "With offsets give (N, H, D), k and v alike but for their width.")
        same = q_offsets is k_offsets
        q_offsets = Offsets.of(q_offsets)
        k_offsets = q_offsets if same else Offsets.of(k_offsets)
        if q_offsets.total != len(q) or k_offsets.total != len(k) or len(q_offsets.starts) != len(k_offsets.starts):
            raise _wrong(
                q,
                k,
                v,
                f"The offsets end at {q_offsets.total} and {k_offsets.total}, "
                f"for {len(q_offsets.starts) - 1} and {len(k_offsets.starts) - 1} sequences.",
            )
        if (form.relative or bias is not None) and not same:
            if not _equal(q_offsets, k_offsets):
                raise RegardError(
                    "Packed, a causal mask, a window or a bias needs the same offsets for queries and keys.",
                    "Use padding() alone, or give (B, H, T, D).",
                )
            k_offsets = q_offsets
        if isinstance(score, Location) and k_offsets.starts.device.type == "cpu" and not torch.compiler.is_compiling():
            longest = int(k_offsets.lengths.max()) if len(k_offsets.starts) > 1 else 0
            if longest > score.max_keys:
                raise too_many_keys(longest, score.max_keys)
    heads, group = of_q[1], of_k[1]
    if heads != group and (group == 0 or heads % group):
        raise _wrong(q, k, v, "The heads of q must be a multiple of those of k.")
    if score.heads is not None and score.heads != heads:
        raise _wrong(q, k, v, f"The score has {score.heads} heads.")
    if score.one_width and of_q[-1] != of_k[-1]:
        raise _wrong(q, k, v, "This score needs q and k of one width; General and Concat do not.")
    return Call(q, k, v, score, form, bias, q_offsets, k_offsets)


def _alike(of_k: torch.Size, of_v: torch.Size) -> bool:
    """Whether two shapes are the same but for their last number."""
    return of_k == of_v or of_k[:-1] == of_v[:-1]


def _equal(a: Offsets, b: Offsets) -> bool:
    if a.starts is b.starts:
        return True
    # Comparing on a GPU waits for it: pass one Offsets for both where that matters.
    return a.max_len == b.max_len and torch.equal(a.starts, b.starts)


def _wrong(q: Tensor, k: Tensor, v: Tensor, hint: str) -> RegardError:
    return RegardError(f"These do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}.", hint)
