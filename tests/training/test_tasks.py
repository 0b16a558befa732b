"""What holds for every task: it trains from files, goes on exactly, keeps what it measured; and what is said when not.

Translation, which the loop's own tests use, is not here, and pictures have a file of their own.
"""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from regard.data.special import Special
from regard.folder import load, save
from regard.training import recipe_from, train
from regard.training.recipe import recipe_table
from regard.training.report import read_metrics
from regard.training.tasks import TASKS
from regard.training.tasks.base import BatchShape, evaluate_loss
from regard.training.trainer import METRICS
from tests.training.helpers import cut_off_and_go_on, run_again, said, same_bits, weights_of
from tests.training.toy_tasks import KINDS, outputs, sentences, toy, write_squad, write_text

PICTURES = {"classify-images", "segment", "mask-images"}
every_task = pytest.mark.parametrize("task", KINDS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of each task. Tests read them."""
    folders = {}
    for task in KINDS:
        folder = tmp_path_factory.mktemp(task)
        train(toy(task, folder), folder / "out", quiet=True)
        folders[task] = folder / "out"
    return folders


def test_every_task_is_here():
    assert {"translate", *KINDS, *PICTURES} == set(TASKS)


@every_task
def test_the_same_seed_gives_the_same_bits(runs, tmp_path, task):
    run_again(runs, task, tmp_path)
    assert same_bits(weights_of(tmp_path), weights_of(runs[task]))
    for name in ("config.json", "tokenizer.json", "training.json"):
        assert (tmp_path / name).read_bytes() == (runs[task] / name).read_bytes()


@every_task
def test_a_run_that_was_cut_off_goes_on_exactly(runs, tmp_path, monkeypatch, task):
    cut_off_and_go_on(monkeypatch, lambda: run_again(runs, task, tmp_path))
    assert same_bits(weights_of(tmp_path), weights_of(runs[task]))
    steps = [[(line["step"], line["kind"]) for line in read_metrics(out / METRICS)] for out in (tmp_path, runs[task])]
    assert steps[0] == steps[1]


@every_task
def test_what_is_saved_is_what_was_measured(runs, task):
    kind, measures = KINDS[task]
    bundle = load(runs[task], "cpu")
    assert type(bundle) is kind
    validated = [line for line in read_metrics(runs[task] / METRICS) if line["kind"] == "validation"]
    assert [line["step"] for line in validated] == [6, 12]
    assert bundle.training["validation"].keys() == {"nll", "perplexity", *measures}
    [line] = [line for line in validated if line["step"] == bundle.training["step"]]
    assert {name: line[name] for name in bundle.training["validation"]} == bundle.training["validation"]
    trained = [line["nll"] for line in read_metrics(runs[task] / METRICS) if line["kind"] == "train"]
    assert trained[-1] < trained[0]  # it learns
    # and once more, by the model that was saved
    recipe = recipe_from(bundle.training["recipe"])
    dataset = TASKS[task].read(recipe.data)
    shape = BatchShape(recipe.train.batch_tokens, recipe.train.seed, constant=False)
    encoded = TASKS[task].encode(dataset, bundle.tokenizers, bundle.special, recipe, bundle.model.config, shape)
    again = evaluate_loss(TASKS[task], bundle.model, encoded.validation, contextlib.nullcontext)
    again |= TASKS[task].validation_scores(bundle, dataset)
    assert again == pytest.approx(bundle.training["validation"], rel=1e-6)


@every_task
def test_what_is_loaded_says_what_was_saved(runs, tmp_path, task):
    bundle = load(runs[task], "cpu")
    bundle.save(tmp_path / "copy")
    copy = load(tmp_path / "copy", "cpu")
    assert copy.training == bundle.training
    assert copy.special == bundle.special
    assert outputs(task, copy) == outputs(task, bundle)
    for one, other in zip(copy.tokenizers, bundle.tokenizers):
        assert one == other


@pytest.mark.parametrize("task", [task for task in KINDS if task != "mask"])  # where other tokens would be hidden
def test_batches_of_constant_shape_have_the_same_loss(runs, task):
    """As a GPU is given them: filled up with texts that do not count."""
    bundle = load(runs[task], "cpu")
    recipe = recipe_from(bundle.training["recipe"])
    dataset = TASKS[task].read(recipe.data)
    found = []
    for constant in (False, True):
        shape = BatchShape(recipe.train.batch_tokens, recipe.train.seed, constant)
        encoded = TASKS[task].encode(dataset, bundle.tokenizers, bundle.special, recipe, bundle.model.config, shape)
        found.append(evaluate_loss(TASKS[task], bundle.model, encoded.validation, contextlib.nullcontext)["nll"])
        bundle.model.zero_grad()
        batch = next(encoded.batches.epoch(0))
        TASKS[task].loss(bundle.model, bundle.model.features, batch, recipe.train).loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in bundle.model.parameters())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@every_task
def test_a_suggested_recipe_can_be_trained(runs, tmp_path, task):
    for fine_tune in (False, True):
        recipe = recipe_from(load(runs[task], "cpu").training["recipe"])
        dataset = TASKS[task].read(recipe.data)
        suggested = dataclasses.replace(TASKS[task].suggest_recipe(dataset, fine_tune), data=recipe.data)
        assert suggested.task == task
        assert recipe_from(recipe_table(suggested)) == suggested
        assert suggested.train.validate_by in ("loss", *TASKS[task].metrics)
        assert 0 < suggested.train.warmup < suggested.train.steps
        short = recipe_from({"train": {"steps": 1, "batch_tokens": 512, "workers": 1, "device": "cpu"}}, suggested)
        bundle = train(short, tmp_path / str(fine_tune), start_from=runs[task] if fine_tune else None, quiet=True)
        assert bundle.model.config.width == (16 if fine_tune else suggested.model.width)


def test_two_workers_compute_what_one_would(runs, tmp_path):
    common = {"steps": 6, "validate_every": 3, "clip": 0.0, "optimizer": "sgd", "lr": 0.1}
    still = {"model": {"dropout": 0.0}}
    alone = common | {"batch_tokens": 128, "accumulate": 2}
    run_again(runs, "mask", tmp_path / "one", train=alone, **still)
    for out in ("two", "again"):
        run_again(runs, "mask", tmp_path / out, train=common | {"workers": 2}, **still)
    one, two, again = (weights_of(tmp_path / out) for out in ("one", "two", "again"))
    assert same_bits(two, again)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


# What is wrong with the data


@every_task
def test_an_empty_file(tmp_path, task):
    recipe = toy(task, tmp_path)
    for file in recipe.data.files:
        Path(file).write_bytes(b"")
    assert said(recipe, tmp_path / "out") == f"{recipe.data.files[0]} is empty."
    assert not (tmp_path / "out").exists()


@every_task
def test_a_file_of_empty_lines(tmp_path, task):
    recipe = toy(task, tmp_path)
    for file in recipe.data.files:
        Path(file).write_bytes(b"\n \n")
    first = recipe.data.files[0]
    assert said(recipe, tmp_path / "out").startswith(
        {
            "language": f"{first}: there is no text to learn from.",
            "mask": f"{first}: there is no text to learn from.",
            "classify": f"{first}: there is no text.",
            "answer": f"{first}, line 3: not JSON",
            "text2text": f"{first}: no pair is left after cleaning.",
        }[task]
    )


@every_task
def test_an_empty_file_to_validate_with(tmp_path, task):
    recipe = toy(task, tmp_path)
    (tmp_path / "empty.tsv").write_bytes(b"")
    names = (str(tmp_path / "empty.tsv"),) * len(recipe.data.files)
    recipe = recipe_from({"data": {"validation": names}}, recipe)
    assert said(recipe, tmp_path / "out") == f"{tmp_path / 'empty.tsv'} is empty."


@pytest.mark.parametrize(
    ("task", "measure", "known"),
    [
        ("language", "accuracy", "loss, last"),
        ("mask", "bleu", "loss, last"),
        ("classify", "f1", "loss, accuracy, last"),
        ("answer", "accuracy", "loss, f1, exact_match, last"),
        ("text2text", "f1", "loss, bleu, chrf, exact_match, last"),
    ],
)
def test_a_measure_of_another_task(tmp_path, task, measure, known):
    recipe = toy(task, tmp_path, train={"validate_by": measure})
    assert said(recipe, tmp_path / "out") == (
        f"train.validate_by = '{measure}' does not fit the task {task}. Choose train.validate_by from: {known}."
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
def test_going_on_from_another_family(runs, tmp_path, task, origin, family, families):
    assert said(toy(task, tmp_path), tmp_path / "out", start_from=runs[origin]) == (
        f"{runs[origin]} holds a {family}, which cannot be trained to {task}. Name a folder of: {families}."
    )
    assert not (tmp_path / "out").exists()


def test_one_label_only(tmp_path):
    recipe = toy("classify", tmp_path)
    write_text(tmp_path / "labelled.tsv", [f"{text}\tsame" for text in sentences(50)])
    assert said(recipe, tmp_path / "out").startswith("Every text has the label 'same': there is nothing to tell apart.")


def test_a_label_of_validation_that_is_not_learned(tmp_path):
    named = write_text(tmp_path / "validation.tsv", ["the cat sees the dog\tothers", "a whale\tfishes"])
    recipe = toy("classify", tmp_path, data={"validation": [named]})
    assert said(recipe, tmp_path / "out").startswith(
        "The text 'a whale' has the label 'fishes', which the model does not know. Its labels are birds, others."
    )


def test_an_imported_model_that_cannot_hide_a_token(runs, tmp_path):
    encoder = load(runs["mask"], "cpu")
    save(tmp_path / "imported", dataclasses.replace(encoder, special=Special(begin=2, end=3)))
    assert said(toy("mask", tmp_path), tmp_path / "out", start_from=tmp_path / "imported").startswith(
        "The model has no id that hides a token."
    )


@pytest.mark.parametrize("kind", ["space", "bpe"])
def test_a_tokenizer_that_loses_line_ends_cannot_learn_a_language(tmp_path, kind):
    recipe = toy("language", tmp_path, tokenizer={"kind": kind})
    assert said(recipe, tmp_path / "out") == (
        f"A tokenizer of kind {kind} does not keep the line ends of a text. "
        "Set tokenizer.kind to char, word, or bytes, which are subwords too."
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"prefixes": ["a: "]}, "data.prefixes has 1 entries for 2 files."),
        ({"weights": [1.0, 2.0, 3.0]}, "data.weights has 3 entries for 2 files."),
        ({"validation": ["same.tsv"]}, "data.validation has 1 entries for 2 files."),
    ],
    ids=str,
)
def test_what_does_not_fit_the_files_of_several_tasks(tmp_path, data, says):
    assert said(toy("text2text", tmp_path, data=data), tmp_path / "out").startswith(says)


def test_pairs_to_validate_with_that_are_all_empty(tmp_path):
    named = write_text(tmp_path / "validation.tsv", ["the cat\t ", " \tTHE CAT"])
    recipe = toy("text2text", tmp_path, data={"validation": [named, named]})
    assert said(recipe, tmp_path / "out") == f"{named}: every pair has an empty side. Give other pairs."


@pytest.mark.parametrize(
    ("task", "write", "says"),
    [
        ("language", lambda path: write_text(path, ["too short"]), "The text has 11 tokens, too few for a piece of 32"),
        ("mask", lambda path: write_text(path, ["one line"]), "There are too few texts to set some aside"),
        (
            "classify",
            lambda path: write_text(path, ["a\tb", "c\td"]),
            "There are too few labelled texts to set some aside",
        ),
        ("classify", lambda path: write_text(path, ["a b"]), "labelled.tsv, line 1: no tab."),
        ("answer", lambda path: write_squad(path, [("who", "the cat", "cat")]), "There are too few questions to set"),
    ],
)
def test_too_little_to_learn_from(tmp_path, task, write, says):
    recipe = toy(task, tmp_path)
    write(Path(recipe.data.files[0]))
    assert says in said(recipe, tmp_path / "out")


def test_pieces_longer_than_a_batch(tmp_path):
    recipe = toy("language", tmp_path, model={"max_len": 300})
    assert said(recipe, tmp_path / "out").startswith("A piece of text has 300 tokens, but a batch only 256.")
