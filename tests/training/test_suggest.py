"""Suggested recipes."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from regard.training import Dataset, Recipe, read_dataset, recipe_from_dict, run_recipe, suggest, suggest_recipe
from regard.training.recipe import DataConfig
from regard.training.tasks import TASKS


def words(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Random spellings with a fake pronunciation."""
    rng = random.Random(seed)
    spelled = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 9))) for _ in range(count)]
    return [(word, " ".join(letter.upper() for letter in word)) for word in spelled]


def dataset_of(tmp_path: Path, pairs: list[tuple[str, str]]) -> Dataset:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    return read_dataset("translate", DataConfig(files=(str(path),)))


def train_briefly(recipe: Recipe, dataset: Dataset, out: Path) -> None:
    short = {"steps": 3, "validate_every": 3, "save_every": 3, "log_every": 1, "workers": 1, "device": "cpu"}
    run_recipe(recipe_from_dict({"train": short}, recipe), out, dataset=dataset, quiet=True)


def test_text_gets_a_shared_bpe_tokenizer(tmp_path):
    dataset = read_dataset("translate", DataConfig(limit=400))
    recipe = suggest_recipe("translate", dataset)
    assert recipe.tokenizer.kind == "bpe"
    assert recipe.tokenizer.target_kind is None
    assert recipe.tokenizer.shared
    assert recipe.model.width == 128
    train_briefly(recipe, dataclasses.replace(dataset, validation=dataset.validation[:4]), tmp_path / "out")


def test_pronunciation_gets_character_and_space_tokenizers(tmp_path):
    dataset = dataset_of(tmp_path, words(300))
    recipe = suggest_recipe("translate", dataset)
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind, recipe.tokenizer.shared) == ("char", "space", False)
    train_briefly(recipe, dataset, tmp_path / "out")


def test_inflection_gets_a_shared_character_tokenizer(tmp_path):
    dataset = dataset_of(tmp_path, [(word, word + "s") for word, _ in words(100)])
    recipe = suggest_recipe("translate", dataset)
    assert (recipe.tokenizer.kind, recipe.tokenizer.target_kind, recipe.tokenizer.shared) == ("char", None, True)


def test_small_data_get_thousands_of_updates_and_a_fixed_schedule():
    for count in (100, 800, 8000):
        train = suggest_recipe("translate", Dataset(words(count), words(9))).train
        assert (train.schedule, train.patience, train.ema) == ("cosine", 0, 0.999)
        assert train.steps >= 2500
        assert train.r_drop == (1.0 if count < 3000 else 0.0)  # it doubles the cost of an update


def test_large_models_with_r_drop_need_a_gpu(monkeypatch):
    dataset = Dataset([("one two three four five six", "un deux trois quatre cinq six")] * 165_000, [("one", "un")])
    on_cpu = suggest_recipe("translate", dataset)
    monkeypatch.setattr(suggest, "find_device", lambda _: torch.device("cuda"))
    on_gpu = suggest_recipe("translate", dataset)
    assert (on_cpu.train.r_drop, on_gpu.train.r_drop) == (0.0, 2.5)
    assert (on_gpu.model.width, on_gpu.model.feedforward, on_gpu.model.encoder_layers) == (256, 512, 4)


def test_three_pairs_can_be_trained_on(tmp_path):
    dataset = dataset_of(tmp_path, [("a cat", "un chat"), ("a dog", "un chien"), ("a cow", "une vache")])
    assert len(dataset.training) == 2
    recipe = suggest_recipe("translate", dataset)
    assert recipe.train.steps >= 500
    train_briefly(recipe, dataset, tmp_path / "out")


def test_long_lines_raise_max_len(tmp_path):
    dataset = dataset_of(tmp_path, [(f"{i} " + "word " * 300, f"{i} " + "mot " * 300) for i in range(20)])
    recipe = suggest_recipe("translate", dataset)
    assert recipe.model.max_len == 512
    assert recipe.train.batch_tokens >= recipe.model.max_len


@pytest.mark.parametrize("pairs", [100, 10_000, 300_000])
def test_fine_tuning_has_a_lower_learning_rate_and_fewer_steps(pairs):
    dataset = Dataset([("one two three", "un deux trois")] * pairs, [("one", "un")])
    fresh = suggest_recipe("translate", dataset).train
    tuned = suggest_recipe("translate", dataset, fine_tune=True).train
    assert tuned.lr == pytest.approx(fresh.lr / 10)
    assert tuned.schedule == "linear"
    assert tuned.warmup < tuned.steps < fresh.steps
    for task in ("translate", "text2text"):
        assert TASKS[task].suggest_recipe(dataset, True).train == tuned
        assert TASKS[task].suggest_recipe(dataset, False).train == fresh


@pytest.mark.parametrize("pairs", [100, 10_000, 50_000, 300_000])
def test_more_data_gives_a_larger_model(pairs):
    dataset = Dataset([("one two three", "un deux trois")] * pairs, [("one", "un")])
    recipe, smaller = (
        suggest_recipe("translate", dataset),
        suggest_recipe("translate", dataclasses.replace(dataset, training=dataset.training[: pairs // 10])),
    )
    assert recipe.model.width >= smaller.model.width
    assert recipe.model.dropout <= smaller.model.dropout
    assert recipe.model.width % recipe.model.heads == 0
    assert recipe.train.warmup < recipe.train.steps / 2
    assert recipe.train.validate_every <= recipe.train.steps
