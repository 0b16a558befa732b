"""Training on images of different sizes in packed batches: classification and segmentation."""

import json
import os
from functools import partial

import numpy as np
import pytest
import torch

from regard.cli import main
from regard.data import RaggedImages
from regard.data.batching.images import RaggedImageBatches
from regard.models import make_model
from regard.pipelines import load, pipeline_class
from regard.training import TrainConfig, recipe_from_dict, run_recipe
from regard.training.cuda_graphs import GraphedUpdate
from regard.training.distributed import count_ranks
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchShape
from regard.viewer import look
from tests.training.helpers import error_message
from tests.training.toy_images import LONGEST, toy_ragged, write_ragged

every_task = pytest.mark.parametrize("task", ["classify-images", "segment"])


@pytest.mark.parametrize(("longest", "size"), [(64, 4), (100, 3), (160, 1)])
def test_workers_are_limited_by_the_largest_image(tmp_path, monkeypatch, longest, size):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    recipe = toy_ragged(
        "classify-images", tmp_path, data={"longest": longest}, train={"batch_tokens": 2048, "workers": 0}
    )
    assert count_ranks(recipe) == size


@every_task
def test_model_learns(tmp_path, task):
    changes = {"steps": 80, "lr": 1e-2, "validate_every": 80, "warmup": 5}
    recipe = toy_ragged(task, tmp_path, train=changes, model={"dropout": 0.0, "drop_path": 0.0})
    scores = run_recipe(recipe, tmp_path / "out", quiet=True).training["validation"]
    assert scores["accuracy" if task == "classify-images" else "pixel_accuracy"] > 85


# Images at their sizes


def dataset_of(recipe):
    return TASKS[recipe.task].read(recipe.data)


def test_images_keep_their_sizes(tmp_path):
    dataset = dataset_of(toy_ragged("classify-images", tmp_path))
    images = dataset.training.images
    assert isinstance(images, RaggedImages)
    assert images.sizes[:5].tolist() == [[12, 12], [12, 20], [16, 12], [8, 16], [12, 24]]
    assert dataset.describe() == "60 images of up to 24×24 pixels in color for training, 15 for validation"


def loss_of(task, tmp_path, rows):
    """A new model, the images, and the loss of one batch of these rows."""
    recipe = toy_ragged(task, tmp_path, model={"dropout": 0.0, "drop_path": 0.0})
    images = dataset_of(recipe).training.images
    config = TASKS[task].complete_config(recipe.model, dataset_of(recipe), ())
    torch.manual_seed(0)
    model = make_model(config)
    targets = partial(TASKS[task].targets, images, config)
    [batch] = RaggedImageBatches(images, np.array(rows), targets, budget=1000, prefix=0, seed=1)
    return model, images, TASKS[task].loss(model, model.features, batch, TrainConfig(label_smoothing=0.2))


def test_packed_classification_loss_equals_the_loss_image_by_image(tmp_path):
    rows = [0, 1, 2, 4, 6]
    model, images, found = loss_of("classify-images", tmp_path, rows)
    logprobs = torch.cat([model(image[None]).log_softmax(-1) for image in images.to_tensors(rows)])
    nll = -logprobs[range(5), images.labels[rows]].sum()
    torch.testing.assert_close(found.nll, nll)
    torch.testing.assert_close(found.loss, 0.8 * nll - 0.2 * logprobs.mean(1).sum())
    assert found.tokens == 5


def test_packed_segmentation_loss_equals_the_loss_image_by_image(tmp_path):
    rows = [0, 1, 2, 4, 6]
    model, images, found = loss_of("segment", tmp_path, rows)
    losses = []
    for row, image in zip(rows, images.to_tensors(rows)):
        target = torch.from_numpy(images.mask(row) == 7).long()[None]
        for smoothing in (0.0, 0.2):
            losses.append(torch.nn.functional.cross_entropy(model(image[None]), target, label_smoothing=smoothing))
    torch.testing.assert_close(found.nll, sum(losses[::2]))
    torch.testing.assert_close(found.loss, sum(losses[1::2]))
    assert found.tokens == 5


def test_images_are_classified_at_their_size(runs, tmp_path):
    model = load(runs["ragged classify-images"], "cpu")
    random = np.random.default_rng(3)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in ((12, 20), (16, 16), (12, 20), (8, 24))]
    predictions = model.classify(images)
    with torch.no_grad():
        for image, prediction in zip(images, predictions):
            [probs] = model.model(torch.from_numpy(image.transpose(2, 0, 1)[None] / np.float32(255))).softmax(-1)
            assert list(prediction.probabilities.values()) == pytest.approx(probs.tolist(), abs=1e-5)
    assert model.classify([]) == []
    # Images larger than the maximum side are shrunk with their aspect ratio.
    assert model.preprocess(np.zeros((50, 100, 3), np.uint8)).shape == (12, 24, 3)
    assert model.preprocess(np.zeros((13, 5, 3), np.uint8)).shape == (12, 4, 3)


