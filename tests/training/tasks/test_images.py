"""The image tasks: classification, segmentation and masked autoencoding."""

import dataclasses
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data import AugmentConfig, read_images
from regard.data.batching.batch import RankSlice
from regard.errors import RegardError
from regard.evaluation.text_metrics import confusion_counts, intersection_over_union
from regard.models import ViTConfig, make_model
from regard.pipelines import load, pipeline_class
from regard.training import DataConfig, TrainConfig, distributed, loop, recipe_from_dict, run_recipe
from regard.training.fine_tuning import HEAD_PARAMETERS
from regard.training.tasks import TASKS
from regard.training.tasks.images import split_by_label, suggest_patch
from regard.training.tasks.task import BatchShape
from tests.training.helpers import error_message
from tests.training.toy_images import EXTRA_METRICS, NAMES, NO_AUGMENTATION, draw, toy, write

every_task = pytest.mark.parametrize("task", EXTRA_METRICS)
PLAIN = {"augment": NO_AUGMENTATION}
STILL = {"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}} | PLAIN


@pytest.mark.parametrize("cache", [True, False])
def test_workers_map_cached_images_instead_of_receiving_them(tmp_path, cache):
    recipe = toy("segment", tmp_path)
    data = recipe.data if cache else dataclasses.replace(recipe.data, cache="")
    dataset = TASKS["segment"].read(data)
    sent = io.BytesIO()
    distributed._Pickler(sent).dump(dataset)
    assert (len(sent.getvalue()) < 5000) == cache
    received = pickle.loads(sent.getvalue())
    assert received.fingerprints == dataset.fingerprints
    np.testing.assert_array_equal(received.training.images.pixels, dataset.training.images.pixels)
    np.testing.assert_array_equal(received.training.images.masks, dataset.training.images.masks)
    assert isinstance(received.training.images.pixels, np.memmap) == cache


# Losses and learning


def test_classification_is_learned(tmp_path):
    changes = {"steps": 60, "lr": 1e-2, "validate_every": 60, "validate_by": "accuracy"}
    model = run_recipe(
        toy("classify-images", tmp_path, train=changes, augment={"mixup": 0.0, "cutmix": 0.0}),
        tmp_path / "out",
        quiet=True,
    )
    assert model.labels == NAMES
    assert model.training["validation"]["accuracy"] == 100
    pixels, labels, _ = draw(30, seed=5)
    assert [prediction.label for prediction in model.classify(list(pixels))] == [NAMES[label] for label in labels]


@pytest.mark.parametrize("segmenter", ["linear", "queries"])
def test_segmentation_is_learned(tmp_path, segmenter):
    changes = {"steps": 60, "lr": 1e-2, "validate_every": 60, "validate_by": "iou"}
    recipe = toy("segment", tmp_path, model={"segmenter": segmenter, "segmenter_layers": 1}, train=changes, **PLAIN)
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    assert model.labels == ("3", "7")
    pixels, _, masks = draw(20, seed=1)  # the validation images
    targets = np.select([masks == 3, masks == 7], [0, 1], -1)
    counts = confusion_counts(np.stack(model.segment(list(pixels))), targets, 2)
    assert counts.sum() == 20 * (144 - 1)
    assert model.training["validation"]["iou"] == pytest.approx(100 * intersection_over_union(counts).mean())
    assert model.training["validation"]["iou"] > 80
    assert model.training["validation"]["pixel_accuracy"] == pytest.approx(100 * np.trace(counts) / counts.sum())


def test_masked_patches_are_learned(tmp_path):
    changes = {"steps": 60, "lr": 1e-2, "validate_every": 60}
    model = run_recipe(
        toy("mask-images", tmp_path, train=changes, model=NO_DROPOUT, **PLAIN), tmp_path / "out", quiet=True
    )
    assert model.training["validation"]["nll"] < 0.95  # 1.0 for predicting the mean of each patch
    assert model.model.config.head == "pixels"


def encode(task, recipe):
    """The config of the model, and the batches."""
    dataset = TASKS[task].read(recipe.data)
    config = TASKS[task].complete_config(recipe.model, dataset, ())
    special = pipeline_class(config).special
    return config, TASKS[task].encode(dataset, (), special, recipe, config, BatchShape(0, 1, True, 16))


def loss_of(task, recipe):
    """A new model, a batch, and a function for its loss with changed training settings."""
    config, encoded = encode(task, recipe)
    batch = next(encoded.batches.epoch(0))
    torch.manual_seed(0)
    model = make_model(config)
    return model, batch, lambda **changes: TASKS[task].loss(model, model.features, batch, TrainConfig(**changes))


NO_DROPOUT = {"dropout": 0.0, "drop_path": 0.0}


def test_classification_loss_matches_its_definition(tmp_path):
    model, batch, loss = loss_of("classify-images", toy("classify-images", tmp_path, model=NO_DROPOUT, **PLAIN))
    assert batch.inputs[0].dtype == torch.uint8
    log_p = model(batch.pixels.permute(0, 3, 1, 2) / 255).log_softmax(-1)
    nll = -log_p.gather(1, batch.targets[:, None]).sum()
    found = loss(label_smoothing=0.2)
    torch.testing.assert_close(found.loss, 0.8 * nll - 0.2 * log_p.mean(1).sum())
    torch.testing.assert_close(found.nll, nll)
    assert found.tokens == 16
    with torch.no_grad():
        torch.testing.assert_close(loss(label_smoothing=0.2).loss, nll.detach())


def test_mixed_images_have_mixed_labels(tmp_path):
    recipe = toy(
        "classify-images", tmp_path, model=NO_DROPOUT, **PLAIN | {"augment": PLAIN["augment"] | {"mixup": 1.0}}
    )
    model, batch, loss = loss_of("classify-images", recipe)
    torch.manual_seed(3)
    found = loss(label_smoothing=0.1)
    torch.manual_seed(3)
    pixels, targets, _ = TASKS["classify-images"].augment_batch(batch, model.config)
    assert (targets.max(1).values < 0.95).sum() > 3
    log_p = model(pixels).log_softmax(-1)
    torch.testing.assert_close(found.loss, -((0.9 * targets + 0.1 / 3) * log_p).sum())


def test_segmentation_loss_matches_its_definition(tmp_path):
    model, batch, loss = loss_of("segment", toy("segment", tmp_path, model=NO_DROPOUT, **PLAIN))
    logits = model(batch.pixels.permute(0, 3, 1, 2) / 255)
    targets = batch.targets.long()
    assert set(targets.unique().tolist()) == {-1, 0, 1}
    each = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none").sum((1, 2)) / 143
    smooth = (
        torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none", label_smoothing=0.2).sum(
            (1, 2)
        )
        / 143
    )
    found = loss(label_smoothing=0.2)
    torch.testing.assert_close(found.loss, smooth.sum())
    torch.testing.assert_close(found.nll, each.sum())
    assert found.tokens == 16


