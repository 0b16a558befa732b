"""Learning from pictures of their own sizes, packed: labels and masks."""

import contextlib
import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli import main
from regard.data import RaggedBatches, RaggedImages
from regard.folder import ImageModel, load
from regard.models import make_model
from regard.training import DataConfig, Recipe, TrainConfig, plan, recipe_from, train, trainer
from regard.training.graphs import GraphedUpdate
from regard.training.tasks import TASKS
from regard.training.tasks.base import Shape, evaluate_loss
from regard.viewer import look
from tests.training.helpers import cut_off_and_go_on, run_again, said, same_bits, weights_of
from tests.training.toy_images import NAMES, TRAIN, VIT

every_task = pytest.mark.parametrize("task", ["classify-images", "segment"])
# Heights and widths; the last is longer than the longest, and comes to (12, 24).
SIZES = [(12, 12), (12, 20), (17, 11), (8, 16), (30, 60)]
LONGEST = 24


def write(folder: Path, count: int, seed: int = 0) -> str:
    """Dark noise with a square of red, green or blue, which is the label; masks: 7 in the square, 3 around it."""
    random = np.random.default_rng(seed)
    (folder / "files").mkdir(parents=True, exist_ok=True)
    rows = ["path,label,mask"]
    for number in range(count):
        height, width = SIZES[number % len(SIZES)]
        label, side = random.integers(3), min(height, width) * 2 // 3
        top, left = random.integers(height - side + 1), random.integers(width - side + 1)
        pixels = random.integers(60, 120, (height, width, 3), np.uint8)
        pixels[top : top + side, left : left + side, label] = 255
        mask = np.full((height, width), 3, np.uint8)
        mask[top : top + side, left : left + side] = 7
        Image.fromarray(pixels).save(folder / "files" / f"{seed}-{number}.png")
        Image.fromarray(mask).save(folder / "files" / f"{seed}-{number}-mask.png")
        rows.append(f"files/{seed}-{number}.png,{NAMES[label]},files/{seed}-{number}-mask.png")
    (folder / f"{seed}.csv").write_text("\n".join(rows))
    return str(folder / f"{seed}.csv")


