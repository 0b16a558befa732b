"""Scenes: the data of a page, a JSON header and blobs with q and k of every attention.

The page computes the maps itself, so its size grows linearly with the length of a text. For every attention

    weights = softmax over the unmasked keys of (scale · pair(q, k) + bias),

with pair(q, k) = q·k ("dot": five of the six scores, after `Score.transform`) or Σ_d w_d tanh(q_d + k_d) ("concat").
Numbers are little-endian float32; large q and k are quantized to uint16.
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

from regard.attention import SCORES, Bias, Concat, Disentangled, Mask, Recorded, Score, SoftCap
from regard.attention.backends.call import Call
from regard.attention.masks import And, Causal, Local, MaskParts, Not, Or, Padding, SelectedSequences, Window
from regard.attention.reference import repeat_heads
from regard.attention.scores import DotLike, is_computed_as
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import mutual_information
from regard.version import __version__
from regard.viewer.outcomes import compute_outcome, output_header
from regard.viewer.page.explanations import explanation_header
from regard.viewer.search_tree import SearchTree, search_header
from regard.viewer.text_look import AttentionMap, Look
from regard.viewer.token_axis import TokenAxis
from regard.viewer.trace.build import trace_for_page
from regard.viewer.trace.computation import PageTensor
from regard.viewer.trace.steps import trace_header, trace_template

FORMAT = 1
# Bytes of q and k up to which they are stored as float32.
MAX_EXACT_BYTES = 16 << 20
MAX_TITLE = 100
# Labels of axes, where they differ from the name: rows of cross-attention are labeled with the tokens they predict.
AXIS_LABELS = {"predicted": "Translation"}
PLOT_HINT = "Save a plot (.png, .svg or .pdf) instead."


@dataclass(frozen=True, eq=False)
class Scene:
    """A JSON header, and the blobs that it refers to by index."""

    header: dict[str, Any]
    blobs: list[bytes]
    trace_template: dict[str, Any] | None = None
    """the steps of the step-by-step view for any input, if the page contains its model"""


# The parts of a page besides its title, model and texts; a part is null where a look has none. The engine of a page
# takes the list from the page's own scene, so that the scenes of new input have the same parts.
PARTS = (
    *("initial", "sides", "attentions", "links"),  # attention maps, and what is shown first
    *("warning", "output", "explained", "decode", "trace"),  # of a text: its output and how it was computed
    *("image", "images"),
    *("compared", "similarity"),
)


def make_header(title: str, family: str, name: str, texts: dict[str, str], **parts: Any) -> dict[str, Any]:
    """The header of a scene, with null for all parts that are not given.

    >>> make_header("cat", "gpt", "pico", {"source": "cat", "target": ""}, attentions=[])["trace"] is None
    True
    """
    if unknown := set(parts) - set(PARTS):
        raise TypeError(f"Unknown parts of a page: {', '.join(sorted(unknown))}.")
    top = {"format": FORMAT, "title": shorten_title(title), "texts": texts}
    return {**top, "model": {"family": family, "name": name, "regard": __version__}, **dict.fromkeys(PARTS), **parts}


class MapInputs(NamedTuple):
    """The inputs from which a page computes the weights of one attention, for one sequence."""

    q: Float[np.ndarray, "T H D"]
    k: Float[np.ndarray, "S G D"]
    scale: float
    w: Float[np.ndarray, "H D"] | None
    """last vector of the concat score"""
    bias: Float[np.ndarray, "H R"] | None
    """bias by distance: R = T + S - 1 numbers; index s - t + T - 1 for query t and key s"""
    mask: Mask | None
    cap: float
    """soft-capping of the scores, cap · tanh(score / cap); 0: none"""
    relative: list[int] | None
    """disentangled attention: the last channels of q and k are products with relative positions; this is the index of
    the channel by distance, as for `bias`"""


def build_scene(
    look: Look,
    attention: str | None = None,
    head: int | None = None,
    *,
    overview: bool = False,
    trace: bool | None = None,
    explain: bool | None = False,
    tensors: Mapping[str, PageTensor] | None = None,
) -> Scene:
    """Build the scene of a look.

    The arguments select the initial view: the mean over heads of an attention, one head, or the overview of all. By
    default the page chooses. `trace` includes the step-by-step view (default: if model and text are small). `explain`
    computes the explanations of the output in advance (None: if they are cheap); otherwise the page requests them from
    its model. `tensors` are the parameters of the model of the page, if it contains one.

    >>> build_scene(look(translator, "The cat sleeps.")).header["attentions"][0]["name"]  # doctest: +SKIP
    'encoder.0.attention'
    """
    if look.question is not None and attention is head is None and not overview:
        attention = look.alignment.name
        head = max(
            range(look.alignment.heads),
            key=lambda one: mutual_information(look.question_block(look.alignment.head_weights(one))),
        )
    initial = initial_view(look, attention, head, overview)
    blobs: list[bytes] = []
    attentions = attention_headers(look.maps, blobs)
    # Without attention, the step-by-step view is all there is to show.
    page_trace = trace_for_page(look, True if not look.maps else trace, tensors)
    outcome = None if look.pipeline is None else compute_outcome(look)
    header = make_header(
        look.title,
        look.family,
        look.name,
        _text_headers(look),
        warning=length_warning(look),
        output=None if outcome is None else output_header(outcome),
        explained=None if outcome is None else explanation_header(look, outcome, explain),
        initial=initial,
        sides=axis_headers(look.maps),
        attentions=attentions,
        trace=None if page_trace is None else trace_header(page_trace, blobs),
        decode=None if look.search_tree is None else _search_header(look.search_tree, blobs),
        links=gold_links(look),
    )
    return Scene(header, blobs, None if page_trace is None else trace_template(page_trace))


def _text_headers(look: Look) -> dict[str, str]:
    texts = {"source": look.source, "target": look.translation}
    return texts | ({"context": look.context} if look.context else {})


def length_warning(look: Look) -> str | None:
    """A warning if a text is longer than any in training, or if only a part of the source was read; otherwise None."""
    if look.pipeline is None:
        return None
    trained, special, longest = look.pipeline.trained_length, look.pipeline.special, max(map(len, look.ids))
    if longest > trained:
        return f"The text has {longest} tokens, more than any in training ({trained}): the output may be worse."
    added = special.add_special_tokens([])
    tokens, read = len(look.pipeline.tokenizers[0].encode(look.source)), len(look.ids[0]) - len(added)
    if len(look.ids[0]) == trained and tokens > read:
        return f"The text has {tokens} tokens; the model reads only {read} of them."
    return None


def initial_view(
    look: Look, attention: str | None = None, head: int | None = None, overview: bool = False
) -> dict[str, Any] | None:
    """The initial view of a page, None without arguments. Raises an error for an unknown attention or head."""
    if attention is None and head is None and not overview:
        return None
    name = None if attention is head is None else look.select_attention(attention, head).name
    return {"attention": name, "head": head, "all": overview}


def shorten_title(title: str) -> str:
    return title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…"


def gold_links(look: Look) -> list[list[int]] | None:
    """Gold links as (target word, source word)."""
    return None if look.gold is None else [[target, source] for source, target in look.gold]


def attention_headers(maps: Mapping[str, AttentionMap], blobs: list[bytes], looks: int = 1) -> list[dict[str, Any]]:
    """Headers of attentions; appends their q and k to the blobs of one or several looks."""
    inputs = {name: _map_inputs(one.recorded) for name, one in maps.items()}
    exact = (
        sum(x.nbytes for map_inputs in inputs.values() for x in (map_inputs.q, map_inputs.k))
        <= MAX_EXACT_BYTES // looks
    )
    headers = []
    for (name, one), layer in zip(inputs.items(), _layer_indices(maps.values())):
        shown = maps[name]
        score = _score_name(shown.recorded.calls[0].score)
        headers.append(
            {
                "name": name,
                "kind": shown.kind,
                "layer": layer,
                "heads": shown.heads,
                "rows": shown.queries.name,
                "columns": shown.keys.name,
                "score": {
                    "name": score,
                    "form": "dot" if one.w is None else "concat",
                    "scale": one.scale,
                    **({"cap": one.cap} if one.cap else {}),
                    **({"relative": one.relative} if one.relative else {}),
                },
                "mask": _mask_header(one.mask),
                "q": add_blob(blobs, one.q, exact),
                "k": add_blob(blobs, one.k, exact),
                "w": add_blob(blobs, one.w),
                "bias": add_blob(blobs, one.bias),
            }
        )
    return headers


def axis_headers(maps: Mapping[str, AttentionMap]) -> dict[str, Any]:
    """Headers of the axes of attentions."""
    axes = {axis.name: axis for shown in maps.values() for axis in (shown.queries, shown.keys)}
    return {
        name: {
            "title": AXIS_LABELS.get(name, name.capitalize()),
            "tokens": axis.tokens,
            "words": axis.words,
            "direction": text_direction(axis),
            # Only those that differ from the token.
            "entries": {str(i): e for i, (t, e) in enumerate(zip(axis.tokens, axis.entries)) if t != e},
        }
        for name, axis in axes.items()
    }


def _search_header(tree: SearchTree, blobs: list[bytes]) -> dict[str, Any]:
    return search_header(tree, add_blob(blobs, tree.weights) if len(tree.weights) else None)


def add_blob(blobs: list[bytes], x: np.ndarray | None, exact: bool = True) -> dict[str, Any] | None:
    """Append an array to the blobs; returns its header."""
    if x is None:
        return None
    blobs.append(x.astype("<f4").tobytes() if exact else quantize_uint16(x))
    return {"at": len(blobs) - 1, "shape": list(x.shape), "type": "float32" if exact else "uint16"}


def quantize_uint16(x: Float[np.ndarray, "N A B"]) -> bytes:
    """Quantize to 16 bits per number: per channel (A·B) a minimum and a step in float32, then N·A·B uint16 steps.

    Channels may have very different offsets, where float16 would lose twenty times as much.

    >>> low, step, *steps = np.frombuffer(quantize_uint16(np.array([[[1.0]], [[3.0]]])), "<u2").reshape(-1, 2)
    >>> steps
    [array([    0, 65535], dtype=uint16)]
    """
    flat = x.reshape(len(x), -1).astype(np.float64)
    low = flat.min(0).astype("<f4")
    step = ((flat.max(0) - low) / 65535).astype("<f4")
    steps = np.rint((flat - low) / np.where(step > 0, step, 1)).clip(0, 65535).astype("<u2")
    return low.tobytes() + step.tobytes() + steps.tobytes()


def text_direction(axis: TokenAxis) -> str:
    """Writing direction of a text, by its first letter: "ltr" or "rtl".

    >>> text_direction(TokenAxis("text", ["<sos>", "(", "שלום"], [-1, 0, 0]))
    'rtl'
    """
    characters = (char for token, word in zip(axis.tokens, axis.words) if word >= 0 for char in token)
    strong = (unicodedata.bidirectional(char) for char in characters)
    return "rtl" if next((kind for kind in strong if kind in ("L", "R", "AL")), "L") != "L" else "ltr"


def _layer_indices(maps: Iterable[AttentionMap]) -> list[int]:
    """Index of each attention among those of its stack and kind."""
    counts: Counter[tuple[str, str]] = Counter()
    indices = []
    for one in maps:
        stack = re.split(r"\.\d+", one.name)[0], one.kind
        indices.append(counts[stack])
        counts[stack] += 1
    return indices


def _score_name(score: Score) -> str:
    if isinstance(score, SoftCap):
        return f"{_score_name(score.inner)}, soft-capped"
    if isinstance(score, Disentangled):
        return "disentangled"
    return next((name for name, kind in SCORES.items() if type(score) is kind), type(score).__name__)


def _mask_header(mask: Mask | None) -> dict[str, Any] | None:
    """A mask of one sequence as JSON."""
    match mask:
        case None:
            return None
        case Causal():
            return {"op": "causal"}
        case Window(n):
            return {"op": "window", "size": n}
        case Local(n):
            return {"op": "local", "size": n}
        case Padding(lengths):
            return {"op": "lengths", "length": int(lengths[0])}
        case And(left, right):
            return {"op": "and", "parts": [_mask_header(left), _mask_header(right)]}
        case Or(left, right):
            return {"op": "or", "parts": [_mask_header(left), _mask_header(right)]}
        case Not(inner):
            return {"op": "not", "part": _mask_header(inner)}
        case SelectedSequences(inner, _):  # a custom mask
            return _mask_header(inner)
    raise RegardError(f"A page cannot compute the mask {type(mask).__name__}.", PLOT_HINT)


@torch.no_grad()
def _map_inputs(recorded: Recorded) -> MapInputs:
    """Inputs of the first sequence. The steps of a recurrent decoder, which share their keys, are one attention."""
    first, *others = (_first_sequence(call) for call in recorded.calls)
    q, k, score, mask_parts, bias = first
    if others:
        if mask_parts.is_relative or bias is not None or not all(torch.equal(k, other.k) for other in others):
            raise RegardError(f"{recorded.name} was called several times with different keys.", PLOT_HINT)
        q = torch.cat([q, *(other.q for other in others)], dim=2)
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    if not is_computed_as(score, DotLike, Concat, SoftCap, Disentangled):
        raise RegardError(f"A page cannot compute the score {_score_name(score)}.", PLOT_HINT)
    with torch.autocast(q.device.type, enabled=False):
        transformed_q, transformed_k, scale = score.transform(q, repeat_heads(k, H))
        w = score.weight_a.squeeze(-1).expand(H, -1) if isinstance(score, Concat) else None
        distances = None if bias is None else _bias_by_distance(bias, H, T, S, q.device)
        channels = None
        if isinstance(score, Disentangled):
            transformed_q, transformed_k, channels = _select_relative(score, transformed_q, transformed_k)
    keys = _distinct_heads(transformed_k[0], k.shape[1])
    return MapInputs(
        _to_numpy(transformed_q[0].transpose(0, 1)),
        _to_numpy(keys.transpose(0, 1)),
        float(scale),
        None if w is None else _to_numpy(w),
        None if distances is None else _to_numpy(distances),
        mask_parts.mask,
        score.cap if isinstance(score, SoftCap) else 0.0,
        channels,
    )


def _select_relative(score: Disentangled, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Queries and keys with the channels of relative positions that occur, and the channel of each distance."""
    width, T, S = score.keys.shape[-1], q.shape[-2], k.shape[-2]
    zero = torch.zeros(1, dtype=torch.long, device=q.device)
    rows = score.index(zero, torch.arange(1 - S, T, device=q.device))[0]
    used, channels = rows.unique(return_inverse=True)
    q, k = (torch.cat((x[..., :width], x[..., width + used]), dim=-1) for x in (q, k))
    return q, k, (channels + width).tolist()


