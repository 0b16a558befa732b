"""`look` at a picture: what each head regarded of its patches, and what all layers together did (D5)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.attention import Recorded
from regard.data import as_numbers
from regard.errors import RegardError
from regard.files import write_whole
from regard.layers.patches import Grid
from regard.models import ViT
from regard.pipelines import ImageModel
from regard.pipelines.image_model import Picture
from regard.viewer.page.notebook_display import Showing
from regard.viewer.rollout import Rollout, Run, number_of, roll_out, rolled, run

PAGE, FORMATS = "html", ("png", "svg")
# So many labels of a segmenter are shown at once: those that have most pixels.
MOST_LABELS = 11
BLOCKS, POOLER, SEGMENTER = "blocks.", "pooler.attention", "segmenter."
"""how names of attentions begin: between patches, of the question that pools them, between labels and patches"""

Patch = tuple[int, int]
"""a row and a column of patches, from 0"""
Weights = Float[np.ndarray, "rows columns"]


@dataclass(frozen=True, eq=False)
class PatchMap:
    """What one attention regarded: a weight for each head, row and column. Every row sums to 1.

    Rows and columns are tokens: first those that are no patches (class token, registers; a segmenter's labels), then
    the patches, row by row.
    """

    name: str
    kind: str
    rows: list[str]
    columns: list[str]
    recorded: Recorded = field(repr=False)

    @cached_property
    def weights(self) -> Float[np.ndarray, "H T S"]:
        """The exact weights, computed when they are first asked for."""
        return self.recorded.weights()[0].float().cpu().numpy()


@dataclass(frozen=True, eq=False)
class ImageLook(Showing):
    """A picture, and every attention of a model in it. Shows itself in a notebook.

    `maps` are the attentions by their modules' names: `look.maps["blocks.3.attention"].weights`.
    """

    name: str
    pixels: UInt8[np.ndarray, "H W C"]
    """as the model saw them"""
    grid: Grid
    """rows and columns of patches"""
    probabilities: dict[str, float]
    """how likely each label is; empty unless the model gives pictures labels"""
    maps: dict[str, PatchMap]
    run: Run = field(repr=False)
    bundle: ImageModel = field(repr=False)
    model_name: str = ""
    """what the page calls the model"""

    @property
    def label(self) -> str | None:
        """The likeliest label."""
        return max(self.probabilities, key=lambda label: self.probabilities[label], default=None)

    def over_patches(
        self, attention: str | None = None, patch: Patch | None = None, label: str | None = None
    ) -> Float[np.ndarray, "H rows columns"]:
        """What each head of an attention regarded of the patches; without a name, of the one nearest to the output.

        The class token asks, or the question by which the picture is pooled; without either it is the mean of what all
        patches regarded. Or the patch in a row and a column asks; or, in a segmenter by queries, that of a label. What
        was regarded of other tokens is missing from the sum of 1.
        """
        shown, count = self.chosen(attention, patch), self.grid[0] * self.grid[1]
        first = len(shown.rows) - count  # of the patches, where they ask
        if patch is not None:
            if shown.name == POOLER:
                raise RegardError(f"In {POOLER} no patch asks.", "Name another attention, or leave out the patch.")
            rows = shown.weights[:, first + number_of(patch, self.grid)]
        elif label is not None:
            if not shown.name.startswith(SEGMENTER):
                raise RegardError(f"In {shown.name} no label asks.", "Leave it out, or ask for the rollout.")
            rows = shown.weights[:, self.number(label)]
        elif self.one_asks(shown):
            rows = shown.weights[:, 0]
        else:
            rows = shown.weights[:, first:].mean(1)
        return rows[:, rows.shape[1] - count :].reshape(-1, *self.grid)

    def rollout(self, patch: Patch | None = None, label: str | None = None) -> Weights:
        """What the picture as a whole, or one patch, comes from through all layers (see `roll_out`).

        With a label it is what speaks for that; in a segmenter by queries, what the query of the label comes from.
        """
        if label is None:
            return self._rollout.over_patches(patch=patch).cpu().numpy()
        if patch is not None:
            raise RegardError("Either a patch asks, or a label.", "Leave out one of them.")
        number = self.number(label)
        if self._rollout.queries is not None:
            return self._rollout.over_patches(query=number).cpu().numpy()
        return roll_out(self.run.model, self.run.images, [number]).over_patches().cpu().numpy()

    def save(
        self,
        path: str | Path,
        attention: str | None = None,
        head: int | None = None,
        *,
        patch: Patch | None = None,
        label: str | None = None,
        rollout: bool = False,
        walk: bool | None = None,
    ) -> None:
        """Writes a page, .html, which shows every head of every attention and needs nothing else, no network either; or
        a picture, .png or .svg: beside the picture what each head of an attention, or one head, regarded.

        Who asks is as in `over_patches`. With attention "all" there is a small panel for each head of each attention.
        With `rollout`, or a label of a classifier, all layers are taken together. A segmenter by queries, of which
        nothing in particular is asked, shows where the query of each label looked. A page has it all; the same choices
        say what it opens with. With `walk` it also has every number between the pixels and the output; without, it has
        them if model and picture are small.
        """
        form = Path(path).suffix.lower().removeprefix(".")
        if form not in (PAGE, *FORMATS):
            raise RegardError(f"{path}: pages are .html, pictures are .png or .svg.", "Change the name's ending.")
        if form == PAGE:
            from regard.viewer.page import html_page, image_scene

            scene = image_scene.scene_of_picture(
                self, attention, head, patch=patch, label=label, rollout=rollout, walk=walk
            )
            content = html_page.page(scene)
        else:
            content = self._picture(form, attention, head, patch, label, rollout)
        write_whole(Path(path), content)

    def _picture(
        self,
        form: str,
        attention: str | None = None,
        head: int | None = None,
        patch: Patch | None = None,
        label: str | None = None,
        rollout: bool = False,
    ) -> bytes:
        from regard.viewer.plots import patch_overlays as pictures

        if rollout or (label is not None and not self.by_queries):
            if attention is not None or head is not None:
                raise RegardError("Rollout goes through all attentions.", "Name neither an attention nor a head.")
            says, panels = self._rolled_out(patch, label)
        elif attention == "all":
            says, table = self._overview(patch)
            return pictures.overlay_table(self.title, says, self.pixels, table, patch, form)
        elif self.by_queries and attention is head is patch is label is None:
            says, panels = self._queries()
        else:
            says, panels = self._heads(attention, head, patch, label)
        return pictures.overlays(self.title, says, self.pixels, panels, patch, form)

    def _heads(
        self, attention: str | None, head: int | None, patch: Patch | None, label: str | None
    ) -> tuple[str, dict[str, Weights]]:
        shown, weights = self.chosen(attention, patch), self.over_patches(attention, patch, label)
        if head is not None and not 0 <= head < len(weights):
            raise RegardError(f"{shown.name} has no head {head}.", f"There are {len(weights)}, counted from 0.")
        chosen = range(len(weights)) if head is None else [head]
        asker = self._asker(shown, patch) if label is None else f"the query of {label}"
        return f"Where {asker} looks in {shown.name}.", {f"head {i}": weights[i] for i in chosen}

    def _overview(self, patch: Patch | None) -> tuple[str, dict[str, Float[np.ndarray, "H rows columns"]]]:
        asked = [one for one in self.maps.values() if patch is None or one.name != POOLER]
        asker = self._asker(asked[0], patch)
        return f"Where {asker} looks, a row for each attention.", {
            one.name: self.over_patches(one.name, patch) for one in asked
        }

    def _rolled_out(self, patch: Patch | None, label: str | None) -> tuple[str, dict[str, Weights]]:
        panels = {"rollout": self.rollout(patch)}
        if label is None:
            return f"What {self._asker(None, patch)} comes from, through all layers.", panels
        panels[f"for {label}"] = self.rollout(patch, label)
        if self.by_queries:
            return f"What the picture, and the query of {label}, come from, through all layers.", panels
        return f"What the picture comes from, through all layers, and what of it speaks for {label}.", panels

    def _queries(self) -> tuple[str, dict[str, Weights]]:
        """The labels that have most pixels, and where their queries looked."""
        labels, output = self.run.model.config.labels, self.run.output
        assert isinstance(output, Tensor)
        areas = torch.bincount(output[0].argmax(0).flatten(), minlength=len(labels)).tolist()
        most = sorted(range(len(labels)), key=lambda i: -areas[i])[:MOST_LABELS]
        shown = self.chosen(None, None)
        panels = {labels[i]: self.over_patches(shown.name, label=labels[i]).mean(0) for i in sorted(most)}
        return f"Where the query of each label looks in {shown.name}, mean of the heads.", panels

    def _make_widget(self) -> Any:
        from regard.viewer.page import image_requests, image_scene, widget

        assert isinstance(self.run.images, Tensor)
        desk = image_requests.PictureDesk(self.bundle, self.model_name, pictures={self.name: self.run.images[0]})
        return widget.widget_with(image_scene.scene_of_picture(self), desk)

    def __repr__(self) -> str:
        return f"ImageLook({self.title!r}, {len(self.maps)} attentions: {', '.join(self.maps)})"

    @property
    def title(self) -> str:
        if self.label is None:
            return self.name
        return f"{self.name}: {self.label}, {100 * self.probabilities[self.label]:.0f} %"

    @property
    def by_queries(self) -> bool:
        return any(name.startswith(SEGMENTER) for name in self.maps)

    @cached_property
    def _rollout(self) -> Rollout:
        return rolled(self.run)

    def chosen(self, name: str | None, patch: Patch | None) -> PatchMap:
        """An attention by its name; without, the last in which there is somebody to ask."""
        if name is None:
            return [one for one in self.maps.values() if patch is None or one.name != POOLER][-1]
        if name not in self.maps:
            raise RegardError(f"The model has no attention {name!r}.", f"There are: {', '.join(self.maps)}.")
        return self.maps[name]

    def one_asks(self, shown: PatchMap) -> bool:
        """The first row of the attention speaks for the picture."""
        class_token = self.run.model.config.pooling == "class" and self.run.model.config.head != "segment"
        return shown.name == POOLER or (class_token and shown.name.startswith(BLOCKS))

    def _asker(self, shown: PatchMap | None, patch: Patch | None) -> str:
        if patch is not None:
            return f"the patch in row {patch[0]}, column {patch[1]}"
        if shown is None:
            return "the picture"
        if self.one_asks(shown):
            return "the question of the pooling" if shown.name == POOLER else "the class token"
        return "a patch, on average,"

    def number(self, label: str) -> int:
        labels = self.run.model.config.labels
        if label not in labels:
            known = ", ".join(labels[:10]) + (", …" if len(labels) > 10 else "")
            hint = f"Its labels are {known}." if labels else "It has none."
            raise RegardError(f"The model does not know the label {label!r}.", hint)
        return labels.index(label)


def look_at_picture(model: ImageModel | ViT, picture: Picture | Tensor, model_name: str = "") -> ImageLook:
    """Lets a model look at a picture: a file, an open picture, bytes; or numbers from 0 to 1, as they go into it."""
    model = model if isinstance(model, ImageModel) else ImageModel(model)
    name = Path(picture).name if isinstance(picture, str | Path) else "the picture"
    if isinstance(picture, Tensor):
        if picture.dim() != 3:
            raise RegardError(f"Numbers of shape {tuple(picture.shape)} are not one picture.", "Give (C, H, W).")
        images = picture.to(model.device)[None]
        pixels = (255 * picture).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
    else:
        pixels = model.seen(picture)
        images = as_numbers(torch.tensor(pixels)[None].to(model.device), pixels.shape[2])
    found = run(model.model, images)
    config, grid = model.model.config, found.grids[0]
    before = ["class token"] * (config.pooling == "class") + ["distillation token"] * config.distilled
    before += [f"register {i}" for i in range(config.registers)]
    patches = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    axes = {
        BLOCKS: ([*before, *patches],) * 2,
        POOLER: (["question"], patches),
        SEGMENTER: ([*config.labels, *patches],) * 2,
    }
    maps = {
        name: PatchMap(name, one.kind, *next(axes[start] for start in axes if name.startswith(start)), one)
        for name, one in found.recording.items()
    }
    shares: Iterable[float] = ()
    if config.head == "classify" and config.labels and isinstance(found.output, Tensor):
        shares = found.output[0].float().softmax(-1).tolist()
    return ImageLook(name, pixels, grid, dict(zip(config.labels, shares)), maps, found, model, model_name)
