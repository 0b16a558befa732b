"""Settings of generation_config.json: the outputs equal those of transformers."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.decode import DecodeConfig, explain
from regard.interop import export_huggingface, import_huggingface
from regard.pipelines import load
from tests.interop.model_comparison import random_model

PROMPTS = [[2, 7, 21, 6, 7], [2, 5, 9, 17, 33, 8]]
MAX_LEN = 24
SOURCES = [[5, 9, 17, 33, 3], [7, 21, 6, 30, 11, 3], [40, 3]]

LANGUAGE_MODEL_CASES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.7},
    {"do_sample": False, "repetition_penalty": 0.6, "no_repeat_ngram_size": 3},
    {"do_sample": False, "no_repeat_ngram_size": 1},
    {"do_sample": False, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    {"do_sample": False, "suppress_tokens": [12, 35, 41], "begin_suppress_tokens": [44, 17, 22]},
    {"num_beams": 3, "early_stopping": True, "repetition_penalty": 1.4},
    {"num_beams": 3, "early_stopping": False, "no_repeat_ngram_size": 2, "length_penalty": 2.0},
    {"num_beams": 4, "suppress_tokens": [12, 35], "length_penalty": 0.3},
    {"num_beams": 2, "early_stopping": "never", "length_penalty": 1.5},
]
TRANSLATOR_CASES: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_beams": 1, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"num_beams": 1, "begin_suppress_tokens": [20, 30, 8, 13], "min_length": 6},
    {"num_beams": 4},
    {"num_beams": 3, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.8},
    {"num_beams": 3, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "early_stopping": True},
    {"num_beams": 3, "min_length": 7, "suppress_tokens": [4, 10, 25]},
]


@pytest.fixture(scope="module")
def gpt(transformers, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gpt")
    sizes = dict(vocab_size=47, n_positions=64, n_embd=12, n_layer=2, n_head=2, eos_token_id=3, bos_token_id=2)
    config = transformers.GPT2Config(**sizes)
    return random_model(transformers.GPT2LMHeadModel, config, folder, add_special_tokens=False), folder


@pytest.fixture(scope="module")
def bart(transformers, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("bart")
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _SIDE.items()}
    sizes = dict(vocab_size=47, d_model=12, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3)
    tokens = dict(decoder_start_token_id=0, forced_bos_token_id=None, forced_eos_token_id=None)
    model = random_model(
        transformers.BartForConditionalGeneration, transformers.BartConfig(**sizes, **sides, **tokens), folder
    )
    with torch.no_grad():  # outputs that vary, most of which end before the maximum length
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(float(name.endswith("weight")))
            elif "shared" not in name:
                parameter.mul_(4.0)
        model.final_logits_bias[0, 3] = 1.0
    model.save_pretrained(folder)
    return model, folder


_SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 16}


def import_with(folder: Path, settings: dict[str, Any]) -> Any:
    """Imports a folder whose generation_config.json has these settings; also saves and loads it."""
    table = {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(table | settings))
    pipeline = import_huggingface(folder)
    saved_folder = Path(tempfile.mkdtemp(dir=folder))
    pipeline.save(saved_folder)
    saved = load(saved_folder, "cpu")
    assert saved.decoding == pipeline.decoding
    return saved


def new_tokens(hf_model: Any, ids: list[int], start: int, settings: dict[str, Any]) -> list[int]:
    # Regard never generates <pad> and <sos>.
    banned = [[0]] if hf_model.config.is_encoder_decoder else [[0], [2]]
    options = {"bad_words_ids": [*settings.get("bad_words_ids", []), *banned], "do_sample": False}
    options = {"max_new_tokens": MAX_LEN} | settings | options
    output = hf_model.generate(torch.tensor([ids]), **options, pad_token_id=0, eos_token_id=3)[0].tolist()[start:]
    return output[: output.index(3)] if 3 in output else output


@pytest.mark.parametrize("settings", LANGUAGE_MODEL_CASES, ids=str)
def test_language_models_decode_like_transformers(gpt, settings):
    hf_model, folder = gpt
    for max_len in (6, MAX_LEN):  # most beams reach it; they are ranked without <eos>
        settings = settings | {"max_new_tokens": max_len}
        pipeline = import_with(folder, settings)
        for prompt in PROMPTS:
            text = " ".join(f"w{i}" for i in prompt[1:])
            expected = new_tokens(hf_model, prompt[1:], len(prompt) - 1, settings)
            for engine in ("auto", "plain"):
                config = replace(pipeline.decoding, engine=engine)
                assert pipeline.generate(text, config)[0].hypothesis.ids == expected


@pytest.mark.parametrize("settings", TRANSLATOR_CASES, ids=str)
def test_translators_decode_like_transformers(bart, settings):
    hf_model, folder = bart
    pipeline = import_with(folder, {"max_new_tokens": MAX_LEN, **settings})
    for ids in SOURCES:
        text = " ".join(f"w{i}" for i in ids[:-1])
        source = pipeline.encode_source(text)
        expected = new_tokens(hf_model, source, 1, settings)
        ids = pipeline.translate(text)[0].hypothesis.ids
        if (
            pipeline.decoding.method == "beam" and len(expected) == MAX_LEN
        ):  # ranked with <eos>, which transformers lacks
            assert len(ids) <= MAX_LEN
        else:
            assert ids == expected


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_bad_words_are_never_generated(gpt, method):
    """Words of one and of several tokens."""
    hf_model, folder = gpt
    beams = {"num_beams": 3, "early_stopping": True} if method == "beam" else {"do_sample": False}
    free = new_tokens(hf_model, PROMPTS[0][1:], 4, beams)
    settings = beams | {"bad_words_ids": [free[:1], free[1:3], free[4:7], [3]]}
    pipeline = import_with(folder, {"max_new_tokens": MAX_LEN, **settings})
    expected = new_tokens(hf_model, PROMPTS[0][1:], 4, settings)
    assert pipeline.generate("w7 w21 w6 w7")[0].hypothesis.ids == expected != free


def test_maximum_lengths_count_like_those_of_transformers(gpt, bart):
    hf_gpt, gpt_folder = gpt
    settings = {"do_sample": False, "max_length": 11}
    expected = new_tokens(hf_gpt, PROMPTS[0][1:], 4, {**settings, "max_new_tokens": None})
    pipeline = import_with(gpt_folder, settings)
    assert len(expected) == 7
    assert pipeline.generate("w7 w21 w6 w7")[0].hypothesis.ids == expected
    hf_bart, folder = bart
    for more in ({}, {"forced_eos_token_id": 3}):
        settings = {"num_beams": 1, "max_length": 9, "min_length": 9, **more}
        pipeline = import_with(folder, settings)
        expected = new_tokens(hf_bart, pipeline.encode_source("w9 w11"), 1, {**settings, "max_new_tokens": None})
        assert len(expected) == 8 - len(more)
        assert pipeline.translate("w9 w11")[0].hypothesis.ids == expected


def test_sampling_settings_are_applied(gpt):
    decoding = import_with(gpt[1], {"do_sample": True, "temperature": 0.6, "top_p": 0.9}).decoding
    assert decoding == DecodeConfig(method="sample", temperature=0.6, top_p=0.9, top_k=50)
    assert import_with(gpt[1], {"do_sample": True, "top_k": 7}).decoding == DecodeConfig(method="sample", top_k=7)
    assert import_with(gpt[1], {}).decoding == DecodeConfig(method="sample")


def test_early_stopping_and_suppressed_tokens_run_in_the_engine(bart):
    settings = {"num_beams": 3, "suppress_tokens": [4, 10, 25], "length_penalty": 0.7}
    pipeline = import_with(bart[1], settings)
    lines = ["w9 w11 w20", "w40", "w5 w5 w30 w7", "w6 w8"] * 5  # compiled kernels for many lines
    with explain() as choices:
        results = pipeline.translate(lines)
        single = [pipeline.translate(line) for line in lines[:4]]
    assert {choice.stepper for choice in choices} == {"static"}
    plain = DecodeConfig(**{**vars(pipeline.decoding), "engine": "plain"})
    expected = [[one.hypothesis.ids for one in n_best] for n_best in pipeline.translate(lines, plain)]
    assert [[one.hypothesis.ids for one in n_best] for n_best in results] == expected
    assert [[one.hypothesis.ids for one in n_best] for n_best in single] == expected[:4]
    assert all(len(n_best) == 1 for n_best in expected)


def test_unsupported_settings_are_listed_in_one_warning(gpt, caplog):
    settings = {"do_sample": True, "min_p": 0.1, "typical_p": 1.0, "temperature": 0.0, "forced_eos_token_id": 9}
    settings |= {"suppress_tokens": [3], "length_penalty": -1.0, "min_length": 4, "bad_words_ids": "none"}
    with caplog.at_level("WARNING", "regard"):
        pipeline = import_with(gpt[1], settings)
    [line] = [record.getMessage() for record in caplog.records]
    values = "length_penalty = -1.0, temperature = 0.0, min_length = 4, suppress_tokens = [3], bad_words_ids = 'none'"
    assert line.endswith(f"ignored: {values}, forced_eos_token_id = 9, min_p = 0.1.")
    assert pipeline.decoding == DecodeConfig(method="sample", top_k=50)


def test_settings_survive_the_round_trip(transformers, bart, tmp_path):
    settings = {"num_beams": 6, "early_stopping": False, "no_repeat_ngram_size": 3, "max_length": 50, "min_p": 0.2}
    export_huggingface(import_with(bart[1], settings), tmp_path / "out")
    exported = transformers.GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    assert {key: exported[key] for key in settings} == settings
    assert import_huggingface(tmp_path / "out").decoding.early_stopping is False


def test_never_stopping_early_is_stored(bart):
    pipeline = import_with(bart[1], {"num_beams": 2, "early_stopping": "never"})
    assert (pipeline.decoding.patience, pipeline.decoding.early_stopping) == (math.inf, True)
