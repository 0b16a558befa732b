"""The task `answer`: the span loss, long contexts in windows, and unanswerable questions."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from regard.data import Question
from regard.data.batching.batch import IGNORE_INDEX, Batch
from regard.data.text.special_tokens import ENCODER_TOKENS
from regard.layers.packed import pack
from regard.models import make_model
from regard.pipelines import load
from regard.training import DataConfig, TrainConfig, run_recipe
from regard.training.tasks import TASKS
from regard.training.tasks.answer import span_loss
from regard.training.tasks.task import BatchShape
from tests.training.toy_tasks import ANIMALS, toy, write_squad

ANSWER = TASKS["answer"]
LEARN = {"steps": 150, "lr": 1e-2, "warmup": 10, "batch_tokens": 512, "validate_every": 150, "save_every": 150}
STILL = {"dropout": 0.0}


def after_key(count: int, words: int, seed: int) -> list[tuple[str, str, str | None]]:
    """Sequences of animals with the word "red" at a random position; the answer is "red" and the next word."""
    rng = random.Random(seed)
    examples: list[tuple[str, str, str | None]] = []
    for _ in range(count):
        row = [rng.choice(ANIMALS) for _ in range(words)]
        position = rng.randrange(words - 1)
        row[position] = "red"
        examples.append(("which", " ".join(row), f"red {row[position + 1]}"))
    return examples


def questions_of(examples: list[tuple[str, str, str | None]]) -> list[Question]:
    return [Question("", question, context) for question, context, _ in examples]


@pytest.fixture(scope="module")
def finder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finder")
    recipe = toy("answer", folder, model=STILL | {"width": 32}, train=LEARN | {"validate_by": "f1"})
    write_squad(folder / "squad.json", after_key(150, 8, seed=1) + after_key(150, 50, seed=2))
    return run_recipe(recipe, folder / "out", quiet=True)


@pytest.mark.parametrize("words", [8, 28, 29, 100])
def test_answers_are_found_in_short_and_long_contexts(finder, words):
    """28 words fit next to the question; longer contexts are read in windows, with the answer in any of them."""
    assert finder.training["validation"]["f1"] > 90
    examples = after_key(40, words, seed=3)
    answers = finder.answer(questions_of(examples))
    assert np.mean([one == answer for one, (_, _, answer) in zip(answers, examples)]) > 0.9


def test_long_contexts_are_split_into_windows(tmp_path):
    recipe = toy("answer", tmp_path, model=STILL)
    write_squad(tmp_path / "squad.json", after_key(40, 50, seed=1))
    dataset = ANSWER.read(recipe.data)
    tokenizers = ANSWER.make_tokenizers(dataset, recipe.tokenizer)
    config = ANSWER.complete_config(recipe.model, dataset, tokenizers)
    encoded = ANSWER.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, False))
    batches = list(encoded.batches.epoch(0))
    assert sum(batch.sentences for batch in batches) == 3 * len(
        dataset.training
    )  # words per window: 28, 14 more, the last 8
    assert encoded.note == "windows of 32 tokens, including the question"
    empty = answered = 0
    for batch in batches:
        ids, lengths = batch.inputs[0].padded()
        second = batch.inputs[1].split(lengths.tolist())
        assert all(
            segments.tolist() == [0] * 3 + [1] * (len(segments) - 3) for segments in second
        )  # <sos>, question, <eos>; then the context
        for row, (first, last) in zip(ids.tolist(), batch.targets.tolist()):
            if first == last == 0:
                empty += 1
            else:
                answered += 1
                assert tokenizers[0].decode(row[first : last + 1]).startswith("red ")
    assert empty > 0
    assert answered >= len(dataset.training)
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    assert model.training["validation"].keys() == {"nll", "perplexity", "exact_match", "f1"}


def test_unanswerable_questions_are_learned(tmp_path):
    """Half of the contexts lack the word "red": their questions, and no others, have no answer."""
    examples = after_key(400, 6, seed=1)
    examples[::2] = [(question, context.replace("red", "owl"), None) for question, context, _ in examples[::2]]
    recipe = toy("answer", tmp_path, model=STILL | {"width": 32}, train=LEARN | {"validate_by": "f1"})
    write_squad(tmp_path / "squad.json", examples[50:])
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    questions = questions_of(examples[:50])
    answers = model.answer(questions, empty=True)
    assert np.mean([one == (answer or "") for one, (_, _, answer) in zip(answers, examples)]) > 0.9
    assert answers.count("") > 20
    assert model.training["validation"]["f1"] > 90  # which counts empty answers too
    assert "" not in model.answer(questions)


def test_files_with_the_same_ids_are_scored_separately(tmp_path):
    one = write_squad(tmp_path / "one.json", [("who", "cat dog", "cat"), ("who", "fox", "fox")])
    other = write_squad(tmp_path / "other.json", [("who", "owl hen", "owl"), ("who", "bee", "bee")])
    dataset = ANSWER.read(DataConfig((one, other), (one, other)))
    assert [question.id for question in dataset.validation] == ["0", "1", "0", "1"]

    class Oracle:
        def answer(self, questions, empty):
            assert not empty
            return [question.answers[0][0] for question in questions]

    assert ANSWER.validation_scores(Oracle(), dataset) == {"exact_match": 100.0, "f1": 100.0}


def test_questions_about_one_context_are_in_one_split(tmp_path):
    examples = [(f"what {i}", f"context {i // 5}", "context") for i in range(300)]
    dataset = ANSWER.read(DataConfig((write_squad(tmp_path / "squad.json", examples),)))
    assert len(dataset.validation) == 30
    assert not {item.context for item in dataset.training} & {item.context for item in dataset.validation}


# The loss


def expected_loss(
    scores: torch.Tensor, lengths: list[int], targets: list[list[int]], smoothing: float = 0.0
) -> torch.Tensor:
    """The sum over texts of the mean of both cross-entropies (first and last token)."""
    total = torch.zeros(())
    for rows, positions in zip(scores.split(lengths), targets):
        for column, position in zip(rows.T, positions):
            target = torch.tensor(position)
            total = total + torch.nn.functional.cross_entropy(column, target, label_smoothing=smoothing) / 2
    return total


def expected_divergence(one: torch.Tensor, other: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The sum over texts of the mean of both Kullback-Leibler divergences (first and last token)."""
    total = torch.zeros(())
    for rows in zip(one.split(lengths), other.split(lengths)):
        p, q = (side.log_softmax(0) for side in rows)
        for a, b in ((p, q), (q, p)):
            total = total + torch.nn.functional.kl_div(a, b, reduction="sum", log_target=True) / 4
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_padded", [False, True])
def test_span_loss_matches_its_definition(is_padded, smoothing):
    lengths, targets = [4, 7, 1, 2], [[1, 3], [6, 6], [0, 0], [0, 1]]
    shape = {"total": 32, "count": 9, "max_len": 8} if is_padded else {}
    packed = pack([[5] * length for length in lengths], **shape)
    positions = torch.full((len(packed), 2), IGNORE_INDEX)
    positions[:4] = torch.tensor(targets)
    assert len(packed) == (9 if is_padded else 4)
    if is_padded:  # with padding tokens, and with empty texts
        assert packed.offsets.lengths.tolist() == [4, 7, 1, 2, 8, 8, 2, 0, 0]
    torch.manual_seed(0)
    scores = torch.randn(packed.offsets.total, 2, requires_grad=True)
    batch = Batch((packed,), positions, sentences=4, tokens=14)
    parts = span_loss(scores, batch, smoothing)
    expected = expected_loss(scores[:14], lengths, targets, smoothing)
    torch.testing.assert_close(parts.loss, expected)
    torch.testing.assert_close(parts.nll, expected_loss(scores[:14], lengths, targets).detach())
    assert parts.tokens == 4
    assert not parts.nll.requires_grad
    [gradient] = torch.autograd.grad(parts.loss, scores)
    [expected_gradient] = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(gradient, expected_gradient)
    # Two passes: the mean of both losses, and their divergence.
    second_pass = torch.randn(packed.offsets.total, 2, requires_grad=True)
    loss = span_loss(scores, batch, smoothing, second_pass, divergence=0.7).loss
    other = expected_loss(second_pass[:14], lengths, targets, smoothing)
    mean = (expected_loss(scores[:14], lengths, targets, smoothing) + other) / 2
    expected = mean + 0.7 * expected_divergence(scores[:14], second_pass[:14], lengths)
    torch.testing.assert_close(loss, expected)
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(total, (scores, second_pass)) for total in (loss, expected))
    ):
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("constant", [False, True])
def test_model_loss_is_the_span_loss_of_its_scores(tmp_path, constant):
    recipe = toy("answer", tmp_path, model=STILL)
    dataset = ANSWER.read(recipe.data)
    tokenizers = ANSWER.make_tokenizers(dataset, recipe.tokenizer)
    config = ANSWER.complete_config(recipe.model, dataset, tokenizers)
    encoded = ANSWER.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, constant))
    torch.manual_seed(0)
    model = make_model(config)
    for batch in encoded.batches.epoch(0):
        lengths = batch.inputs[0].offsets.lengths[: batch.sentences].tolist()
        scores = model(*batch.inputs)[: sum(lengths)]
        targets = batch.targets[: batch.sentences].tolist()
        # Without dropout both passes are equal.
        parts = ANSWER.loss(model, model.features, batch, TrainConfig(label_smoothing=0.2, r_drop=1.0))
        torch.testing.assert_close(parts.loss, expected_loss(scores, lengths, targets, 0.2))
        assert parts.tokens == batch.sentences
        with torch.no_grad():  # as in validation
            plain = ANSWER.loss(model, model.features, batch, TrainConfig(label_smoothing=0.2, r_drop=1.0))
        torch.testing.assert_close(plain.loss, expected_loss(scores, lengths, targets).detach())


