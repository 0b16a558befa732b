"""Learning from pictures: labels, masks, hidden patches. What holds for the tasks of texts holds here too."""

import contextlib
import dataclasses
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data import AugmentConfig, read_images
from regard.errors import RegardError
from regard.folder import ImageModel, load
from regard.models import ViTConfig, make_model
from regard.training import DataConfig, TrainConfig, recipe_from, train, trainer, workers
from regard.training.fine_tuning import HEADS
from regard.training.metrics import intersection_over_union, label_counts
from regard.training.recipe import recipe_table
from regard.training.report import read_metrics
from regard.training.tasks import TASKS
from regard.training.tasks.base import BatchShape, evaluate_loss
from regard.training.tasks.image_tasks import patch_for, split_by_label
from regard.training.trainer import METRICS
from tests.training.helpers import cut_off_and_go_on, run_again, said, same_bits, weights_of
from tests.training.toy_images import MEASURES, NAMES, draw, outputs, toy, write

every_task = pytest.mark.parametrize("task", MEASURES)
PLAIN = {"augment": {key: value for key, value in vars(AugmentConfig()).items() if key != "padding"}}
STILL = {"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}} | PLAIN


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of each task. Tests read them."""
    folders = {}
    for task in MEASURES:
        folder = tmp_path_factory.mktemp(task)
        train(toy(task, folder), folder / "out", quiet=True)
        folders[task] = folder / "out"
    return folders


# As every task


@every_task
def test_the_same_seed_gives_the_same_bits(runs, tmp_path, task):
    run_again(runs, task, tmp_path / "out")
    assert same_bits(weights_of(tmp_path / "out"), weights_of(runs[task]))
    for name in ("config.json", "training.json"):
        assert (tmp_path / "out" / name).read_bytes() == (runs[task] / name).read_bytes()
    assert not (runs[task] / "tokenizer.json").exists()
    run_again(runs, task, tmp_path / "other", train={"seed": 2})
    assert not same_bits(weights_of(tmp_path / "other"), weights_of(runs[task]))


@every_task
def test_a_run_that_was_cut_off_goes_on_exactly(runs, tmp_path, monkeypatch, task):
    cut_off_and_go_on(monkeypatch, lambda: run_again(runs, task, tmp_path))
    assert same_bits(weights_of(tmp_path), weights_of(runs[task]))
    steps = [[(line["step"], line["kind"]) for line in read_metrics(out / METRICS)] for out in (tmp_path, runs[task])]
    assert steps[0] == steps[1]


@every_task
def test_what_is_saved_is_what_was_measured(runs, task):
    bundle = load(runs[task], "cpu")
    assert type(bundle) is ImageModel
    lines = read_metrics(runs[task] / METRICS)
    validated = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validated] == [6, 12]
    assert bundle.training["validation"].keys() == {"nll", *MEASURES[task]}
    assert validated[1]["nll"] < validated[0]["nll"]  # it learns
    assert all(line["pictures_per_second"] > 0 for line in lines if line["kind"] == "train")
    [line] = [line for line in validated if line["step"] == bundle.training["step"]]
    assert {name: line[name] for name in bundle.training["validation"]} == bundle.training["validation"]
    recipe = recipe_from(bundle.training["recipe"])
    dataset = TASKS[task].read(recipe.data)
    shape = BatchShape(0, recipe.train.seed, constant=True, images=7)
    encoded = TASKS[task].encode(dataset, (), bundle.special, recipe, bundle.model.config, shape)
    again = evaluate_loss(TASKS[task], bundle.model, encoded.validation, contextlib.nullcontext)
    again |= TASKS[task].validation_scores(bundle, dataset)
    if task != "mask-images":  # in other batches other patches are hidden
        assert again == pytest.approx(bundle.training["validation"], rel=1e-5)


@every_task
def test_what_is_loaded_says_what_was_saved(runs, tmp_path, task):
    bundle = load(runs[task], "cpu")
    bundle.save(tmp_path / "copy")
    copy = load(tmp_path / "copy", "cpu")
    assert (copy.training, copy.model.config) == (bundle.training, bundle.model.config)
    assert outputs(task, copy) == outputs(task, bundle)


@every_task
@pytest.mark.parametrize("fine_tune", [False, True])
def test_a_suggested_recipe_can_be_trained(runs, tmp_path, task, fine_tune):
    data = recipe_from(load(runs[task], "cpu").training["recipe"]).data
    dataset = TASKS[task].read(data)
    suggested = dataclasses.replace(TASKS[task].suggest_recipe(dataset, fine_tune), data=data)
    assert suggested.task == task
    assert recipe_from(recipe_table(suggested)) == suggested
    assert suggested.train.validate_by in ("loss", *TASKS[task].metrics)
    assert 0 < suggested.train.warmup < suggested.train.steps
    assert suggested.model.mean == tuple(round(one, 4) for one in dataset.training.images.mean)
    short = recipe_from({"train": {"steps": 1, "batch_images": 8, "workers": 1, "device": "cpu"}}, suggested)
    bundle = train(short, tmp_path / "out", start_from=runs[task] if fine_tune else None, quiet=True)
    assert bundle.model.config.width == (16 if fine_tune else suggested.model.width)
    assert bundle.model.config.mean == ((0.5,) if fine_tune else suggested.model.mean)


def test_two_workers_compute_what_one_would(runs, tmp_path):
    still = {"model": {"dropout": 0.0, "drop_path": 0.0}} | PLAIN
    common = {"steps": 6, "validate_every": 3, "clip": 0.0, "optimizer": "sgd", "lr": 0.1}
    run_again(runs, "classify-images", tmp_path / "one", train=common | {"batch_images": 8, "accumulate": 2}, **still)
    run_again(runs, "classify-images", tmp_path / "two", train=common | {"workers": 2}, **still)
    one, two = (weights_of(tmp_path / out) for out in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cache", [True, False])
def test_workers_map_cached_images_instead_of_receiving_them(tmp_path, cache):
    recipe = toy("segment", tmp_path)
    data = recipe.data if cache else dataclasses.replace(recipe.data, cache="")
    dataset = TASKS["segment"].read(data)
    sent = io.BytesIO()
    workers._Pickler(sent).dump(dataset)
    assert (len(sent.getvalue()) < 5000) == cache
    received = pickle.loads(sent.getvalue())
    assert received.fingerprints == dataset.fingerprints
    np.testing.assert_array_equal(received.training.images.pixels, dataset.training.images.pixels)
    np.testing.assert_array_equal(received.training.images.masks, dataset.training.images.masks)
    assert isinstance(received.training.images.pixels, np.memmap) == cache


# What is learned


def test_labels_are_learned(tmp_path):
    changes = {"steps": 60, "lr": 1e-2, "validate_every": 60, "validate_by": "accuracy"}
    model = train(
        toy("classify-images", tmp_path, train=changes, augment={"mixup": 0.0, "cutmix": 0.0}),
        tmp_path / "out",
        quiet=True,
    )
    assert model.labels == NAMES
    assert model.training["validation"]["accuracy"] == 100
    pixels, labels, _ = draw(30, seed=5)
    assert [one.label for one in model.classify(list(pixels))] == [NAMES[label] for label in labels]


@pytest.mark.parametrize("segmenter", ["linear", "queries"])
def test_masks_are_learned(tmp_path, segmenter):
    changes = {"steps": 60, "lr": 1e-2, "validate_every": 60, "validate_by": "iou"}
    recipe = toy("segment", tmp_path, model={"segmenter": segmenter, "segmenter_layers": 1}, train=changes, **PLAIN)
    model = train(recipe, tmp_path / "out", quiet=True)
    assert model.labels == ("3", "7")
    pixels, _, masks = draw(20, seed=1)  # what was validated with
    wanted = np.select([masks == 3, masks == 7], [0, 1], -1)
    counts = label_counts(np.stack(model.segment(list(pixels))), wanted, 2)
    assert counts.sum() == 20 * (144 - 1)
    assert model.training["validation"]["iou"] == pytest.approx(100 * intersection_over_union(counts).mean())
    assert model.training["validation"]["iou"] > 80
    assert model.training["validation"]["pixel_accuracy"] == pytest.approx(100 * np.trace(counts) / counts.sum())


def test_hidden_patches_are_learned(tmp_path):
    changes = {"steps": 60, "lr": 1e-2, "validate_every": 60}
    model = train(toy("mask-images", tmp_path, train=changes, model=QUIET, **PLAIN), tmp_path / "out", quiet=True)
    assert model.training["validation"]["nll"] < 0.95  # 1: nothing but each patch's mean is known
    assert model.model.config.head == "pixels"


def loss_of(task, recipe):
    """A fresh model, a batch, and the loss of that under a config."""
    dataset = TASKS[task].read(recipe.data)
    config = TASKS[task].complete_config(recipe.model, dataset, ())
    encoded = TASKS[task].encode(dataset, (), trainer.OPENED["vit"].special, recipe, config, BatchShape(0, 1, True, 16))
    batch = next(encoded.batches.epoch(0))
    torch.manual_seed(0)
    model = make_model(config)
    return model, batch, lambda **changes: TASKS[task].loss(model, model.features, batch, TrainConfig(**changes))


QUIET = {"dropout": 0.0, "drop_path": 0.0}


def test_the_loss_of_labels(tmp_path):
    model, batch, loss = loss_of("classify-images", toy("classify-images", tmp_path, model=QUIET, **PLAIN))
    assert batch.inputs[0].dtype == torch.uint8
    log_p = model(batch.pixels.permute(0, 3, 1, 2) / 255).log_softmax(-1)
    nll = -log_p.gather(1, batch.targets[:, None]).sum()
    found = loss(label_smoothing=0.2)
    torch.testing.assert_close(found.loss, 0.8 * nll - 0.2 * log_p.mean(1).sum())
    torch.testing.assert_close(found.nll, nll)
    assert found.tokens == 16
    with torch.no_grad():
        torch.testing.assert_close(loss(label_smoothing=0.2).loss, nll.detach())


def test_mixed_pictures_have_mixed_labels(tmp_path):
    recipe = toy("classify-images", tmp_path, model=QUIET, **PLAIN | {"augment": PLAIN["augment"] | {"mixup": 1.0}})
    model, batch, loss = loss_of("classify-images", recipe)
    torch.manual_seed(3)
    found = loss(label_smoothing=0.1)
    torch.manual_seed(3)
    pixels, targets, _ = TASKS["classify-images"].changed(batch, model.config)
    assert (targets.max(1).values < 0.95).sum() > 3
    log_p = model(pixels).log_softmax(-1)
    torch.testing.assert_close(found.loss, -((0.9 * targets + 0.1 / 3) * log_p).sum())


def test_the_loss_of_masks(tmp_path):
    model, batch, loss = loss_of("segment", toy("segment", tmp_path, model=QUIET, **PLAIN))
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


def test_the_loss_of_hidden_patches(tmp_path):
    model, batch, loss = loss_of("mask-images", toy("mask-images", tmp_path, model=QUIET, **PLAIN))
    torch.manual_seed(4)
    found = loss()
    torch.manual_seed(4)
    torch.testing.assert_close(found.loss, 16 * model.masked_loss(batch.pixels.permute(0, 3, 1, 2) / 255, 0.75))
    assert loss().loss != found.loss  # others are hidden each time
    with torch.no_grad():
        state = torch.get_rng_state()
        assert loss().loss == loss().loss  # but not in validation
        assert torch.equal(state, torch.get_rng_state())


@every_task
def test_pictures_are_changed_for_training_alone(tmp_path, task):
    recipe = toy(task, tmp_path)
    dataset = TASKS[task].read(recipe.data)
    config = TASKS[task].complete_config(recipe.model, dataset, ())
    encoded = TASKS[task].encode(dataset, (), trainer.OPENED["vit"].special, recipe, config, BatchShape(0, 1, True, 16))
    for batch, changed in ((next(encoded.batches.epoch(0)), True), (next(iter(encoded.validation)), False)):
        pixels = TASKS[task].changed(batch, config).pixels
        assert torch.equal(pixels, batch.pixels.permute(0, 3, 1, 2) / 255) != changed
    shapes = [(batch.pixels.shape, batch.targets.shape) for epoch in range(2) for batch in encoded.batches.epoch(epoch)]
    assert len(set(shapes)) == 1
    assert len(shapes) == 2 * (100 // 16)
    assert sum(len(batch.pixels) for batch in encoded.validation) == 20


def test_the_last_model_is_kept_however_it_does(tmp_path, monkeypatch):
    losses = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(trainer, "evaluate_loss", lambda *_: {"nll": next(losses)})
    for kept, out in (("last", 12), ("loss", 6)):
        recipe = toy("mask-images", tmp_path, train={"validate_by": kept})
        assert train(recipe, tmp_path / kept, quiet=True).training["step"] == out


# From a trained model


def encoder_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for name, one in load(folder, "cpu").model.named_parameters() if not name.startswith(HEADS)}


@pytest.mark.parametrize("task", ["classify-images", "segment"])
@pytest.mark.parametrize("origin", MEASURES)
def test_the_encoder_is_taken_over(runs, tmp_path, origin, task):
    """Of any task for any other; a head that fits too."""
    recipe = toy(task, tmp_path, model={"segmenter": "queries", "drop_path": 0.4}, **STILL)
    model = train(recipe, tmp_path / "out", start_from=runs[origin], quiet=True).model
    before, after = encoder_weights(runs[origin]), encoder_weights(tmp_path / "out")
    assert "blocks.1.attention.out.weight" in before
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.config.drop_path == 0.4  # which no weight depends on
    assert model.config.width == 16
    same = origin == task
    if task == "segment":
        assert model.config.segmenter == ("linear" if same else "queries")
    if same:
        assert torch.equal(model.output.weight, load(runs[origin], "cpu").model.output.weight)


def test_learned_positions_are_taken_over_to_another_size(tmp_path):
    small = {"model": {"positions": "learned", "pooling": "class"}}
    recipe = toy("classify-images", tmp_path, **STILL, **small)
    first = train(recipe, tmp_path / "first", quiet=True).model
    write(tmp_path / "train.npz", 40, side=20)
    write(tmp_path / "validation.npz", 10, side=20)
    second = train(recipe, tmp_path / "second", start_from=tmp_path / "first", quiet=True).model
    assert (second.config.image_height, second.config.image_width, second.config.grid) == (20, 20, (5, 5))
    table = first.embedding.learned.weight
    grid = table[1:].T.reshape(1, 16, 3, 3)
    wider = torch.nn.functional.interpolate(grid, (5, 5), mode="bicubic", align_corners=False)
    torch.testing.assert_close(second.embedding.learned.weight[1:], wider[0].flatten(1).T)
    assert torch.equal(second.embedding.learned.weight[:1], table[:1])
    pixels = torch.rand(2, 3, 20, 20)
    with torch.no_grad():
        torch.testing.assert_close(second.encode(pixels), first.encode(pixels))


def test_other_labels_than_before(runs, tmp_path):
    recipe = toy("classify-images", tmp_path, **STILL)
    labels = draw(100)[1]
    for name, count, seed in (("train", 100, 0), ("validation", 20, 1)):
        labels = draw(count, seed)[1] % 2
        write(tmp_path / f"{name}.npz", count, seed, labels=labels, names=np.array(["even", "odd"]))
    model = train(recipe, tmp_path / "out", start_from=runs["classify-images"], quiet=True)
    assert model.labels == ("even", "odd")
    assert model.model.output.weight.shape == (2, 16)


def test_grey_pictures_to_a_model_of_colours_and_the_reverse(runs, tmp_path):
    recipe = toy("classify-images", tmp_path, **STILL)
    for name, count, seed in (("train", 100, 0), ("validation", 20, 1)):
        grey = draw(count, seed)[0].mean(-1).astype(np.uint8)
        write(tmp_path / f"{name}.npz", count, seed, images=grey)
    model = train(recipe, tmp_path / "out", start_from=runs["classify-images"], quiet=True)
    assert model.model.config.channels == 3
    alone = train(recipe_from({"model": {"channels": 1}}, recipe), tmp_path / "grey", quiet=True)
    assert alone.model.config.channels == 1
    colours = toy("classify-images", tmp_path, **STILL)
    assert said(colours, tmp_path / "no", start_from=tmp_path / "grey") == (
        "The pictures have colours, and the model takes grey ones. Set data.channels to 1 to have them grey."
    )
    as_grey = recipe_from({"data": {"channels": 1}}, colours)
    assert train(as_grey, tmp_path / "yes", start_from=tmp_path / "grey", quiet=True).model.config.channels == 1


# What files there are


def test_a_folder_of_photographs(tmp_path):
    pixels, labels, _ = draw(60)
    for number, (picture, label) in enumerate(zip(pixels, labels)):
        (tmp_path / "photos" / NAMES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).resize((30, 20 + number % 3)).save(
            tmp_path / "photos" / NAMES[label] / f"{number}.png"
        )
    recipe = toy("classify-images", tmp_path)
    recipe = dataclasses.replace(recipe, data=DataConfig((str(tmp_path / "photos"),), size=12))
    model = train(recipe, tmp_path / "models" / "photos", quiet=True)
    assert sorted(model.labels) == sorted(NAMES)
    assert model.training["data"]["training"]["pictures"] + model.training["data"]["validation"]["pictures"] == 60
    # Decoded once, beside the model, where the next run finds them.
    cached = list((tmp_path / "models" / "regard-cache").iterdir())
    assert len(cached) == 1
    stamp = cached[0].stat().st_mtime_ns
    train(recipe, tmp_path / "models" / "others", quiet=True)
    assert [one.stat().st_mtime_ns for one in (tmp_path / "models" / "regard-cache").iterdir()] == [stamp]


def test_a_tenth_of_each_label_is_set_aside():
    labels = np.repeat(np.arange(5), [100, 50, 7, 4, 1])
    training, validation = split_by_label(labels)
    assert np.bincount(labels[validation], minlength=5).tolist() == [10, 5, 1, 0, 0]
    assert sorted([*training, *validation]) == list(range(len(labels)))
    many = np.arange(100_000) % 10
    assert len(split_by_label(many)[1]) == 2000
    assert [len(rows) for rows in split_by_label(np.full(30, -1))] == [27, 3]  # pictures without labels


def test_sides_of_patches():
    assert patch_for(224, 160) == 16
    assert patch_for(64, 48) == 4
    assert patch_for(33, 33) == 3
    assert patch_for(9, 9) == 1
    with pytest.raises(RegardError, match=r"29×31 pixels cannot be cut .* --data.size 24"):
        patch_for(29, 31)


# What is wrong


@pytest.mark.parametrize(
    ("task", "arrays", "says"),
    [
        (
            "classify-images",
            {"labels": np.zeros(100, np.int64)},
            "Every picture has the label 'first': there is nothing",
        ),
        ("segment", {"masks": np.full((100, 12, 12), 4, np.uint8)}, "Every pixel of the masks has the same number"),
    ],
)
def test_nothing_to_tell_apart(tmp_path, task, arrays, says):
    recipe = toy(task, tmp_path)
    write(tmp_path / "train.npz", 100, **arrays)
    assert said(recipe, tmp_path / "out").startswith(says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("task", "lacks"), [("classify-images", "labels"), ("segment", "masks")])
@pytest.mark.parametrize("side", ["train", "validation"])
def test_pictures_alone(tmp_path, task, lacks, side):
    recipe = toy(task, tmp_path)
    np.savez(tmp_path / f"{side}.npz", images=draw(20)[0])
    assert said(recipe, tmp_path / "out").startswith(f"The pictures have no {lacks}.")


def test_labels_of_validation_that_are_not_learned(tmp_path):
    recipe = toy("classify-images", tmp_path)
    write(tmp_path / "validation.npz", 20, names=np.array(["first", "second", "fourth"]))
    assert said(recipe, tmp_path / "out").startswith("Some pictures have the label 'fourth', which the model does not")
    recipe = toy("segment", tmp_path)
    write(tmp_path / "validation.npz", 20, masks=np.full((20, 12, 12), 9, np.uint8))
    assert said(recipe, tmp_path / "out").startswith("Some masks to validate with hold the number 9, and none to learn")


def test_too_few_to_set_some_aside(tmp_path):
    write(tmp_path / "train.npz", 3)
    recipe = toy("mask-images", tmp_path, data={"validation": []})
    write(tmp_path / "train.npz", 3)
    assert said(recipe, tmp_path / "out").startswith("There are too few pictures to set some aside for validation.")


@pytest.mark.parametrize(
    ("task", "sections", "says"),
    [
        ("classify-images", {"train": {"r_drop": 1.0}}, "train.r_drop is for texts, and these are pictures."),
        (
            "classify-images",
            {"train": {"validate_by": "iou"}},
            "train.validate_by = 'iou' does not fit the task classify-images.",
        ),
        ("classify-images", {"model": {"patch": 5}}, "An image of 12×12 pixels does not divide into patches of 5×5."),
        ("classify-images", {"augment": {"crop": 12}}, "crop = 12 moves whole pictures away."),
        ("segment", {"augment": {"mixup": 0.5}}, "Mixup blends labels, and masks have none to blend."),
        ("mask-images", {"augment": {"cutmix": 0.5}}, "Cutmix mixes labels or masks, and there are none."),
    ],
)
def test_what_cannot_be_is_said_before_the_first_step(tmp_path, task, sections, says):
    recipe = toy(task, tmp_path)
    assert said(recipe_from(sections, recipe), tmp_path / "out").startswith(says)
    train(recipe, tmp_path / "out", quiet=True)  # and the folder is free for a better recipe


def test_a_recipe_names_what_is_done_to_pictures():
    recipe = recipe_from({"task": "classify-images", "augment": {"flip": 1, "padding": "zero"}})
    assert recipe.augment == AugmentConfig(flip=1.0, padding="zero")
    assert recipe.model == ViTConfig()
    for table, says in (
        ({"augment": {"flop": 1}}, "unknown key augment.flop. Did you mean augment.flip?"),
        ({"augment": {"padding": "grey"}}, "augment.padding must be one of reflect, zero (got 'grey')."),
        ({"augment": {"flip": 2.0}}, "augment.flip must be between 0 and 1 (got 2.0)."),
        ({"task": "segment", "model": {"image_height": 3}}, "unknown key model.image_height."),
    ):
        with pytest.raises(RegardError) as caught:
            recipe_from(table)
        assert says in str(caught.value)


def test_pictures_are_read_in_the_order_of_the_file(tmp_path):
    """Rows of the validation set are those of the files."""
    recipe = toy("classify-images", tmp_path)
    dataset = TASKS["classify-images"].read(recipe.data)
    assert dataset.validation.images.labels.tolist() == read_images(recipe.data.validation).labels.tolist()
    assert dataset.describe() == "100 pictures of 12×12 colour pixels for training, 20 for validation"
