"""What a page is given of a look: a header that says what there is, and q and k of every attention as bytes.

A page computes its maps itself, so it grows with the length of a text and not with its square. For every attention

    weights = softmax over keys of (scale · pair(q, k) + bias), where the mask allows,

with pair(q, k) = q·k ("dot": five of the six scores, q and k being folded as `Score.fold` says) or
Σ_d w_d tanh(q_d + k_d) ("concat"). Numbers are little-endian float32; those of large q and k uint16, see `narrow`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import SCORES, Bias, Concat, Mask, Recorded, Score
from regard.attention.backends.call import Call
from regard.attention.masks import And, Causal, Form, Not, Or, Padding, Window
from regard.attention.reference import repeat_heads
from regard.attention.scores import DotLike
from regard.errors import RegardError
from regard.version import __version__
from regard.viewer import beams
from regard.viewer.forcing import information
from regard.viewer.looking import AttentionMap, Look, Side
from regard.viewer.walk.page_walk import walk_for
from regard.viewer.walk.walkthrough import header_of

FORMAT = 1
# Bytes of q and k up to which they are carried as they are.
EXACT = 16 << 20
TITLE = 100
# What people call a side, where that is not its name: rows of cross-attention stand at what they predict.
CALLED = {"predicted": "Translation"}
INSTEAD = "Save a picture: .png or .svg."


@dataclass(frozen=True, eq=False)
class Scene:
    """A header, which is JSON, and the blobs that it names by their numbers."""

    header: dict[str, Any]
    blobs: list[bytes]


class Ingredients(NamedTuple):
    """What the weights of one attention are made of, for one sequence."""

    q: Float[np.ndarray, "T H D"]
    k: Float[np.ndarray, "S G D"]
    scale: float
    w: Float[np.ndarray, "H D"] | None
    """concat's last vector"""
    bias: Float[np.ndarray, "H R"] | None
    """what is added, by distance: R = T + S - 1 numbers, that of query t and key s at s - t + T - 1"""
    mask: Mask | None


def scene_of(
    look: Look,
    attention: str | None = None,
    head: int | None = None,
    *,
    overview: bool = False,
    walk: bool | None = None,
) -> Scene:
    """The scene of a look, and what it opens with, where somebody says so: the mean over an attention's heads, or one
    head, or the overview of all. Otherwise whoever shows it chooses. With `walk` it has the walk too, which it has
    anyway where model and text are small.

    >>> scene_of(look(translator, "The cat sleeps.")).header["attentions"][0]["name"]  # doctest: +SKIP
    'encoder.0.attention'
    """
    if look.question is not None and attention is head is None and not overview:
        attention = look.alignment.name
        head = max(range(look.alignment.heads), key=lambda one: information(look.block(look.alignment.of(one))))
    opens = opening(look, attention, head, overview)
    blobs: list[bytes] = []
    attentions = carried(look.maps, blobs)
    # A model without attention has nothing but its walk to show.
    walked = walk_for(look, True if not look.maps else walk)
    header = {
        "format": FORMAT,
        "title": shortened(look.title),
        "model": {"family": look.family, "name": look.name, "regard": __version__},
        "texts": {"source": look.source, "target": look.translation},
        "opens": opens,
        "sides": sides_of(look.maps),
        "attentions": attentions,
        "walk": None if walked is None else header_of(walked, blobs),
        "decode": None if look.decoding is None else _decode(look.decoding, blobs),
        "links": links_of(look),
    }
    return Scene(header, blobs)


def opening(
    look: Look, attention: str | None = None, head: int | None = None, overview: bool = False
) -> dict[str, Any] | None:
    """What a page opens with, where somebody says so; an error for what the look does not have."""
    if attention is None and head is None and not overview:
        return None
    named = None if attention is head is None else look.chosen(attention, head).name
    return {"attention": named, "head": head, "all": overview}


def shortened(title: str) -> str:
    return title if len(title) <= TITLE else title[: TITLE - 1] + "…"


