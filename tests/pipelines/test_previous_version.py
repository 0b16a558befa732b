"""Run folders and recipes written by the previous version, before modules and keys were renamed.

`previous/` holds two small training runs (a translator, an image classifier), the outputs that the previous version
gave for the inputs below (expected.json), and recipes as `regard config show` printed them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from regard.pipelines import load
from regard.training import read_toml, recipe_from_dict, run_recipe
from regard.training.recipe import recipe_to_dict
from regard.training.run.checkpoint_store import CheckpointStore, load_checkpoint
from regard.training.run.run_folder import read_stored_recipe

PREVIOUS = Path(__file__).parent / "previous"
EXPECTED = json.loads((PREVIOUS / "expected.json").read_text())
RECIPES = sorted(PREVIOUS.glob("recipe_*.toml"), key=lambda path: path.name)


def write_images(folder: Path) -> None:
    """The images that images_run was trained on."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 8, 8), dtype=np.uint8)
    np.savez(folder / "digits.npz", images=pixels, labels=np.arange(40) % 2)


def test_translator_gives_the_same_log_probability():
    score = load(PREVIOUS / "translator_run", "cpu").score([("The cat sleeps.", "Le chat dort.")])[0]
    assert score.logprob == pytest.approx(EXPECTED["logprob"], abs=1e-5)


def test_image_classifier_gives_the_same_probabilities():
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    found = load(PREVIOUS / "images_run", "cpu").classify([pixels])[0]
    assert found.probabilities == pytest.approx(EXPECTED["probabilities"], abs=1e-5)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_opens_with_the_same_values(path):
    recipe = recipe_from_dict(read_toml(path), origin=str(path))
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert recipe.train.steps == {"recipe_images": 2, "recipe_translate": 4}.get(path.stem, 4000)


@pytest.mark.parametrize("name", ["translator_run", "images_run"])
def test_finished_run_is_extended(name, tmp_path, monkeypatch):
    """Training continues from the checkpoint of the previous version: step, optimizer state and data order."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    shutil.copytree(PREVIOUS / name, tmp_path / "run")
    recipe = read_stored_recipe("run")
    assert recipe is not None
    steps = recipe.train.steps
    longer = recipe_from_dict({"train": {"steps": steps + 2}}, recipe)
    run_recipe(longer, "run", quiet=True)
    assert load_checkpoint(CheckpointStore("run").find_intact()).facts["step"] == steps + 2
