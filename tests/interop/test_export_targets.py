"""Export targets: `unsupported_settings`, the exporters and the table in the docs agree."""

import dataclasses
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from regard.cli.demo import demo_recipe
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.interop import export_ctranslate2, export_huggingface, export_onnx
from regard.interop.export_targets import ExportTarget, check_exportable, nearest_exportable, unsupported_settings
from regard.models import GPTConfig, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig, t5_small
from regard.pipelines import Translator
from regard.training import DataConfig, recipe_from_dict
from tests.conftest import number_pairs
from tests.training.helpers import plan

TARGETS: tuple[ExportTarget, ...] = get_args(ExportTarget)
SMALL: dict[str, Any] = dict(width=16, heads=4, feedforward=32, encoder_layers=1, decoder_layers=1, max_len=32)
EXPORTERS = {"huggingface": export_huggingface, "ctranslate2": export_ctranslate2, "onnx": export_onnx}


def make_translator(config: TransformerConfig, shared: bool) -> Translator:
    """A translator with random weights and one or two word tokenizers."""
    torch.manual_seed(1)
    pairs = number_pairs(50, seed=1)
    texts = [[text for pair in pairs for text in pair]] * 2 if shared else zip(*pairs)
    source, target = (Tokenizer.train(side, "word") for side in texts)
    vocabularies = dict(source_vocab=source.vocab_size, target_vocab=target.vocab_size, shared_vocab=shared)
    model = Transformer(dataclasses.replace(config, **vocabularies)).eval()
    return Translator(model, source, source if shared else target)


FIELDS = {
    "norm": ("pre", "post"),
    "positions": ("rotary", "sinusoidal", "learned", "relative", "none"),
    "qk_norm": (True, False),
}
FORMS = [dict(zip(FIELDS, values)) for values in itertools.product(*FIELDS.values())]
MORE_FORMS: list[dict[str, Any]] = [
    {"norm_kind": "rms", "activation": "swiglu", "kv_heads": 2},
    {"activation": "relu2", "encoder_score": "cosine", "head_width": 5},
    {"embedding_norm": True, "tied": False, "cross_score": "dot"},
    vars(t5_small(**SMALL)),
]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", [*FORMS, *MORE_FORMS], ids=lambda form: str(list(form.values())[:3]))
def test_exporters_agree_with_unsupported_settings(tmp_path, form, shared):
    config = TransformerConfig(**(SMALL | form))
    for target in TARGETS:
        translator = make_translator(config, shared)
        fields = unsupported_settings(translator.model.config, target)
        if target == "onnx":  # supports all forms: test_onnx.py
            assert not fields
        elif fields:
            with pytest.raises(
                RegardError, match=f"{next(iter(fields))} = |T5ForConditionalGeneration has one vocabulary"
            ):
                EXPORTERS[target](translator, tmp_path / target)
        else:
            EXPORTERS[target](translator, tmp_path / target)
        changed = nearest_exportable(translator.model.config, target)
        assert not unsupported_settings(changed, target)
        assert {name: getattr(changed, name) for name in SMALL} == SMALL
        if not fields:
            assert changed == translator.model.config


@pytest.mark.parametrize("config", [GPTConfig(), Seq2SeqConfig()])
def test_other_families_are_an_error(config):
    for target in TARGETS:
        with pytest.raises(RegardError, match="applies to the family transformer"):
            nearest_exportable(config, target)


@pytest.mark.parametrize(
    "pairs",
    [
        [("the cat sleeps on a mat", "le chat dort sur un tapis")] * 40,
        [("abc", "e b i")] * 40,  # characters to symbols: two vocabularies
        [("cat", "cats")] * 40,
    ],
)
@pytest.mark.parametrize("task", ["translate", "text2text"])
def test_suggested_recipes_are_restricted_to_the_target(tmp_path, pairs, task):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source} {i}\t{target} {i}\n" for i, (source, target) in enumerate(pairs)))
    data = DataConfig(files=(str(path),))
    for target in TARGETS:
        recipe, _ = plan(task, data, export_for=target)
        check_exportable(dataclasses.replace(recipe.model, shared_vocab=recipe.tokenizer.shared), target)
    plain, _ = plan(task, data)
    assert recipe == plain  # ONNX restricts nothing


def test_unsupported_explicit_settings_are_named():
    recipe = recipe_from_dict({"model": {"positions": "rotary", "qk_norm": True}})
    message = r"--for huggingface does not support (.*)positions = 'rotary' \(supported: 'sinusoidal'"
    with pytest.raises(RegardError, match=message):
        check_exportable(recipe.model, "huggingface")
    with pytest.raises(RegardError, match=r"--for ctranslate2 does not support qk_norm = True \(supported: False\)\. "):
        check_exportable(recipe.model, "ctranslate2")


def test_demo_model_exports_to_all_targets():
    model = demo_recipe().model
    assert {target: unsupported_settings(model, target) for target in TARGETS} == {target: {} for target in TARGETS}


def test_table_in_the_docs_is_correct(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")
    table = page.partition("## What exports where")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]*?`([^|`]+)`[^|]* \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.M)
    assert len(rows) > 10
    for index, (settings, *cells) in enumerate(rows):
        form = tomllib.loads("\n".join(settings.split(", ")))
        shared = form.pop("tokenizer", {}).get("shared", True)
        translator = make_translator(TransformerConfig(**(SMALL | form)), shared)
        actual = []
        for target in ("ctranslate2", "onnx"):
            actual.append("no" if unsupported_settings(translator.model.config, target) else "yes")
        try:
            actual.append(export_huggingface(translator, tmp_path / str(index)))
        except RegardError:
            actual.append("no")
        assert [cell.strip(" `") for cell in cells] == actual, settings
