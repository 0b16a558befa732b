"""All tasks except translation: training from files, resuming, validation scores and error messages.

Translation is covered by test_loop.py.
"""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from regard.data.text.special_tokens import SpecialTokens
from regard.evaluation.text_metrics import margin_key
from regard.pipelines import ImageModel, load, save
from regard.training import recipe_from_dict, run_recipe
from regard.training.checkpoint import METRICS
from regard.training.log import read_metrics
from regard.training.recipe import recipe_to_dict
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchShape, evaluate_loss
from tests.training import toy_images, toy_tasks
from tests.training.helpers import bit_equal, error_message, interrupt_and_resume, plan, repeat_run, saved_tensors
from tests.training.tasks.conftest import CASES
from tests.training.toy_tasks import KINDS, TRAIN, sentences, toy, write_squad, write_text

every_case = pytest.mark.parametrize("case", CASES)
every_task = pytest.mark.parametrize("task", KINDS)


def test_every_task_has_tests():
    assert {"translate", *(case.removeprefix("ragged ") for case in CASES)} == set(TASKS)


@every_case
def test_resumed_run_has_the_same_weights(runs, tmp_path, monkeypatch, case):
    """As the seed determines all else, and no time or path is stored, the files are the same too."""
    interrupt_and_resume(monkeypatch, lambda: repeat_run(runs, case, tmp_path))
    assert bit_equal(saved_tensors(tmp_path), saved_tensors(runs[case]))
    steps = [[(line["step"], line["kind"]) for line in read_metrics(out / METRICS)] for out in (tmp_path, runs[case])]
    assert steps[0] == steps[1]
    for name in ("config.json", "training.json", *["tokenizer.json"] * (case in KINDS)):
        assert (tmp_path / name).read_bytes() == (runs[case] / name).read_bytes()
    assert (tmp_path / "tokenizer.json").exists() == (case in KINDS)


def test_another_seed_gives_other_images(runs, tmp_path):
    repeat_run(runs, "mask-images", tmp_path, train={"seed": 2})
    assert not bit_equal(saved_tensors(tmp_path), saved_tensors(runs["mask-images"]))


def encode(pipeline, constant=False):
    """The dataset of a run, and its batches in another shape: images in parts of 7, or of 40 tokens if they differ."""
    recipe = recipe_from_dict(pipeline.training["recipe"])
    task, dataset = TASKS[recipe.task], TASKS[recipe.task].read(recipe.data)
    shape = BatchShape(recipe.train.batch_tokens, recipe.train.seed, constant)
    if isinstance(pipeline, ImageModel):
        ragged = recipe.data.longest > 0
        shape = BatchShape(40 if ragged else 0, recipe.train.seed, constant=True, images=0 if ragged else 7)
    return dataset, task.encode(dataset, pipeline.tokenizers, pipeline.special, recipe, pipeline.model.config, shape)


WITH_MARGINS = ("translate", "text2text", "classify", "classify-images", "ragged classify-images")


@every_case
def test_saved_model_has_the_logged_validation_scores(runs, case):
    kind, metrics = CASES[case]
    pipeline, lines = load(runs[case], "cpu"), read_metrics(runs[case] / METRICS)
    assert type(pipeline) is kind
    validated = [line for line in lines if line["kind"] == "validation"]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in validated] == [6, 12]
    scores = pipeline.training["validation"]
    margins = {name for name in scores if name.endswith("_margin")}
    assert margins == ({margin_key(name) for name in metrics} if case in WITH_MARGINS else set())
    assert scores.keys() - margins == {"nll", *metrics} | ({"perplexity"} if case in KINDS else set())
    [line] = [line for line in validated if line["step"] == pipeline.training["step"]]
    assert {name: line[name] for name in scores} == scores
    logged = validated if kind is ImageModel else trained
    assert logged[-1]["nll"] < logged[0]["nll"]
    task = TASKS[case.removeprefix("ragged ")]
    assert all(line[f"{task.unit}s_per_second"] > 0 for line in trained)
    # and again with the saved model
    dataset, encoded = encode(pipeline)
    again = evaluate_loss(task, pipeline.model, encoded.validation, contextlib.nullcontext)
    again |= task.validation_scores(pipeline, dataset)
    if case != "mask-images":  # other batches mask other patches
        assert again == pytest.approx(scores, rel=1e-6 if case in KINDS else 1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("ragged")])
def test_loaded_pipeline_gives_the_same_outputs(runs, tmp_path, case):
    pipeline = load(runs[case], "cpu")
    pipeline.save(tmp_path / "copy")
    copy = load(tmp_path / "copy", "cpu")
    assert (copy.training, copy.special, copy.model.config) == (
        pipeline.training,
        pipeline.special,
        pipeline.model.config,
    )
    outputs = toy_tasks.outputs if case in KINDS else toy_images.outputs
    assert outputs(case, copy) == outputs(case, pipeline)
    assert copy.tokenizers == pipeline.tokenizers


