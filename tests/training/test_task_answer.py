"""Learning to find answers: the loss over two places, long contexts in pieces, questions without an answer."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from regard.data import IGNORED, Batch, Question
from regard.data.special import READING
from regard.folder import load
from regard.layers.packed import pack
from regard.models import make_model
from regard.training import DataConfig, TrainConfig, train
from regard.training.tasks import TASKS
from regard.training.tasks.answer import span_loss
from regard.training.tasks.base import BatchShape
from tests.training.toy_tasks import ANIMALS, toy, write_squad

ANSWER = TASKS["answer"]
LEARN = {"steps": 150, "lr": 1e-2, "warmup": 10, "batch_tokens": 512, "validate_every": 150, "save_every": 150}
STILL = {"dropout": 0.0}


def after_key(count: int, words: int, seed: int) -> list[tuple[str, str, str | None]]:
    """Rows of animals with "red" somewhere among them: the answer is that and what comes after it."""
    draw = random.Random(seed)
    asked: list[tuple[str, str, str | None]] = []
    for _ in range(count):
        row = [draw.choice(ANIMALS) for _ in range(words)]
        place = draw.randrange(words - 1)
        row[place] = "red"
        asked.append(("which", " ".join(row), f"red {row[place + 1]}"))
    return asked


def questions_of(asked: list[tuple[str, str, str | None]]) -> list[Question]:
    return [Question("", question, context) for question, context, _ in asked]


@pytest.fixture(scope="module")
def finder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finder")
    recipe = toy("answer", folder, model=STILL | {"width": 32}, train=LEARN | {"validate_by": "f1"})
    write_squad(folder / "squad.json", after_key(150, 8, seed=1) + after_key(150, 50, seed=2))
    return train(recipe, folder / "out", quiet=True)


@pytest.mark.parametrize("words", [8, 28, 29, 100])
def test_the_word_after_a_key_is_found(finder, words):
    """28 words are all that fit beside the question: longer contexts are read in pieces, the answer being anywhere."""
    assert finder.training["validation"]["f1"] > 90
    asked = after_key(40, words, seed=3)
    found = finder.answer(questions_of(asked))
    assert np.mean([one == answer for one, (_, _, answer) in zip(found, asked)]) > 0.9


def test_long_contexts_are_learned_from_in_pieces(tmp_path):
    recipe = toy("answer", tmp_path, model=STILL)
    write_squad(tmp_path / "squad.json", after_key(40, 50, seed=1))
    dataset = ANSWER.read(recipe.data)
    tokenizers = ANSWER.make_tokenizers(dataset, recipe.tokenizer)
    config = ANSWER.complete_config(recipe.model, dataset, tokenizers)
    encoded = ANSWER.encode(dataset, tokenizers, READING, recipe, config, BatchShape(256, 1, False))
    batches = list(encoded.batches.epoch(0))
    assert sum(batch.sentences for batch in batches) == 3 * len(dataset.training)  # 28 words, 14 more, the last 8
    assert encoded.note == "pieces of 32 tokens, question included"
    empty = answered = 0
    for batch in batches:
        ids, lengths = batch.inputs[0].padded()
        second = batch.inputs[1].split(lengths.tolist())
        assert all(one.tolist() == [0] * 3 + [1] * (len(one) - 3) for one in second)  # begin, question, end; the rest
        for row, (first, last) in zip(ids.tolist(), batch.targets.tolist()):
            if first == last == 0:
                empty += 1
            else:
                answered += 1
                assert tokenizers[0].decode(row[first : last + 1]).startswith("red ")
    assert empty > 0
    assert answered >= len(dataset.training)
    model = train(recipe, tmp_path / "out", quiet=True)
    assert model.training["validation"].keys() == {"nll", "perplexity", "exact_match", "f1"}


def test_questions_that_have_no_answer(tmp_path):
    """Where the key is missing in half of the contexts, nothing is the answer to those, and to no others."""
    asked = after_key(400, 6, seed=1)
    asked[::2] = [(question, context.replace("red", "owl"), None) for question, context, _ in asked[::2]]
    recipe = toy("answer", tmp_path, model=STILL | {"width": 32}, train=LEARN | {"validate_by": "f1"})
    write_squad(tmp_path / "squad.json", asked[50:])
    model = train(recipe, tmp_path / "out", quiet=True)
    questions = questions_of(asked[:50])
    found = model.answer(questions, empty=True)
    assert np.mean([one == (answer or "") for one, (_, _, answer) in zip(found, asked)]) > 0.9
    assert found.count("") > 20
    assert model.training["validation"]["f1"] > 90  # by which nothing counts as an answer too
    assert "" not in model.answer(questions)


def test_files_that_have_ids_in_common(tmp_path):
    """Each question is judged by its own answer."""
    one = write_squad(tmp_path / "one.json", [("who", "cat dog", "cat"), ("who", "fox", "fox")])
    other = write_squad(tmp_path / "other.json", [("who", "owl hen", "owl"), ("who", "bee", "bee")])
    dataset = ANSWER.read(DataConfig((one, other), (one, other)))
    assert [question.id for question in dataset.validation] == ["0", "1", "0", "1"]

    class Knows:
        def answer(self, questions, empty):
            assert not empty
            return [question.answers[0][0] for question in questions]

    assert ANSWER.validation_scores(Knows(), dataset) == {"exact_match": 100.0, "f1": 100.0}


def test_questions_about_one_context_stay_together(tmp_path):
    asked = [(f"what {i}", f"context {i // 5}", "context") for i in range(300)]
    dataset = ANSWER.read(DataConfig((write_squad(tmp_path / "squad.json", asked),)))
    assert len(dataset.validation) == 30
    assert not {one.context for one in dataset.training} & {one.context for one in dataset.validation}


# The loss


def by_hand(scores: torch.Tensor, lengths: list[int], targets: list[list[int]], smoothing: float = 0.0) -> torch.Tensor:
    """Text by text: the mean of the two cross-entropies."""
    total = torch.zeros(())
    for rows, places in zip(scores.split(lengths), targets):
        for column, place in zip(rows.T, places):
            wanted = torch.tensor(place)
            total = total + torch.nn.functional.cross_entropy(column, wanted, label_smoothing=smoothing) / 2
    return total


def divergence_by_hand(one: torch.Tensor, other: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Text by text: the mean of the two Kullback-Leibler divergences, of the two places."""
    total = torch.zeros(())
    for rows in zip(one.split(lengths), other.split(lengths)):
        p, q = (side.log_softmax(0) for side in rows)
        for a, b in ((p, q), (q, p)):
            total = total + torch.nn.functional.kl_div(a, b, reduction="sum", log_target=True) / 4
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("filled", [False, True])
def test_the_loss_is_that_of_the_two_places(filled, smoothing):
    lengths, targets = [4, 7, 1, 2], [[1, 3], [6, 6], [0, 0], [0, 1]]
    shape = {"total": 32, "count": 9, "max_len": 8} if filled else {}
    packed = pack([[5] * length for length in lengths], **shape)
    places = torch.full((len(packed), 2), IGNORED)
    places[:4] = torch.tensor(targets)
    assert len(packed) == (9 if filled else 4)
    if filled:  # with tokens that are of no text, and with texts of no tokens
        assert packed.offsets.lengths.tolist() == [4, 7, 1, 2, 8, 8, 2, 0, 0]
    torch.manual_seed(0)
    scores = torch.randn(packed.offsets.total, 2, requires_grad=True)
    batch = Batch((packed,), places, sentences=4, tokens=14)
    parts = span_loss(scores, batch, smoothing)
    expected = by_hand(scores[:14], lengths, targets, smoothing)
    torch.testing.assert_close(parts.loss, expected)
    torch.testing.assert_close(parts.nll, by_hand(scores[:14], lengths, targets).detach())
    assert parts.tokens == 4
    assert not parts.nll.requires_grad
    [gradient] = torch.autograd.grad(parts.loss, scores)
    [wanted] = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(gradient, wanted)
    # Two passes: the mean of both, and how far they are from each other.
    twin = torch.randn(packed.offsets.total, 2, requires_grad=True)
    loss = span_loss(scores, batch, smoothing, twin, divergence=0.7).loss
    other = by_hand(twin[:14], lengths, targets, smoothing)
    mean = (by_hand(scores[:14], lengths, targets, smoothing) + other) / 2
    expected = mean + 0.7 * divergence_by_hand(scores[:14], twin[:14], lengths)
    torch.testing.assert_close(loss, expected)
    for gradient, wanted in zip(*(torch.autograd.grad(one, (scores, twin)) for one in (loss, expected))):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("constant", [False, True])
