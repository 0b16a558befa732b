"""Attention rollout (Abnar and Zuidema 2020): attention weights multiplied through all layers.

Of an image model also weighted by the gradients of a label. The page computes the plain one itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import Offsets, Recording
from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import attention_names
from regard.layers.embeddings import Images
from regard.layers.patches import Grid, PackedImages, compute_grid
from regard.models import ViT
from regard.models.vit import IMAGE_HEADS, ImageLabelHead
from regard.viewer.model_run import MAX_PATCHES, ModelRun, is_small, run_model

if TYPE_CHECKING:
    from regard.viewer.text_look import AttentionMap, Look

PatchCoordinates = tuple[int, int]
"""row and column of a patch"""


class ImageRun(NamedTuple):
    """A recorded forward pass of a model on images."""

    model: ViT
    images: Images
    encoded: Float[Tensor, "*n E"]
    output: Tensor | list[Tensor]
    recording: Recording
    model_run: ModelRun | None
    """None in a look that was pickled"""

    def without_model(self) -> "ImageRun":
        """The run with the config of the model alone, as it is pickled with a look."""
        return self._replace(model=cast(Any, SimpleNamespace(config=self.model.config)), model_run=None)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Rows and columns of patches per image."""
        if isinstance(self.images, PackedImages):
            return self.images.grids
        return (compute_grid(self.images.shape[-2:], self.model.config.patch),) * len(self.images)


def run_on_images(model: ViT, images: Images, *, needs_grad: bool = False) -> ImageRun:
    """Run a model on images and record its attention."""
    images = _require_grad(images) if needs_grad else images
    keep_outputs = False
    if isinstance(images, Tensor) and len(images) == 1 and not needs_grad:
        rows, columns = compute_grid(images.shape[-2:], model.config.patch)
        keep_outputs = is_small(model, rows * columns, MAX_PATCHES)
    with torch.set_grad_enabled(needs_grad):
        run = run_model(model, lambda: forward_all_tokens(model, images), keep_outputs=keep_outputs)
    encoded, output = run.output
    return ImageRun(model, images, encoded, output, run.recording, run)


def forward_all_tokens(model: ViT, images: Images) -> tuple[Tensor, Any]:
    """The encoded tokens and the output of the model.

    Unlike the model's forward, it computes all tokens of the last block, even if the label needs the class token only.
    """
    encoded = model.encode(images)
    return encoded, model.output_of_tokens(encoded, images)


def _require_grad(images: Images) -> Images:
    """Copies of images that require gradients, so that the model may be frozen; none is an inference-mode tensor."""
    if not isinstance(images, PackedImages):
        return images.detach().clone().requires_grad_()
    offsets = Offsets(images.offsets.starts.clone(), images.offsets.total, images.offsets.max_len)
    return replace(images, pixels=images.pixels.detach().clone().requires_grad_(), offsets=offsets)


@dataclass(frozen=True, eq=False)
class Rollout:
    """How much each input token contributes to each token of the last layer. Every row sums to 1.

    Exception: with a label, `pooled` is 0 if no weight of the pooling has a positive gradient.
    """

    matrix: Float[Tensor, "B T T"]
    """a row per token of the last layer, a column per input token; the first `prefix` tokens are not patches"""
    pooled: Float[Tensor, "B T"]
    """the rollout of the pooled vector: the class token, the pooling query, or the mean of the patches"""
    queries: Float[Tensor, "B V T"] | None
    """the rollout of the class queries of a segmenter"""
    prefix: int
    grids: tuple[Grid, ...]

    def patch_weights(
        self, image: int = 0, patch: PatchCoordinates | None = None, query: int | None = None
    ) -> Float[Tensor, "rows columns"]:
        """Weights over the patches of one row: of the pooled vector, of a patch, or of a class query."""
        row = self.pooled[image]
        if patch is not None:
            row = self.matrix[image, self.prefix + patch_index(patch, self.grids[image])]
        elif query is not None:
            assert self.queries is not None
            row = self.queries[image, query]
        rows, columns = self.grids[image]
        return row[self.prefix :][: rows * columns].view(rows, columns)


def patch_index(patch: PatchCoordinates, grid: Grid) -> int:
    """Index of the patch with these coordinates in row-major order.

    >>> patch_index((1, 2), (3, 4))
    6
    """
    if not all(0 <= index < count for index, count in zip(patch, grid)):
        raise RegardError(
            f"There is no patch in row {patch[0]}, column {patch[1]}.",
            f"The image has {grid[0]} rows and {grid[1]} columns of patches, counted from 0.",
        )
    return patch[0] * grid[1] + patch[1]