def test_masks_are_drawn_by_image(tmp_path):
    """Not by rank, nor by the parts of a batch that did not fit into memory."""
    recipe = toy("mask-images", tmp_path, model=NO_DROPOUT, **PLAIN)
    model, batch, loss = loss_of("mask-images", recipe)
    pixels = batch.pixels.permute(0, 3, 1, 2) / 255
    whole = loss().loss
    torch.testing.assert_close(whole, 16 * model.masked_loss(pixels, 0.75, batch.noise))
    _, encoded = encode("mask-images", recipe)
    parts = [next(encoded.batches.epoch(0, part=RankSlice(rank, 4))) for rank in range(4)]
    for pieces in (parts, batch.split(3)):
        losses = [TASKS["mask-images"].loss(model, model.features, piece, recipe.train).loss for piece in pieces]
        torch.testing.assert_close(sum(losses), whole)
    epochs = [torch.cat([batch.noise for batch in encoded.batches.epoch(epoch)]) for epoch in range(2)]
    assert len(torch.cat(epochs).unique(dim=0)) == 2 * len(epochs[0])  # other patches each time
    validation = [[batch.noise for batch in encoded.validation] for _ in range(2)]
    assert all(map(torch.equal, *validation))


@every_task
def test_only_training_images_are_augmented(tmp_path, task):
    config, encoded = encode(task, toy(task, tmp_path))
    for batch, is_augmented in ((next(encoded.batches.epoch(0)), True), (next(iter(encoded.validation)), False)):
        pixels = TASKS[task].augment_batch(batch, config).pixels
        assert torch.equal(pixels, batch.pixels.permute(0, 3, 1, 2) / 255) != is_augmented
    shapes = [(batch.pixels.shape, batch.targets.shape) for epoch in range(2) for batch in encoded.batches.epoch(epoch)]
    assert len(set(shapes)) == 1
    assert len(shapes) == 2 * (100 // 16)
    assert sum(len(batch.pixels) for batch in encoded.validation) == 20


def test_validate_by_last_saves_the_last_model(tmp_path, monkeypatch):
    losses = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(loop, "evaluate_loss", lambda *_: {"nll": next(losses)})
    for metric, step in (("last", 12), ("loss", 6)):
        recipe = toy("mask-images", tmp_path, train={"validate_by": metric})
        assert run_recipe(recipe, tmp_path / metric, quiet=True).training["step"] == step


# Fine-tuning


def encoder_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in load(folder, "cpu").model.named_parameters()
        if not name.startswith(HEAD_PARAMETERS)
    }