def test_look_and_segment_use_the_size_of_the_image(runs):
    image = np.random.default_rng(3).integers(0, 256, (13, 27, 3), np.uint8)
    assert look(load(runs["ragged classify-images"], "cpu"), image).grid == (3, 6)
    segmenter = load(runs["ragged segment"], "cpu")
    assert segmenter.preprocess(image).shape == (12, 24, 3)
    assert [mask.shape for mask in segmenter.segment([image, image[:8, :8]])] == [(13, 27), (8, 8)]


@every_task
def test_evaluate_command_matches_the_validation_scores(runs, tmp_path, capsys, task):
    out = runs[f"ragged {task}"]
    recipe = recipe_from_dict(load(out, "cpu").training["recipe"])
    scores = tmp_path / "scores.json"
    argv = ["evaluate", str(out), "--data", *recipe.data.validation, "--device", "cpu", "--json", str(scores)]
    assert main(argv) == 0
    measured, logged = json.loads(scores.read_text()), load(out, "cpu").training["validation"]
    key, logged_key = ("accuracy", "accuracy") if task == "classify-images" else ("mean_iou", "iou")
    assert measured[key] == pytest.approx(logged[logged_key])
    assert measured["images"] == 15
    assert main(["info", str(out), "--device", "cpu"]) == 0
    assert "longest_side" in capsys.readouterr().out
    assert (load(out, "cpu").model.config.longest_side, load(out, "cpu").size) == (LONGEST, (24, 24))


def test_train_command_chooses_settings_from_the_images(tmp_path, capsys):
    data, out = write_ragged(tmp_path, 40), tmp_path / "model"
    size = ["--model.width", "16", "--model.heads", "2", "--model.layers", "1", "--model.feedforward", "32"]
    steps = ["--train.steps", "2", "--train.warmup", "1", "--train.workers", "1", "--train.device", "cpu"]
    argv = ["train", "--task", "classify-images", "--data", data, "--data.longest", "28", "--out", str(out)]
    assert main([*argv, *size, *steps]) == 0
    assert "of up to 28×28 pixels in color" in capsys.readouterr().err
    recipe = load(out, "cpu").training["recipe"]
    assert (recipe["model"]["patch"], recipe["augment"]["mixup"]) == (4, 0.0)
    assert recipe["train"]["batch_tokens"] == 768  # 36 images of 14 patches on average
    assert main(["classify", str(out), str(tmp_path / "files" / "0-4.png"), "--device", "cpu"]) == 0


def test_fine_tuning_between_one_size_and_different_sizes(runs, tmp_path):
    """Learned positions are interpolated to the new grid, and the config has the new sizes."""
    still = {"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}, "model": {"positions": "learned"}}
    ragged = toy_ragged("classify-images", tmp_path, **still)
    one_size = recipe_from_dict({"data": {"longest": 0, "patch": 0, "size": 12}}, ragged)
    run_recipe(one_size, tmp_path / "one", quiet=True)
    second = run_recipe(ragged, tmp_path / "ragged", start_from=tmp_path / "one", quiet=True)
    assert (second.model.config.longest_side, second.model.config.grid) == (24, (6, 6))
    third = run_recipe(one_size, tmp_path / "back", start_from=tmp_path / "ragged", quiet=True)
    assert (third.model.config.longest_side, third.size) == (0, (12, 12))


# Error messages


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"size": 16}}, "data.size resizes all images to one size, while data.longest keeps different sizes."),
        ({"augment": {"mixup": 0.5}}, "augment.mixup and augment.cutmix need images of one size. Set both to 0"),
        ({"augment": {"cutmix": 0.5}}, "augment.mixup and augment.cutmix need images of one size. Set both to 0"),
        ({"augment": {"crop": 8}}, "augment.crop is 8; it must be smaller than the image (16 x 8 pixels)."),
        (
            {"model": {"patch": 8}},
            "The images are resized for patches of 4×4 pixels, but the model has patches of 8×8. Set data.patch to 8.",
        ),
        ({"train": {"batch_tokens": 12}}, "An image has 18 tokens, but a batch has only 12. Raise train.batch_tokens"),
        ({"data": {"patch": 32}}, "The patch size (32) must be at least 1 and at most the maximum side (24)."),
        ({"task": "mask-images", "augment": {}}, "The task mask-images needs images of one size. Set data.size"),
    ],
)
def test_invalid_settings_are_errors_before_the_first_step(tmp_path, sections, message):
    recipe = toy_ragged("classify-images", tmp_path)
    assert error_message(recipe_from_dict(sections, recipe), tmp_path / "out").startswith(message)


def test_batches_of_different_image_sizes_are_not_captured(tmp_path):
    """Batches of the same shape may hold images of other sizes, so no CUDA graph is captured."""
    recipe = toy_ragged("classify-images", tmp_path)
    config = TASKS["classify-images"].complete_config(recipe.model, dataset_of(recipe), ())
    encoded = TASKS["classify-images"].encode(
        dataset_of(recipe),
        (),
        pipeline_class(config).special,
        recipe,
        config,
        BatchShape(128, 1, constant=True),
    )
    calls = []
    update = object.__new__(GraphedUpdate)  # __init__ needs a GPU
    update.update = calls.append
    batch = next(encoded.batches.epoch(0))
    update([batch])
    assert calls == [[batch]]