def attention_rollout(model: ViT, images: Images, labels: Sequence[int] | None = None) -> Rollout:
    """Attention rollout (Abnar and Zuidema 2020): in each layer the heads are averaged, the identity is added for the
    residual connection, and rows are normalized to sum to 1; the layers are multiplied.

    With the index of a label per image, weights are multiplied by their gradients (after Chefer, Gur and Wolf 2021):
    each head contributes the positive part of its weights times the gradient of the label's logit. These rows are
    normalized before the identity is added, so that the result does not depend on the scale of the logits. The pooling
    of the patches, a mean included, is treated like an attention.

    >>> from regard.models import ViTConfig
    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> rollout = attention_rollout(model, torch.rand(5, 3, 32, 48))
    >>> rollout.matrix.shape, rollout.patch_weights(4).shape, rollout.pooled.sum(1).allclose(torch.ones(5))
    (torch.Size([5, 7, 7]), torch.Size([2, 3]), True)
    """
    if labels is None:
        return rollout_of_run(run_on_images(model, images))
    if len(labels) != len(images):
        raise RegardError(f"{len(labels)} labels for {len(images)} images.", "Pass one label per image.")
    return label_rollouts(model, images, [labels])[0]


def label_rollouts(model: ViT, images: Images, choices: Iterable[Sequence[int]]) -> list[Rollout]:
    """Gradient-weighted rollouts for several choices of labels from one forward pass.

    >>> from regard.models import ViTConfig
    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> len(label_rollouts(model, torch.rand(1, 3, 32, 48), [[0], [1]]))
    2
    """
    if not isinstance(IMAGE_HEADS[model.config.head], ImageLabelHead) or model.output is None:
        raise RegardError(
            f"Rollout for a label needs an image classifier with labels; this model has the head {model.config.head}.",
            "Leave out the label, or use a model with labels.",
        )
    with torch.inference_mode(False):
        run = run_on_images(model, images, needs_grad=True)
        return [_gradient_rollout(run, labels) for labels in choices]


@torch.no_grad()
def rollout_of_run(run: ImageRun) -> Rollout:
    """The plain rollout of a recorded forward pass."""
    model, recording = run.model, run.recording
    config, grids = model.config, run.grids
    matrix = _multiply(_add_residual(recording[name].weights().mean(1)) for name in _layer_names(run, "blocks"))
    patches, queries = matrix[:, config.prefix :], None
    if config.reads_class_token:
        pooled = matrix[:, : 1 + config.distilled].mean(1)
    elif "pooler.attention" in recording:
        pooled = _trace_back(recording["pooler.attention"].weights().mean(1), patches)[:, 0]
    else:
        is_patch = _patch_mask(grids, patches)
        pooled = _trace_back((is_patch / is_patch.sum(1, keepdim=True))[:, None], patches)[:, 0]
    if blocks := _layer_names(run, "segmenter.blocks"):
        segmenter = _multiply(_add_residual(recording[name].weights().mean(1)) for name in blocks)
        count = len(config.labels)
        to_patches = segmenter[:, :count, count:]  # without the contributions of the queries themselves
        queries = _trace_back(to_patches / to_patches.sum(-1, keepdim=True), patches)
    return Rollout(matrix, pooled, queries, config.prefix, grids)


@torch.no_grad()
def _gradient_rollout(run: ImageRun, labels: Sequence[int]) -> Rollout:
    model, recording = run.model, run.recording
    config, grids = model.config, run.grids
    assert isinstance(run.output, Tensor)
    with torch.enable_grad():
        logits = run.output.gather(1, torch.tensor(labels, device=run.output.device)[:, None]).sum()
    gradients = recording.gradients(logits)

    def relevance(name: str) -> Float[Tensor, "B T S"]:
        return _normalize_rows((gradients[name] * recording[name].weights()).clamp(min=0).mean(1))

    matrix = _multiply(_add_residual(relevance(name)) for name in _layer_names(run, "blocks"))
    first = 0 if config.pooling == "class_mean" else config.prefix  # the first token that the output reads
    patches = matrix[:, first:]
    if config.pooling == "class":
        pooled = matrix[:, : 1 + config.distilled].mean(1)
    else:
        if "pooler.attention" in recording:
            weights = relevance("pooler.attention")
        else:
            # The mean is an attention of equal weights: weight times gradient is the gradient times the patch itself.
            (gradient,) = torch.autograd.grad(logits, run.encoded, retain_graph=True)
            per_token = _pad((gradient * run.encoded).sum(-1), run)[:, None, first:]
            weights = _normalize_rows(per_token.clamp(min=0))
        pooled = _trace_back(weights, patches)[:, 0]
    return Rollout(matrix, pooled, None, config.prefix, grids)