@pytest.mark.parametrize("task", ["classify-images", "segment"])
@pytest.mark.parametrize("origin", EXTRA_METRICS)
def test_fine_tuning_keeps_the_encoder_weights(runs, tmp_path, origin, task):
    """From any task to any other; the head is kept if it fits."""
    recipe = toy(task, tmp_path, model={"segmenter": "queries", "drop_path": 0.4}, **STILL)
    model = run_recipe(recipe, tmp_path / "out", start_from=runs[origin], quiet=True).model
    before, after = encoder_weights(runs[origin]), encoder_weights(tmp_path / "out")
    assert "blocks.1.attention.out.weight" in before
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.config.drop_path == 0.4  # does not affect the weights
    assert model.config.width == 16
    is_same_task = origin == task
    if task == "segment":
        assert model.config.segmenter == ("linear" if is_same_task else "queries")
    if is_same_task:
        assert torch.equal(model.output.weight, load(runs[origin], "cpu").model.output.weight)


def test_learned_positions_are_interpolated_to_another_image_size(tmp_path):
    learned = {"model": {"positions": "learned", "pooling": "class"}}
    recipe = toy("classify-images", tmp_path, **STILL, **learned)
    first = run_recipe(recipe, tmp_path / "first", quiet=True).model
    write(tmp_path / "train.npz", 40, side=20)
    write(tmp_path / "validation.npz", 10, side=20)
    second = run_recipe(recipe, tmp_path / "second", start_from=tmp_path / "first", quiet=True).model
    assert (second.config.image_height, second.config.image_width, second.config.grid) == (20, 20, (5, 5))
    table = first.embedding.learned.weight
    grid = table[1:].T.reshape(1, 16, 3, 3)
    wider = torch.nn.functional.interpolate(grid, (5, 5), mode="bicubic", align_corners=False)
    torch.testing.assert_close(second.embedding.learned.weight[1:], wider[0].flatten(1).T)
    assert torch.equal(second.embedding.learned.weight[:1], table[:1])
    pixels = torch.rand(2, 3, 20, 20)
    with torch.no_grad():
        torch.testing.assert_close(second.encode(pixels), first.encode(pixels))


