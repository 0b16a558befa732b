"""What `regard evaluate` measures of labels: of texts, of pictures, and of the pixels of pictures."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from regard.cli.common import steps_of
from regard.data import IGNORED, label_ids, read_images, read_labelled, read_ragged
from regard.errors import RegardError
from regard.evaluation.label_metrics import class_scores, label_scores, mask_scores
from regard.evaluation.text_metrics import label_counts
from regard.pipelines import Classified, ImageModel, TextEncoder
from regard.training.datasets import Images
from regard.training.tasks.image_tasks import NO_LABEL, check_annotations

# Pictures that are looked at before the bar moves on.
AT_A_TIME = 512


def texts(encoder: TextEncoder, files: Sequence[str], columns: Sequence[str], truncate: bool) -> dict[str, Any]:
    """Scores of the labels of texts."""
    names, examples = encoder.model.config.labels, read_labelled(files, columns)
    numbers = np.array(label_ids(examples, names))  # which refuses what the model does not know
    found: list[Classified] = []
    with steps_of("classifying") as tell:
        for part in parts(len(examples), tell):
            found += encoder.classify([examples[i].texts for i in part], truncate=truncate)
    shares = np.array([[one.probabilities[name] for name in names] for one in found])
    return {"texts": len(examples)} | _labels(shares, numbers, names)


def pictures(model: ImageModel, files: Sequence[str], column: str) -> dict[str, Any]:
    """How good the labels of pictures are, or those of their pixels, at the size that the model was trained on."""
    head = model.model.config.head
    if head not in ("classify", "segment"):
        raise RegardError(
            f"There is no measure for a model with the head {head}.",
            "Train it on for a task first: regard train --from …",
        )
    with steps_of("reading") as tell:
        images = _read(model, files, column, tell)
    check_annotations(images, "labels" if head == "classify" else "masks")
    began = time.perf_counter()
    found = _whole(model, images) if head == "classify" else _pixels(model, images)
    rate = len(images) / (time.perf_counter() - began)
    return {"pictures": len(images)} | found | {"pictures_per_second": rate}


def _read(model: ImageModel, files: Sequence[str], column: str, tell: Callable[[int, int | None], None]) -> Images:
    config = model.model.config
    if config.longest_side:
        longest, patch = config.longest_side, config.patch
        return read_ragged(files, patch=patch, longest=longest, channels=config.channels, label=column, progress=tell)
    return read_images(files, size=model.size, channels=config.channels, label=column, progress=tell)


def _whole(model: ImageModel, images: Images) -> dict[str, Any]:
    known = images.with_names(model.labels)
    with steps_of("classifying") as tell:
        shares = np.concatenate([model.probabilities(images.some(part)) for part in parts(len(images), tell)])
    return _labels(shares, known.labels, model.labels)


def _labels(shares: Float[np.ndarray, "M V"], numbers: Int[np.ndarray, "M"], names: Sequence[str]) -> dict[str, Any]:
    scores = label_scores(shares, numbers)
    top = {"top_5": scores.top_5} if len(names) > 5 else {}
    classes = class_scores(scores.counts)
    found = {
        "accuracy": scores.accuracy,
        **top,
        "macro_f1": float(np.mean([one.f1 for one in classes])),
        "calibration_error": scores.calibration_error,
        "cross_entropy": scores.loss,
    }
    per_class = {name: dataclasses.asdict(one) for name, one in zip(names, classes)}
    return found | {"per_class": per_class, "labels": list(names), "confusion": scores.counts.tolist()}


def _pixels(model: ImageModel, images: Images) -> dict[str, Any]:
    table = np.full(256, IGNORED, np.int64)
    table[list(model.mask_values)] = np.arange(len(model.labels))
    for value in images.mask_values:
        if value != NO_LABEL and table[value] == IGNORED:
            known = ", ".join(map(str, model.mask_values[:10])) + (", …" if len(model.labels) > 10 else "")
            message = f"Some masks hold the number {value}, which the model does not know."
            raise RegardError(message, f"Its labels are {known}; {NO_LABEL} is none.")
    counts = np.zeros((len(model.labels), len(model.labels)), np.int64)
    with steps_of("segmenting") as tell:
        for part in parts(len(images), tell):
            for found, row in zip(model.segment(list(images.some(part))), part.tolist()):
                counts += label_counts(found, table[images.mask(row)], len(model.labels))
    scores = mask_scores(counts)
    shares = {label: float(iou) for label, iou in zip(model.labels, scores.iou) if not np.isnan(iou)}
    measured = {"mean_iou": scores.mean_iou, "iou": shares, "pixel_accuracy": scores.pixel_accuracy}
    return measured | {"labels": list(model.labels), "confusion": counts.tolist()}


def parts(count: int, tell: Callable[[int, int | None], None]) -> Iterator[Int[np.ndarray, "B"]]:
    """Numbers of examples that are evaluated together; tells how many are done."""
    for start in range(0, count, AT_A_TIME):
        yield np.arange(start, min(start + AT_A_TIME, count))
        tell(min(start + AT_A_TIME, count), count)


def confusion_picture(results: dict[str, Any], form: str) -> bytes:
    """What texts, pictures, or their pixels were taken for."""
    from regard.viewer.plots.confusion_matrix import draw_confusion  # matplotlib is slow to import

    what = "pixels" if "mean_iou" in results else "texts" if "texts" in results else "pictures"
    measure = "mean IoU" if what == "pixels" else "accuracy"
    value = results["mean_iou" if what == "pixels" else "accuracy"]
    title = f"{' '.join(results['data'])}: {measure} {value:.2f} %"
    return draw_confusion(np.array(results["confusion"]), results["labels"], title, what, form)
