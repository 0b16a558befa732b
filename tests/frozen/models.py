"""The models of the frozen values: tiny configs of every family, and weights that are a function of their names.

`shapes.json` has the name and the shape of every weight on the day of freezing. A commit that renames weights extends
`current_name`, so that every model keeps its numbers.
"""

import dataclasses
import functools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from regard.data import Tokenizer
from regard.interop import import_huggingface
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, ViTConfig, make_model
from regard.models.transformer import t5_small
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from tests.interop.model_comparison import write_tokenizer, write_translation_tokenizer

VALUES = Path(__file__).parent / "values"
SHAPES = VALUES / "shapes.json"
WORDS = [f"w{i}" for i in range(43)]
VOCAB = 47  # four special tokens and the words
VOCABS = (VOCAB, VOCAB + 1, 50)  # sizes with a mask token, and of T5
UNK, EOS = 1, 3
LABELS = ("red", "green", "blue")

_TRANSLATOR: dict[str, Any] = dict(
    **dict(width=16, heads=2, feedforward=24, encoder_layers=2, decoder_layers=2, dropout=0.0, max_len=32),
    **dict(source_vocab=VOCAB, target_vocab=VOCAB, shared_vocab=True),
)
_RECURRENT: dict[str, Any] = dict(
    width=16, dropout=0.0, max_len=32, source_vocab=VOCAB, target_vocab=VOCAB, shared_vocab=True
)
_LANGUAGE: dict[str, Any] = dict(width=16, heads=2, layers=2, feedforward=24, dropout=0.0, max_len=48, vocab=VOCAB)
_ENCODER: dict[str, Any] = dict(width=16, heads=2, layers=2, feedforward=24, dropout=0.0, max_len=32, vocab=VOCAB + 1)
_IMAGES: dict[str, Any] = dict(
    **dict(width=16, heads=2, layers=2, feedforward=24, patch=4, image_height=12, image_width=16, labels=LABELS),
)
_SCORES = ("dot", "cosine", "general", "concat", "location")

TRANSLATORS: dict[str, Any] = {
    "transformer": TransformerConfig(**_TRANSLATOR),
    **{
        f"transformer, {score}": TransformerConfig(
            **_TRANSLATOR, encoder_score=score, decoder_score=score, cross_score=score
        )
        for score in _SCORES
    },
    "transformer, BART": TransformerConfig(
        **_TRANSLATOR, norm="post", positions="learned", position_offset=2, embedding_norm=True, activation="gelu"
    ),
    "transformer, rotary": TransformerConfig(
        **_TRANSLATOR, positions="rotary", kv_heads=1, qk_norm=True, norm_kind="rms", activation="swiglu", tied=False
    ),
    "transformer, T5": t5_small(**_TRANSLATOR, head_width=5, relative_buckets=8, relative_distance=9),
    **{f"seq2seq, {score}": Seq2SeqConfig(**_RECURRENT, score=score) for score in ("scaled_dot", *_SCORES)},
    "seq2seq, Bahdanau": Seq2SeqConfig(**_RECURRENT, attention="bahdanau", score="concat", cell="lstm", layers=2),
    "seq2seq, no attention": Seq2SeqConfig(**_RECURRENT, attention="none", cell="rnn", bidirectional=False),
}
GENERATORS: dict[str, Any] = {
    "gpt": GPTConfig(**_LANGUAGE),
    **{f"gpt, {score}": GPTConfig(**_LANGUAGE, score=score) for score in _SCORES},
    "gpt, Llama": GPTConfig(**_LANGUAGE, activation="swiglu", qk_norm=False, kv_heads=1, tied=False),
    "gpt, GPT-2": GPTConfig(
        **_LANGUAGE, positions="learned", norm_kind="layer", activation="gelu_tanh", qk_norm=False, bias="all"
    ),
}
ENCODERS: dict[str, Any] = {
    "bert, mask": BertConfig(**_ENCODER, head="mask"),
    "bert, classify": BertConfig(**_ENCODER, head="classify", pooler="tanh", labels=LABELS),
    "bert, tag": BertConfig(**_ENCODER, head="tag", labels=("O", "B-X", "I-X")),
    "bert, answer": BertConfig(**_ENCODER, head="answer"),
    "bert, none": BertConfig(**_ENCODER, head="none"),
}
IMAGE_MODELS: dict[str, Any] = {
    "vit, classify": ViTConfig(**_IMAGES),
    "vit, stem": ViTConfig(**_IMAGES, positions="rotary", patches="stem", pooling="query", registers=2),
    "vit, segment": ViTConfig(
        **_IMAGES, head="segment", segmenter="queries", segmenter_layers=1, positions="sinusoidal"
    ),
}
MODELS = TRANSLATORS | GENERATORS | ENCODERS | IMAGE_MODELS

