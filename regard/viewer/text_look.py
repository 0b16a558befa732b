"""`look`: what every attention of a model regarded while it translated or read a text. Pictures: see overlays.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import Recorded, record
from regard.data import Tokenizer
from regard.data.text.questions import Question
from regard.data.text.special_tokens import Special
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.alignment import Link, Words, spans
from regard.evaluation.teacher_forcing import attentions, force, information
from regard.files import write_whole
from regard.layers.packed import pack
from regard.models import ViT, family_of
from regard.pipelines import ImageModel, LanguageModel, TextEncoder, Translation, Translator
from regard.pipelines.image_model import Picture
from regard.viewer.image_look import ImageLook, look_at_picture
from regard.viewer.page.notebook_display import Showing

if TYPE_CHECKING:
    from regard.viewer.search_tree import BeamTree

PICTURES, PAGE = ("png", "svg"), "html"
Layers = str | Sequence[str] | None
# So many rows are enough to see how clear an attention is.
SAMPLE = 256


class Side(NamedTuple):
    """What stands along an axis: its tokens, and the number of the word that each is a part of, -1 for none."""

    name: str
    tokens: list[str]
    words: list[int]

    def framed(self, name: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> "Side":
        """The same with special tokens around it.

        >>> Side("source", ["cat"], [0]).framed("target", ["<sos>"])
        Side(name='target', tokens=['<sos>', 'cat'], words=[-1, 0])
        """
        return Side(name, [*before, *self.tokens, *after], [-1] * len(before) + self.words + [-1] * len(after))


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """What one attention regarded: a weight for each head, row and column. Every row sums to 1.

    In self-attention rows and columns are the tokens that are read (`<sos>` first on the decoder's side). In
    cross-attention a row belongs to the token that it predicts, so the target stands there with `<eos>` at its end.
    """

    name: str
    kind: str
    queries: Side
    keys: Side
    recorded: Recorded = field(repr=False)

    @property
    def rows(self) -> list[str]:
        return self.queries.tokens

    @property
    def columns(self) -> list[str]:
        return self.keys.tokens

    @property
    def heads(self) -> int:
        return self.recorded.calls[0].q.shape[1]

    @cached_property
    def weights(self) -> Float[np.ndarray, "H T S"]:
        """The exact weights, computed when they are first asked for."""
        return self.recorded.weights()[0].float().cpu().numpy()

    def of(self, head: int | None = None) -> Float[np.ndarray, "T S"]:
        """One head's weights, or the mean of all."""
        if head is None:
            return self.weights.mean(0)
        self.need(head)
        return self.weights[head]

    def need(self, head: int | None) -> None:
        """An error for a head that it does not have."""
        if head is not None and not 0 <= head < self.heads:
            raise RegardError(f"{self.name} has no head {head}.", f"There are {self.heads}, counted from 0.")

    @property
    def clearness(self) -> float:
        """How much the rows, averaged over heads, tell about where they look: of a long text, a sample of them."""
        if len(self.rows) <= SAMPLE:
            return information(self.of())
        some = np.linspace(0, len(self.rows) - 1, SAMPLE).astype(int).tolist()
        return information(self.recorded.weights(queries=some)[0].float().mean(0).cpu().numpy())


@dataclass(frozen=True, eq=False)
class Look(Showing):
    """A sentence, its translation, and every attention between them; or a text that was read, and every attention
    inside it. Shows itself in a notebook.

    `maps` are the attentions by their modules' names: `look.maps["decoder.0.cross"].weights`.
    """

    source: str
    translation: str
    source_pieces: list[str]
    target_pieces: list[str]
    maps: dict[str, AttentionMap]
    family: str = ""
    """of the model"""
    name: str = ""
    """what the page calls the model"""
    gold: list[Link] | None = None
    """which word should be linked to which, where somebody said so"""
    bundle: Any = field(default=None, repr=False)
    """the model with its tokenisers, which a walk goes through"""
    ids: tuple[list[int], ...] = field(default=(), repr=False)
    """what it was given"""
    segments: list[int] | None = field(default=None, repr=False)
    """of a question and its context: the segment of each token"""
    question: tuple[range, range] | None = None
    """of a question and its context: the tokens of both"""
    search: tuple[list[Translation], DecodeConfig, str] | None = field(default=None, repr=False)
    """what the model found when it translated, how it searched, and the beginning that it was given"""

    @property
    def title(self) -> str:
        return "  →  ".join(filter(None, self._texts()))

    @cached_property
    def alignment(self) -> AttentionMap:
        """The attention whose rows, averaged over heads, tell most about where they look (see `information`): of those
        between source and translation, where there are any.
        """
        if not self.maps:
            raise RegardError(
                "This model has no attention: there is no attention map.",
                "Write a page (.html), which shows its states and its context vector step by step.",
            )
        if self.question is not None:
            return max(self.maps.values(), key=lambda one: information(self.block(one.of())))
        cross = [one for one in self.maps.values() if one.kind == "cross"]
        return max(cross or self.maps.values(), key=lambda one: one.clearness)

    def block(self, weights: Float[np.ndarray, "T S"]) -> Float[np.ndarray, "t s"]:
        """Of weights over a question and its context: from each token of the question to those of the context."""
        if self.question is None:
            return weights
        rows, columns = self.question
        return weights[rows.start : rows.stop, columns.start : columns.stop]

    @cached_property
    def decoding(self) -> "BeamTree | None":
        """The search for the translation, where the model made it: computed when it is first asked for."""
        from regard.viewer.search_tree import tree_of

        if self.search is None or (history := self.search[0][0].history) is None:
            return None
        found, config, prefix = self.search
        named = self.alignment.name if self.maps and self.alignment.kind == "cross" else None
        outputs = [one.hypothesis for one in found]
        return tree_of(self.bundle, self.ids[0], outputs, history, config, prefix=prefix, attention=named)

    def chosen(self, attention: str | None = None, head: int | None = None) -> AttentionMap:
        """An attention by its name, by default the alignment; an error if it, or a head of it, is not there."""
        if attention is not None and attention not in self.maps:
            raise RegardError(f"The model has no attention {attention!r}.", f"There are: {', '.join(self.maps)}.")
        one = self.alignment if attention is None else self.maps[attention]
        one.need(head)
        return one

    def save(
        self,
        path: str | Path,
        attention: str | None = None,
        head: int | None = None,
        *,
        overview: bool = False,
        walk: bool | None = None,
    ) -> None:
        """Writes a page, .html, which shows every attention and needs nothing else, no network either; or a picture,
        .png or .svg, of one attention, by default the alignment: its mean over heads, or one head.

        With `overview` (or attention "all") the picture is a small map for each head of each attention. A page has it
        all; the same choices say what it opens with, which is otherwise the clearest head. With `walk` it also has
        every number between the text and the output; without, it has them if model and text are small.
        """
        form = Path(path).suffix.lower().removeprefix(".")
        if form not in (PAGE, *PICTURES):
            raise RegardError(f"{path}: pages are .html, pictures are .png or .svg.", "Change the name's ending.")
        if attention == "all":
            attention, overview = None, True
        if form == PAGE:
            from regard.viewer.page import html_page, text_scene

            content = html_page.page(text_scene.scene_of(self, attention, head, overview=overview, walk=walk))
        else:
            content = self._picture(form, attention, head, overview)
        write_whole(Path(path), content)

    def _picture(
        self, form: str, attention: str | None = None, head: int | None = None, overview: bool = False
    ) -> bytes:
        from regard.viewer.plots import heatmaps

        if overview:
            panels = [heatmaps.Panels(one.name, one.weights, one.rows, one.columns) for one in self.maps.values()]
            return heatmaps.overview(self.title, panels, form)
        shown = self.chosen(attention, head)
        heads = shown.heads
        which = f"head {head}" if head is not None else f"mean of {heads} heads" if heads > 1 else "its one head"
        title = f"{shown.name}, {which}"
        if self.question is not None:
            rows, columns = (shown.rows[part.start : part.stop] for part in self.question)
            return heatmaps.heat_map(self.block(shown.of(head)), rows, columns, title, "question", form)
        return heatmaps.heat_map(shown.of(head), shown.rows, shown.columns, title, shown.kind, form)

    def _make_widget(self) -> Any:
        from regard.viewer.page import widget

        return widget.widget_of(self)

    def __repr__(self) -> str:
        texts = " → ".join(repr(text) for text in self._texts() if text)
        return f"Look({texts}, {len(self.maps)} attentions: {', '.join(self.maps)})"

    def _texts(self) -> tuple[str, str]:
        return self.source.strip(), self.translation.strip()


@overload
def look(
    bundle: Translator | LanguageModel | TextEncoder,
    source: str,
    target: str | None = None,
    *,
    layers: Layers = None,
    gold: Sequence[Link] | None = None,
    words: Words = str.split,
    config: DecodeConfig | None = None,
    prefix: str = "",
    name: str = "",
    truncate: bool = False,
    context: str | None = None,
) -> Look: ...
@overload
def look(bundle: ImageModel | ViT, source: Picture | Tensor, *, name: str = "") -> ImageLook: ...
def look(
    bundle: Any,
    source: Any,
    target: str | None = None,
    *,
    layers: Layers = None,
    gold: Sequence[Link] | None = None,
    words: Words = str.split,
    config: DecodeConfig | None = None,
    prefix: str = "",
    name: str = "",
    truncate: bool = False,
    context: str | None = None,
) -> Look | ImageLook:
    """Translates a sentence (or takes the translation that is given) and shows what was regarded.

    A language model and an encoder of texts read the text, and show what was regarded in it; a model of images looks
    at a picture (a file, an open picture, bytes; or a tensor as it goes into the model). `layers` chooses some
    attentions by name, with * and ?: of a long text all may be more than a page can hold. `gold` is what should be
    linked, by the numbers of `words` of source and target; `config` is how to translate, and `prefix` what the
    translation must begin with; `name` is what a page calls the model. A model that answers questions takes the text
    that the question is about as `context`.

    >>> seen = look(translator, "The cat chased the mouse.")  # doctest: +SKIP
    >>> seen.maps["decoder.1.cross"].weights.shape  # doctest: +SKIP
    (4, 8, 7)
    >>> seen.save("page.html")  # doctest: +SKIP
    """
    if isinstance(bundle, ImageModel | ViT):
        if any(option is not None for option in (target, layers, gold, context)):
            raise RegardError("A picture has no target, no gold links, and is looked at as a whole.", "Leave them out.")
        return look_at_picture(bundle, source, name)
    if not source.strip():
        raise RegardError("The text is empty: there is nothing to look at.", "Give a sentence.")
    if gold is not None:
        _check(gold, source, target, words)
    if (config is not None or prefix) and (target is not None or not isinstance(bundle, Translator)):
        raise RegardError(
            "Nothing is translated here, so there is no search to configure.", "Leave out config (--beam) and prefix."
        )
    if context is not None:
        if not isinstance(bundle, TextEncoder) or bundle.model.config.head != "answer":
            raise RegardError("Only a model that answers questions takes a context.", "Leave out context (--context).")
        if not context.strip():
            raise RegardError("The context is empty.", "Give the text that the question is about.")
    if isinstance(bundle, Translator):
        search = config or DecodeConfig(), prefix
        seen = _look_at_translation(bundle, source, target, layers, words, search, truncate)
    else:
        if target is not None:
            raise RegardError("Only a translator has a target to look at.", "Leave it out.")
        seen = _look_at_text(bundle, source, layers, words, truncate, context)
    links = None if gold is None else sorted(set(gold))
    return replace(seen, family=family_of(bundle.model.config), name=name, gold=links)


def _check(gold: Sequence[Link], source: str, target: str | None, words: Words) -> None:
    """An error for links between words that are not there."""
    if target is None:
        raise RegardError("Links are between a source and a target, and there is no target.", "Give it too.")
    counts = len(words(source)), len(words(target))
    for link in gold:
        if not all(0 <= number < count for number, count in zip(link, counts)):
            raise RegardError(
                f"The link {link[0]}-{link[1]} leads nowhere.",
                f"The source has {counts[0]} words and the target {counts[1]}, counted from 0.",
            )


def _look_at_text(
    bundle: LanguageModel | TextEncoder, text: str, layers: Layers, words: Words, truncate: bool, context: str | None
) -> Look:
    segments: list[int] | None = None
    if isinstance(bundle, LanguageModel):
        ids = bundle.prompt_ids(text, name="the text", truncate=truncate)
    elif context is None:
        ids = bundle.text_ids(text, name="the text", truncate=truncate)
    else:
        encoded = bundle.encode_rows([(text, context)], name="the question with its context", truncate=truncate)
        ids = encoded.ids[0].tolist()
        segments = None if encoded.segments is None else encoded.segments[0].tolist()
    bundle.model.eval()
    given = [] if segments is None else [torch.tensor(segments, device=bundle.device)]
    with torch.inference_mode(), record(bundle.model, layers) as recording:
        bundle.model(pack([ids]).to(bundle.device), *given)
    special, names = bundle.special, bundle.tokenizer.vocabulary
    head, tail = (0 if one is None else 1 for one in (special.begin, special.end))
    question, answer = None, ""
    if context is None:
        inside = _side(bundle.tokenizer, text, ids[head : len(ids) - tail], words)
    else:
        question = _parts_of(len(bundle.tokenizer.encode(text)), len(ids), special)
        inside = _pair_side(bundle.tokenizer, (text, context), ids[head : len(ids) - tail], question, head, words)
        answer = bundle.answer(Question("", text, context))  # type: ignore[union-attr]
    side = inside.framed("text", [names[i] for i in ids[:head]], [names[i] for i in ids[len(ids) - tail :]])
    maps = {}
    for name, one in recording.items():
        for number, call in enumerate(one.calls):  # several where layers share their weights
            called = name if len(one.calls) == 1 else f"{name}.{number}"
            # The only cross-attention of a text is that of a learned query which pools it.
            queries = Side("query", ["query"], [-1]) if one.kind == "cross" else side
            maps[called] = AttentionMap(called, one.kind, queries, side, replace(one, calls=[call]))
    return Look(text, answer, side.tokens, [], maps, bundle=bundle, ids=(ids,), segments=segments, question=question)


def _parts_of(asked: int, total: int, special: Special) -> tuple[range, range]:
    """The tokens of a question of `asked` tokens, and those of its context, in the framed text of both."""
    head = 0 if special.begin is None else 1
    between = len(special.framed([])) - head + (special.between is not None)
    first = head + asked + between
    return range(head, head + asked), range(first, total - (0 if special.end is None else 1))


def _pair_side(
    tokenizer: Tokenizer,
    texts: tuple[str, str],
    ids: Sequence[int],
    parts: tuple[range, range],
    head: int,
    words: Words,
) -> Side:
    """The tokens of a question and its context, and those between them; words are counted through both."""
    question, context = (
        _side(tokenizer, text, ids[part.start - head : part.stop - head], words) for text, part in zip(texts, parts)
    )
    middle = [tokenizer.vocabulary[i] for i in ids[parts[0].stop - head : parts[1].start - head]]
    first = max(question.words, default=-1) + 1
    later = [-1 if word < 0 else word + first for word in context.words]
    return Side("", question.tokens + middle + context.tokens, question.words + [-1] * len(middle) + later)


def _look_at_translation(
    translator: Translator,
    source: str,
    target: str | None,
    layers: Layers,
    words: Words,
    search: tuple[DecodeConfig, str],
    truncate: bool,
) -> Look:
    source_ids = translator.source_ids(source, name="the source", truncate=truncate)
    searched = None
    if target is None:
        config, prefix = search
        begin_with = [prefix] if prefix else None
        found = translator.translate([source], config, prefixes=begin_with, truncate=truncate, history=True)[0]
        searched, best = (found, config, prefix), found[0]
        target, target_ids = best.text, best.hypothesis.ids[len(translator.special.begun([])) - 1 :]
    else:
        target_ids = translator.target_ids(target, name="the target", truncate=truncate)
    # Without attention there is nothing to record: a page shows the walk alone.
    recording = force(translator, [(source_ids, target_ids)], layers) if attentions(translator) else {}
    special, names = translator.special, translator.target_tokenizer.vocabulary
    source_names = translator.source_tokenizer.vocabulary
    begin, end = (0 if one is None else 1 for one in (special.begin, special.end))
    last = len(source_ids) - end
    sources = _side(translator.source_tokenizer, source, source_ids[begin:last], words)
    targets = _side(translator.target_tokenizer, target, target_ids, words)
    frame = [[source_names[i] for i in ids] for ids in (source_ids[:begin], source_ids[last:])]
    read = sources.framed("source", *frame)
    begun = [names[i] for i in special.begun([])]
    written = targets.framed("target", begun)
    predicted = targets.framed("predicted", begun[1:], [names[special.eos]])
    axes = {"self": (read, read), "masked": (written, written), "cross": (predicted, read)}
    maps = {name: AttentionMap(name, one.kind, *axes[one.kind], one) for name, one in recording.items()}
    given = source_ids, special.begun(target_ids)
    return Look(source, target, sources.tokens, targets.tokens, maps, bundle=translator, ids=given, search=searched)


def _side(tokenizer: Tokenizer, text: str, ids: Sequence[int], words: Words) -> Side:
    """A label for each id: its piece of the text, unless these ids are not how the text is encoded.

    A model may spell a word by other pieces than its tokeniser would, and may say `<unk>`. A text that was cut short is
    its beginning, or its end.
    """
    whole = tokenizer.encode(text)
    for cut in (slice(len(ids)), slice(len(whole) - len(ids), None)):
        if whole[cut] == list(ids):
            pieces = tokenizer.pieces(text)[cut]
            labels = [piece for piece, _ in pieces]
            break
    else:
        text, pieces = tokenizer.decode(ids), tokenizer.pieces_of(ids)
        labels = [tokenizer.vocabulary[i] for i in ids]
    return Side("", labels, _numbers([place for _, place in pieces], spans(text, words(text))))


def _numbers(pieces: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the word that each piece is a part of, by their places; of the first, where it reaches into many.

    >>> _numbers([(0, 2), (2, 3), (3, 4), (4, 6)], [(0, 3), (4, 6)])
    [0, 0, -1, 1]
    """
    starts, ends = (np.array([word[i] for word in words], int) for i in (0, 1))
    first = np.searchsorted(ends, [start for start, _ in pieces], side="right")
    return [int(i) if i < len(words) and starts[i] < end else -1 for i, (_, end) in zip(first, pieces)]