def test_the_loss_of_a_model_is_that_of_its_scores(tmp_path, constant):
    recipe = toy("answer", tmp_path, model=STILL)
    dataset = ANSWER.read(recipe.data)
    tokenizers = ANSWER.make_tokenizers(dataset, recipe.tokenizer)
    config = ANSWER.complete_config(recipe.model, dataset, tokenizers)
    encoded = ANSWER.encode(dataset, tokenizers, READING, recipe, config, BatchShape(256, 1, constant))
    torch.manual_seed(0)
    model = make_model(config)
    for batch in encoded.batches.epoch(0):
        lengths = batch.inputs[0].offsets.lengths[: batch.sentences].tolist()
        scores = model(*batch.inputs)[: sum(lengths)]
        targets = batch.targets[: batch.sentences].tolist()
        # Without dropout the two passes are one.
        parts = ANSWER.loss(model, model.features, batch, TrainConfig(label_smoothing=0.2, r_drop=1.0))
        torch.testing.assert_close(parts.loss, by_hand(scores, lengths, targets, 0.2))
        assert parts.tokens == batch.sentences
        with torch.no_grad():  # which is validation
            plain = ANSWER.loss(model, model.features, batch, TrainConfig(label_smoothing=0.2, r_drop=1.0))
        torch.testing.assert_close(plain.loss, by_hand(scores, lengths, targets).detach())