def toy(task, folder: Path, **sections):
    files = (write(folder, 60),), (write(folder, 15, seed=1),)
    data = DataConfig(*files, longest=LONGEST, patch=4, cache=str(folder / "cache"))
    settings = dataclasses.replace(TRAIN, batch_tokens=128)
    lively = {"flip": 0.5, "crop": 1, "colour": 0.2, "zoom": 0.8, "cutout": 2}
    if task == "segment":
        del lively["cutout"]
    return recipe_from({"augment": lively} | sections, Recipe(task, data, model=VIT, train=settings))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of each task. Tests read them."""
    folders = {}
    for task in ("classify-images", "segment"):
        folder = tmp_path_factory.mktemp(task)
        train(toy(task, folder), folder / "out", quiet=True)
        folders[task] = folder / "out"
    return folders


# As for pictures of one size


@every_task
def test_the_same_seed_gives_the_same_bits(runs, tmp_path, task):
    run_again(runs, task, tmp_path / "out")
    assert same_bits(weights_of(tmp_path / "out"), weights_of(runs[task]))
    run_again(runs, task, tmp_path / "other", train={"seed": 2})
    assert not same_bits(weights_of(tmp_path / "other"), weights_of(runs[task]))


@every_task
def test_a_run_that_was_cut_off_goes_on_exactly(runs, tmp_path, monkeypatch, task):
    cut_off_and_go_on(monkeypatch, lambda: run_again(runs, task, tmp_path))
    assert same_bits(weights_of(tmp_path), weights_of(runs[task]))


@pytest.mark.parametrize(("longest", "size"), [(64, 4), (100, 3), (160, 1)])
def test_no_more_processes_than_have_room_for_any_picture(tmp_path, monkeypatch, longest, size):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    recipe = toy("classify-images", tmp_path, data={"longest": longest}, train={"batch_tokens": 2048, "workers": 0})
    with trainer._configured_machine(recipe, None) as found:
        assert found == size


@every_task
def test_what_is_saved_is_what_was_measured(runs, task):
    bundle = load(runs[task], "cpu")
    config, recipe = bundle.model.config, recipe_from(bundle.training["recipe"])
    assert (config.longest_side, bundle.size) == (LONGEST, (24, 24))
    dataset = TASKS[task].read(recipe.data)
    encoded = TASKS[task].encode(dataset, (), bundle.special, recipe, config, Shape(40, 1, constant=True))
    again = evaluate_loss(TASKS[task], bundle.model, encoded.validation, contextlib.nullcontext)
    again |= TASKS[task].validation_scores(bundle, dataset)
    assert again == pytest.approx(bundle.training["validation"], rel=1e-5)


@every_task
def test_it_learns(tmp_path, task):
    changes = {"steps": 80, "lr": 1e-2, "validate_every": 80, "warmup": 5}
    recipe = toy(task, tmp_path, train=changes, model={"dropout": 0.0, "drop_path": 0.0})
    scores = train(recipe, tmp_path / "out", quiet=True).training["validation"]
    assert scores["accuracy" if task == "classify-images" else "pixel_accuracy"] > 85


# Each picture at its own size


def dataset_of(recipe):
    return TASKS[recipe.task].read(recipe.data)


def test_pictures_keep_their_sizes(tmp_path):
    dataset = dataset_of(toy("classify-images", tmp_path))
    images = dataset.training.images
    assert isinstance(images, RaggedImages)
    assert images.sizes[:5].tolist() == [[12, 12], [12, 20], [16, 12], [8, 16], [12, 24]]
    assert dataset.describe() == "60 pictures of their own sizes up to 24 colour pixels for training, 15 for validation"


def loss_of(task, tmp_path, rows):
    """A fresh model, the pictures, and the loss of some of them, in the order that these have in a batch."""
    recipe = toy(task, tmp_path, model={"dropout": 0.0, "drop_path": 0.0})
    images = dataset_of(recipe).training.images
    config = TASKS[task].complete_config(recipe.model, dataset_of(recipe), ())
    torch.manual_seed(0)
    model = make_model(config)
    targets = partial(TASKS[task].targets, images, config)
    [batch] = RaggedBatches(images, np.array(rows), targets, budget=1000, prefix=0, seed=1)
    return model, images, TASKS[task].loss(model, model.features, batch, TrainConfig(label_smoothing=0.2))


def test_the_loss_of_labels_is_that_of_one_picture_at_a_time(tmp_path):
    rows = [0, 1, 2, 4, 6]
    model, images, found = loss_of("classify-images", tmp_path, rows)
    logprobs = torch.cat([model(one[None]).log_softmax(-1) for one in images.tensors(rows)])
    nll = -logprobs[range(5), images.labels[rows]].sum()
    torch.testing.assert_close(found.nll, nll)
    torch.testing.assert_close(found.loss, 0.8 * nll - 0.2 * logprobs.mean(1).sum())
    assert found.tokens == 5


def test_the_loss_of_masks_is_that_of_one_picture_at_a_time(tmp_path):
    rows = [0, 1, 2, 4, 6]
    model, images, found = loss_of("segment", tmp_path, rows)
    losses = []
    for row, picture in zip(rows, images.tensors(rows)):
        wanted = torch.from_numpy(images.mask(row) == 7).long()[None]
        for smoothing in (0.0, 0.2):
            losses.append(torch.nn.functional.cross_entropy(model(picture[None]), wanted, label_smoothing=smoothing))
    torch.testing.assert_close(found.nll, sum(losses[::2]))
    torch.testing.assert_close(found.loss, sum(losses[1::2]))
    assert found.tokens == 5


def test_a_picture_is_classified_at_its_own_size(runs, tmp_path):
    model = load(runs["classify-images"], "cpu")
    random = np.random.default_rng(3)
    pictures = [random.integers(0, 256, (*size, 3), np.uint8) for size in ((12, 20), (16, 16), (12, 20), (8, 24))]
    found = model.classify(pictures)
    with torch.no_grad():
        for picture, one in zip(pictures, found):
            [shares] = model.model(torch.from_numpy(picture.transpose(2, 0, 1)[None] / np.float32(255))).softmax(-1)
            assert list(one.probabilities.values()) == pytest.approx(shares.tolist(), abs=1e-5)
    assert model.classify([]) == []
    # One that is larger than the longest is made smaller; proportions stay.
    assert model.seen(np.zeros((50, 100, 3), np.uint8)).shape == (12, 24, 3)
    assert model.seen(np.zeros((13, 5, 3), np.uint8)).shape == (12, 4, 3)


def test_a_picture_is_looked_at_and_segmented_at_its_own_size(runs):
    picture = np.random.default_rng(3).integers(0, 256, (13, 27, 3), np.uint8)
    assert look(load(runs["classify-images"], "cpu"), picture).grid == (3, 6)
    segmenter = load(runs["segment"], "cpu")
    assert segmenter.seen(picture).shape == (12, 24, 3)
    assert [mask.shape for mask in segmenter.segment([picture, picture[:8, :8]])] == [(13, 27), (8, 8)]


@every_task
def test_the_commands(runs, tmp_path, capsys, task):
    """evaluate measures what training did."""
    out, recipe = runs[task], recipe_from(load(runs[task], "cpu").training["recipe"])
    scores = tmp_path / "scores.json"
    argv = ["evaluate", str(out), "--data", *recipe.data.validation, "--device", "cpu", "--json", str(scores)]
    assert main(argv) == 0
    measured, there = json.loads(scores.read_text()), load(out, "cpu").training["validation"]
    ours, theirs = ("accuracy", "accuracy") if task == "classify-images" else ("mean_iou", "iou")
    assert measured[ours] == pytest.approx(there[theirs])
    assert measured["images"] == 15
    assert main(["info", str(out), "--device", "cpu"]) == 0
    assert "longest_side" in capsys.readouterr().out


def test_from_the_command_line(tmp_path, capsys):
    """What nobody says is chosen from the pictures."""
    data, out = write(tmp_path, 40), tmp_path / "model"
    size = ["--model.width", "16", "--model.heads", "2", "--model.layers", "1", "--model.feedforward", "32"]
    steps = ["--train.steps", "2", "--train.warmup", "1", "--train.workers", "1", "--train.device", "cpu"]
    argv = ["train", "--task", "classify-images", "--data", data, "--data.longest", "28", "--out", str(out)]
    assert main([*argv, *size, *steps]) == 0
    assert "of their own sizes up to 28 colour pixels" in capsys.readouterr().err
    recipe = load(out, "cpu").training["recipe"]
    assert (recipe["model"]["patch"], recipe["augment"]["mixup"]) == (4, 0.0)
    assert recipe["train"]["batch_tokens"] == 768  # 36 pictures, of 14 patches on average
    assert main(["classify", str(out), str(tmp_path / "files" / "0-4.png"), "--device", "cpu"]) == 0


@every_task
@pytest.mark.parametrize("fine_tune", [False, True])
def test_a_suggested_recipe_can_be_trained(runs, tmp_path, task, fine_tune):
    data = recipe_from(load(runs[task], "cpu").training["recipe"]).data
    suggested, dataset = plan(task, data, fine_tune=fine_tune)
    assert suggested.augment.crop < 8  # which the lowest picture has
    short = recipe_from({"train": {"steps": 1, "workers": 1, "device": "cpu"}}, suggested)
    start = runs[task] if fine_tune else None
    assert isinstance(train(short, tmp_path / "out", start_from=start, dataset=dataset, quiet=True), ImageModel)


def test_from_one_size_to_own_sizes_and_back(runs, tmp_path):
    """Learned positions are brought to the new grid; and a model says which of the two it is for."""
    still = {"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}, "model": {"positions": "learned"}}
    own = toy("classify-images", tmp_path, **still)
    one = recipe_from({"data": {"longest": 0, "patch": 0, "size": 12}}, own)
    train(one, tmp_path / "one", quiet=True)
    second = train(own, tmp_path / "own", start_from=tmp_path / "one", quiet=True)
    assert (second.model.config.longest_side, second.model.config.grid) == (24, (6, 6))
    third = train(one, tmp_path / "back", start_from=tmp_path / "own", quiet=True)
    assert (third.model.config.longest_side, third.size) == (0, (12, 12))


# What cannot be


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"size": 16}}, "data.size brings all pictures to one size, and data.longest lets each keep its own."),
        ({"augment": {"mixup": 0.5}}, "Pictures of different sizes cannot be mixed. Set augment.mixup and"),
        ({"augment": {"cutmix": 0.5}}, "Pictures of different sizes cannot be mixed. Set augment.mixup and"),
        ({"augment": {"crop": 8}}, "crop = 8 moves whole pictures away."),
        (
            {"model": {"patch": 8}},
            "Sides of pictures are multiples of 4, and the model's patches have 8×8 pixels. Set data.patch to 8.",
        ),
        ({"train": {"batch_tokens": 12}}, "A picture has 18 tokens, but a batch only 12. Raise train.batch_tokens"),
        ({"data": {"patch": 32}}, "Sides up to 24 cannot be whole patches of 32."),
        ({"task": "mask-images", "augment": {}}, "Patches are hidden in pictures of one size only. Set data.size"),
    ],
)
def test_what_cannot_be_is_said_before_the_first_step(tmp_path, sections, says):
    recipe = toy("classify-images", tmp_path)
    assert said(recipe_from(sections, recipe), tmp_path / "out").startswith(says)


def test_a_captured_step_would_not_fit_another_batch(tmp_path):
    """Batches of the same shapes may hold pictures of other sizes, so a GPU captures none of them."""
    recipe = toy("classify-images", tmp_path)
    config = TASKS["classify-images"].complete_config(recipe.model, dataset_of(recipe), ())
    encoded = TASKS["classify-images"].encode(
        dataset_of(recipe), (), trainer.OPENED["vit"].special, recipe, config, Shape(128, 1, constant=True)
    )
    asked = []
    update = object.__new__(GraphedUpdate)  # without a GPU it has no stream
    update.update = asked.append
    batch = next(encoded.batches.epoch(0))
    update([batch])
    assert asked == [[batch]]