def _layer_names(run: ImageRun, stack: str) -> list[str]:
    """The attentions of a stack of blocks, first to last."""
    return [name for name in run.recording if name.startswith(f"{stack}.")]


def _add_residual(weights: Float[Tensor, "*B T T"]) -> Float[Tensor, "*B T T"]:
    """Attention weights and residual connection of a layer in equal parts."""
    return _normalize_rows(weights + torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device))


def _normalize_rows(rows: Float[Tensor, "*b T"]) -> Float[Tensor, "*b T"]:
    """Rows that sum to 1; rows of zeros are unchanged."""
    sums = rows.sum(-1, keepdim=True)
    return rows / sums.where(sums > 0, 1.0)


def _multiply(layers: Iterable[Float[Tensor, "*B T T"]]) -> Float[Tensor, "*B T T"]:
    """The product with the last layer on the left: rows are output tokens, columns input tokens."""
    matrix: Tensor | None = None
    for layer in layers:
        matrix = layer if matrix is None else layer @ matrix
    assert matrix is not None
    return matrix


def _trace_back(weights: Float[Tensor, "B K P"], patches: Float[Tensor, "B P T"]) -> Float[Tensor, "B K T"]:
    """Weights over patches of the last layer as weights over input tokens."""
    return weights @ patches[:, : weights.shape[2]]


def _patch_mask(grids: tuple[Grid, ...], like: Float[Tensor, "B P T"]) -> Float[Tensor, "B P"]:
    """1 for patches, 0 for padding."""
    counts = torch.tensor([rows * columns for rows, columns in grids], device=like.device)
    return (torch.arange(like.shape[1], device=like.device) < counts[:, None]).float()


def _pad(x: Float[Tensor, "*n"], run: ImageRun) -> Float[Tensor, "B T"]:
    """One value per token as (B, T), padded with 0."""
    if not isinstance(run.images, PackedImages):
        return x
    counts = [run.model.config.prefix + rows * columns for rows, columns in run.grids]
    return torch.nn.utils.rnn.pad_sequence(list(x.split(counts)), batch_first=True)


def text_rollout(look: "Look") -> dict[str, Float[np.ndarray, "T S"]]:
    """How much each input token contributes to each token of the last layer, by attention weights alone.

    In each layer the heads are averaged, and attention and residual connection count in equal parts. In a translator,
    the rows of the decoder distribute their weight over source and target: the rollout of the encoder is continued
    through the cross-attentions. Rows sum to 1, of a translator over source and target together.

    >>> text_rollout(look(translator, "The cat sleeps."))["source"].shape  # doctest: +SKIP
    (5, 4)
    """
    if look.pipeline is None:
        raise RegardError("This look has no model.", "Create it with regard.look.")
    kinds = {kind: [one for one in look.maps.values() if one.kind == kind] for kind in KINDS}
    if not any(attention_names(look.pipeline, kind) for kind in ("self", "masked")):
        raise RegardError("Rollout needs a Transformer, in which every layer has attention.", "Use another measure.")
    if not set(attention_names(look.pipeline)) <= {shown.recorded.name for shown in look.maps.values()}:
        raise RegardError("Rollout needs all attentions of the model.", "Leave out layers.")
    if not (kinds["masked"] and kinds["cross"]):
        layers = kinds["self"] or kinds["masked"]
        return {"text": _multiply(_add_residual(_mean_of_heads(layer)) for layer in layers).numpy()}
    encoder = _multiply(_add_residual(_mean_of_heads(layer)) for layer in kinds["self"])
    target_length = len(kinds["masked"][0].rows)
    source, target = encoder.new_zeros(target_length, len(encoder)), torch.eye(target_length, dtype=encoder.dtype)
    for masked, cross in zip(kinds["masked"], kinds["cross"]):
        layer = _add_residual(_mean_of_heads(masked))
        source, target = layer @ source, layer @ target
        source, target = (source + _mean_of_heads(cross) @ encoder) / 2, target / 2
    return {"source": source.numpy(), "target": target.numpy()}


def _mean_of_heads(shown: "AttentionMap") -> Float[Tensor, "T S"]:
    return torch.from_numpy(shown.head_weights()).double()