def test_two_passes_are_drawn_apart(tmp_path):
    recipe = toy("answer", tmp_path, model={"dropout": 0.5})
    dataset = ANSWER.read(recipe.data)
    tokenizers = ANSWER.make_tokenizers(dataset, recipe.tokenizer)
    config = ANSWER.complete_config(recipe.model, dataset, tokenizers)
    encoded = ANSWER.encode(dataset, tokenizers, READING, recipe, config, BatchShape(256, 1, False))
    torch.manual_seed(0)
    model, batch = make_model(config), next(iter(encoded.batches.epoch(0)))
    losses = []
    for r_drop in (1e-9, 10.0):
        torch.manual_seed(1)
        losses.append(ANSWER.loss(model, model.features, batch, TrainConfig(r_drop=r_drop)).loss.item())
    assert losses[1] > losses[0] + 1e-4


def test_from_a_model_that_names_hidden_tokens(tmp_path):
    train(toy("mask", tmp_path), tmp_path / "mask", quiet=True)
    recipe = toy("answer", tmp_path, train={"lr": 1e-30, "steps": 1, "validate_every": 1})
    model = train(recipe, tmp_path / "out", start_from=tmp_path / "mask", quiet=True).model
    origin = load(tmp_path / "mask", "cpu").model
    assert dataclasses.replace(model.config, head="mask") == origin.config
    assert torch.equal(model.embedding.tokens.weight, origin.embedding.tokens.weight)
    assert torch.equal(model.blocks[0].feedforward.inner.weight, origin.blocks[0].feedforward.inner.weight)
    assert model.output.weight.shape == (2, 16)
