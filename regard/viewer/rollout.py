"""Attention through all layers of an image model at once: rollout, and its form that asks for one label (D5)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import Offsets, Recording, record
from regard.errors import RegardError
from regard.layers.embeddings import Images
from regard.layers.patches import Grid, PackedImages, grid_of, take_away
from regard.models import ViT


class Run(NamedTuple):
    """What a model made of images, and what its attentions were given on the way."""

    model: ViT
    images: Images
    encoded: Float[Tensor, "*n E"]
    output: Tensor | list[Tensor]
    recording: Recording

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Rows and columns of the patches of each image."""
        if isinstance(self.images, PackedImages):
            return self.images.grids
        return (grid_of(self.images.shape[-2:], self.model.config.patch),) * len(self.images)


def run(model: ViT, images: Images, *, gradients: bool = False) -> Run:
    """Runs a model on images and records it. It goes the long way: all tokens of the last block are made, which a label
    alone does not need."""
    config = model.config
    model.eval()
    images = _asking(images) if gradients else images
    with torch.set_grad_enabled(gradients), record(model) as recording:
        encoded = model.encode(images)
        output: Tensor | list[Tensor] = encoded
        if config.head == "segment":
            offsets = images.offsets if isinstance(images, PackedImages) else None
            output = model.masks(take_away(encoded, config.prefix, offsets), images)
        elif config.head != "pixels":
            output = model.logits(model.pooled(encoded, images))
    called = Recording({name: one for name, one in recording.items() if one.calls})
    return Run(model, images, encoded, output, called)


def _asking(images: Images) -> Images:
    """Images at whose pixels gradients begin, so that a model may be frozen; nothing in them is of inference mode."""
    if not isinstance(images, PackedImages):
        return images.detach().clone().requires_grad_()
    offsets = Offsets(images.offsets.starts.clone(), images.offsets.total, images.offsets.max_len)
    return replace(images, pixels=images.pixels.detach().clone().requires_grad_(), offsets=offsets)


@dataclass(frozen=True, eq=False)
class Rollout:
    """Which tokens of the input each token of the last layer comes from, image by image. Every row sums to 1.

    Only where a label was asked for, and in pooling nothing speaks for it, `whole` is 0.
    """

    matrix: Float[Tensor, "B T T"]
    """a row for each token of the last layer, a column for each of the input; the first `prefix` are no patches"""
    whole: Float[Tensor, "B T"]
    """of what the image's label is read off: the class token, the question, or the mean of the patches"""
    queries: Float[Tensor, "B V T"] | None
    """of each label's query, in a model that segments by such"""
    prefix: int
    grids: tuple[Grid, ...]

    def over_patches(
        self, image: int = 0, patch: tuple[int, int] | None = None, query: int | None = None
    ) -> Float[Tensor, "rows columns"]:
        """The patches that one row comes from: of the whole image, of the patch at a row and column, of a query."""
        row = self.whole[image]
        if patch is not None:
            row = self.matrix[image, self.prefix + number_of(patch, self.grids[image])]
        elif query is not None:
            assert self.queries is not None
            row = self.queries[image, query]
        rows, columns = self.grids[image]
        return row[self.prefix :][: rows * columns].view(rows, columns)


def number_of(patch: tuple[int, int], grid: Grid) -> int:
    """Which patch of an image it is that lies in this row and this column, from 0.

    >>> number_of((1, 2), (3, 4))
    6
    """
    if not all(0 <= place < count for place, count in zip(patch, grid)):
        raise RegardError(
            f"There is no patch in row {patch[0]}, column {patch[1]}.",
            f"The image has {grid[0]} rows and {grid[1]} columns of patches, counted from 0.",
        )
    return patch[0] * grid[1] + patch[1]


def roll_out(model: ViT, images: Images, labels: Sequence[int] | None = None) -> Rollout:
    """Attention rollout (Abnar and Zuidema 2020): in each layer the heads are averaged, the identity is added for the
    residual connection, rows are made to sum to 1; the layers are multiplied.

    With the number of a label for each image the same is weighted by gradients (after Chefer, Gur and Wolf 2021): of
    each head the positive part of its weights times the gradient of the label's logit by them is taken. Rows of these
    are made to sum to 1 before the identity is added, so that it does not matter how large logits are. What pools the
    patches, be it their mean, is treated likewise.

    >>> from regard.models import ViTConfig
    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> rolled = roll_out(model, torch.rand(5, 3, 32, 48))
    >>> rolled.matrix.shape, rolled.over_patches(4).shape, rolled.whole.sum(1).allclose(torch.ones(5))
    (torch.Size([5, 7, 7]), torch.Size([2, 3]), True)
    """
    if labels is None:
        return rolled(run(model, images))
    if len(labels) != len(images):
        raise RegardError(f"{len(labels)} labels for {len(images)} images.", "Give one for each image.")
    return roll_outs(model, images, [labels])[0]