def links_of(look: Look) -> list[list[int]] | None:
    """Gold links, which a page counts from the target's words."""
    return None if look.gold is None else [[target, source] for source, target in look.gold]


def carried(maps: Mapping[str, AttentionMap], blobs: list[bytes], looks: int = 1) -> list[dict[str, Any]]:
    """What a header says of attentions; their q and k go to the blobs, which several looks may share."""
    made = {name: _ingredients(one.recorded) for name, one in maps.items()}
    exact = sum(x.nbytes for one in made.values() for x in (one.q, one.k)) <= EXACT // looks
    attentions = []
    for (name, one), layer in zip(made.items(), _layers(maps.values())):
        shown = maps[name]
        score = _called(shown.recorded.calls[0].score)
        attentions.append(
            {
                "name": name,
                "kind": shown.kind,
                "layer": layer,
                "heads": shown.heads,
                "rows": shown.queries.name,
                "columns": shown.keys.name,
                "score": {"called": score, "form": "dot" if one.w is None else "concat", "scale": one.scale},
                "mask": _tree(one.mask),
                "q": put(blobs, one.q, exact),
                "k": put(blobs, one.k, exact),
                "w": put(blobs, one.w),
                "bias": put(blobs, one.bias),
            }
        )
    return attentions


def sides_of(maps: Mapping[str, AttentionMap]) -> dict[str, Any]:
    """What stands along the axes of attentions."""
    sides = {side.name: side for one in maps.values() for side in (one.queries, one.keys)}
    return {
        name: {
            "called": CALLED.get(name, name.capitalize()),
            "tokens": side.tokens,
            "words": side.words,
            "direction": direction(side),
        }
        for name, side in sides.items()
    }


def _decode(tree: beams.BeamTree, blobs: list[bytes]) -> dict[str, Any]:
    return beams.header_of(tree, put(blobs, tree.looked) if len(tree.looked) else None)


def put(blobs: list[bytes], x: np.ndarray | None, exact: bool = True) -> dict[str, Any] | None:
    """Puts an array with the blobs; gives what the header says of it."""
    if x is None:
        return None
    blobs.append(x.astype("<f4").tobytes() if exact else narrow(x))
    return {"at": len(blobs) - 1, "shape": list(x.shape), "type": "float32" if exact else "uint16"}


def narrow(x: Float[np.ndarray, "N A B"]) -> bytes:
    """16 bits a number: for each of the A·B channels its least value and a step, float32, and then N·A·B whole numbers
    of steps. Channels may lie far from 0 and from one another, so that half floats would lose twenty times as much.

    >>> low, step, *steps = np.frombuffer(narrow(np.array([[[1.0]], [[3.0]]])), "<u2").reshape(-1, 2)
    >>> steps
    [array([    0, 65535], dtype=uint16)]
    """
    flat = x.reshape(len(x), -1).astype(np.float64)
    low = flat.min(0).astype("<f4")
    step = ((flat.max(0) - low) / 65535).astype("<f4")
    steps = np.rint((flat - low) / np.where(step > 0, step, 1)).clip(0, 65535).astype("<u2")
    return low.tobytes() + step.tobytes() + steps.tobytes()


def direction(side: Side) -> str:
    """Whether a text is written from the left or from the right: as its first letter is.

    >>> direction(Side("text", ["<sos>", "(", "שלום"], [-1, 0, 0]))
    'rtl'
    """
    signs = (sign for token, word in zip(side.tokens, side.words) if word >= 0 for sign in token)
    strong = (unicodedata.bidirectional(sign) for sign in signs)
    return "rtl" if next((kind for kind in strong if kind in ("L", "R", "AL")), "L") != "L" else "ltr"


def _layers(maps: Iterable[AttentionMap]) -> list[int]:
    """The number of each attention among those of its stack and kind."""
    seen: Counter[tuple[str, str]] = Counter()
    numbers = []
    for one in maps:
        stack = re.split(r"\.\d+", one.name)[0], one.kind
        numbers.append(seen[stack])
        seen[stack] += 1
    return numbers