def test_fine_tuning_with_other_labels(runs, tmp_path):
    recipe = toy("classify-images", tmp_path, **STILL)
    labels = draw(100)[1]
    for name, count, seed in (("train", 100, 0), ("validation", 20, 1)):
        labels = draw(count, seed)[1] % 2
        write(tmp_path / f"{name}.npz", count, seed, labels=labels, names=np.array(["even", "odd"]))
    model = run_recipe(recipe, tmp_path / "out", start_from=runs["classify-images"], quiet=True)
    assert model.labels == ("even", "odd")
    assert model.model.output.weight.shape == (2, 16)


def test_gray_images_with_a_color_model_and_the_reverse(runs, tmp_path):
    recipe = toy("classify-images", tmp_path, **STILL)
    for name, count, seed in (("train", 100, 0), ("validation", 20, 1)):
        gray = draw(count, seed)[0].mean(-1).astype(np.uint8)
        write(tmp_path / f"{name}.npz", count, seed, images=gray)
    model = run_recipe(recipe, tmp_path / "out", start_from=runs["classify-images"], quiet=True)
    assert model.model.config.channels == 3
    alone = run_recipe(recipe_from_dict({"model": {"channels": 1}}, recipe), tmp_path / "gray", quiet=True)
    assert alone.model.config.channels == 1
    color = toy("classify-images", tmp_path, **STILL)
    assert error_message(color, tmp_path / "no", start_from=tmp_path / "gray") == (
        "The images are in color, but the model expects gray images. Set data.channels to 1 to convert them."
    )
    as_gray = recipe_from_dict({"data": {"channels": 1}}, color)
    assert run_recipe(as_gray, tmp_path / "yes", start_from=tmp_path / "gray", quiet=True).model.config.channels == 1


# Files and splits


def test_folder_of_images_is_cached_next_to_the_model(tmp_path):
    pixels, labels, _ = draw(60)
    for index, (image, label) in enumerate(zip(pixels, labels)):
        (tmp_path / "photos" / NAMES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((30, 20 + index % 3)).save(tmp_path / "photos" / NAMES[label] / f"{index}.png")
    recipe = toy("classify-images", tmp_path)
    recipe = dataclasses.replace(recipe, data=DataConfig((str(tmp_path / "photos"),), size=12))
    model = run_recipe(recipe, tmp_path / "models" / "photos", quiet=True)
    assert sorted(model.labels) == sorted(NAMES)
    assert model.training["data"]["training"]["images"] + model.training["data"]["validation"]["images"] == 60
    # Decoded images are cached next to the model folder, and reused by the next run.
    cached = list((tmp_path / "models" / "regard-cache").iterdir())
    assert len(cached) == 1
    stamp = cached[0].stat().st_mtime_ns
    run_recipe(recipe, tmp_path / "models" / "others", quiet=True)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "models" / "regard-cache").iterdir()] == [stamp]


def test_a_tenth_of_each_label_is_in_the_validation_split():
    labels = np.repeat(np.arange(5), [100, 50, 7, 4, 1])
    training, validation = split_by_label(labels)
    assert np.bincount(labels[validation], minlength=5).tolist() == [10, 5, 1, 0, 0]
    assert sorted([*training, *validation]) == list(range(len(labels)))
    many = np.arange(100_000) % 10
    assert len(split_by_label(many)[1]) == 2000
    assert [len(rows) for rows in split_by_label(np.full(30, -1))] == [27, 3]  # images without labels


def test_suggested_patch_sizes():
    assert suggest_patch(224, 160) == 16
    assert suggest_patch(64, 48) == 4
    assert suggest_patch(33, 33) == 3
    assert suggest_patch(9, 9) == 1
    with pytest.raises(RegardError, match=r"29×31 pixels cannot be divided .* --data.size 24"):
        suggest_patch(29, 31)


# Error messages


@pytest.mark.parametrize(
    ("task", "arrays", "message"),
    [
        (
            "classify-images",
            {"labels": np.zeros(100, np.int64)},
            "All images have the label 'first'; classification needs",
        ),
        ("segment", {"masks": np.full((100, 12, 12), 4, np.uint8)}, "All pixels of the masks have the same label"),
    ],
)
def test_single_label_is_an_error(tmp_path, task, arrays, message):
    recipe = toy(task, tmp_path)
    write(tmp_path / "train.npz", 100, **arrays)
    assert error_message(recipe, tmp_path / "out").startswith(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("task", "annotation"), [("classify-images", "labels"), ("segment", "masks")])
