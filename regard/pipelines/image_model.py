"""A model of images, ready to use. It has no tokenisers: pixels are what it reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageOps
from torch import Tensor, nn

from regard.data.batching.image_batches import as_numbers
from regard.data.images.image_decoding import Fit, load, naming, pixels_of
from regard.data.images.image_set import ImageSet
from regard.errors import RegardError
from regard.layers.patches import PackedImages, pack_images
from regard.models import ViT
from regard.pipelines.pipeline import ReadyModel
from regard.pipelines.scoring import Classified, classified

# Tokens that are encoded at once.
BATCH_TOKENS = 16384

Picture = str | Path | Image.Image | np.ndarray
"""a file, an open picture, or its bytes: height, width and perhaps channels"""
Pictures = Sequence[Picture] | ImageSet
PixelArrays = UInt8[np.ndarray, "M H W C"] | list[UInt8[np.ndarray, "_ _ C"]]
"""bytes of pictures of one size, or of any sizes, in whole patches"""
Size = tuple[int, int]


@dataclass
class ImageModel(ReadyModel):
    """A model that says what is in a picture, or where in it.

    >>> model = load("pets")  # doctest: +SKIP
    >>> model.classify(["photo.jpg"])[0].label  # doctest: +SKIP
    'Sphynx'
    """

    model: ViT
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.model.config.labels

    @property
    def size(self) -> Size:
        """Height and width of the pictures that it was trained on; if these had their own sizes, of the largest."""
        return self.model.config.image_height, self.model.config.image_width

    @property
    def mask_values(self) -> tuple[int, ...]:
        """The number that stands for each label in files of masks: its name if all names are such, else its place."""
        numbers = {str(number): number for number in range(255)}  # 255 is no label's
        named = [numbers[label] for label in self.labels if label in numbers]
        return tuple(named if len(named) == len(self.labels) else range(len(self.labels)))

    @overload
    def classify(self, images: str | Path) -> Classified: ...
    @overload
    def classify(self, images: Pictures) -> list[Classified]: ...
    def classify(self, images: str | Path | Pictures) -> Any:
        """The label of each picture, and the probability of each label; for the path of a single file, its own.

        A picture is brought to the size of those that the model was trained on: scaled, and its middle cut out. If
        those had sizes of their own, it keeps its own too, as far as it is not larger than they were.
        """
        if isinstance(images, str | Path):
            return self.classify([images])[0]
        found: list[Classified] = []
        for batch in self._batches(images):
            rows = self.probabilities([self._fitted(*one) for one in batch]).tolist()
            found += [classified(self.labels, row) for row in rows]
        return found

    @torch.no_grad()
    def probabilities(self, pixels: PixelArrays) -> Float[np.ndarray, "M V"]:
        """How likely each label is for each picture, which is taken as it is."""
        self._need("classify", "classify-images")
        found = np.zeros((len(pixels), len(self.labels)), np.float32)
        self.model.eval()
        sizes = sorted(range(len(pixels)), key=lambda i: pixels[i].size)  # of about one size together
        step = self._at_once(pixels[sizes[-1]].shape) if sizes else 1
        for start in range(0, len(sizes), step):
            part = sizes[start : start + step]
            found[part] = self.model(self._together([pixels[i] for i in part])).float().softmax(-1).cpu().numpy()
        return found

    @overload
    def segment(self, images: str | Path) -> Int[np.ndarray, "_ _"]: ...
    @overload
    def segment(self, images: Pictures) -> list[Int[np.ndarray, "_ _"]]: ...
    @torch.no_grad()
    def segment(self, images: str | Path | Pictures) -> Any:
        """For each pixel of each picture the number of its label, at the picture's own size; for the path of a single
        file, those of this picture.

        A picture is scaled until it covers the size of those that the model was trained on; nothing is cut off. If
        those had sizes of their own, it keeps its own too, as far as it is not larger than they were.
        """
        if isinstance(images, str | Path):
            return self.segment([images])[0]
        self._need("segment", "segment")
        found: list[Int[np.ndarray, "_ _"]] = []
        self.model.eval()
        for batch in self._batches(images):
            scaled = [self._covering(*one) for one in batch]
            own = [image.size[::-1] for image, _ in batch]
            for _, alike in groupby(range(len(batch)), key=lambda i: scaled[i].shape):
                numbers = list(alike)
                logits = self.model(self._tensor(np.stack([scaled[i] for i in numbers])))
                found += [_best(one.float(), own[i]) for i, one in zip(numbers, logits)]
        return found

    def seen(self, picture: Picture) -> UInt8[np.ndarray, "H W C"]:
        """A picture as the model sees it: scaled as `segment` does it, or scaled and cut as `classify` does."""
        opened = _opened(picture, "the picture")
        return self._covering(*opened) if self.model.config.head == "segment" else self._fitted(*opened)

    def _need(self, head: str, task: str) -> None:
        if self.model.config.head != head or not self.labels:
            raise RegardError(
                f"This model was not trained to {head}.", f"Train it on: regard train --task {task} --from …"
            )

    def _at_once(self, size: Sequence[int]) -> int:
        """Pictures of this height and width that make up a batch."""
        config = self.model.config
        return max(1, BATCH_TOKENS // (config.prefix + size[0] * size[1] // config.patch**2))

    def _tensor(self, pixels: UInt8[np.ndarray, "B H W C"]) -> Float[Tensor, "B C H W"]:
        return as_numbers(torch.from_numpy(np.ascontiguousarray(pixels)).to(self.device), self.model.config.channels)

    def _together(self, pixels: list[UInt8[np.ndarray, "_ _ C"]]) -> Float[Tensor, "B C H W"] | PackedImages:
        """Pictures as the model takes them: packed, where they are not of one size."""
        config = self.model.config
        if len({one.shape for one in pixels}) == 1:
            return self._tensor(np.stack(pixels))
        numbers = [as_numbers(torch.tensor(one)[None], config.channels)[0] for one in pixels]
        return pack_images(numbers, config.patch).to(self.device)

    def _batches(self, images: Pictures) -> Iterator[list[tuple[Image.Image, str]]]:
        """Open pictures, each with its name, as many as are encoded at once."""
        rows: Sequence[Picture] = images.pixels if isinstance(images, ImageSet) else images  # type: ignore[assignment]
        step = self._at_once(self.size)
        for start in range(0, len(rows), step):
            yield [_opened(rows[i], f"picture {i + 1}") for i in range(start, min(start + step, len(rows)))]

    def _fitted(self, image: Image.Image, name: str) -> UInt8[np.ndarray, "H W C"]:
        with naming(name):
            return pixels_of(image, self.model.config.channels, self._own(image) or self.size)

    def _own(self, image: Image.Image) -> Size | None:
        """The height and width of a picture in whole patches, for models of pictures of their own sizes."""
        config = self.model.config
        fit = Fit(patch=config.patch, longest=config.longest_side)
        return fit.target(image.height, image.width) if config.longest_side else None

    def _covering(self, image: Image.Image, name: str) -> UInt8[np.ndarray, "_ _ C"]:
        """The whole picture, as large as in training along one side and at least as large along the other."""
        config = self.model.config
        scale = max(side / own for side, own in zip(self.size, image.size[::-1]))
        covering = (max(1, round(own * scale / config.patch)) * config.patch for own in image.size[::-1])
        height, width = self._own(image) or covering
        with naming(name):
            pixels = pixels_of(image, config.channels, image.size[::-1])
        if pixels.shape[:2] == (height, width):
            return pixels
        grey = config.channels == 1
        whole = Image.fromarray(pixels[..., 0] if grey else pixels).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(whole).reshape(height, width, config.channels)


def _opened(picture: Picture, name: str) -> tuple[Image.Image, str]:
    """A picture, upright, and what it is called in a message."""
    if isinstance(picture, str | Path):
        with naming(picture):
            return load(Path(picture))[0], str(picture)
    if isinstance(picture, Image.Image):
        with naming(name):
            return ImageOps.exif_transpose(picture), name
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (1,), (3,), (4,)):
        raise RegardError(
            f"{name}: an array of {picture.dtype} and shape {picture.shape} is not a picture.",
            "Give uint8, of height, width and perhaps 1, 3 or 4 channels.",
        )
    return Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture), name


def _best(logits: Float[Tensor, "V _ _"], size: Size) -> Int[np.ndarray, "_ _"]:
    """The number of the likeliest label of each pixel at another size: label by label, since pictures may be large."""
    best = torch.full(size, -torch.inf, device=logits.device)
    which = torch.zeros(size, dtype=torch.long, device=logits.device)
    for number, plane in enumerate(logits):
        wide = nn.functional.interpolate(plane[None, None], size, mode="bilinear")[0, 0]
        which = torch.where(wide > best, number, which)
        best = torch.maximum(best, wide)
    return which.cpu().numpy().astype(np.min_scalar_type(len(logits) - 1))
