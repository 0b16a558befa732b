"""`look`: the attention maps of a model on a text or a translation. For images see image_look.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import Recorded
from regard.data.text.questions import Question
from regard.data.text.readers import Link
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import mutual_information
from regard.files import write_atomically
from regard.layers.packed import pack
from regard.models import ViT, family_name
from regard.pipelines import ImageModel, Pipeline, TextEncoder, TextGenerator, Translation, Translator
from regard.pipelines.decoding_request import check_options
from regard.pipelines.image_model import ImageLike
from regard.ranges import format_value
from regard.viewer.display import PAGE_FORMAT, ExplainedLook, NotebookDisplay, check_format, make_widget
from regard.viewer.image_look import ImageLook, look_at_image
from regard.viewer.model_run import ModelRun, is_small, run_model
from regard.viewer.token_axis import TokenAxis, WordSplitter, build_axis, build_pair_axis, group_weights, pair_ranges

if TYPE_CHECKING:
    from regard.viewer.explanations.attribution import Attribution
    from regard.viewer.page.model import Precision
    from regard.viewer.search_tree import SearchTree

LayerNames = str | Sequence[str] | None
"""names of attentions, with the wildcards * and ?; None: all"""
# Rows from which the sharpness of a long map is computed.
SAMPLE_ROWS = 256


class GroupedWeights(NamedTuple):
    """Weights between groups of tokens, the labels of the groups, and a note on their size, if it is not one token."""

    weights: Float[np.ndarray, "H t s"]
    rows: list[str]
    columns: list[str]
    note: str


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The map of one attention: a weight per head, row (query) and column (key). Every row sums to 1.

    In self-attention, rows and columns are the input tokens (with `<sos>` first in a decoder). In cross-attention a row
    is labeled with the token that it predicts: the rows are the target and `<eos>`.
    """

    name: str
    kind: str
    queries: TokenAxis = field(repr=False)
    keys: TokenAxis = field(repr=False)
    recorded: Recorded = field(repr=False)

    @property
    def rows(self) -> list[str]:
        return self.queries.tokens

    @property
    def columns(self) -> list[str]:
        return self.keys.tokens

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Float[np.ndarray, "H T S"]:
        return np.array(self.weights, dtype, copy=copy)

    @property
    def heads(self) -> int:
        return self.recorded.calls[0].q.shape[1]

    @cached_property
    def weights(self) -> Float[np.ndarray, "H T S"]:
        """The exact weights, computed on first access."""
        return self.recorded.weights()[0].float().cpu().numpy()

    def head_weights(self, head: int | None = None) -> Float[np.ndarray, "T S"]:
        """The weights of one head, or their mean over heads."""
        if head is None:
            return self.weights.mean(0)
        self.check_head(head)
        return self.weights[head]

    def grouped_weights(self, limit: int, rows: range | None = None, columns: range | None = None) -> "GroupedWeights":
        """The weights for a plot, between at most `limit` groups of tokens along each axis, one token each if possible.

        `rows` and `columns` select a part of the map.
        """
        T, S = (
            range(len(all_)) if part is None else part for part, all_ in ((rows, self.rows), (columns, self.columns))
        )
        t, s = (max(1, -(-len(part) // limit)) for part in (T, S))
        if t == s == 1:
            weights = self.weights[:, T.start : T.stop, S.start : S.stop]
        else:  # not all rows of all heads are in memory at a time
            step = t * max(1, SAMPLE_ROWS // t) if len(self.recorded.calls) == 1 else len(T)
            parts = [T[i : i + step] for i in range(0, len(T), step)]
            exact = (
                self.recorded.weights(queries=part)[0, :, :, S.start : S.stop].float().cpu().numpy() for part in parts
            )
            weights = np.concatenate([group_weights(one, t, s) for one in exact], axis=1)
        row_labels, column_labels = (
            [f"{tokens[i]} …" if size > 1 else tokens[i] for i in part[::size]]
            for tokens, part, size in ((self.rows, T, t), (self.columns, S, s))
        )
        note = (
            ""
            if t == s == 1
            else f"Each cell: mean of {t} rows, sum of {s} columns, which are named by their first tokens."
        )
        return GroupedWeights(weights, row_labels, column_labels, note)

    def check_head(self, head: int | None) -> None:
        """Raise an error if there is no such head."""
        if head is not None and not 0 <= head < self.heads:
            raise RegardError(f"{self.name} has no head {head}.", f"Choose a head from 0 to {self.heads - 1}.")

    @property
    def sharpness(self) -> float:
        """Mutual information of row and column, averaged over heads; of a long text, from a sample of rows."""
        if len(self.rows) <= SAMPLE_ROWS:
            return mutual_information(self.head_weights())
        sample = np.linspace(0, len(self.rows) - 1, SAMPLE_ROWS).astype(int).tolist()
        return mutual_information(self.recorded.weights(queries=sample)[0].float().mean(0).cpu().numpy())


@dataclass(frozen=True, eq=False)
class Look(ExplainedLook, NotebookDisplay):
    """The attention maps of a model on a sentence and its translation, or on one text. Notebooks display it.

    `maps` has one entry per attention module: `look.maps["decoder.0.cross"].weights`.
    """

    source: str
    translation: str
    source_pieces: list[str]
    target_pieces: list[str]
    maps: dict[str, AttentionMap]
    family: str = ""
    """family of the model"""
    name: str = ""
    """name of the model in the page"""
    gold: list[Link] | None = None
    """gold word alignment"""
    pipeline: Any = field(default=None, repr=False)
    """the model with its tokenizers"""
    ids: tuple[list[int], ...] = field(default=(), repr=False)
    """input ids of the model"""
    segments: list[int] | None = field(default=None, repr=False)
    """question answering: segment id per token"""
    question: tuple[range, range] | None = None
    """question answering: positions of the question and of the context"""
    context: str = ""
    """question answering: the text that the question is about"""
    run: ModelRun | None = field(default=None, repr=False)
    """the forward pass that was recorded; None in a look that was pickled or is one of a comparison"""
    search: tuple[list[Translation], DecodeConfig, str] | None = field(default=None, repr=False)
    """if the model translated: the n-best list, the configuration and the prefix of the search"""

    @property
    def title(self) -> str:
        return "  →  ".join(filter(None, self._texts()))

    @cached_property
    def alignment(self) -> AttentionMap:
        """The sharpest attention (see `AttentionMap.sharpness`), among the cross-attentions if there are any."""
        if not self.maps:
            raise RegardError(
                "This model has no attention: there is no attention map.",
                "Save a page (.html), which shows its states and its context vector step by step.",
            )
        if self.question is not None:
            return max(self.maps.values(), key=lambda one: mutual_information(self.question_block(one.head_weights())))
        cross = [shown for shown in self.maps.values() if shown.kind == "cross"]
        return max(cross or self.maps.values(), key=lambda one: one.sharpness)

    def question_block(self, weights: Float[np.ndarray, "T S"]) -> Float[np.ndarray, "t s"]:
        """The weights from the tokens of the question to those of the context; without a question, all weights."""
        if self.question is None:
            return weights
        rows, columns = self.question
        return weights[rows.start : rows.stop, columns.start : columns.stop]

    @cached_property
    def search_tree(self) -> "SearchTree | None":
        """The search for the translation, computed on first access; None without a search or a model."""
        from regard.viewer.search_tree import build_tree

        if self.search is None or self.pipeline is None or (history := self.search[0][0].history) is None:
            return None
        translations, config, prefix = self.search
        attention = self.alignment.name if self.maps and self.alignment.kind == "cross" else None
        hypotheses = [translation.hypothesis for translation in translations]
        return build_tree(self.pipeline, self.ids[0], hypotheses, history, config, prefix=prefix, attention=attention)

    def attribution(self, method: str = "gradient") -> "Attribution":
        """Attribution of every prediction to every input token.

        The method is "gradient" (× input), "integrated_gradients" or "occlusion": see `Attribution`.
        """
        from regard.viewer.explanations.attribution import compute_attribution

        return compute_attribution(self, method=method)

    def rollout(self) -> "dict[str, Float[np.ndarray, 'T S']]":
        """Attention rollout through all layers, over source and target or over the text (see `text_rollout`)."""
        from regard.viewer.rollout import text_rollout

        return text_rollout(self)

    def select_attention(self, attention: str | None = None, head: int | None = None) -> AttentionMap:
        """An attention by name, by default the alignment. Raises an error for an unknown attention or head."""
        if attention is not None and attention not in self.maps:
            raise RegardError(f"The model has no attention {attention!r}.", f"There are: {', '.join(self.maps)}.")
        selected = self.alignment if attention is None else self.maps[attention]
        selected.check_head(head)
        return selected

    def save(
        self,
        path: str | Path,
        attention: str | None = None,
        head: int | None = None,
        *,
        overview: bool = False,
        trace: bool | None = None,
        explain: bool | None = None,
        with_model: "bool | Precision | None" = None,
    ) -> None:
        """Save a self-contained page (.html) with all attentions, or a plot (.png, .svg, .pdf) of one attention.

        The plot shows the alignment by default, averaged over heads or one head; with `overview` (or attention "all") a
        small map per head of each attention. For a page the same arguments select the initial view, by default the
        sharpest head. `trace` includes the step-by-step view; by default, if model and text are small. `explain`
        includes the effects of heads, the logit lens and the attributions; by default if they are cheap and the page
        has no model to compute them. `with_model` includes the model itself, so that the page runs new input offline;
        by default a small one (4 MB).
        """
        file_format = check_format(path)
        if attention == "all":
            attention, overview = None, True
        if file_format == PAGE_FORMAT:
            from regard.viewer.page.html import render_page
            from regard.viewer.page.model import model_for_page
            from regard.viewer.page.text_scene import build_scene, initial_view

            initial_view(self, attention, head, overview)  # raises errors before the model is captured
            model = model_for_page(self, with_model)
            tensors = None if model is None else model.tensors
            explain = False if explain is None and model is not None else explain
            scene = build_scene(self, attention, head, overview=overview, trace=trace, explain=explain, tensors=tensors)
            content = render_page(scene, model)
        elif with_model:
            raise RegardError("Only a page can contain the model.", "Save it as .html, or leave out with_model.")
        else:
            content = self._plot(file_format, attention, head, overview)
        write_atomically(Path(path), content)

    def _plot(
        self, file_format: str, attention: str | None = None, head: int | None = None, overview: bool = False
    ) -> bytes:
        from regard.viewer.plots import (  # matplotlib is slow to import
            MAX_LABELS,
            MAX_SMALL_LABELS,
            HeadPanels,
            plot_heat_map,
            plot_overview,
        )

        if overview:
            panels = [HeadPanels(one.name, *one.grouped_weights(MAX_SMALL_LABELS)[:3]) for one in self.maps.values()]
            return plot_overview(self.title, panels, file_format)
        shown = self.select_attention(attention, head)
        heads = shown.heads
        head_label = f"head {head}" if head is not None else f"mean of {heads} heads" if heads > 1 else "single head"
        weights, rows, columns, note = shown.grouped_weights(MAX_LABELS, *(self.question or ()))
        plotted = weights.mean(0) if head is None else weights[head]
        kind = shown.kind if self.question is None else "question"
        return plot_heat_map(plotted, rows, columns, f"{shown.name}, {head_label}", kind, file_format, note)

    def _make_widget(self) -> Any:
        from regard.viewer.page.requests import TextRequestHandler
        from regard.viewer.page.text_scene import build_scene

        if self.pipeline is None:
            return make_widget(build_scene(self), None)
        layers = list(dict.fromkeys(shown.recorded.name for shown in self.maps.values()))
        return make_widget(build_scene(self), TextRequestHandler(self.pipeline, self.name, layers))

    def __repr__(self) -> str:
        texts = " → ".join(repr(text) for text in self._texts() if text)
        return f"Look({texts}, {len(self.maps)} attentions: {', '.join(self.maps)})"

    def _texts(self) -> tuple[str, str]:
        return self.source.strip(), self.translation.strip()


@dataclass(frozen=True)
class LookOptions:
    """Options of `look`; each model reads those that concern it."""

    target: str | None = None
    """translators: the forced output"""
    layers: LayerNames = None
    """attentions to record, by name with the wildcards * and ?; None: all"""
    gold: Sequence[Link] | None = None
    """translators: gold word alignment, by the indices of the `words` of source and target"""
    words: WordSplitter = str.split
    """splits a text into words"""
    config: DecodeConfig | None = None
    """translators: search configuration; None: that of the model"""
    prefix: str = ""
    """translators: forced beginning of the translation"""
    name: str = ""
    """name of the model in the page"""
    truncate: bool = False
    """truncate inputs that are too long, instead of raising an error"""
    context: str | None = None
    """question answering: the text that the question is about"""
    to: str | None = None
    """translators into several languages: code of the target language"""
    source_language: str | None = None
    """translators that need it: code of the source language"""


@overload
def look(
    model: Translator | TextGenerator | TextEncoder, source: str, target: str | None = None, **options: Any
) -> Look: ...
@overload
def look(
    model: Translator | TextGenerator | TextEncoder,
    source: list[str] | tuple[str, ...],
    target: Sequence[str] | None = None,
    **options: Any,
) -> list[Look]: ...
@overload
def look(model: ImageModel | ViT, source: ImageLike | Tensor, *, name: str = "") -> ImageLook: ...
@overload
def look(model: ImageModel | ViT, source: list[Any] | tuple[Any, ...], *, name: str = "") -> list[ImageLook]: ...
def look(model: Any, source: Any, target: Any = None, **options: Any) -> Any:
    """Run a model on an input and record all of its attention maps; a list of inputs gives a list of looks.

    A translator translates the source, or is forced to output `target`; language models and text encoders read the
    text; image models take an image (a file, a PIL image, an array, bytes, or a tensor as the model takes it).
    `options` are those of `LookOptions`, such as `layers`, `config` and `context`.

    >>> result = look(translator, "The cat chased the mouse.")  # doctest: +SKIP
    >>> result.maps["decoder.1.cross"].weights.shape  # doctest: +SKIP
    (4, 8, 7)
    >>> result.save("page.html")  # doctest: +SKIP
    """
    check_options(options, LookOptions.__annotations__, "look")
    if look_at.dispatch(type(model)) is look_at.dispatch(object):
        raise RegardError(
            f"look needs a model with its tokenizers (got {type(model).__name__}).",
            "Pass the pipeline that regard.load or regard.train returned, not its .model.",
        )
    if not isinstance(source, list | tuple):
        return look_at(model, source, LookOptions(target, **options))
    targets = [None] * len(source) if target is None else target
    if isinstance(targets, str) or len(targets) != len(source) or options.get("gold") is not None:
        raise RegardError(
            f"A list of {len(source)} sources needs as many targets, or none, and no gold links.",
            "Look at one source at a time.",
        )
    return [look_at(model, text, LookOptions(forced, **options)) for text, forced in zip(source, targets)]


@singledispatch
def look_at(model: Any, source: Any, options: LookOptions) -> Any:
    """The look at one input; each class of pipelines registers a function."""
    raise NotImplementedError


@look_at.register
def look_at_translation(translator: Translator, source: str, options: LookOptions) -> Look:
    target = options.target
    check_text(translator, source, options)
    bound = translator.with_target(options.to, options.source_language)
    if target is not None:
        target_ids = bound.encode_target(target, name="the target", truncate=options.truncate)
        result = _look_at_pair(bound, source, target, target_ids, options)
    else:
        bound.encode_source(source, name="the source", truncate=options.truncate)  # raises an error if it is too long
        config, prefixes = options.config or bound.decoding, [options.prefix] if options.prefix else None
        outputs = bound.translate([source], config, prefixes=prefixes, truncate=options.truncate, history=True)[0]
        result = look_at_output(bound, source, outputs[0], options)
        result = replace(result, search=(outputs, config, options.prefix))
    return replace(result, gold=None if options.gold is None else sorted(set(options.gold)))


@look_at.register
def look_at_prompt(generator: TextGenerator, source: str, options: LookOptions) -> Look:
    check_text(generator, source, options)
    ids = generator.encode_prompt(source, name="the text", truncate=options.truncate)
    return _look_at_ids(generator, source, ids, options)


@look_at.register
def look_at_text(encoder: TextEncoder, source: str, options: LookOptions) -> Look:
    check_text(encoder, source, options)
    context = options.context
    if context is None:
        ids = encoder.encode_text(source, name="the text", truncate=options.truncate)
        return _look_at_ids(encoder, source, ids, options)
    pair, tokenizer, special = (source, context), encoder.tokenizer, encoder.special
    encoded = encoder.encode_rows([pair], name="the question with its context", truncate=options.truncate)
    ids = encoded.ids[0].tolist()
    segments = None if encoded.segments is None else encoded.segments[0].tolist()
    begin, end = len(special.prefix), len(ids) - len(special.suffix)
    question = pair_ranges(len(tokenizer.encode(source)), len(ids), special)
    axis = build_pair_axis(tokenizer, pair, ids[begin:end], question, begin, options.words)
    result = _look_at_ids(encoder, source, ids, options, axis, segments)
    return replace(result, translation=encoder.answer(Question("", *pair)), question=question, context=context)


@look_at.register
def look_at_pixels(model: ImageModel, source: Any, options: LookOptions) -> ImageLook:
    if any(option is not None for option in (options.target, options.layers, options.gold, options.context)):
        raise RegardError("target, layers, gold and context are not supported for images.", "Leave them out.")
    return look_at_image(model, source, options.name)


@look_at.register
def look_at_bare_model(model: ViT, source: Any, options: LookOptions) -> ImageLook:
    return look_at_pixels(ImageModel(model), source, options)


def check_text(pipeline: Pipeline, source: Any, options: LookOptions) -> None:
    """Raise an error for an empty source, and for options that the pipeline does not support."""
    if not isinstance(source, str):
        raise RegardError(f"look needs a text (got {format_value(source)}).", "Pass a string or a list of strings.")
    if not source.strip():
        raise RegardError("The text is empty: there is nothing to look at.", "Pass a sentence.")
    if options.gold is not None:
        _check_links(options.gold, source, options.target, options.words)
    searches = "target" in pipeline.fields and options.target is None
    if (options.config is not None or options.prefix) and not searches:
        raise RegardError(
            "Without translation there is no search to configure.", "Leave out config (--beam) and prefix."
        )
    if options.context is not None:
        if "context" not in pipeline.fields:
            raise RegardError("Only a question-answering model takes a context.", "Leave out context (--context).")
        if not options.context.strip():
            raise RegardError("The context is empty.", "Pass the text that the question is about.")
    if options.target is not None and "target" not in pipeline.fields:
        raise RegardError("Only a translator takes a target.", "Leave out the target.")


def _check_links(gold: Sequence[Link], source: str, target: str | None, words: WordSplitter) -> None:
    """Raise an error for gold links without a target or with an index out of range."""
    if target is None:
        raise RegardError("Gold links need a target.", "Pass the target too.")
    counts = len(words(source)), len(words(target))
    for link in gold:
        if not all(0 <= index < count for index, count in zip(link, counts)):
            raise RegardError(
                f"The link {link[0]}-{link[1]} is out of range.",
                f"The source has {counts[0]} words and the target {counts[1]}, counted from 0.",
            )


def _look_at_ids(
    pipeline: TextGenerator | TextEncoder,
    text: str,
    ids: list[int],
    options: LookOptions,
    inner: TokenAxis | None = None,
    segments: list[int] | None = None,
) -> Look:
    """The look at a text of these ids; `inner` is the axis of the tokens without special ones."""
    run = _run_on(pipeline.model, model_inputs(pipeline, [ids], segments), len(ids), options.layers)
    special, label = pipeline.special, pipeline.tokenizer.label
    head, tail = (0 if one is None else 1 for one in (special.begin, special.end))
    inner = inner or build_axis(pipeline.tokenizer, text, ids[head : len(ids) - tail], options.words)
    axis = inner.add_special_tokens("text", [label(i) for i in ids[:head]], [label(i) for i in ids[len(ids) - tail :]])
    maps = {}
    for name, recorded in run.recording.items():
        for index, call in enumerate(recorded.calls):  # several if layers share weights
            map_name = name if len(recorded.calls) == 1 else f"{name}.{index}"
            # The only cross-attention of a single text is pooling by a learned query.
            queries = TokenAxis("query", ["query"], [-1]) if recorded.kind == "cross" else axis
            maps[map_name] = AttentionMap(map_name, recorded.kind, queries, axis, replace(recorded, calls=[call]))
    return Look(
        text,
        "",
        axis.tokens,
        [],
        maps,
        pipeline=pipeline,
        ids=(ids,),
        segments=segments,
        run=run,
        family=family_name(pipeline.model.config),
        name=options.name,
    )


def look_at_output(
    translator: Translator,
    source: str,
    output: Translation,
    options: LookOptions | None = None,
) -> Look:
    """The look at a translation, with the token ids that the model chose: encoding its text may give others.

    >>> look_at_output(translator, "She sleeps.", translator.translate(["She sleeps."])[0][0])  # doctest: +SKIP
    Look('She sleeps.' → 'Elle dort.', 6 attentions: …)
    """
    ids = output.hypothesis.ids[len(translator.special.make_decoder_input([])) - 1 :]
    return _look_at_pair(translator, source, output.text, ids, options or LookOptions())


def _look_at_pair(
    translator: Translator,
    source: str,
    target: str,
    target_ids: list[int],
    options: LookOptions,
) -> Look:
    words = options.words
    source_ids = translator.encode_source(source, name="the source", truncate=options.truncate)
    special, label = translator.special, translator.target_tokenizer.label
    source_label = translator.source_tokenizer.label
    begin, last = len(special.prefix), len(source_ids) - len(special.suffix)
    source_text = build_axis(translator.source_tokenizer, source, source_ids[begin:last], words)
    target_text = build_axis(translator.target_tokenizer, target, target_ids, words)
    source_special = [[source_label(i) for i in ids] for ids in (source_ids[:begin], source_ids[last:])]
    encoder_axis = source_text.add_special_tokens("source", *source_special)
    forced = [label(i) for i in special.make_decoder_input([])]
    decoder_axis = target_text.add_special_tokens("target", forced)
    predicted = target_text.add_special_tokens("predicted", forced[1:], [label(special.eos)])
    axes = {
        "self": (encoder_axis, encoder_axis),
        "masked": (decoder_axis, decoder_axis),
        "cross": (predicted, encoder_axis),
    }
    ids = source_ids, special.make_decoder_input(target_ids)
    run = _run_on(translator.model, model_inputs(translator, ids), max(map(len, ids)), options.layers)
    # Without attention there are no maps: a page shows the step-by-step view alone.
    maps = {
        name: AttentionMap(name, recorded.kind, *axes[recorded.kind], recorded)
        for name, recorded in run.recording.items()
    }
    return Look(
        source,
        target,
        source_text.tokens,
        target_text.tokens,
        maps,
        pipeline=translator,
        ids=ids,
        run=run,
        family=family_name(translator.model.config),
        name=options.name,
    )


def model_inputs(pipeline: Any, ids: Sequence[list[int]], segments: list[int] | None = None) -> list[Any]:
    """The arguments of the model's forward for one input: the ids of each side, and segment ids of a question."""
    inputs: list[Any] = [pack([side]).to(pipeline.device) for side in ids]
    return inputs if segments is None else [*inputs, torch.tensor(segments, device=pipeline.device)]


@torch.inference_mode()
def _run_on(model: Any, inputs: list[Any], tokens: int, layers: LayerNames) -> ModelRun:
    return run_model(model, lambda: model(*inputs), layers, keep_outputs=layers is None and is_small(model, tokens))
