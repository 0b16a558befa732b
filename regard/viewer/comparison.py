"""Comparison of looks: two sentences, two models, or the checkpoints of one training run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.errors import RegardError
from regard.files import write_atomically
from regard.viewer.display import PAGE_FORMAT, NotebookDisplay, check_format, make_widget
from regard.viewer.page.requests import TextRequestHandler
from regard.viewer.page.text_scene import (
    Scene,
    attention_headers,
    axis_headers,
    gold_links,
    initial_view,
    length_warning,
    make_header,
)
from regard.viewer.text_look import AttentionMap, Look, look

SECOND_SOURCE = "beside"
"""field of the second sentence in a request"""


@dataclass(frozen=True, eq=False)
class Comparison(NotebookDisplay):
    """Several looks with labels. A notebook displays a page with any two of them side by side and their difference;
    with more than two looks, a slider selects.
    """

    looks: tuple[Look, ...]
    labels: tuple[str, ...]
    outputs: tuple[str | None, ...] = ()
    """the translation of each model itself, where another one was forced; by default computed from the looks"""

    @property
    def title(self) -> str:
        return _common(look.title for look in self.looks) or " | ".join(self.labels)

    def difference(
        self, attention: str | None = None, head: int | None = None, *, first: int = 0, second: int = -1
    ) -> Float[np.ndarray, "T S"]:
        """Weights of one look minus those of another: of one head, or averaged over heads.

        By default the first look minus the last, in the alignment attention of the last look (see `Look.alignment`).
        Both looks must have the same tokens.
        """
        one, other = (self._select(self.looks[index], attention, head) for index in (first, second))
        if (one.rows, one.columns) != (other.rows, other.columns):
            raise RegardError(
                "The two looks do not have the same tokens: their weights cannot be subtracted.",
                "Compare models on one text, and pass the same target to translators.",
            )
        return one.head_weights(head) - other.head_weights(head)

    def save(self, path: str | Path, attention: str | None = None, head: int | None = None) -> None:
        """Save a page (.html) with all attentions of all looks, or a plot (.png, .svg, .pdf) of one attention in all.

        The default attention is the alignment attention of the last look, averaged over heads.
        """
        file_format = check_format(path)
        if file_format == PAGE_FORMAT:
            from regard.viewer.page.html import render_page

            content = render_page(self.scene(attention, head))
        else:
            content = self._plot(file_format, attention, head)
        write_atomically(Path(path), content)

    def scene(self, attention: str | None = None, head: int | None = None) -> Scene:
        """The scene of the first look, with the headers of the individual looks under "compared"."""
        blobs: list[bytes] = []
        looks = self.looks
        parts = [
            {
                "sides": axis_headers(look.maps),
                "attentions": attention_headers(look.maps, blobs, len(looks)),
                "links": gold_links(look),
            }
            for look in looks
        ]
        labeled = [
            {"label": label, "texts": {"source": look.source, "target": look.translation}, "own_output": output}
            for look, label, output in zip(looks, self.labels, self.outputs or _own_outputs(looks))
        ]
        header = make_header(
            self.title,
            _common(look.family for look in looks),
            _common(look.name for look in looks),
            {"source": _common(look.source for look in looks), "target": _common(look.translation for look in looks)},
            warning=next(filter(None, map(length_warning, looks)), None),
            similarity=_similarity(looks),
            initial=initial_view(looks[0], attention, head),
            **parts[0],
            # The attentions of the first look are at the top level.
            compared=[labeled[0], *(one | part for one, part in zip(labeled[1:], parts[1:]))],
        )
        return Scene(header, blobs)

    @property
    def handler(self) -> "ComparisonRequestHandler | None":
        """Handler for requests with other sentences, if every look has its model: all models on one sentence, or one
        model on two sentences.
        """
        models = [look.pipeline for look in self.looks]
        if None in models:
            return None
        layers = sorted({shown.recorded.name for result in self.looks for shown in result.maps.values()})
        if _common(look.source for look in self.looks):
            loaders = [lambda model=model: model for model in models]
            return ComparisonRequestHandler(models[0], self.looks[0].name, layers, models=loaders, labels=self.labels)
        if len(models) == 2 and models[0] is models[1]:
            return ComparisonRequestHandler(models[0], self.looks[0].name, layers)
        return None

    def _make_widget(self) -> Any:
        return make_widget(self.scene(), self.handler)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.labels))})"

    def _select(self, one: Look, attention: str | None, head: int | None) -> AttentionMap:
        return one.select_attention(self.looks[-1].alignment.name if attention is None else attention, head)

    def _plot(self, file_format: str, attention: str | None = None, head: int | None = None) -> bytes:
        # matplotlib is slow to import
        from regard.viewer.plots import MAX_SMALL_LABELS, HeadPanels, plot_side_by_side

        shown = [self._select(look, attention, head) for look in self.looks]
        head_label = "mean of heads" if head is None else f"head {head}"
        grouped = [one.grouped_weights(MAX_SMALL_LABELS) for one in shown]
        panels = [
            HeadPanels(label, weights.mean(0, keepdims=True) if head is None else weights[[head]], rows, columns)
            for label, (weights, rows, columns, _) in zip(self.labels, grouped)
        ]
        return plot_side_by_side(f"{shown[-1].name}, {head_label}", panels, file_format)


def compare(*looks: Look, labels: Sequence[str] | None = None) -> Comparison:
    """Compare looks at several sentences, of several models, or of several steps of a training run.

    By default, the labels are what differs: the names of the models, their training steps, or the texts.

    >>> both = compare(look(model, "The cat sleeps."), look(model, "The cats sleep."))  # doctest: +SKIP
    >>> both.save("page.html")  # doctest: +SKIP
    """
    if len(looks) < 2:
        raise RegardError("A comparison needs at least two looks.", "Pass two looks or more.")
    if not all(isinstance(look, Look) for look in looks):
        raise RegardError("Only looks at texts can be compared.", "Pass results of look(model, text).")
    if labels is not None and len(labels) != len(looks):
        raise RegardError(f"There are {len(looks)} looks and {len(labels)} labels.", "Pass one label per look.")
    return Comparison(looks, tuple(labels) if labels is not None else _default_labels(looks))


def _default_labels(looks: Sequence[Look]) -> tuple[str, ...]:
    """Labels from the first attribute in which all looks differ; otherwise their numbers."""
    attributes: list[Callable[[Look], str]] = [
        lambda one: one.name,
        lambda one: one.source.strip(),
        lambda one: f"step {one.pipeline.training['step']}" if "step" in getattr(one.pipeline, "training", {}) else "",
        lambda one: one.translation.strip(),
        lambda one: one.family,
    ]
    for attribute in attributes:
        labels = tuple(attribute(look) for look in looks)
        if all(labels) and len(set(labels)) == len(looks):
            return labels
    return tuple(str(index + 1) for index in range(len(looks)))


def _own_outputs(looks: Sequence[Look]) -> list[str | None]:
    """The translation of each model itself, if models are compared on one source."""
    return [_own_output(look) if _common(other.source for other in looks) else None for look in looks]


def _own_output(result: Look) -> str | None:
    """The translation of the model itself, if the target of the look was given."""
    is_forced = result.translation and result.search is None and "target" in result.pipeline.fields
    return result.pipeline(result.source) if is_forced else None


def _similarity(looks: Sequence[Look]) -> float | None:
    """Cosine similarity of two texts, if one encoder without a head embeds both."""
    if len(looks) != 2 or looks[0].pipeline is not looks[1].pipeline or looks[0].pipeline is None:
        return None
    if looks[0].pipeline.abilities != ("embed",):
        return None
    first, second = looks[0].pipeline.embed([look.source for look in looks], truncate=True)
    return float(first @ second)


def _common(texts: Any) -> str:
    """The text that all are equal to; empty if they differ."""
    distinct = set(texts)
    return distinct.pop() if len(distinct) == 1 else ""


@dataclass(frozen=True, eq=False)
class ComparisonRequestHandler(TextRequestHandler):
    """Compares several models on one sentence or, without `models`, one model on two sentences."""

    models: Sequence[Callable[[], Any]] = ()
    """loaders of the models: the checkpoints of a long run need not be in memory together"""
    labels: Sequence[str] = ()
    share_last_translation: bool = False
    """force the translation of the last model on all translators, so that their maps have the same tokens"""

    @property
    def fields(self) -> list[str]:
        return super().fields if self.models else ["source", SECOND_SOURCE]

    def look(self, texts: dict[str, str]) -> Scene:
        return self.compare(texts).scene()

    def compare(self, texts: dict[str, str]) -> Comparison:
        """Compare looks at these texts, by field name."""
        source = texts["source"]
        if not self.models:
            looks = [
                self._look_with(self.pipeline, text)
                for text in (source, texts.get(SECOND_SOURCE, "").strip() or source)
            ]
            return compare(*looks, labels=[look.source.strip() for look in looks])
        target = texts.get("target", "").strip() or None
        if self.share_last_translation and target is None and "target" in self.pipeline.fields:
            target = self._look_with(self.models[-1](), source).translation
        looks, outputs = [], []
        for load in self.models:
            result = self._look_with(load(), source, target)
            outputs.append(_own_output(result))
            looks.append(replace(result, pipeline=None, search=None, run=None))
        return replace(compare(*looks, labels=self.labels), outputs=tuple(outputs))

    def _look_with(self, model: Any, source: str, target: str | None = None) -> Look:
        return look(model, source, target, layers=self.layers, name=self.name, truncate=self.truncate)
