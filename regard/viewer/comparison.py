"""Looks beside one another: two sentences, two models, or one model on its way through training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.errors import RegardError
from regard.files import write_whole
from regard.pipelines import Translator
from regard.version import __version__
from regard.viewer.page.notebook_display import Showing
from regard.viewer.page.text_requests import Desk
from regard.viewer.page.text_scene import FORMAT, Scene, carried, links_of, opening, shortened, sides_of
from regard.viewer.text_look import PAGE, PICTURES, AttentionMap, Look, look

BESIDE = "beside"


@dataclass(frozen=True, eq=False)
class Comparison(Showing):
    """Several looks, each with a label. Shows itself in a notebook: one page, in which any two stand side by side, and
    what one has more than the other; of more than two a slider chooses.
    """

    looks: tuple[Look, ...]
    labels: tuple[str, ...]

    @property
    def title(self) -> str:
        return _common(one.title for one in self.looks) or " | ".join(self.labels)

    def difference(
        self, attention: str | None = None, head: int | None = None, *, first: int = 0, second: int = -1
    ) -> Float[np.ndarray, "T S"]:
        """The weights of one look less those of another: of one head, or of the mean over heads.

        By default the first look less the last, of the attention that is clearest in the last. Both must be of the
        same tokens.
        """
        one, other = (self._chosen(self.looks[number], attention, head) for number in (first, second))
        if (one.rows, one.columns) != (other.rows, other.columns):
            raise RegardError(
                "The two looks are not of the same tokens: there is no difference cell by cell.",
                "Compare models on one text, and give translators the same target.",
            )
        return one.of(head) - other.of(head)

    def save(self, path: str | Path, attention: str | None = None, head: int | None = None) -> None:
        """Writes a page, .html, which shows every attention of every look; or a picture, .png or .svg, of one attention
        in all of them, by default the clearest of the last: its mean over heads, or one head.
        """
        form = Path(path).suffix.lower().removeprefix(".")
        if form not in (PAGE, *PICTURES):
            raise RegardError(f"{path}: pages are .html, pictures are .png or .svg.", "Change the name's ending.")
        if form == PAGE:
            from regard.viewer.page import html_page

            content = html_page.page(self.scene(attention, head))
        else:
            content = self._picture(form, attention, head)
        write_whole(Path(path), content)

    def scene(self, attention: str | None = None, head: int | None = None) -> Scene:
        """What a page is given: the first look like any other, and under "compared" what belongs to each alone."""
        blobs: list[bytes] = []
        looks = self.looks
        parts = [
            {
                "sides": sides_of(one.maps),
                "attentions": carried(one.maps, blobs, len(looks)),
                "links": links_of(one),
            }
            for one in looks
        ]
        labelled = [
            {"label": label, "texts": {"source": one.source, "target": one.translation}}
            for one, label in zip(looks, self.labels)
        ]
        header = {
            "format": FORMAT,
            "title": shortened(self.title),
            "model": {
                "family": _common(one.family for one in looks),
                "name": _common(one.name for one in looks),
                "regard": __version__,
            },
            "texts": {
                "source": _common(one.source for one in looks),
                "target": _common(one.translation for one in looks),
            },
            "opens": opening(looks[0], attention, head),
            **parts[0],
            # The first has its attentions at the top.
            "compared": [labelled[0], *(one | more for one, more in zip(labelled[1:], parts[1:]))],
        }
        return Scene(header, blobs)

    @property
    def desk(self) -> "ComparingDesk | None":
        """Who answers for other sentences, where every look knows its model: all models for one sentence or, where two
        sentences are compared, one model for both.
        """
        models = [one.bundle for one in self.looks]
        if None in models:
            return None
        layers = sorted({one.recorded.name for seen in self.looks for one in seen.maps.values()})
        if _common(one.source for one in self.looks):
            openers = [lambda model=model: model for model in models]
            return ComparingDesk(models[0], self.looks[0].name, layers, models=openers, labels=self.labels)
        if len(models) == 2 and models[0] is models[1]:
            return ComparingDesk(models[0], self.looks[0].name, layers)
        return None

    def _make_widget(self) -> Any:
        from regard.viewer.page import widget

        return widget.widget_with(self.scene(), self.desk)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.labels))})"

    def _chosen(self, one: Look, attention: str | None, head: int | None) -> AttentionMap:
        return one.chosen(self.looks[-1].alignment.name if attention is None else attention, head)

    def _picture(self, form: str, attention: str | None = None, head: int | None = None) -> bytes:
        from regard.viewer.plots import heatmaps

        shown = [self._chosen(one, attention, head) for one in self.looks]
        which = "mean of heads" if head is None else f"head {head}"
        panels = [
            heatmaps.Panels(label, one.of(head)[None], one.rows, one.columns) for label, one in zip(self.labels, shown)
        ]
        return heatmaps.beside(f"{shown[-1].name}, {which}", panels, form)


def compare(*looks: Look, labels: Sequence[str] | None = None) -> Comparison:
    """Puts looks beside one another: of several sentences, of several models, or of several steps of a training run.

    Without `labels` they are called by what tells them apart: the models' names or steps, or the texts.

    >>> both = compare(look(model, "The cat sleeps."), look(model, "The cats sleep."))  # doctest: +SKIP
    >>> both.save("page.html")  # doctest: +SKIP
    """
    if len(looks) < 2:
        raise RegardError("One look has nothing to be compared with.", "Give two looks, or more.")
    if not all(isinstance(one, Look) for one in looks):
        raise RegardError("Only looks at texts can be compared.", "Give what look(model, text) gives.")
    if labels is not None and len(labels) != len(looks):
        raise RegardError(f"There are {len(looks)} looks and {len(labels)} labels.", "Give one for each.")
    return Comparison(looks, tuple(labels) if labels is not None else _told_apart(looks))


def _told_apart(looks: Sequence[Look]) -> tuple[str, ...]:
    """Labels that differ, if the looks differ in anything that can be said."""
    ways: list[Callable[[Look], str]] = [
        lambda one: one.name,
        lambda one: one.source.strip(),
        lambda one: f"step {one.bundle.training['step']}" if "step" in getattr(one.bundle, "training", {}) else "",
        lambda one: one.translation.strip(),
        lambda one: one.family,
    ]
    for way in ways:
        labels = tuple(way(one) for one in looks)
        if all(labels) and len(set(labels)) == len(looks):
            return labels
    return tuple(str(number + 1) for number in range(len(looks)))


def _common(texts: Any) -> str:
    """What all of them are, or nothing."""
    different = set(texts)
    return different.pop() if len(different) == 1 else ""


@dataclass(frozen=True, eq=False)
class ComparingDesk(Desk):
    """Several models that answer for one sentence; or, without `models`, one that answers for two."""

    models: Sequence[Callable[[], Any]] = ()
    """each gives a model: those of a long run need not be in memory together"""
    labels: Sequence[str] = ()
    last_leads: bool = False
    """translators are all given the last one's translation, so that their maps are of the same tokens"""

    @property
    def fields(self) -> list[str]:
        return super().fields if self.models else ["source", BESIDE]

    def see(self, texts: dict[str, str]) -> Scene:
        return self.compared(texts).scene()

    def compared(self, texts: dict[str, str]) -> Comparison:
        """What the models regarded in texts that were written into the fields."""
        source = texts["source"]
        if not self.models:
            both = [self._look(self.bundle, text) for text in (source, texts.get(BESIDE, "").strip() or source)]
            return compare(*both, labels=[one.source.strip() for one in both])
        target = texts.get("target", "").strip() or None
        if self.last_leads and target is None and isinstance(self.bundle, Translator):
            target = self._look(self.models[-1](), source).translation
        looks = [replace(self._look(model(), source, target), bundle=None, search=None) for model in self.models]
        return compare(*looks, labels=self.labels)

    def _look(self, model: Any, source: str, target: str | None = None) -> Look:
        return look(model, source, target, layers=self.layers, name=self.name, truncate=self.truncate)