def test_two_passes_have_different_dropout(tmp_path):
    recipe = toy("answer", tmp_path, model={"dropout": 0.5})
    dataset = ANSWER.read(recipe.data)
    tokenizers = ANSWER.make_tokenizers(dataset, recipe.tokenizer)
    config = ANSWER.complete_config(recipe.model, dataset, tokenizers)
    encoded = ANSWER.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, False))
    torch.manual_seed(0)
    model, batch = make_model(config), next(iter(encoded.batches.epoch(0)))
    losses = []
    for r_drop in (1e-9, 10.0):
        torch.manual_seed(1)
        losses.append(ANSWER.loss(model, model.features, batch, TrainConfig(r_drop=r_drop)).loss.item())
    assert losses[1] > losses[0] + 1e-4


def test_fine_tuning_from_a_masked_language_model(tmp_path):
    run_recipe(toy("mask", tmp_path), tmp_path / "mask", quiet=True)
    recipe = toy("answer", tmp_path, train={"lr": 1e-30, "steps": 1, "validate_every": 1})
    model = run_recipe(recipe, tmp_path / "out", start_from=tmp_path / "mask", quiet=True).model
    origin = load(tmp_path / "mask", "cpu").model
    assert dataclasses.replace(model.config, head="mask") == origin.config
    assert torch.equal(model.embedding.tokens.weight, origin.embedding.tokens.weight)
    assert torch.equal(model.blocks[0].feedforward.fc1.weight, origin.blocks[0].feedforward.fc1.weight)
    assert model.output.weight.shape == (2, 16)