@pytest.mark.parametrize("side", ["train", "validation"])
def test_images_without_annotations_are_an_error(tmp_path, task, annotation, side):
    recipe = toy(task, tmp_path)
    np.savez(tmp_path / f"{side}.npz", images=draw(20)[0])
    assert error_message(recipe, tmp_path / "out").startswith(f"The images have no {annotation}.")


def test_validation_label_missing_from_training_is_an_error(tmp_path):
    recipe = toy("classify-images", tmp_path)
    write(tmp_path / "validation.npz", 20, names=np.array(["first", "second", "fourth"]))
    assert error_message(recipe, tmp_path / "out").startswith(
        "Some images have the label 'fourth', which the model does not"
    )
    recipe = toy("segment", tmp_path)
    write(tmp_path / "validation.npz", 20, masks=np.full((20, 12, 12), 9, np.uint8))
    assert error_message(recipe, tmp_path / "out").startswith(
        "Label 9 occurs in the validation masks but not in the training masks"
    )


def test_too_few_images_for_a_validation_split_is_an_error(tmp_path):
    write(tmp_path / "train.npz", 3)
    recipe = toy("mask-images", tmp_path, data={"validation": []})
    write(tmp_path / "train.npz", 3)
    assert error_message(recipe, tmp_path / "out").startswith("Too few images for a validation split.")


@pytest.mark.parametrize(
    ("task", "sections", "message"),
    [
        ("classify-images", {"train": {"r_drop": 1.0}}, "train.r_drop is only supported for text, not for images."),
        (
            "classify-images",
            {"train": {"validate_by": "iou"}},
            "train.validate_by = 'iou' is not a metric of the task classify-images.",
        ),
        ("classify-images", {"model": {"patch": 5}}, "An image of 12×12 pixels does not divide into patches of 5×5."),
        (
            "classify-images",
            {"augment": {"crop": 12}},
            "augment.crop is 12; it must be smaller than the image (12 x 12 pixels).",
        ),
        ("segment", {"augment": {"mixup": 0.5}}, "augment.mixup needs labels; masks cannot be blended."),
        ("mask-images", {"augment": {"cutmix": 0.5}}, "augment.cutmix needs labels or masks."),
    ],
)
def test_invalid_settings_are_errors_before_the_first_step(tmp_path, task, sections, message):
    recipe = toy(task, tmp_path)
    assert error_message(recipe_from_dict(sections, recipe), tmp_path / "out").startswith(message)
    run_recipe(recipe, tmp_path / "out", quiet=True)  # the error left nothing in the folder


def test_augmentation_settings_are_checked():
    recipe = recipe_from_dict({"task": "classify-images", "augment": {"flip": 1, "padding": "zero"}})
    assert recipe.augment == AugmentConfig(flip=1.0, padding="zero")
    assert recipe.model == ViTConfig()
    for table, message in (
        ({"augment": {"flop": 1}}, "unknown key augment.flop. Did you mean augment.flip?"),
        ({"augment": {"padding": "grey"}}, "augment.padding must be one of reflect, zero (got 'grey')."),
        ({"augment": {"flip": 2.0}}, "augment.flip must be between 0 and 1 (got 2.0)."),
        ({"task": "segment", "model": {"image_height": 3}}, "unknown key model.image_height."),
    ):
        with pytest.raises(RegardError) as caught:
            recipe_from_dict(table)
        assert message in str(caught.value)


def test_validation_images_keep_the_order_of_the_file(tmp_path):
    recipe = toy("classify-images", tmp_path)
    dataset = TASKS["classify-images"].read(recipe.data)
    assert dataset.validation.images.labels.tolist() == read_images(recipe.data.validation).labels.tolist()
    assert dataset.describe() == "100 images of 12×12 pixels in color for training, 20 for validation"
