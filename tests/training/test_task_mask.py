"""Learning to name hidden tokens: the loss over those alone, and what a model says that has learned some phrases."""

import json

import pytest
import torch

from regard.data import IGNORED, Batch
from regard.data.special import READING
from regard.layers.packed import pack
from regard.models import make_model
from regard.training import TrainConfig, recipe_from, train
from regard.training.tasks import TASKS
from regard.training.tasks.base import BatchShape, features_loss
from tests.training.toy_tasks import toy, write_text

MASK = TASKS["mask"]
PHRASES = ["bread and butter", "salt or pepper"]


def model_and_batches(folder, constant: bool = False):
    recipe = toy("mask", folder, model={"dropout": 0.0})
    dataset = MASK.read(recipe.data)
    tokenizers = MASK.make_tokenizers(dataset, recipe.tokenizer)
    config = MASK.complete_config(recipe.model, dataset, tokenizers)
    encoded = MASK.encode(dataset, tokenizers, READING, recipe, config, BatchShape(256, 1, constant))
    torch.manual_seed(0)
    return make_model(config), list(encoded.batches.epoch(0))


def gradients(model, parts) -> dict[str, torch.Tensor]:
    model.zero_grad()
    parts.loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("constant", [False, True])
def test_the_loss_of_the_hidden_tokens_alone_is_the_loss(tmp_path, constant, smoothing):
    """On a CPU nothing is computed of the tokens that are not asked for; on a GPU everything is."""
    model, batches = model_and_batches(tmp_path, constant)
    config = TrainConfig(label_smoothing=smoothing)
    for batch in batches[:3]:
        assert 0 < (batch.targets != IGNORED).sum() < len(batch.targets) / 5
        some, all_rows = (
            MASK.loss(model, model.features, batch, config),
            features_loss(model, model.features, batch, config),
        )
        for one, other in zip(some, all_rows):
            torch.testing.assert_close(one, other)
        expected = gradients(model, all_rows)
        assert "output.bias" in expected
        torch.testing.assert_close(gradients(model, some), expected, atol=1e-5, rtol=1e-4)
        with torch.no_grad():  # as in validation: not smoothed
            some = MASK.loss(model, model.features, batch, config)
        asked = (batch.targets != IGNORED).nonzero()[:, 0]
        log_p = model(*batch.inputs).log_softmax(-1)[asked, batch.targets[asked]]
        torch.testing.assert_close(some.nll, -log_p.sum())
        torch.testing.assert_close(some.loss, some.nll)


def test_what_fills_a_batch_up_changes_nothing(tmp_path):
    model, batches = model_and_batches(tmp_path, constant=True)
    for batch in batches[:3]:
        rows, _ = batch.inputs[0].padded()
        lengths = batch.inputs[0].offsets.lengths[: batch.sentences].tolist()
        real = pack([row[:length].tolist() for row, length in zip(rows, lengths)])
        assert real.offsets.total == batch.tokens < len(batch.targets)
        bare = Batch((real,), batch.targets[: batch.tokens], batch.sentences, batch.tokens)
        for one, other in zip(*(MASK.loss(model, model.features, each, TrainConfig()) for each in (batch, bare))):
            torch.testing.assert_close(one, other)


def test_a_model_names_a_token_that_is_certain(tmp_path):
    wide = {"dropout": 0.0, "width": 64}
    learn = {"steps": 80, "lr": 1e-2, "warmup": 10, "batch_tokens": 1024, "label_smoothing": 0.0, "validate_every": 80}
    recipe = toy("mask", tmp_path, tokenizer={"kind": "word"}, model=wide, train=learn)
    write_text(tmp_path / "lines.txt", PHRASES * 120)
    named = write_text(tmp_path / "validation.txt", PHRASES * 5)
    model = train(recipe_from({"data": {"validation": [named]}}, recipe), tmp_path / "out", quiet=True)
    for phrase in PHRASES:
        words = phrase.split()
        for place, word in enumerate(words):
            hidden = " ".join("<mask>" if i == place else other for i, other in enumerate(words))
            [[(best, share)]] = model.fill(hidden, count=1)
            assert best == word
            assert share > 0.5
    one, other, again = model.embed([*PHRASES, PHRASES[0]])
    assert one @ again > 0.9999 > one @ other + 0.01


def test_what_is_hidden_to_validate_with_is_the_same_for_every_seed(tmp_path):
    recipe = toy("mask", tmp_path)
    dataset = MASK.read(recipe.data)
    tokenizers = MASK.make_tokenizers(dataset, recipe.tokenizer)
    config = MASK.complete_config(recipe.model, dataset, tokenizers)
    one, other = (
        MASK.encode(dataset, tokenizers, READING, recipe, config, BatchShape(256, seed, False)) for seed in (1, 2)
    )
    for a, b in zip(one.validation, other.validation, strict=True):
        assert torch.equal(a.inputs[0].ids, b.inputs[0].ids)
        assert torch.equal(a.targets, b.targets)
    assert not torch.equal(next(one.batches.epoch(0)).targets, next(other.batches.epoch(0)).targets)


def test_lines_are_texts_and_long_ones_come_in_pieces(tmp_path):
    recipe = toy("mask", tmp_path, tokenizer={"kind": "word"})
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "one two\n\n three " + "four " * 70}), encoding="utf-8")
    (tmp_path / "lines.txt").write_text("a line\n\n  \nanother\n", encoding="utf-8")
    files = [str(tmp_path / "lines.txt"), str(tmp_path / "more.jsonl")]
    data = recipe_from({"data": {"files": files, "validation": files}}, recipe).data
    dataset = MASK.read(data)
    assert [text.split()[0] for text in dataset.training] == ["a", "another", "one", "three"]
    assert dataset.training == dataset.validation
    tokenizers = MASK.make_tokenizers(dataset, recipe.tokenizer)
    config = MASK.complete_config(recipe.model, dataset, tokenizers)
    encoded = MASK.encode(dataset, tokenizers, READING, recipe, config, BatchShape(256, 1, False))
    lengths = sorted(n for batch in encoded.validation for n in batch.inputs[0].offsets.lengths.tolist())
    assert lengths == [3, 4, 4, 13, 32, 32]  # 71 words: 30 and 30 and 11, and each piece framed


def test_a_batch_of_unknown_words_spoils_nothing(tmp_path):
    """Nothing is hidden in it, so nothing is learned from it."""
    recipe = toy(
        "mask", tmp_path, tokenizer={"kind": "word", "vocab_size": 7}, train={"batch_tokens": 34, "log_every": 1}
    )
    known = ["the cat"] * 30
    write_text(tmp_path / "lines.txt", [*known, "rare words that nobody knows " * 6])
    named = write_text(tmp_path / "validation.txt", known)
    model = train(recipe_from({"data": {"validation": [named]}}, recipe), tmp_path / "out", quiet=True)
    assert all(p.isfinite().all() for p in model.model.parameters())


def test_training_on_keeps_the_head(tmp_path):
    recipe = toy("mask", tmp_path)
    model = train(recipe, tmp_path / "first", quiet=True)
    still = recipe_from({"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}}, recipe)
    further = train(still, tmp_path / "second", start_from=tmp_path / "first", quiet=True)
    assert further.fill("the <mask>") == model.fill("the <mask>")
    assert further.model.config == model.model.config