class _FirstSequence(NamedTuple):
    q: Float[Tensor, "1 H T D"]
    k: Float[Tensor, "1 G S C"]
    score: Score
    mask_parts: MaskParts
    bias: Bias | None


def _first_sequence(call: Call) -> _FirstSequence:
    precise = torch.promote_types(call.q.dtype, torch.float32)
    q, k = call.q.to(precise), call.k.to(precise)
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = (x[: int(o.starts[1])].transpose(0, 1)[None] for x, o in ((q, call.q_offsets), (k, call.k_offsets)))
    return _FirstSequence(q[:1], k[:1], call.score, call.mask_parts.select_sequences(slice(0, 1)), call.bias)


def _distinct_heads(k: Float[Tensor, "H S D"], groups: int) -> Float[Tensor, "G S D"]:
    """The distinct heads of keys: one for all heads (location), one per group, or one per head."""
    for count in (1, groups):
        grouped = k.unflatten(0, (count, -1))
        if torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
            return grouped[:, 0]
    return k


def _bias_by_distance(bias: Bias, H: int, T: int, S: int, device: torch.device) -> Float[Tensor, "H R"]:
    """A relative bias as one number per head and distance."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    by_distance = bias(zero, torch.arange(1 - S, T, device=device))[:, 0]
    t, s = torch.tensor([0, T // 2, T - 1], device=device), torch.arange(S, device=device)
    if not torch.allclose(bias(t + (S - T), s), by_distance[:, s - t[:, None] + T - 1]):
        raise RegardError(
            f"A page cannot compute the bias {type(bias).__name__}: it does not depend on the distance alone.",
            PLOT_HINT,
        )
    return by_distance.expand(H, -1)


def _to_numpy(x: Tensor) -> Float[np.ndarray, "..."]:
    return x.float().contiguous().cpu().numpy()
