"""The task `mask`: the loss over masked tokens, predictions, and reading of lines."""

import json

import pytest
import torch

from regard.data.batching.pair_batches import IGNORE_INDEX, Batch
from regard.data.text.special_tokens import ENCODER_TOKENS
from regard.layers.packed import pack
from regard.models import make_model
from regard.training import TrainConfig, recipe_from_dict, run_recipe
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchShape, features_loss
from tests.training.toy_tasks import toy, write_text

MASK = TASKS["mask"]
PHRASES = ["bread and butter", "salt or pepper"]


def model_and_batches(folder, constant: bool = False):
    recipe = toy("mask", folder, model={"dropout": 0.0})
    dataset = MASK.read(recipe.data)
    tokenizers = MASK.make_tokenizers(dataset, recipe.tokenizer)
    config = MASK.complete_config(recipe.model, dataset, tokenizers)
    encoded = MASK.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, constant))
    torch.manual_seed(0)
    return make_model(config), list(encoded.batches.epoch(0))


def gradients(model, parts) -> dict[str, torch.Tensor]:
    model.zero_grad()
    parts.loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("constant", [False, True])
def test_loss_of_masked_tokens_equals_the_full_loss(tmp_path, constant, smoothing):
    """On a CPU only the logits of masked tokens are computed, on a GPU all logits."""
    model, batches = model_and_batches(tmp_path, constant)
    config = TrainConfig(label_smoothing=smoothing)
    for batch in batches[:3]:
        assert 0 < (batch.targets != IGNORE_INDEX).sum() < len(batch.targets) / 5
        masked_rows, all_rows = (
            MASK.loss(model, model.features, batch, config),
            features_loss(model, model.features, batch, config),
        )
        for one, other in zip(masked_rows, all_rows):
            torch.testing.assert_close(one, other)
        expected = gradients(model, all_rows)
        assert "output.bias" in expected
        torch.testing.assert_close(gradients(model, masked_rows), expected, atol=1e-5, rtol=1e-4)
        with torch.no_grad():  # as in validation, without smoothing
            masked_rows = MASK.loss(model, model.features, batch, config)
        masked = (batch.targets != IGNORE_INDEX).nonzero()[:, 0]
        log_p = model(*batch.inputs).log_softmax(-1)[masked, batch.targets[masked]]
        torch.testing.assert_close(masked_rows.nll, -log_p.sum())
        torch.testing.assert_close(masked_rows.loss, masked_rows.nll)


def test_padding_does_not_change_the_loss(tmp_path):
    model, batches = model_and_batches(tmp_path, constant=True)
    for batch in batches[:3]:
        rows, _ = batch.inputs[0].padded()
        lengths = batch.inputs[0].offsets.lengths[: batch.sentences].tolist()
        real = pack([row[:length].tolist() for row, length in zip(rows, lengths)])
        assert real.offsets.total == batch.tokens < len(batch.targets)
        bare = Batch((real,), batch.targets[: batch.tokens], batch.sentences, batch.tokens)
        for one, other in zip(*(MASK.loss(model, model.features, each, TrainConfig()) for each in (batch, bare))):
            torch.testing.assert_close(one, other)


def test_certain_tokens_are_predicted(tmp_path):
    wide = {"dropout": 0.0, "width": 64}
    learn = {"steps": 80, "lr": 1e-2, "warmup": 10, "batch_tokens": 1024, "label_smoothing": 0.0, "validate_every": 80}
    recipe = toy("mask", tmp_path, tokenizer={"kind": "word"}, model=wide, train=learn)
    write_text(tmp_path / "lines.txt", PHRASES * 120)
    named = write_text(tmp_path / "validation.txt", PHRASES * 5)
    model = run_recipe(recipe_from_dict({"data": {"validation": [named]}}, recipe), tmp_path / "out", quiet=True)
    for phrase in PHRASES:
        words = phrase.split()
        for position, word in enumerate(words):
            masked = " ".join("<mask>" if i == position else other for i, other in enumerate(words))
            [[(best, probability)]] = model.fill(masked, count=1)
            assert best == word
            assert probability > 0.5
    one, other, again = model.embed([*PHRASES, PHRASES[0]])
    assert one @ again > 0.9999 > one @ other + 0.01


def test_masked_validation_tokens_do_not_depend_on_the_seed(tmp_path):
    recipe = toy("mask", tmp_path)
    dataset = MASK.read(recipe.data)
    tokenizers = MASK.make_tokenizers(dataset, recipe.tokenizer)
    config = MASK.complete_config(recipe.model, dataset, tokenizers)
    one, other = (
        MASK.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, seed, False))
        for seed in (1, 2)
    )
    for a, b in zip(one.validation, other.validation, strict=True):
        assert torch.equal(a.inputs[0].ids, b.inputs[0].ids)
        assert torch.equal(a.targets, b.targets)
    assert not torch.equal(next(one.batches.epoch(0)).targets, next(other.batches.epoch(0)).targets)


def test_lines_are_texts_and_long_lines_are_split(tmp_path):
    recipe = toy("mask", tmp_path, tokenizer={"kind": "word"})
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "one two\n\n three " + "four " * 70}), encoding="utf-8")
    (tmp_path / "lines.txt").write_text("a line\n\n  \nanother\n", encoding="utf-8")
    files = [str(tmp_path / "lines.txt"), str(tmp_path / "more.jsonl")]
    data = recipe_from_dict({"data": {"files": files, "validation": files}}, recipe).data
    dataset = MASK.read(data)
    assert [text.split()[0] for text in dataset.training] == ["a", "another", "one", "three"]
    assert dataset.training == dataset.validation
    tokenizers = MASK.make_tokenizers(dataset, recipe.tokenizer)
    config = MASK.complete_config(recipe.model, dataset, tokenizers)
    encoded = MASK.encode(dataset, tokenizers, ENCODER_TOKENS, recipe, config, BatchShape(256, 1, False))
    lengths = sorted(n for batch in encoded.validation for n in batch.inputs[0].offsets.lengths.tolist())
    assert lengths == [3, 4, 4, 13, 32, 32]  # 71 words: 30 + 30 + 11, each with two special tokens


def test_batch_without_masked_tokens_is_harmless(tmp_path):
    """A batch of unknown words has no masked tokens, and its loss must not become NaN."""
    recipe = toy(
        "mask", tmp_path, tokenizer={"kind": "word", "vocab_size": 7}, train={"batch_tokens": 34, "log_every": 1}
    )
    known = ["the cat"] * 30
    write_text(tmp_path / "lines.txt", [*known, "rare words outside the vocabulary " * 6])
    named = write_text(tmp_path / "validation.txt", known)
    model = run_recipe(recipe_from_dict({"data": {"validation": [named]}}, recipe), tmp_path / "out", quiet=True)
    assert all(p.isfinite().all() for p in model.model.parameters())


def test_fine_tuning_keeps_the_masked_language_model_head(tmp_path):
    recipe = toy("mask", tmp_path)
    model = run_recipe(recipe, tmp_path / "first", quiet=True)
    still = recipe_from_dict({"train": {"lr": 1e-30, "steps": 1, "validate_every": 1}}, recipe)
    tuned = run_recipe(still, tmp_path / "second", start_from=tmp_path / "first", quiet=True)
    assert tuned.fill("the <mask>") == model.fill("the <mask>")
    assert tuned.model.config == model.model.config
