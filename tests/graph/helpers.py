"""Small models of every family, score and positional encoding, for tests of graphs and exports."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from regard.attention import Score
from regard.models import GPT, Bert, Seq2Seq, Transformer, ViT
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig
from regard.models.seq2seq import Seq2SeqConfig
from regard.models.transformer import TransformerConfig
from regard.models.vit import ViTConfig

VOCAB = 23


def _transformer(**choices: Any) -> Callable[[], nn.Module]:
    sizes = dict(width=12, heads=2, feedforward=20, encoder_layers=1, decoder_layers=1, dropout=0.3)
    vocabularies = dict(source_vocab=VOCAB, target_vocab=VOCAB, max_len=32)
    return lambda: Transformer(TransformerConfig(**(sizes | vocabularies | choices)))  # type: ignore[arg-type]


def _seq2seq(**choices: Any) -> Callable[[], nn.Module]:
    return lambda: Seq2Seq(Seq2SeqConfig(width=10, source_vocab=VOCAB, target_vocab=VOCAB, max_len=32, **choices))


def _gpt(**choices: Any) -> Callable[[], nn.Module]:
    sizes = dict(width=12, heads=2, layers=1, feedforward=20, vocab=VOCAB, max_len=32)
    return lambda: GPT(GPTConfig(**(sizes | choices)))  # type: ignore[arg-type]


def _bert(**choices: Any) -> Callable[[], nn.Module]:
    sizes = dict(width=12, heads=2, layers=1, feedforward=20, vocab=VOCAB, max_len=32)
    return lambda: Bert(BertConfig(**(sizes | choices)))  # type: ignore[arg-type]


def _vit(**choices: Any) -> Callable[[], nn.Module]:
    sizes = dict(width=16, heads=2, layers=1, feedforward=20, patch=8, image_height=16, image_width=24)
    return lambda: ViT(ViTConfig(labels=("cat", "dog", "owl"), **(sizes | choices)))  # type: ignore[arg-type]


TRANSLATORS = {
    "sinusoidal, scaled dot": _transformer(shared_vocab=True),
    "split halves, post-norm, location": _transformer(
        positions="sinusoidal_halves", norm="post", encoder_score="location", cross_score="location"
    ),
    "learned, cosine, concat, general": _transformer(
        positions="learned", encoder_score="cosine", decoder_score="concat", cross_score="general", activation="relu2"
    ),
    "rotary, QK-norm, RMS, SwiGLU, grouped heads": _transformer(
        positions="rotary", qk_norm=True, norm_kind="rms", activation="swiglu", kv_heads=1, bias=False
    ),
    "relative, dot, general, GeGLU": _transformer(
        positions="relative", encoder_score="dot", decoder_score="general", cross_score="concat", activation="geglu"
    ),
    "none, output scale, embedding norm": _transformer(
        positions="none", output_scale=True, embedding_norm=True, decoder_score="cosine", activation="gelu"
    ),
    "GRU, Luong, general": _seq2seq(),
    "LSTM, Luong, dot, two layers": _seq2seq(cell="lstm", layers=2, score="dot"),
    "GRU, Bahdanau, concat": _seq2seq(attention="bahdanau", score="concat"),
    "LSTM, Bahdanau, location": _seq2seq(cell="lstm", attention="bahdanau", score="location"),
    "GRU, no attention": _seq2seq(attention="none"),
    "tanh RNN, one direction, cosine": _seq2seq(cell="rnn", bidirectional=False, score="cosine"),
}
LANGUAGE_MODELS = {
    "GPT, rotary": _gpt(positions="rotary", score="cosine"),
    "GPT, learned": _gpt(positions="learned", norm_kind="layer", activation="gelu_tanh"),
    "GPT, windows, soft-capping, sandwich norms": _gpt(
        **dict(layers=2, norm="sandwich", norm_kind="rms_zero_centered", embedding_scale=True, logit_cap=3.0),
        **dict(sliding_windows=(3, 0), window_rotary_base=50.0, score_cap=2.0, score_width=5.0, kv_heads=1),
    ),
    "GPT, parallel": _gpt(parallel=True, norm_kind="layer"),
    "GPT, output norms, partial rotary": _gpt(
        **dict(layers=2, norm="output", qk_norm_joint=True, rotary_share=0.5, unrotated_layers=(1,)),
        **dict(rotary_factor=4.0, rotary_context=16, rotary_scaling="yarn", head_width=8),
    ),
}
ENCODERS = {
    "BERT, mask": _bert(head="mask", segments=2),
    "BERT, classify": _bert(head="classify", labels=("a", "b", "c"), pooler="tanh", positions="rotary", norm="pre"),
    "BERT, answer": _bert(head="answer", groups=1, embedding_width=8),
    "BERT, features": _bert(head="none"),
    "MPNet": _bert(relative="bias", relative_buckets=8, relative_distance=9),
    "DeBERTa": _bert(relative="disentangled", relative_buckets=8, relative_distance=7, positions="none"),
    "ModernBERT": _bert(
        **dict(norm="pre", first_norm=False, norm_kind="layer_without_bias", bias="none", activation="geglu_exact"),
        **dict(positions="rotary", rotary_base=90.0, sliding_windows=(0, 2), window_rotary_base=30.0),
        **dict(head="classify", labels=("a", "b", "c"), pooling="mean", head_transform=True, head_bias=False),
    ),
    "BERT, learned query": _bert(head="classify", labels=("a", "b", "c"), pooling="query"),
}
IMAGES = {
    "ViT, class token": _vit(),
    "ViT, convolution, sinusoidal, mean": _vit(patches="convolution", positions="sinusoidal", pooling="mean"),
    "ViT, stem, rotary, query": _vit(patches="stem", positions="rotary", pooling="query"),
    "ViT, segmentation": _vit(head="segment", layer_scale=0.1),
    "ViT, class queries": _vit(head="segment", segmenter="queries"),
}
MODELS = TRANSLATORS | LANGUAGE_MODELS | ENCODERS | IMAGES


@cache
def model_of(name: str) -> Any:
    """A model whose output depends on every parameter: biases and norms differ from their initial values."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, tensor in model.named_parameters():
            if tensor.dim() == 1 and "log_scale" not in parameter_name:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


class Gate(nn.Module):
    """A custom layer that the interpreters do not know."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.map = inner, nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x) * torch.sigmoid(self.map(x))


class Distance(Score):
    """A custom score that the interpreters do not know: minus the squared distance."""

    def pair_scores(self, q, k):
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def toy_model() -> Transformer:
    """A Transformer with a custom layer and a custom score."""
    torch.manual_seed(0)
    sizes = dict(width=12, heads=2, feedforward=20, encoder_layers=1, decoder_layers=1)
    model = Transformer(TransformerConfig(**sizes, source_vocab=VOCAB, target_vocab=VOCAB)).eval()
    model.encoder[0].feedforward = Gate(model.encoder[0].feedforward, 12)
    model.decoder[0].cross.score = Distance()
    return model
