"""Model cards of exported folders."""

import pytest
import yaml

from regard.data.text.languages import LanguagePair
from regard.interop import export_huggingface, import_huggingface
from regard.interop.huggingface.model_card import make_model_card
from regard.training import run_recipe
from tests.training.helpers import small_dataset, small_recipe


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    recipe = small_recipe(model={"norm": "post"}, train={"steps": 2, "validate_every": 2})
    translator = run_recipe(recipe, tmp_path_factory.mktemp("run"), dataset=small_dataset(), quiet=True)
    translator.language_pairs = (LanguagePair("en", "pt-BR"),)
    translator.training["recipe"]["data"]["files"] = ["/home/someone/private/pairs|1.tsv"]
    return translator


def parse_card(text: str) -> tuple[dict, str]:
    _, front, content = text.split("---\n", 2)
    return yaml.safe_load(front), content


def test_card_has_data_recipe_scores_and_seed(translator, tmp_path):
    name = export_huggingface(translator, tmp_path / "my-translator")
    front, content = parse_card((tmp_path / "my-translator/README.md").read_text())
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "language": ["en", "pt"],
        "tags": ["regard"],
    }
    assert "# my-translator\n" in content
    assert f"from transformers import AutoTokenizer, {name}" in content
    assert "`pairs|1.tsv`" in content
    assert "/home/someone" not in content
    for row in (
        "| `train.seed` | 1 |",
        f"| `train.lr` | {translator.training['recipe']['train']['lr']} |",
        "| `chrf` | ",
        "| `task` | translate |",
    ):
        assert row in content
    assert f"sha256 {translator.training['data']['training']['sha256'][:8]}" in content
    imported = import_huggingface(tmp_path / "my-translator")
    assert "Imported from `my-translator`" in make_model_card(imported, name, "again")


def test_an_existing_card_is_kept_and_damaged_training_data_is_left_out(translator, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/README.md").write_text("mine")
    export_huggingface(translator, tmp_path / "out")
    assert (tmp_path / "out/README.md").read_text() == "mine"
    for training in ({}, {"recipe": 1, "data": [], "validation": "x", "versions": None, "start_from": "a/base: model"}):
        translator.training = training
        front, content = parse_card(make_model_card(translator, "Class", "name"))
        assert "## Training" not in content
        assert front.get("base_model") == ("base: model" if training else None)
