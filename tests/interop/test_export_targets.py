"""Export targets: `unsupported_settings`, the exporters and the table in the docs agree."""

import dataclasses
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli.demo import demo_recipe
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.interop import export_ctranslate2, export_huggingface, export_onnx
from regard.interop.export_targets import ExportTarget, check_exportable, unsupported_settings
from regard.layers.packed import pack
from regard.models import GPT, Bert, BertConfig, GPTConfig, Seq2SeqConfig, ViT, ViTConfig, family_name
from regard.models.bert import bert_tiny
from regard.models.transformer import Transformer, TransformerConfig, t5_small
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.training import DataConfig, recipe_from_dict
from tests.conftest import number_pairs
from tests.training import toy_images, toy_tasks
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
        changed = dataclasses.replace(translator.model.config, **{field: values[0] for field, values in fields.items()})
        assert not unsupported_settings(changed, target)
        assert {name: getattr(changed, name) for name in SMALL} == SMALL
        if not fields:
            assert changed == translator.model.config


def test_families_without_a_class_are_an_error():
    cases: list[tuple[Any, ExportTarget]] = [
        *((Seq2SeqConfig(), "huggingface"), (Seq2SeqConfig(), "ctranslate2"), (ViTConfig(), "ctranslate2"))
    ]
    for config, target in cases:
        message = f"--for {target} does not support models of the family {family_name(config)}"
        with pytest.raises(RegardError, match=message):
            check_exportable(config, target)
    check_exportable(Seq2SeqConfig(), "onnx")


OTHER_FORMS = [
    *[GPTConfig(), GPTConfig(activation="geglu", norm_kind="layer"), GPTConfig(positions="learned", bias="all")],
    *[BertConfig(norm="pre", positions="rotary"), bert_tiny(head="none"), BertConfig(head="tag", groups=2)],
    BertConfig(head="classify", pooling="mean", labels=("a", "b")),
    ViTConfig(patches="stem", positions="rotary", pooling="mean", labels=("a", "b")),
    ViTConfig(qk_norm=True, layer_scale=0.1, registers=3, head="none"),
]


@pytest.mark.parametrize("config", OTHER_FORMS, ids=lambda config: f"{family_name(config)}-{OTHER_FORMS.index(config)}")
def test_settings_of_other_families_are_changed_to_supported_ones(tmp_path, config):
    """What is left after the changes is exported, and the unsupported fields are those that the exporter names."""
    sizes: dict[str, Any] = dict(width=16, heads=2, layers=2, feedforward=20)
    sizes |= dict(image_height=16, image_width=16, patch=4) if isinstance(config, ViTConfig) else dict(max_len=12)
    for target in ("huggingface", "ctranslate2"):
        if target == "ctranslate2" and (isinstance(config, ViTConfig) or getattr(config, "head", "none") != "none"):
            continue
        small = dataclasses.replace(config, **sizes)
        fields = unsupported_settings(small, target)
        changed = dataclasses.replace(small, **{field: values[0] for field, values in fields.items()})
        assert not unsupported_settings(changed, target)
        if fields:
            with pytest.raises(RegardError, match=next(iter(fields))):
                EXPORTERS[target](make_pipeline_for(small), tmp_path / target)
        EXPORTERS[target](make_pipeline_for(changed), tmp_path / target)


def make_pipeline_for(config: Any) -> Any:
    """A model with random weights and, if it reads text, a tokenizer."""
    torch.manual_seed(1)
    if isinstance(config, ViTConfig):
        return ImageModel(ViT(config).eval())
    is_encoder = isinstance(config, BertConfig)
    tokenizer = Tokenizer.train(["one two three"], "word", mask=is_encoder)
    config = dataclasses.replace(config, vocab=tokenizer.vocab_size)
    return TextEncoder(Bert(config).eval(), tokenizer) if is_encoder else TextGenerator(GPT(config).eval(), tokenizer)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (bert_tiny(head="classify", pooling="query", labels=("a", "b")), r"SequenceClassification.* pooling = 'query'"),
        (BertConfig(head="classify", pooling="mean", labels=("a", "b")), r"SequenceClassification.* pooling = 'mean'"),
        (ViTConfig(pooling="query"), r"ViTForImageClassification.* pooling = 'query'"),
        (ViTConfig(head="segment", labels=("a", "b")), "has the head 'segment'"),
    ],
)
def test_refusals_name_the_setting_and_not_the_head(tmp_path, config, message):
    sizes: dict[str, Any] = dict(width=16, heads=2, layers=1, feedforward=20)
    with pytest.raises(RegardError, match=message) as caught:
        export_huggingface(make_pipeline_for(dataclasses.replace(config, **sizes)), tmp_path / "out")
    assert "head =" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("language", "Qwen3ForCausalLM"),
        ("mask", "BertForMaskedLM"),
        ("classify", "BertForSequenceClassification"),
        ("tag", "BertForTokenClassification"),
        ("answer", "BertForQuestionAnswering"),
        ("classify-images", "ViTForImageClassification"),
    ],
)
def test_suggested_models_open_in_transformers_and_give_the_same_logits(transformers, tmp_path, task, name):
    """With --for huggingface; language models also without."""
    is_image_task = task == "classify-images"
    data = (toy_images if is_image_task else toy_tasks).toy(task, tmp_path).data.files
    sizes: dict[str, Any] = dict(width=16, heads=2, layers=2, feedforward=24, steps=2, device="cpu", workers=1)
    export_for: ExportTarget | None = None if task == "language" else "huggingface"
    pipeline = regard.train(data, tmp_path / "model", task=task, export_for=export_for, quiet=True, **sizes)
    assert export_huggingface(pipeline, tmp_path / "out") == name
    hf_model, report = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    batch: tuple[Any, ...]
    if is_image_task:
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*pipeline.size, 3), np.uint8))
        inputs = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")(image, return_tensors="pt")
        batch = (torch.tensor(pipeline.preprocess(image)).permute(2, 0, 1)[None] / 255,)
    else:
        first, *others = ["who likes it", "the cat sees the dog"] if task == "answer" else ["the owl hears the bee"]
        inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(first, *others, return_tensors="pt")
        ids = pipeline.special.add_special_tokens(pipeline.tokenizer.encode(first))
        segments = [0] * len(ids)
        for other in others:
            ids += pipeline.special.add_special_tokens_to_second(pipeline.tokenizer.encode(other))
            segments += [1] * (len(ids) - len(segments))
        assert inputs["input_ids"].tolist() == [ids]
        batch = (pack([ids]), *([] if task == "language" else [torch.tensor(segments)]))
    with torch.no_grad():
        output = hf_model.eval()(**inputs)
        logits = torch.stack([output.start_logits, output.end_logits], -1) if task == "answer" else output.logits
        torch.testing.assert_close(pipeline.model(*batch), logits.flatten(0, -2), atol=1e-4, rtol=0)


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
