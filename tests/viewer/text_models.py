"""Small models of every form that a config supports, with cached looks and traces."""

import dataclasses
from functools import cache

import torch

from regard.data import Tokenizer
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.models.transformer import t5_small
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.viewer import build_trace, look
from regard.viewer.trace.steps import Trace

SOURCE, TARGET = "one two three four", "quatre trois deux"
WORDS = [*SOURCE.split(), *TARGET.split()]
SMALL = dict(width=16, heads=4, feedforward=16, encoder_layers=1, decoder_layers=1, dropout=0.1)
READER = dict(width=16, heads=4, feedforward=16, layers=2, dropout=0.1)

# Every score, family and form that a config supports.
TRANSLATORS = {
    "transformer": TransformerConfig(**(SMALL | dict(decoder_layers=2))),
    "dot, cosine, location": TransformerConfig(
        **SMALL, encoder_score="dot", decoder_score="cosine", cross_score="location"
    ),
    "general, grouped concat": TransformerConfig(
        **SMALL, kv_heads=2, encoder_score="general", decoder_score="concat", cross_score="concat"
    ),
    "rotary, grouped": TransformerConfig(**SMALL, positions="rotary", kv_heads=2, qk_norm=True, cross_score="general"),
    "post, learned": TransformerConfig(**SMALL, norm="post", positions="learned", position_offset=2, tied=False),
    "BART": TransformerConfig(**SMALL, norm="post", embedding_norm=True, output_bias=True, activation="gelu"),
    "T5": t5_small(**SMALL, head_width=8, tied=True, output_scale=True, relative_buckets=8, relative_distance=6),
    "swiglu": TransformerConfig(
        **SMALL, activation="swiglu", bias=False, norm_kind="rms", qk_norm=True, positions="sinusoidal_halves"
    ),
    "luong": Seq2SeqConfig(width=8, attention="luong", score="general"),
    "luong lstm of two layers": Seq2SeqConfig(width=8, layers=2, attention="luong", cell="lstm", score="cosine"),
    "bahdanau": Seq2SeqConfig(width=8, attention="bahdanau", score="concat"),
    "bahdanau gru of two layers": Seq2SeqConfig(width=8, layers=2, attention="bahdanau", score="location"),
    "bahdanau lstm of two layers": Seq2SeqConfig(width=8, layers=2, attention="bahdanau", cell="lstm", score="dot"),
}
READERS = {
    "gpt": GPTConfig(**READER, bias="qkv", tied=False),
    "llama": GPTConfig(**READER, kv_heads=2, activation="swiglu", rotary_factor=2.0, rotary_context=4, head_width=6),
    "gpt2": GPTConfig(
        **READER,
        norm_kind="layer",
        qk_norm=False,
        activation="gelu_tanh",
        positions="learned",
        bias="all",
        score="concat",
    ),
    "gemma": GPTConfig(
        **READER,
        **dict(norm="sandwich", norm_kind="rms_zero_centered", embedding_scale=True, logit_cap=3.0, kv_heads=2),
        **dict(sliding_windows=(2, 0), window_rotary_base=50.0, score_cap=1.5, score_width=5.0),
    ),
    "bert": BertConfig(**READER),
    "bert, pre": BertConfig(**READER, norm="pre", norm_eps=1e-5, positions="rotary", segments=0, score="general"),
    "albert": BertConfig(**(READER | dict(layers=4)), groups=2, embedding_width=8),
    "classify": BertConfig(**READER, head="classify", pooler="tanh", labels=("good", "bad")),
    "answer": BertConfig(**READER, head="answer", score="cosine"),
    "embed": BertConfig(**READER, head="none", positions="sinusoidal"),
    "modernbert": BertConfig(
        **dict(READER, norm="pre", norm_eps=1e-5, norm_kind="layer_without_bias", first_norm=False, bias="none"),
        **dict(positions="rotary", segments=0, activation="geglu_exact", sliding_windows=(0, 1), relative="bias"),
        **dict(head="classify", labels=("good", "bad"), pooling="mean", head_transform=True, head_bias=False),
    ),
    "deberta": BertConfig(**READER, relative="disentangled", relative_buckets=8, relative_distance=4, positions="none"),
}
FORMS = [*TRANSLATORS, *READERS]


def make_pipeline(form: str):
    torch.manual_seed(0)
    config = (TRANSLATORS | READERS)[form]
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word", mask=isinstance(config, BertConfig))
    size = tokenizer.vocab_size
    if form in READERS:
        kind = TextGenerator if isinstance(config, GPTConfig) else TextEncoder
        return kind(amplify_weights(make_model(dataclasses.replace(config, vocab=size))), tokenizer)
    model = make_model(dataclasses.replace(config, source_vocab=size, target_vocab=size))
    return Translator(amplify_weights(model), tokenizer, tokenizer)


def amplify_weights(model):
    """Amplify weights and perturb biases and gains, so that a missing one changes the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 1.5
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def make_look(pipeline):
    return look(pipeline, SOURCE, TARGET if isinstance(pipeline, Translator) else None)


@cache
def cached_look(form: str):
    """The cached look at the model of a form."""
    return make_look(make_pipeline(form))


@cache
def cached_trace(form: str) -> Trace:
    return build_trace(cached_look(form))
