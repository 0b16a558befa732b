"""BERT, RoBERTa, DistilBERT and ALBERT: the tables of their names, and their configs in our words and back."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from regard.data.special import Special
from regard.errors import RegardError
from regard.interop.mapping import STACKED, Row, Table, both
from regard.interop.one_stack import (
    ACTIVATIONS,
    Kind,
    Weights,
    named,
    read_labels,
    read_one_stack,
    write_labels,
    write_one_stack,
    write_sizes,
)
from regard.interop.settings import Settings
from regard.models.bert import BertConfig, Head

# -- the tables ------------------------------------------------------------------------------------------------------

# What other classes of the same family have and files often keep; and the numbers 0, 1, 2, …
_UNUSED = ("*pooler.*", "cls.*", "lm_head.*", "vocab_*", "predictions.*", "sop_classifier.*")
_BESIDE = ("*embeddings.position_ids",)

_EMBEDDINGS = [
    Row("embedding.tokens.weight", "embeddings.word_embeddings.weight"),
    Row("embedding.positions.weight", "embeddings.position_embeddings.weight"),
    Row("embedding.segments.weight", "embeddings.token_type_embeddings.weight"),
    *both("embedding.norm", "embeddings.LayerNorm"),
]
_BERT_LAYER = [
    *both("blocks.{i}.attention.query", "encoder.layer.{i}.attention.self.query"),
    *both(
        "blocks.{i}.attention.key_value",
        ("encoder.layer.{i}.attention.self.key", "encoder.layer.{i}.attention.self.value"),
        STACKED,
    ),
    *both("blocks.{i}.attention.out", "encoder.layer.{i}.attention.output.dense"),
    *both("blocks.{i}.attention_norm", "encoder.layer.{i}.attention.output.LayerNorm"),
    *both("blocks.{i}.feedforward.inner", "encoder.layer.{i}.intermediate.dense"),
    *both("blocks.{i}.feedforward.outer", "encoder.layer.{i}.output.dense"),
    *both("blocks.{i}.feedforward_norm", "encoder.layer.{i}.output.LayerNorm"),
]
_DISTILBERT_LAYER = [
    *both("blocks.{i}.attention.query", "transformer.layer.{i}.attention.q_lin"),
    *both(
        "blocks.{i}.attention.key_value",
        ("transformer.layer.{i}.attention.k_lin", "transformer.layer.{i}.attention.v_lin"),
        STACKED,
    ),
    *both("blocks.{i}.attention.out", "transformer.layer.{i}.attention.out_lin"),
    *both("blocks.{i}.attention_norm", "transformer.layer.{i}.sa_layer_norm"),
    *both("blocks.{i}.feedforward.inner", "transformer.layer.{i}.ffn.lin1"),
    *both("blocks.{i}.feedforward.outer", "transformer.layer.{i}.ffn.lin2"),
    *both("blocks.{i}.feedforward_norm", "transformer.layer.{i}.output_layer_norm"),
]
# Here {i} is a group of layers that have the same weights.
_ALBERT_LAYER = [
    *both("blocks.{i}.attention.query", "encoder.albert_layer_groups.{i}.albert_layers.0.attention.query"),
    *both(
        "blocks.{i}.attention.key_value",
        (
            "encoder.albert_layer_groups.{i}.albert_layers.0.attention.key",
            "encoder.albert_layer_groups.{i}.albert_layers.0.attention.value",
        ),
        STACKED,
    ),
    *both("blocks.{i}.attention.out", "encoder.albert_layer_groups.{i}.albert_layers.0.attention.dense"),
    *both("blocks.{i}.attention_norm", "encoder.albert_layer_groups.{i}.albert_layers.0.attention.LayerNorm"),
    *both("blocks.{i}.feedforward.inner", "encoder.albert_layer_groups.{i}.albert_layers.0.ffn"),
    *both("blocks.{i}.feedforward.outer", "encoder.albert_layer_groups.{i}.albert_layers.0.ffn_output"),
    *both("blocks.{i}.feedforward_norm", "encoder.albert_layer_groups.{i}.albert_layers.0.full_layer_layer_norm"),
]
_POOLER = both("pooler", "pooler.dense")
_ALBERT_ROWS = [*_EMBEDDINGS, *both("widen", "encoder.embedding_hidden_mapping_in"), *both("pooler", "pooler")]

_BERT = Table([*_EMBEDDINGS, *_POOLER], {"blocks": _BERT_LAYER}, _BESIDE, _UNUSED, prefix="bert.")
_ROBERTA = _BERT._replace(prefix="roberta.")
# RoBERTa's label comes through a layer of the head, where BERT's comes through the pooler.
_ROBERTA_UNPOOLED = _ROBERTA._replace(rows=_EMBEDDINGS)
_DISTILBERT = Table(_EMBEDDINGS, {"blocks": _DISTILBERT_LAYER}, _BESIDE, _UNUSED, prefix="distilbert.")
_ALBERT = Table(_ALBERT_ROWS, {"blocks": _ALBERT_LAYER}, _BESIDE, _UNUSED, prefix="albert.")


def _naming(table: Table, dense: str, norm: str, bias: str, decoder: str) -> Table:
    """A table with the head that names masked tokens; its last layer, the decoder, is the embedding."""
    tokens = f"{table.prefix}embeddings.word_embeddings.weight"
    return table.with_head(
        *both("mask_head.dense", dense),
        *both("mask_head.norm", norm),
        Row("output.bias", bias),
        twins=((f"{decoder}.weight", tokens), (f"{decoder}.bias", bias)),
    )


_BERT_NAMING = _naming(
    _BERT,
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
)
_ROBERTA_NAMING = _naming(
    _ROBERTA,
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    bias="lm_head.bias",
    decoder="lm_head.decoder",
)
_DISTILBERT_NAMING = _naming(
    _DISTILBERT,
    dense="vocab_transform",
    norm="vocab_layer_norm",
    bias="vocab_projector.bias",
    decoder="vocab_projector",
)
_ALBERT_NAMING = _naming(
    _ALBERT,
    dense="predictions.dense",
    norm="predictions.LayerNorm",
    bias="predictions.bias",
    decoder="predictions.decoder",
)
_CLASSIFIER, _ANSWER = both("output", "classifier"), both("output", "qa_outputs")
_ROBERTA_CLASSIFIER = [*both("pooler", "classifier.dense"), *both("output", "classifier.out_proj")]
_DISTILBERT_CLASSIFIER = [*both("pooler", "pre_classifier"), *_CLASSIFIER]

# -- the configs -----------------------------------------------------------------------------------------------------


def _plain(settings: Settings, head: Head) -> None:
    """Refuses what would make another computation of it."""
    settings.must_be("position_embedding_type", "absolute")
    settings.must_be("is_decoder", False)
    settings.must_be("add_cross_attention", False)
    settings.must_be("pruned_heads", {})
    if head == "mask":
        settings.must_be("tie_word_embeddings", True)


def _read_bert(settings: Settings, head: Head) -> BertConfig:
    _plain(settings, head)
    pooled = head == "classify" or (head == "none" and settings.flag("add_pooling_layer", True))
    return BertConfig(
        width=settings.size("hidden_size", 768),
        heads=settings.size("num_attention_heads", 12),
        layers=settings.size("num_hidden_layers", 12),
        feedforward=settings.size("intermediate_size", 3072),
        dropout=settings.fraction("hidden_dropout_prob", 0.1),
        norm_eps=settings.fraction("layer_norm_eps", 1e-12),
        activation=settings.choice("hidden_act", ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        segments=settings.size("type_vocab_size", 2),
        head=head,
        pooler="tanh" if pooled else "none",
        labels=read_labels(settings) if head == "classify" else (),
        max_len=settings.size("max_position_embeddings", 512),
        vocab=settings.size("vocab_size", 30522),
    )


def _write_bert(config: BertConfig, head: Head) -> dict[str, Any]:
    return {
        "model_type": "bert",
        **write_sizes(config),
        "type_vocab_size": config.segments or 1,
        "max_position_embeddings": config.max_len,
        "vocab_size": config.vocab,
        **(write_labels(config.labels) if head == "classify" else {}),
    }


def _read_roberta(settings: Settings, head: Head) -> BertConfig:
    """BERT but for its positions, which are counted from the padding's id on."""
    if head == "mask":
        settings.must_be("hidden_act", "gelu")  # which this head has whatever the other layers have
    offset = settings.number("pad_token_id", 1) + 1
    places = settings.size("max_position_embeddings", 512)
    if places <= offset:
        raise settings.refusal("max_position_embeddings", f"the first {offset} positions are never used")
    own = {"vocab_size": settings.size("vocab_size", 50265), "max_position_embeddings": places - offset}
    bert = _read_bert(settings.over(own), head)
    return replace(bert, position_offset=offset)