def roll_outs(model: ViT, images: Images, choices: Iterable[Sequence[int]]) -> list[Rollout]:
    """The rollouts for several choices of labels; the model runs only once.

    >>> from regard.models import ViTConfig
    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> len(roll_outs(model, torch.rand(1, 3, 32, 48), [[0], [1]]))
    2
    """
    if model.config.head != "classify" or model.output is None:
        raise RegardError(
            f"A model with the head {model.config.head} gives images no label that rollout could ask for.",
            "Leave the label out, or take a model that classifies.",
        )
    with torch.inference_mode(False):
        found = run(model, images, gradients=True)
        return [_weighted(found, labels) for labels in choices]


@torch.no_grad()
def rolled(found: Run) -> Rollout:
    """The rollout of a run."""
    model, recording = found.model, found.recording
    config, grids = model.config, found.grids
    matrix = _product(_with_itself(recording[name].weights().mean(1)) for name in _layers(found, "blocks"))
    patches, queries = matrix[:, config.prefix :], None
    if config.pooling == "class" and config.head != "segment":
        whole = matrix[:, : 1 + config.distilled].mean(1)
    elif "pooler.attention" in recording:
        whole = _through(recording["pooler.attention"].weights().mean(1), patches)[:, 0]
    else:
        real = _real(grids, patches)
        whole = _through((real / real.sum(1, keepdim=True))[:, None], patches)[:, 0]
    if _layers(found, "segmenter.blocks"):
        blocks = _layers(found, "segmenter.blocks")
        drawn = _product(_with_itself(recording[name].weights().mean(1)) for name in blocks)
        count = len(config.labels)
        drawn = drawn[:, :count, count:]  # what a query keeps for itself, or has from others, is no patch
        queries = _through(drawn / drawn.sum(-1, keepdim=True), patches)
    return Rollout(matrix, whole, queries, config.prefix, grids)


@torch.no_grad()
def _weighted(found: Run, labels: Sequence[int]) -> Rollout:
    model, recording = found.model, found.recording
    config, grids = model.config, found.grids
    assert isinstance(found.output, Tensor)
    with torch.enable_grad():
        asked = found.output.gather(1, torch.tensor(labels, device=found.output.device)[:, None]).sum()
    gradients = recording.gradients(asked)

    def speaking(name: str) -> Float[Tensor, "B T S"]:
        return _summing_to_one((gradients[name] * recording[name].weights()).clamp(min=0).mean(1))

    matrix = _product(_with_itself(speaking(name)) for name in _layers(found, "blocks"))
    patches = matrix[:, config.prefix :]
    if config.pooling == "class":
        whole = matrix[:, : 1 + config.distilled].mean(1)
    else:
        if "pooler.attention" in recording:
            shares = speaking("pooler.attention")
        else:
            # The mean is an attention of equal weights: weight times gradient is the product with the patch itself.
            (by_token,) = torch.autograd.grad(asked, found.encoded, retain_graph=True)
            each = _rectangle((by_token * found.encoded).sum(-1), found)[:, None, config.prefix :]
            shares = _summing_to_one(each.clamp(min=0))
        whole = _through(shares, patches)[:, 0]
    return Rollout(matrix, whole, None, config.prefix, grids)


def _layers(found: Run, stack: str) -> list[str]:
    """The attentions of a stack of blocks, from the first."""
    return [name for name in found.recording if name.startswith(f"{stack}.")]


def _with_itself(regarded: Float[Tensor, "B T T"]) -> Float[Tensor, "B T T"]:
    """What a layer makes of tokens: half of it they regarded, the other half is passed on as it was."""
    return _summing_to_one(regarded + torch.eye(regarded.shape[-1], device=regarded.device))


def _summing_to_one(rows: Float[Tensor, "*b T"]) -> Float[Tensor, "*b T"]:
    """A row of zeros stays one."""
    sums = rows.sum(-1, keepdim=True)
    return rows / sums.where(sums > 0, 1.0)


def _product(layers: Iterable[Float[Tensor, "B T T"]]) -> Float[Tensor, "B T T"]:
    """The last layer on the left: a row is of what comes out, a column of what went in."""
    matrix: Tensor | None = None
    for layer in layers:
        matrix = layer if matrix is None else layer @ matrix
    assert matrix is not None
    return matrix


def _through(shares: Float[Tensor, "B K P"], patches: Float[Tensor, "B P T"]) -> Float[Tensor, "B K T"]:
    """What is drawn from patches, traced to the tokens of the input."""
    return shares @ patches[:, : shares.shape[2]]


def _real(grids: tuple[Grid, ...], like: Float[Tensor, "B P T"]) -> Float[Tensor, "B P"]:
    """1 for a patch, 0 behind the last of an image that is smaller than others."""
    counts = torch.tensor([rows * columns for rows, columns in grids], device=like.device)
    return (torch.arange(like.shape[1], device=like.device) < counts[:, None]).float()


def _rectangle(x: Float[Tensor, "*n"], found: Run) -> Float[Tensor, "B T"]:
    """A number a token as (B, T), 0 behind the last of an image that is smaller than others."""
    if not isinstance(found.images, PackedImages):
        return x
    counts = [found.model.config.prefix + rows * columns for rows, columns in found.grids]
    return torch.nn.utils.rnn.pad_sequence(list(x.split(counts)), batch_first=True)