def _called(score: Score) -> str:
    return next((name for name, kind in SCORES.items() if type(score) is kind), type(score).__name__)


def _tree(mask: Mask | None) -> dict[str, Any] | None:
    """A mask of one sequence as JSON."""
    match mask:
        case None:
            return None
        case Causal():
            return {"op": "causal"}
        case Window(n):
            return {"op": "window", "size": n}
        case Padding(lengths):
            return {"op": "lengths", "length": int(lengths[0])}
        case And(left, right):
            return {"op": "and", "parts": [_tree(left), _tree(right)]}
        case Or(left, right):
            return {"op": "or", "parts": [_tree(left), _tree(right)]}
        case Not(inner):
            return {"op": "not", "part": _tree(inner)}
    raise RegardError(f"A page cannot compute the mask {type(mask).__name__}.", INSTEAD)


@torch.no_grad()
def _ingredients(recorded: Recorded) -> Ingredients:
    """Of the first sequence. The steps of a recurrent decoder, which all look at the same keys, are one attention."""
    first, *others = (_of_first_sequence(call) for call in recorded.calls)
    q, k, score, form, bias = first
    if others:
        if form.relative or bias is not None or not all(torch.equal(k, one.k) for one in others):
            raise RegardError(f"{recorded.name} was called several times, with other keys each time.", INSTEAD)
        q = torch.cat([q, *(one.q for one in others)], dim=2)
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    if type(score).pair not in (DotLike.pair, Concat.pair):
        raise RegardError(f"A page cannot compute the score {_called(score)}.", INSTEAD)
    with torch.autocast(q.device.type, enabled=False):
        folded_q, folded_k, scale = score.fold(q, repeat_heads(k, H))
        w = score.weight_a.squeeze(-1).expand(H, -1) if isinstance(score, Concat) else None
        distances = None if bias is None else _by_distance(bias, H, T, S, q.device)
    keys = _distinct(folded_k[0], k.shape[1])
    return Ingredients(
        _numbers(folded_q[0].transpose(0, 1)),
        _numbers(keys.transpose(0, 1)),
        float(scale),
        None if w is None else _numbers(w),
        None if distances is None else _numbers(distances),
        form.mask,
    )


class _Given(NamedTuple):
    q: Float[Tensor, "1 H T D"]
    k: Float[Tensor, "1 G S C"]
    score: Score
    form: Form
    bias: Bias | None


def _of_first_sequence(call: Call) -> _Given:
    precise = torch.promote_types(call.q.dtype, torch.float32)
    q, k = call.q.to(precise), call.k.to(precise)
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = (x[: int(o.starts[1])].transpose(0, 1)[None] for x, o in ((q, call.q_offsets), (k, call.k_offsets)))
    return _Given(q[:1], k[:1], call.score, call.form.of_batch(slice(0, 1)), call.bias)


def _distinct(k: Float[Tensor, "H S D"], groups: int) -> Float[Tensor, "G S D"]:
    """The heads of keys that differ: one for all (location), one a group, or one a head."""
    for count in (1, groups):
        grouped = k.unflatten(0, (count, -1))
        if torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
            return grouped[:, 0]
    return k


def _by_distance(bias: Bias, H: int, T: int, S: int, device: torch.device) -> Float[Tensor, "H R"]:
    """A bias as numbers by distance, as which every relative one can be told."""
    at = torch.zeros(1, dtype=torch.long, device=device)
    numbers = bias(at, torch.arange(1 - S, T, device=device))[:, 0]
    t, s = torch.tensor([0, T // 2, T - 1], device=device), torch.arange(S, device=device)
    if not torch.allclose(bias(t + (S - T), s), numbers[:, s - t[:, None] + T - 1]):
        raise RegardError(f"A page cannot compute the bias {type(bias).__name__}: it is not one of distances.", INSTEAD)
    return numbers.expand(H, -1)


def _numbers(x: Tensor) -> Float[np.ndarray, "..."]:
    return x.float().contiguous().cpu().numpy()