def _write_roberta(config: BertConfig, head: Head) -> dict[str, Any]:
    offset = config.position_offset or 1
    own = {
        "model_type": "roberta",
        "pad_token_id": offset - 1,
        "max_position_embeddings": config.max_len + offset,
    }
    if head == "mask":
        own["hidden_act"] = "gelu"
    return _write_bert(config, head) | own


def _read_distilbert(settings: Settings, head: Head) -> BertConfig:
    _plain(settings, head)
    return BertConfig(
        width=settings.size("dim", 768),
        heads=settings.size("n_heads", 12),
        layers=settings.size("n_layers", 6),
        feedforward=settings.size("hidden_dim", 3072),
        dropout=settings.fraction("dropout", 0.1),
        norm_eps=1e-12,
        activation=settings.choice("activation", ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        segments=0,
        head=head,
        pooler="relu" if head == "classify" else "none",
        labels=read_labels(settings) if head == "classify" else (),
        max_len=settings.size("max_position_embeddings", 512),
        vocab=settings.size("vocab_size", 30522),
    )


def _write_distilbert(config: BertConfig, head: Head) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        "dim": config.width,
        "n_heads": config.heads,
        "n_layers": config.layers,
        "hidden_dim": config.feedforward,
        "dropout": config.dropout,
        "attention_dropout": 0.0,
        "activation": named(ACTIVATIONS, config.activation),
        "max_position_embeddings": config.max_len,
        "vocab_size": config.vocab,
        **(write_labels(config.labels) if head == "classify" else {}),
    }