@pytest.mark.parametrize("task", [task for task in KINDS if task != "mask"])  # where other tokens would be masked
def test_constant_shapes_give_the_same_loss(runs, task):
    """Constant shapes, as used on a GPU, are padded with texts that do not count."""
    pipeline = load(runs[task], "cpu")
    losses = []
    for constant in (False, True):
        _, encoded = encode(pipeline, constant)
        losses.append(evaluate_loss(TASKS[task], pipeline.model, encoded.validation, contextlib.nullcontext)["nll"])
        pipeline.model.zero_grad()
        batch = next(encoded.batches.epoch(0))
        TASKS[task].loss(pipeline.model, pipeline.model.features, batch, TRAIN).loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in pipeline.model.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@every_case
@pytest.mark.parametrize("fine_tune", [False, True])
def test_suggested_recipe_can_be_trained(runs, tmp_path, case, fine_tune):
    data = recipe_from_dict(load(runs[case], "cpu").training["recipe"]).data
    suggested, dataset = plan(case.removeprefix("ragged "), data, fine_tune=fine_tune)
    task = TASKS[suggested.task]
    assert recipe_from_dict(recipe_to_dict(suggested)) == suggested
    assert suggested.train.validate_by in ("loss", *task.metrics)
    assert 0 < suggested.train.warmup < suggested.train.steps
    batch = {"batch_tokens": 512} if case in KINDS else {} if case.startswith("ragged") else {"batch_images": 8}
    short = recipe_from_dict({"train": {"steps": 1, "workers": 1, "device": "cpu"} | batch}, suggested)
    start = runs[case] if fine_tune else None
    config = run_recipe(short, tmp_path / "out", start_from=start, dataset=dataset, quiet=True).model.config
    assert config.width == (16 if fine_tune else suggested.model.width)
    if case in toy_images.EXTRA_METRICS:
        assert suggested.model.mean == tuple(round(value, 4) for value in dataset.training.images.mean)
        assert config.mean == ((0.5,) if fine_tune else suggested.model.mean)
    if case.startswith("ragged"):
        assert suggested.augment.crop < 8  # the height of the smallest image