# Tiny configs in Hugging Face format: classes whose layers have parts that only imported models need.
_IDS = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=2, eos_token_id=3)
_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_DECODER = dict(
    **_IDS,
    **dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24),
)
_BERT = dict(
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
    cls_token_id=2,
    sep_token_id=3,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
)
IMPORTED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(
        _DECODER, model_type="llama", rope_parameters={**_ROPE, "original_max_position_embeddings": 64}
    ),
    "Gemma2ForCausalLM": dict(
        _DECODER,
        model_type="gemma2",
        head_dim=6,
        sliding_window=3,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=2.0,
    ),
    "T5ForConditionalGeneration": dict(
        **dict(model_type="t5", vocab_size=50, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
        **dict(d_model=16, d_kv=5, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2),
        **dict(relative_attention_num_buckets=8, relative_attention_max_distance=9, feed_forward_proj="gated-gelu"),
    ),
    "BertForMaskedLM": dict(**_BERT, model_type="bert", vocab_size=VOCAB, max_position_embeddings=32),
    "ModernBertForMaskedLM": dict(
        **dict(_BERT, num_hidden_layers=4), model_type="modernbert", vocab_size=VOCAB, local_attention=6
    ),
    "DebertaV2ForMaskedLM": dict(
        **dict(_BERT, model_type="deberta-v2", vocab_size=VOCAB, relative_attention=True, position_buckets=4),
        **dict(max_position_embeddings=32, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", legacy=True),
        **dict(share_att_key=True, position_biased_input=False, type_vocab_size=0),
    ),
}


# Parts of names of weights that changed since the values were frozen.
RENAMED = {"painter.": "mae_decoder.", "feedforward.inner": "feedforward.fc1", "feedforward.outer": "feedforward.fc2"}


def current_name(name: str) -> str:
    """The present name of a weight that had this name when the values were frozen."""
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


@functools.cache
def frozen_shapes() -> dict[str, dict[str, list[int]]]:
    """The shapes of the weights of every model, by their names at the time of freezing."""
    return json.loads(SHAPES.read_text(encoding="utf-8")) if SHAPES.exists() else {}


def frozen_weights(key: str, scale: float = 0.3) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and the values of the weights of a model. Each is a function of its name; gains are around 1."""
    for name, shape in sorted(frozen_shapes()[key].items()):
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        is_gain = len(shape) == 1 and name.endswith("weight")
        values = scale * noise if len(shape) > 1 else is_gain + 0.2 * noise
        if shape[0] in VOCABS:  # so that outputs vary, and end at different steps
            values = 2 * values
            values[UNK], values[EOS] = 0.9 * values[20:28].sum(0), 2 * values[3:12].sum(0)
        yield name, torch.from_numpy(values.astype(np.float32))


def frozen_model(key: str, config: Any, scale: float = 0.3) -> Any:
    """A model with its frozen weights."""
    model = make_model(config)
    parameters = dict(model.named_parameters())
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    frozen_shapes().setdefault(key, shapes)  # for `python -m tests.frozen`, which then writes them
    with torch.no_grad():
        for name, values in frozen_weights(key, scale):
            parameter = parameters.pop(current_name(name))
            assert parameter.shape == values.shape, name
            parameter.copy_(values)
    assert not parameters, f"weights without frozen values: {', '.join(parameters)}"
    return model.eval()


@functools.cache
def make_tokenizer(*, mask: bool = False) -> Tokenizer:
    return Tokenizer.train([" ".join(WORDS)], "word", mask=mask)


@functools.cache
def make_pipeline(name: str, **options: Any) -> Any:
    """The pipeline of a model of `MODELS`; `options` are fields of the pipeline."""
    model = frozen_model(name, MODELS[name])
    if name in TRANSLATORS:
        return Translator(model, make_tokenizer(), make_tokenizer(), **options)
    if name in IMAGE_MODELS:
        return ImageModel(model, **options)
    kind = TextGenerator if name in GENERATORS else TextEncoder
    return kind(model, make_tokenizer(mask=name in ENCODERS), **options)


def import_model(name: str, folder: Path) -> Any:
    """The pipeline of a model of `IMPORTED`, read from a folder in Hugging Face format."""
    config = IMPORTED[name] | {"architectures": [name]}
    folder.mkdir(exist_ok=True)
    if name not in frozen_shapes():
        import transformers

        model = getattr(transformers, name)(transformers.AutoConfig.for_model(**config))
        model.save_pretrained(folder)  # writes tied weights once
        saved = load_file(folder / "model.safetensors")
        frozen_shapes()[name] = {key: [*tensor.shape] for key, tensor in saved.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(frozen_weights(name)), folder / "model.safetensors", metadata={"format": "pt"})
    if name.startswith("T5"):
        write_translation_tokenizer(folder, SimpleNamespace(**config))
    else:
        write_tokenizer(folder, add_special_tokens=not name.endswith("CausalLM"))
    return import_huggingface(folder)


def initial_statistics(name: str) -> dict[str, list[float]]:
    """Mean, standard deviation and size of every weight of a new, wider model."""
    torch.manual_seed(0)
    config = MODELS[name]
    wider = {"width": 64, "feedforward": 96} if hasattr(config, "feedforward") else {"width": 64}
    parameters = dict(make_model(dataclasses.replace(config, **wider)).named_parameters())
    current = {old: parameters[current_name(old)] for old in frozen_shapes()[name]}
    return {
        old: [float(f"{x.mean().item():.4g}"), float(f"{x.std(correction=0).item():.4g}"), x.numel()]
        for old, x in current.items()
    }
