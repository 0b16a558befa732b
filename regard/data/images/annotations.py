"""Annotations of images: labels and masks."""

from typing import Literal

from regard.data.images.image_set import ImageSet, RaggedImages
from regard.errors import RegardError

Annotation = Literal["labels", "masks", "none"]
# Value of unlabeled mask pixels, as in PASCAL VOC.
NO_LABEL = 255


def check_annotations(images: ImageSet | RaggedImages, annotation: Annotation) -> None:
    """Raise an error for images without the annotation that a task needs."""
    if annotation == "labels" and not images.names:
        raise RegardError(
            "The images have no labels.",
            "Pass a folder with one sub-folder per class, or a table with a `label` column.",
        )
    if annotation == "masks" and not images.mask_values:
        raise RegardError(
            "The images have no masks.",
            "Pass a folder with the sub-folders `images` and `masks`, or a table with a `mask` column.",
        )