def _read_albert(settings: Settings, head: Head) -> BertConfig:
    settings.must_be("inner_group_num", 1)
    own = {
        "vocab_size": settings.size("vocab_size", 30000),
        "hidden_size": settings.size("hidden_size", 4096),
        "num_attention_heads": settings.size("num_attention_heads", 64),
        "intermediate_size": settings.size("intermediate_size", 16384),
        "hidden_act": settings.table.get("hidden_act") or "gelu_new",
        "hidden_dropout_prob": settings.fraction("hidden_dropout_prob", 0.0),
    }
    bert = _read_bert(settings.over(own), head)
    return replace(
        bert,
        embedding_width=settings.size("embedding_size", 128),
        groups=settings.size("num_hidden_groups", 1),
    )


def _write_albert(config: BertConfig, head: Head) -> dict[str, Any]:
    own = {
        "model_type": "albert",
        "embedding_size": config.embedding_width or config.width,
        "num_hidden_groups": config.groups or config.layers,
    }
    return _write_bert(config, head) | own


# -- the classes -----------------------------------------------------------------------------------------------------


def _kind(table: Table, read: Any, write: Any, head: Head) -> Kind:
    return Kind(table, partial(read, head=head), partial(write, head=head))


CLASSES = {
    "BertModel": _kind(_BERT, _read_bert, _write_bert, "none"),
    "BertForMaskedLM": _kind(_BERT_NAMING, _read_bert, _write_bert, "mask"),
    "BertForSequenceClassification": _kind(_BERT.with_head(*_CLASSIFIER), _read_bert, _write_bert, "classify"),
    "BertForQuestionAnswering": _kind(_BERT.with_head(*_ANSWER), _read_bert, _write_bert, "answer"),
    # Its other half, whether a sentence follows another, is left out.
    "BertForPreTraining": _kind(_BERT_NAMING, _read_bert, _write_bert, "mask"),
    "RobertaModel": _kind(_ROBERTA, _read_roberta, _write_roberta, "none"),
    "RobertaForMaskedLM": _kind(_ROBERTA_NAMING, _read_roberta, _write_roberta, "mask"),
    "RobertaForSequenceClassification": _kind(
        _ROBERTA_UNPOOLED.with_head(*_ROBERTA_CLASSIFIER), _read_roberta, _write_roberta, "classify"
    ),
    "RobertaForQuestionAnswering": _kind(_ROBERTA.with_head(*_ANSWER), _read_roberta, _write_roberta, "answer"),
    "DistilBertModel": _kind(_DISTILBERT, _read_distilbert, _write_distilbert, "none"),
    "DistilBertForMaskedLM": _kind(_DISTILBERT_NAMING, _read_distilbert, _write_distilbert, "mask"),
    "DistilBertForSequenceClassification": _kind(
        _DISTILBERT.with_head(*_DISTILBERT_CLASSIFIER), _read_distilbert, _write_distilbert, "classify"
    ),
    "DistilBertForQuestionAnswering": _kind(
        _DISTILBERT.with_head(*_ANSWER), _read_distilbert, _write_distilbert, "answer"
    ),
    "AlbertModel": _kind(_ALBERT, _read_albert, _write_albert, "none"),
    "AlbertForMaskedLM": _kind(_ALBERT_NAMING, _read_albert, _write_albert, "mask"),
    "AlbertForSequenceClassification": _kind(_ALBERT.with_head(*_CLASSIFIER), _read_albert, _write_albert, "classify"),
    "AlbertForQuestionAnswering": _kind(_ALBERT.with_head(*_ANSWER), _read_albert, _write_albert, "answer"),
    "AlbertForPreTraining": _kind(_ALBERT_NAMING, _read_albert, _write_albert, "mask"),
}
# RoBERTa with other tokenisers, and as RoBERTa they go out: of the classes that fit, the first is taken.
CLASSES |= {
    name.replace("Roberta", other): kind
    for other in ("XLMRoberta", "Camembert")
    for name, kind in CLASSES.items()
    if name.startswith("Roberta")
}