@pytest.mark.parametrize(
    ("task", "still"),
    [
        ("mask", {"model": {"dropout": 0.0}}),
        ("classify-images", {"model": {"dropout": 0.0, "drop_path": 0.0}, "augment": toy_images.NO_AUGMENTATION}),
    ],
)
def test_two_workers_give_the_same_weights_as_one(runs, tmp_path, task, still):
    common = {"steps": 6, "validate_every": 3, "clip": 0.0, "optimizer": "sgd", "lr": 0.1}
    for workers in (1, 2):
        repeat_run(runs, task, tmp_path / str(workers), train=common | {"workers": workers}, **still)
    one, two = (saved_tensors(tmp_path / out) for out in ("1", "2"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


# Error messages


@every_task
def test_empty_file_is_an_error(tmp_path, task):
    recipe = toy(task, tmp_path)
    for file in recipe.data.files:
        Path(file).write_bytes(b"")
    assert error_message(recipe, tmp_path / "out") == f"{recipe.data.files[0]} is empty."
    assert not (tmp_path / "out").exists()


@every_task
def test_file_of_empty_lines_is_an_error(tmp_path, task):
    recipe = toy(task, tmp_path)
    for file in recipe.data.files:
        Path(file).write_bytes(b"\n \n")
    first = recipe.data.files[0]
    assert error_message(recipe, tmp_path / "out").startswith(
        {
            "language": f"{first}: there is no text.",
            "mask": f"{first}: there is no text.",
            "classify": f"{first}: there is no text.",
            "answer": f"{first}, line 3: not JSON",
            "tag": f"{first}: there is no text",
            "text2text": f"{first}: no pair is left after cleaning.",
        }[task]
    )


@every_task
def test_empty_validation_file_is_an_error(tmp_path, task):
    recipe = toy(task, tmp_path)
    (tmp_path / "empty.tsv").write_bytes(b"")
    names = (str(tmp_path / "empty.tsv"),) * len(recipe.data.files)
    recipe = recipe_from_dict({"data": {"validation": names}}, recipe)
    assert error_message(recipe, tmp_path / "out") == f"{tmp_path / 'empty.tsv'} is empty."


@pytest.mark.parametrize(
    ("task", "metric", "choices"),
    [
        ("language", "accuracy", "loss, last"),
        ("mask", "bleu", "loss, last"),
        ("classify", "f1", "loss, accuracy, last"),
        ("answer", "accuracy", "loss, f1, exact_match, last"),
        ("text2text", "f1", "loss, bleu, chrf, exact_match, last"),
    ],
)
def test_metric_of_another_task_is_an_error(tmp_path, task, metric, choices):
    recipe = toy(task, tmp_path, train={"validate_by": metric})
    assert error_message(recipe, tmp_path / "out") == (
        f"train.validate_by = '{metric}' is not a metric of the task {task}. Choose train.validate_by from: {choices}."
    )


@pytest.mark.parametrize(
    ("task", "origin", "family", "families"),
    [
        ("language", "mask", "bert", "gpt"),
        ("mask", "language", "gpt", "bert"),
        ("classify", "text2text", "transformer", "bert"),
        ("answer", "language", "gpt", "bert"),
        ("text2text", "classify", "bert", "transformer"),
    ],
)
def test_fine_tuning_another_family_is_an_error(runs, tmp_path, task, origin, family, families):
    assert error_message(toy(task, tmp_path), tmp_path / "out", start_from=runs[origin]) == (
        f"{runs[origin]} holds a model of the family {family}, which does not support the task {task}. "
        f"Pass a model of the family {families}."
    )
    assert not (tmp_path / "out").exists()


def test_single_label_is_an_error(tmp_path):
    recipe = toy("classify", tmp_path)
    write_text(tmp_path / "labeled.tsv", [f"{text}\tsame" for text in sentences(50)])
    assert error_message(recipe, tmp_path / "out").startswith(
        "Every text has the label 'same'; classification needs at least two labels."
    )


def test_validation_label_missing_from_training_is_an_error(tmp_path):
    named = write_text(tmp_path / "validation.tsv", ["the cat sees the dog\tothers", "a whale\tfishes"])
    recipe = toy("classify", tmp_path, data={"validation": [named]})
    assert error_message(recipe, tmp_path / "out").startswith(
        "The text 'a whale' has the label 'fishes', which the model does not have. Its labels are birds, others."
    )


def test_imported_model_without_a_mask_token_is_an_error(runs, tmp_path):
    encoder = load(runs["mask"], "cpu")
    save(tmp_path / "imported", dataclasses.replace(encoder, special=SpecialTokens(begin=2, end=3)))
    assert error_message(toy("mask", tmp_path), tmp_path / "out", start_from=tmp_path / "imported").startswith(
        "The model has no mask token."
    )


@pytest.mark.parametrize("kind", ["space", "bpe"])
def test_tokenizer_without_line_breaks_is_an_error(tmp_path, kind):
    recipe = toy("language", tmp_path, tokenizer={"kind": kind})
    assert error_message(recipe, tmp_path / "out") == (
        f"tokenizer.kind = '{kind}' does not preserve line breaks. "
        "Set tokenizer.kind to char, word or bytes (subwords)."
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prefixes": ["a: "]}, "data.prefixes must have one entry per file of data.files: expected 2, got 1."),
        ({"weights": [1.0, 2.0, 3.0]}, "data.weights must have one entry per file of data.files: expected 2, got 3."),
        (
            {"validation": ["same.tsv"]},
            "data.validation must have one entry per file of data.files: expected 2, got 1.",
        ),
    ],
    ids=str,
)
def test_wrong_number_of_entries_per_file_is_an_error(tmp_path, data, message):
    assert error_message(toy("text2text", tmp_path, data=data), tmp_path / "out").startswith(message)


def test_empty_validation_pairs_are_an_error(tmp_path):
    named = write_text(tmp_path / "validation.tsv", ["the cat\t ", " \tTHE CAT"])
    recipe = toy("text2text", tmp_path, data={"validation": [named, named]})
    assert (
        error_message(recipe, tmp_path / "out")
        == f"{named}: every pair has an empty side. Pass other validation files."
    )


@pytest.mark.parametrize(
    ("task", "write", "message"),
    [
        ("language", lambda path: write_text(path, ["too short"]), "The text has 11 tokens; a window of 32"),
        ("mask", lambda path: write_text(path, ["one line"]), "Too few texts for a validation split."),
        (
            "classify",
            lambda path: write_text(path, ["a\tb", "c\td"]),
            "Too few labeled texts for a validation split.",
        ),
        ("classify", lambda path: write_text(path, ["a b"]), "labeled.tsv, line 1: no tab."),
        (
            "answer",
            lambda path: write_squad(path, [("who", "the cat", "cat")]),
            "Too few questions for a validation split.",
        ),
    ],
)
def test_too_little_data_is_an_error(tmp_path, task, write, message):
    recipe = toy(task, tmp_path)
    write(Path(recipe.data.files[0]))
    assert message in error_message(recipe, tmp_path / "out")


def test_max_len_larger_than_a_batch_is_an_error(tmp_path):
    recipe = toy("language", tmp_path, model={"max_len": 300})
    assert error_message(recipe, tmp_path / "out").startswith("A window has 300 tokens, but a batch has only 256.")
