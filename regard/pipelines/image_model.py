"""Image pipeline: classification and segmentation."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageOps
from torch import Tensor, nn

from regard.data.batching.images import pixels_to_float
from regard.data.images.decoding import ResizeRule, Resizing, image_errors, load_image, to_pixel_array
from regard.data.images.sets import ImageSet
from regard.errors import RegardError
from regard.layers.patches import PackedImages, pack_images
from regard.models import ViT
from regard.models.vit import IMAGE_HEADS, ImageHead, ImageLabelHead, PixelLabelHead
from regard.pipelines.pipeline import Pipeline
from regard.pipelines.scoring import Classification

if TYPE_CHECKING:
    from regard.pipelines.folder import ModelFolder

# Tokens (patches) per batch.
BATCH_TOKENS = 16384

ImageLike = str | Path | Image.Image | np.ndarray
"""a file, a PIL image, or a uint8 array of (H, W) or (H, W, C)"""
ImageBatchLike = Sequence[ImageLike] | ImageSet
PixelArrays = UInt8[np.ndarray, "M H W C"] | list[UInt8[np.ndarray, "_ _ C"]]
"""pixels of images of one size, or of images of different sizes that are multiples of the patch size"""
Size = tuple[int, int]


@dataclass(repr=False)
class ImageModel(Pipeline):
    """A Vision Transformer that classifies or segments images.

    >>> model = load("pets")  # doctest: +SKIP
    >>> model.classify(["photo.jpg"])[0].label  # doctest: +SKIP
    'Sphynx'
    """

    description = "an image model"
    commands = "regard classify, segment, evaluate, look, info"
    tokenizer_count = 0
    sides = fields = ("image",)
    stored_keys = frozenset({"resizing"})
    model: ViT
    training: dict[str, Any] = field(default_factory=dict)
    resizing: Resizing | None = None
    """resizing of an imported model; None: images are scaled and center-cropped to the training size"""

    @property
    def head(self) -> ImageHead:
        """What the outputs of the model are."""
        return IMAGE_HEADS[self.model.config.head]

    @classmethod
    def from_parts(cls, model: Any, tokenizers: Any, training: dict[str, Any], special: Any = None) -> "ImageModel":
        return cls(model, training=training)

    def write_settings(self, folder: Path) -> dict[str, Any]:
        return {} if self.resizing is None else {"resizing": dataclasses.asdict(self.resizing)}

    def read_settings(self, folder: "ModelFolder") -> None:
        self.resizing = folder.read_section("resizing", Resizing())

    @property
    def abilities(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.head.method,) if self.labels and self.head.method else ()

    def _describe_input(self) -> str:
        return f"images of {self.size[0]} × {self.size[1]} pixels, {len(self.labels)} labels"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        return self.model.config.labels

    @property
    def size(self) -> Size:
        """Height and width of the training images; the maximum, if they had different sizes."""
        return self.model.config.image_height, self.model.config.image_width

    @property
    def mask_values(self) -> tuple[int, ...]:
        """The pixel value of each label in mask files: its name if all names are integers below 255, else its index."""
        values = {str(value): value for value in range(255)}  # 255 means unlabeled
        named = [values[label] for label in self.labels if label in values]
        return tuple(named if len(named) == len(self.labels) else range(len(self.labels)))

    @overload
    def classify(self, images: str | Path) -> Classification: ...
    @overload
    def classify(self, images: ImageBatchLike) -> list[Classification]: ...
    def classify(self, images: str | Path | ImageBatchLike) -> Any:
        """The label of each image, with the probability of every label; one result for the path of a single file.

        An image is scaled and center-cropped to the training size, or as `resizing` says. If the model was trained on
        images of different sizes, it keeps its size and proportions, up to the maximum size in training.
        """
        if isinstance(images, str | Path):
            return self.classify([images])[0]
        results: list[Classification] = []
        for batch in self._batches(images):
            rows = self.probabilities([self._resize_and_crop(image, name) for image, name in batch]).tolist()
            results += [Classification.from_probabilities(self.labels, row) for row in rows]
        return results

    @torch.no_grad()
    def probabilities(self, pixels: PixelArrays) -> Float[np.ndarray, "M V"]:
        """The probability of each label for each image; images are not resized."""
        self._check_head(ImageLabelHead, "classify", "classify-images")
        probabilities = np.zeros((len(pixels), len(self.labels)), np.float32)
        self.model.eval()
        order = sorted(range(len(pixels)), key=lambda i: pixels[i].size)  # images of similar size in one batch
        step = self._batch_size(pixels[order[-1]].shape) if order else 1
        for start in range(0, len(order), step):
            batch = order[start : start + step]
            logits = self.model(self._make_batch([pixels[i] for i in batch]))
            probabilities[batch] = logits.float().softmax(-1).cpu().numpy()
        return probabilities

    @overload
    def segment(self, images: str | Path) -> Int[np.ndarray, "_ _"]: ...
    @overload
    def segment(self, images: ImageBatchLike) -> list[Int[np.ndarray, "_ _"]]: ...
    @torch.no_grad()
    def segment(self, images: str | Path | ImageBatchLike) -> Any:
        """The label index of every pixel, at the original size of each image; one mask for the path of a single file.

        An image is scaled to cover the training size and is not cropped. If the model was trained on images of
        different sizes, it keeps its size and proportions, up to the maximum size in training.
        """
        if isinstance(images, str | Path):
            return self.segment([images])[0]
        self._check_head(PixelLabelHead, "segment", "segment")
        masks: list[Int[np.ndarray, "_ _"]] = []
        self.model.eval()
        for batch in self._batches(images):
            scaled = [self._resize_to_cover(image, name) for image, name in batch]
            original_sizes = [image.size[::-1] for image, _ in batch]
            for _, group in groupby(range(len(batch)), key=lambda i: scaled[i].shape):
                indices = list(group)
                logits = self.model(self._tensor(np.stack([scaled[i] for i in indices])))
                masks += [_best_labels(mask.float(), original_sizes[i]) for i, mask in zip(indices, logits)]
        return masks

    def preprocess(self, image: ImageLike) -> UInt8[np.ndarray, "H W C"]:
        """The pixels of an image as input of the model: resized as in `segment`, or resized and cropped as in
        `classify`.
        """
        opened = _open_image(image, "the image")
        return self._resize_to_cover(*opened) if self.head.is_per_pixel else self._resize_and_crop(*opened)

    def _check_head(self, head: type[ImageHead], verb: str, task: str) -> None:
        if not isinstance(self.head, head) or not self.labels:
            raise RegardError(
                f"This model was not trained to {verb} images.", f"Fine-tune it: regard train --task {task} --from …"
            )

    def _batch_size(self, size: Sequence[int]) -> int:
        """Number of images of this height and width per batch."""
        config = self.model.config
        return max(1, BATCH_TOKENS // (config.prefix + size[0] * size[1] // config.patch**2))

    def _tensor(self, pixels: UInt8[np.ndarray, "B H W C"]) -> Float[Tensor, "B C H W"]:
        return pixels_to_float(
            torch.from_numpy(np.ascontiguousarray(pixels)).to(self.device), self.model.config.channels
        )

    def _make_batch(self, pixels: list[UInt8[np.ndarray, "_ _ C"]]) -> Float[Tensor, "B C H W"] | PackedImages:
        """Images as input of the model: packed, if they differ in size."""
        config = self.model.config
        if len({image.shape for image in pixels}) == 1:
            return self._tensor(np.stack(pixels))
        tensors = [pixels_to_float(torch.tensor(image)[None], config.channels)[0] for image in pixels]
        return pack_images(tensors, config.patch).to(self.device)

    def _batches(self, images: ImageBatchLike) -> Iterator[list[tuple[Image.Image, str]]]:
        """Batches of opened images, each with its name for error messages."""
        sources: Sequence[ImageLike] = images.pixels if isinstance(images, ImageSet) else images  # type: ignore[assignment]
        step = self._batch_size(self.size)
        for start in range(0, len(sources), step):
            yield [_open_image(sources[i], f"image {i + 1}") for i in range(start, min(start + step, len(sources)))]

    def _resize_and_crop(self, image: Image.Image, name: str) -> UInt8[np.ndarray, "H W C"]:
        with image_errors(name):
            target = self.resizing or self._variable_size(image) or self.size
            return to_pixel_array(image, self.model.config.channels, target)

    def _variable_size(self, image: Image.Image) -> Size | None:
        """The input size of an image, a multiple of the patch size; None if the model has one fixed size."""
        config = self.model.config
        rule = ResizeRule(patch=config.patch, longest=config.longest_side)
        return rule.target_size(image.height, image.width) if config.longest_side else None

    def _resize_to_cover(self, image: Image.Image, name: str) -> UInt8[np.ndarray, "_ _ C"]:
        """The full image, resized to the training size along one side and to at least that along the other."""
        config = self.model.config
        scale = max(trained / side for trained, side in zip(self.size, image.size[::-1]))
        covering_size = (max(1, round(side * scale / config.patch)) * config.patch for side in image.size[::-1])
        height, width = self._variable_size(image) or covering_size
        with image_errors(name):
            pixels = to_pixel_array(image, config.channels, image.size[::-1])
        if pixels.shape[:2] == (height, width):
            return pixels
        is_gray = config.channels == 1
        resized = Image.fromarray(pixels[..., 0] if is_gray else pixels).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        return np.asarray(resized).reshape(height, width, config.channels)


def _open_image(image: ImageLike, name: str) -> tuple[Image.Image, str]:
    """The image in upright orientation, and its name for error messages."""
    if isinstance(image, str | Path):
        with image_errors(image):
            return load_image(Path(image))[0], str(image)
    if isinstance(image, Image.Image):
        with image_errors(name):
            return ImageOps.exif_transpose(image), name
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (1,), (3,), (4,)):
        raise RegardError(
            f"{name}: an array of dtype {image.dtype} and shape {image.shape} is not an image.",
            "Pass uint8 of shape (H, W) or (H, W, C) with 1, 3 or 4 channels.",
        )
    return Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image), name


def _best_labels(logits: Float[Tensor, "V _ _"], size: Size) -> Int[np.ndarray, "_ _"]:
    """The most probable label of each pixel at another size; interpolated label by label to save memory."""
    best = torch.full(size, -torch.inf, device=logits.device)
    labels = torch.zeros(size, dtype=torch.long, device=logits.device)
    for label, plane in enumerate(logits):
        resized = nn.functional.interpolate(plane[None, None], size, mode="bilinear")[0, 0]
        labels = torch.where(resized > best, label, labels)
        best = torch.maximum(best, resized)
    return labels.cpu().numpy().astype(np.min_scalar_type(len(logits) - 1))