def read_bert_like(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], theirs: Mapping[str, Tensor], origin: str
) -> tuple[BertConfig, Special, Weights]:
    """A model of the class `name`: our config, its special ids, and its weights under our names.

    `table` is config.json, `tokens` the tokeniser's special ids by what they are for.
    """
    pooler = {"add_pooling_layer": any("pooler." in key for key in theirs)}  # which many bare models lack
    config, weights = read_one_stack(CLASSES[name], Settings(table, origin).over(pooler), theirs)
    begin, end = tokens.get("begin", tokens.get("cls")), tokens.get("end", tokens.get("sep"))
    pad = config.position_offset - 1 if config.position_offset else tokens.get("pad", 0)
    special = Special(
        pad=pad,
        unk=tokens.get("unk", pad),
        sos=pad if begin is None else begin,
        eos=pad if end is None else end,
        mask=tokens.get("mask"),
        begin=begin,
        end=end,
        between=tokens.get("between"),
    )
    return config, special, weights


def write_bert_like(
    config: BertConfig, special: Special, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json (nothing here) and the tensors of the class that fits; else an error."""
    name, table, tensors = write_one_stack(CLASSES, config, weights)
    if table.setdefault("pad_token_id", special.pad) != special.pad:
        raise RegardError(
            f"{name} counts positions from the padding's id on, and position_offset = {config.position_offset} is not"
            f" one more than that id, {special.pad}.",
            "Train with other choices to export there.",
        )
    ids = {"bos_token_id": special.begin, "eos_token_id": special.end}
    return {"architectures": [name]} | table | ids, {}, tensors
