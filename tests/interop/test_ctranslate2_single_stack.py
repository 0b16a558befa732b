"""Language models and text encoders in CTranslate2: the same numbers as in Regard."""

from typing import Any

import numpy as np
import pytest
import torch

from regard.cli import main
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop import export_ctranslate2
from regard.layers.packed import pack
from regard.models import GPT, Bert, ViT
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig, gpt2
from regard.models.vit import vit_pico
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, save

TOKENIZER = Tokenizer.train([" ".join(f"w{i}" for i in range(45))], "word", mask=True)
SIZES: dict[str, Any] = dict(width=24, heads=4, layers=2, feedforward=36, dropout=0.0, max_len=24, vocab=50)
TEXTS = [[2, 5, 6, 7, 8, 30], [2, 9], [2, 4, 49, 10]]
ctranslate2: Any = pytest.importorskip("ctranslate2")


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * (0.3 if tensor.dim() > 1 else 0.2))
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1.0)
    return model.eval()


def make_generator(config: GPTConfig) -> TextGenerator:
    return TextGenerator(randomize(GPT(config)), TOKENIZER)


DECODERS = [
    gpt2(**SIZES),
    gpt2(**SIZES, tied=False, activation="gelu", positions="sinusoidal"),
    GPTConfig(**SIZES, activation="swiglu", qk_norm=False, kv_heads=2, tied=False),
    GPTConfig(**SIZES, activation="swiglu", qk_norm=True, head_width=8, rotary_base=500.0, bias="qkv", norm_eps=1e-5),
    GPTConfig(**SIZES, activation="geglu", qk_norm=False, embedding_scale=True, score="dot", bias="attention"),
    GPTConfig(**SIZES, activation="relu", qk_norm=False, positions="learned", position_offset=2, norm_kind="layer"),
    GPTConfig(**SIZES, activation="silu", qk_norm=False, positions="none", bias="not_qkv"),
]


@pytest.mark.parametrize("config", DECODERS, ids=range(len(DECODERS)))
def test_language_models_have_the_same_logits_and_texts(tmp_path, config):
    generator = make_generator(config)
    export_ctranslate2(generator, tmp_path)
    runner = ctranslate2.Generator(str(tmp_path), compute_type="float32", intra_threads=1)
    for ids in TEXTS:
        logits = np.array(runner.forward_batch([ids]))[0]
        with torch.no_grad():
            expected = generator.model(pack([ids]))
        torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=1e-4)
    names = [TOKENIZER.entry(i) for i in range(50)]
    for text in ("w3 w7", "w40"):
        prompt = [names[2], *(names[i] for i in TOKENIZER.encode(text))]
        (result,) = runner.generate_batch(
            [prompt], max_length=8, include_prompt_in_result=False, suppress_sequences=[["<pad>"], ["<unk>"], ["<sos>"]]
        )
        (best, *_) = generator.generate(text, DecodeConfig("greedy", max_len=8))
        ids = [names.index(token) for token in result.sequences[0]]
        assert TOKENIZER.decode(ids) == best.text.removeprefix(text).strip()


ENCODERS = [
    BertConfig(**SIZES, head="none", pooler="tanh"),
    BertConfig(**SIZES, head="none", pooler="relu", norm="pre", positions="rotary", norm_eps=1e-5),
    BertConfig(**SIZES, head="mask", segments=0, position_offset=2, activation="gelu_tanh"),
    BertConfig(**SIZES, head="mask", segments=1, norm_kind="rms", norm="pre", activation="swiglu", positions="none"),
]


@pytest.mark.parametrize("config", ENCODERS, ids=range(len(ENCODERS)))
def test_encoders_have_the_same_hidden_states(tmp_path, config):
    model: Any = randomize(Bert(config))
    export_ctranslate2(TextEncoder(model, TOKENIZER), tmp_path)
    runner = ctranslate2.Encoder(str(tmp_path), compute_type="float32", intra_threads=1)
    for ids in TEXTS:
        packed = pack([ids])
        segments = [min(i % 2, max(0, config.segments - 1)) for i in range(len(ids))]
        types = {"token_type_ids": [segments]} if config.segments else {}
        output = runner.forward_batch([ids], **types)
        with torch.no_grad():
            encoded = model.encode(packed, torch.tensor(segments) if config.segments else None)
            pooled = model.pool(encoded, packed)
        hidden = torch.from_numpy(np.array(output.last_hidden_state)[0])
        torch.testing.assert_close(hidden, encoded, atol=1e-4, rtol=1e-4)
        if config.pooler != "none":
            pooler = torch.from_numpy(np.array(output.pooler_output))
            torch.testing.assert_close(pooler, pooled, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTConfig(**SIZES), "activation = 'relu2'"),
        (GPTConfig(**SIZES, activation="silu", norm_kind="layer"), "qk_norm = True with norm_kind = 'layer'"),
        (GPTConfig(**SIZES, activation="silu", sliding_windows=(4,)), r"sliding_windows = \(4,\)"),
        (GPTConfig(**SIZES, activation="silu", rotary_factor=2.0), r"rotary_factor = 2.0 \(supported: 1.0\)"),
        (GPTConfig(**SIZES, activation="silu", norm="sandwich", logit_cap=30.0), "norm = 'sandwich'.*logit_cap = 30.0"),
        (BertConfig(**SIZES, head="answer"), "head = 'answer'"),
        (BertConfig(**SIZES, groups=1, embedding_width=12), "embedding_width = 12.*groups = 1"),
    ],
)
def test_unsupported_options_are_named(tmp_path, config, message):
    model = GPT(config) if isinstance(config, GPTConfig) else Bert(config)
    pipeline_class: Any = TextGenerator if isinstance(config, GPTConfig) else TextEncoder
    with pytest.raises(RegardError, match=f"CTranslate2 does not support .*{message}"):
        export_ctranslate2(pipeline_class(model, TOKENIZER), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_image_models_are_an_error(tmp_path):
    model: Any = ImageModel(ViT(vit_pico(layers=1, image_height=16, image_width=16, labels=("cat", "dog"))))
    with pytest.raises(RegardError, match="does not support an image model"):
        export_ctranslate2(model, tmp_path)


def test_the_command_exports_language_models(tmp_path):
    save(tmp_path / "model", make_generator(DECODERS[0]))
    assert main(["export", str(tmp_path / "model"), "--to", "ctranslate2", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.bin").exists()
