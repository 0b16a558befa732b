"""`look` at an image: attention maps over patches, and attention rollout (Abnar and Zuidema 2020)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.attention import Recorded
from regard.data.batching.images import pixels_to_float
from regard.errors import RegardError
from regard.files import write_atomically
from regard.layers.patches import Grid
from regard.models import ViT
from regard.models.vit import IMAGE_HEADS, ImageLabelHead
from regard.pipelines import ImageModel
from regard.pipelines.image_model import ImageLike
from regard.viewer.display import PAGE_FORMAT, ExplainedLook, NotebookDisplay, check_format, make_widget
from regard.viewer.rollout import (
    ImageRun,
    PatchCoordinates,
    Rollout,
    attention_rollout,
    patch_index,
    rollout_of_run,
    run_on_images,
)

if TYPE_CHECKING:
    from regard.viewer.page.model import Precision

# Labels of a segmenter in one plot: those with the most pixels.
MAX_LABELS = 11
BLOCKS, POOLER, SEGMENTER = "blocks.", "pooler.attention", "segmenter."
"""prefixes of attention names: between patches; pooling by a learned query; between class queries and patches"""

PatchWeights = Float[np.ndarray, "rows columns"]


@dataclass(frozen=True, eq=False)
class PatchMap:
    """The map of one attention of an image model: a weight per head, row (query) and column (key).

    Rows and columns are tokens: class token, registers or the class queries of a segmenter first, then the patches, row
    by row. Every row sums to 1.
    """

    name: str
    kind: str
    rows: list[str] = field(repr=False)
    columns: list[str] = field(repr=False)
    recorded: Recorded = field(repr=False)

    @property
    def heads(self) -> int:
        return self.recorded.calls[0].q.shape[1]

    @cached_property
    def weights(self) -> Float[np.ndarray, "H T S"]:
        """The exact weights, computed on first access."""
        return self.recorded.weights()[0].float().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Float[np.ndarray, "H T S"]:
        return np.array(self.weights, dtype, copy=copy)


@dataclass(frozen=True, eq=False)
class ImageLook(ExplainedLook, NotebookDisplay):
    """The attention maps of a model on an image. Notebooks display it.

    `maps` has one entry per attention module: `look.maps["blocks.3.attention"].weights`.
    """

    name: str
    pixels: UInt8[np.ndarray, "H W C"]
    """after resizing and cropping, as the model takes them"""
    grid: Grid
    """rows and columns of patches"""
    probabilities: dict[str, float]
    """probability per label; empty unless the model is a classifier"""
    maps: dict[str, PatchMap]
    run: ImageRun = field(repr=False)
    pipeline: ImageModel = field(repr=False)
    model_name: str = ""
    """name of the model in the page"""
    file: Path | None = None
    """file of the image, which `save` does not replace"""

    @property
    def model(self) -> ViT:
        """The model; an error in a look that was pickled."""
        if self.pipeline is None:
            raise RegardError("This look was loaded from a pickle, which has no model.", "Call regard.look again.")
        return self.run.model

    @property
    def label(self) -> str | None:
        """The most likely label."""
        return max(self.probabilities, key=lambda label: self.probabilities[label], default=None)

    def patch_weights(
        self, attention: str | None = None, patch: PatchCoordinates | None = None, label: str | None = None
    ) -> Float[np.ndarray, "H rows columns"]:
        """Weights over the patches per head of an attention, by default of the last one.

        The query is the class token or the learned pooling query; without either, the weights are averaged over the
        queries of all patches. `patch` selects the query of one patch instead, `label` the class query of a segmenter.
        Weights of other tokens are left out, so the sum may be less than 1.
        """
        shown, count = self.select_attention(attention, patch), self.grid[0] * self.grid[1]
        first = len(shown.rows) - count
        if patch is not None:
            check_has_patch_queries(shown)
            rows = shown.weights[:, first + patch_index(patch, self.grid)]
        elif label is not None:
            check_has_class_queries(shown)
            rows = shown.weights[:, self.label_index(label)]
        elif self.has_single_query(shown):
            rows = shown.weights[:, 0]
        else:
            rows = shown.weights[:, first:].mean(1)
        return rows[:, rows.shape[1] - count :].reshape(-1, *self.grid)

    def rollout(self, patch: PatchCoordinates | None = None, label: str | None = None) -> PatchWeights:
        """Attention rollout through all layers, of the image or of one patch (see `attention_rollout`).

        With a label, the gradient-weighted rollout for it; in a segmenter with class queries, the rollout of its query.
        """
        if label is None:
            return self._rollout.patch_weights(patch=patch).cpu().numpy()
        if patch is not None:
            raise RegardError("A patch and a label cannot be combined.", "Leave out one of them.")
        index = self.label_index(label)
        if self._rollout.queries is not None:
            return self._rollout.patch_weights(query=index).cpu().numpy()
        return attention_rollout(self.model, self.run.images, [index]).patch_weights().cpu().numpy()

    def attribution(self, label: str | None = None, method: str = "gradient") -> PatchWeights:
        """Attribution of a label, by default the most likely one, to each patch.

        The method is "gradient" (× input), "integrated_gradients" or "occlusion": see `Attribution`.
        """
        from regard.viewer.explanations.attribution import compute_image_attribution

        return compute_image_attribution(self, label, method)

    def save(
        self,
        path: str | Path,
        attention: str | None = None,
        head: int | None = None,
        *,
        patch: PatchCoordinates | None = None,
        label: str | None = None,
        rollout: bool = False,
        trace: bool | None = None,
        explain: bool | None = None,
        with_model: "bool | Precision | None" = None,
    ) -> None:
        """Save a self-contained page (.html) with all attentions, or a plot (.png, .svg, .pdf) of one attention.

        The plot shows the image and a panel per head (or one head); the query is selected as in `patch_weights`. With
        attention "all" it has a small panel per head of each attention; with `rollout`, or a label of a classifier, the
        rollout through all layers. By default, a segmenter with class queries is shown with a panel per label. For a
        page the same arguments select the initial view. `trace` includes the step-by-step view; by default a page
        includes it if model and image are small. `explain` includes the effects of heads and the logit lens; by
        default if they are cheap and the page has no model to compute them. `with_model` includes the model, so that
        the page runs experiments offline; by default a small one (4 MB).
        """
        file_format = check_format(path, image=self.file)
        if file_format == PAGE_FORMAT:
            from regard.viewer.page.html import render_page
            from regard.viewer.page.image_scene import build_image_scene
            from regard.viewer.page.model import model_for_page

            model = model_for_page(self, with_model)
            explain = False if explain is None and model is not None else explain
            view: dict[str, Any] = dict(patch=patch, label=label, rollout=rollout)
            scene = build_image_scene(self, attention, head, **view, trace=trace, explain=explain)
            content = render_page(scene, model)
        elif with_model:
            raise RegardError("Only a page can contain the model.", "Save it as .html, or leave out with_model.")
        else:
            content = self._plot(file_format, attention, head, patch, label, rollout)
        write_atomically(Path(path), content)

    def _plot(
        self,
        file_format: str,
        attention: str | None = None,
        head: int | None = None,
        patch: PatchCoordinates | None = None,
        label: str | None = None,
        rollout: bool = False,
    ) -> bytes:
        from regard.viewer.plots import plot_overlay_table, plot_overlays  # matplotlib is slow to import

        if rollout or (label is not None and not self.has_class_queries):
            check_rollout(attention, head)
            caption, panels = self._rollout_panels(patch, label)
        elif attention == "all":
            caption, table = self._overview_table(patch)
            return plot_overlay_table(self.title, caption, self.pixels, table, patch, file_format)
        elif self.has_class_queries and attention is head is patch is label is None:
            caption, panels = self._class_query_panels()
        else:
            caption, panels = self._head_panels(attention, head, patch, label)
        return plot_overlays(self.title, caption, self.pixels, panels, patch, file_format)

    def _head_panels(
        self, attention: str | None, head: int | None, patch: PatchCoordinates | None, label: str | None
    ) -> tuple[str, dict[str, PatchWeights]]:
        shown, weights = self.select_attention(attention, patch), self.patch_weights(attention, patch, label)
        check_head(shown, head, len(weights))
        heads = range(len(weights)) if head is None else [head]
        query = self._query_name(shown, patch) if label is None else f"the query of {label}"
        return f"Attention of {query} in {shown.name}.", {f"head {i}": weights[i] for i in heads}

    def _overview_table(
        self, patch: PatchCoordinates | None
    ) -> tuple[str, dict[str, Float[np.ndarray, "H rows columns"]]]:
        shown = [one for one in self.maps.values() if patch is None or one.name != POOLER]
        query = self._query_name(shown[0], patch)
        return f"Attention of {query}, one row per attention.", {
            one.name: self.patch_weights(one.name, patch) for one in shown
        }

    def _rollout_panels(self, patch: PatchCoordinates | None, label: str | None) -> tuple[str, dict[str, PatchWeights]]:
        panels = {"rollout": self.rollout(patch)}
        if label is None:
            return f"Attention rollout of {self._query_name(None, patch)} through all layers.", panels
        panels[f"for {label}"] = self.rollout(patch, label)
        if self.has_class_queries:
            return f"Attention rollout of the image and of the query of {label} through all layers.", panels
        return f"Attention rollout of the image through all layers, plain and weighted by gradients of {label}.", panels

    def _class_query_panels(self) -> tuple[str, dict[str, PatchWeights]]:
        """Attention of the class queries of the labels with the most pixels."""
        labels, output = self.run.model.config.labels, self.run.output
        assert isinstance(output, Tensor)
        areas = torch.bincount(output[0].argmax(0).flatten(), minlength=len(labels)).tolist()
        largest = sorted(range(len(labels)), key=lambda i: -areas[i])[:MAX_LABELS]
        shown = self.select_attention(None, None)
        panels = {labels[i]: self.patch_weights(shown.name, label=labels[i]).mean(0) for i in sorted(largest)}
        return f"Attention of the query of each label in {shown.name}, mean of the heads.", panels

    def _make_widget(self) -> Any:
        from regard.viewer.page.image_scene import build_image_scene
        from regard.viewer.page.requests import ImageRequestHandler

        assert isinstance(self.run.images, Tensor)
        handler = ImageRequestHandler(self.pipeline, self.model_name, images={self.name: self.run.images[0]})
        return make_widget(build_image_scene(self), handler)

    def __repr__(self) -> str:
        return f"ImageLook({self.title!r}, {len(self.maps)} attentions: {', '.join(self.maps)})"

    @property
    def title(self) -> str:
        if self.label is None:
            return self.name
        return f"{self.name}: {self.label}, {100 * self.probabilities[self.label]:.0f} %"

    @property
    def has_class_queries(self) -> bool:
        """Whether the model is a segmenter with a learned query per label."""
        return any(name.startswith(SEGMENTER) for name in self.maps)

    @cached_property
    def _rollout(self) -> Rollout:
        return rollout_of_run(self.run)

    def select_attention(self, name: str | None, patch: PatchCoordinates | None) -> PatchMap:
        """An attention by name, by default the last one (that has patches as queries, if a patch is given)."""
        if name is None:
            return [shown for shown in self.maps.values() if patch is None or shown.name != POOLER][-1]
        if name not in self.maps:
            raise RegardError(f"The model has no attention {name!r}.", f"There are: {', '.join(self.maps)}.")
        return self.maps[name]

    def has_single_query(self, shown: PatchMap) -> bool:
        """Whether the first query alone (class token or pooling query) represents the image."""
        return shown.name == POOLER or (self.run.model.config.reads_class_token and shown.name.startswith(BLOCKS))

    def _query_name(self, shown: PatchMap | None, patch: PatchCoordinates | None) -> str:
        if patch is not None:
            return f"the patch in row {patch[0]}, column {patch[1]}"
        if shown is None:
            return "the image"
        if self.has_single_query(shown):
            return "the pooling query" if shown.name == POOLER else "the class token"
        return "all patches (mean)"

    def label_index(self, label: str) -> int:
        labels = self.run.model.config.labels
        if label not in labels:
            known = ", ".join(labels[:10]) + (", …" if len(labels) > 10 else "")
            hint = f"Its labels are {known}." if labels else "It has no labels."
            raise RegardError(f"The model has no label {label!r}.", hint)
        return labels.index(label)


def check_head(shown: PatchMap, head: int | None, heads: int) -> None:
    """Raise an error if the attention has no such head."""
    if head is not None and not 0 <= head < heads:
        raise RegardError(f"{shown.name} has no head {head}.", f"Choose a head from 0 to {heads - 1}.")


def check_has_patch_queries(shown: PatchMap) -> None:
    if shown.name == POOLER:
        raise RegardError(f"{POOLER} has no patches as queries.", "Choose another attention, or leave out the patch.")


def check_has_class_queries(shown: PatchMap) -> None:
    if not shown.name.startswith(SEGMENTER):
        raise RegardError(f"{shown.name} has no labels as queries.", "Leave out the label, or choose the rollout.")


def check_rollout(attention: str | None, head: int | None) -> None:
    if attention is not None or head is not None:
        raise RegardError("Rollout combines all attentions and heads.", "Leave out the attention and the head.")


def look_at_image(model: ImageModel, image: ImageLike | Tensor, model_name: str = "") -> ImageLook:
    """Run a model on an image and record its attention: a file, a PIL image, an array, bytes; or a tensor in 0…1."""
    file = Path(image) if isinstance(image, str | Path) else None
    name = "the image" if file is None else file.name
    if isinstance(image, Tensor):
        if image.dim() != 3:
            raise RegardError(f"A tensor of shape {tuple(image.shape)} is not one image.", "Pass a (C, H, W) tensor.")
        images = image.to(model.device)[None]
        pixels = (255 * image).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
    else:
        pixels = model.preprocess(image)
        images = pixels_to_float(torch.tensor(pixels)[None].to(model.device), pixels.shape[2])
    run = run_on_images(model.model, images)
    config, grid = model.model.config, run.grids[0]
    prefix = ["class token"] * config.has_class_token + ["distillation token"] * config.distilled
    prefix += [f"register {i}" for i in range(config.registers)]
    patches = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    axes = {
        BLOCKS: ([*prefix, *patches],) * 2,
        POOLER: (["query"], patches),
        SEGMENTER: ([*config.labels, *patches],) * 2,
    }
    maps = {
        name: PatchMap(name, recorded.kind, *next(axes[start] for start in axes if name.startswith(start)), recorded)
        for name, recorded in run.recording.items()
    }
    probabilities: Iterable[float] = ()
    head = IMAGE_HEADS[config.head]
    if isinstance(head, ImageLabelHead) and config.labels and isinstance(run.output, Tensor):
        probabilities = run.output[0].float().softmax(-1).tolist()
    return ImageLook(name, pixels, grid, dict(zip(config.labels, probabilities)), maps, run, model, model_name, file)
