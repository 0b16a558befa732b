"""BERT, RoBERTa, DistilBERT, ALBERT and ELECTRA of transformers: mapping tables and configs in both directions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from regard.interop.foreign_config import (
    ConfigKey,
    ConfigKeys,
    ForeignConfig,
    read_fields,
    replace_defaults,
    write_fields,
)
from regard.interop.huggingface.single_stack import (
    ACTIVATIONS,
    ENCODER_KEYS,
    ForeignClass,
    read_labels,
    read_problem_type,
    write_labels,
    write_problem_type,
)
from regard.interop.weight_mapping import MappingRow, MappingTable, block_rows, weight_and_bias
from regard.models.bert import TEXT_HEADS, BertConfig, Head

# -- mapping tables ---------------------------------------------------------------------------------------------------

# Tensors of other classes of the family, which files often keep; and position indices.
_UNUSED = ("*pooler.*", "cls.*", "lm_head.*", "vocab_*", "predictions.*", "sop_classifier.*")
_ELECTRA_UNUSED = ("generator_*", "discriminator_*")
IGNORED = ("*embeddings.position_ids",)

EMBEDDINGS = [
    MappingRow("embedding.tokens.weight", "embeddings.word_embeddings.weight"),
    MappingRow("embedding.positions.weight", "embeddings.position_embeddings.weight"),
    MappingRow("embedding.segments.weight", "embeddings.token_type_embeddings.weight"),
    *weight_and_bias("embedding.norm", "embeddings.LayerNorm"),
]
_BERT_LAYER = block_rows(
    "encoder.layer.{i}",
    attention=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    feedforward=("intermediate.dense", "output.dense"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
_DISTILBERT_LAYER = block_rows(
    "transformer.layer.{i}",
    attention=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
    feedforward=("ffn.lin1", "ffn.lin2"),
    norms=("sa_layer_norm", "output_layer_norm"),
)
_ALBERT_LAYER = block_rows(
    "encoder.albert_layer_groups.{i}.albert_layers.0",  # {i}: a group of layers that share their weights
    attention=("attention.query", "attention.key", "attention.value", "attention.dense"),
    feedforward=("ffn", "ffn_output"),
    norms=("attention.LayerNorm", "full_layer_layer_norm"),
)
POOLER = weight_and_bias("pooler", "pooler.dense")
_ALBERT_ROWS = [
    *EMBEDDINGS,
    *weight_and_bias("widen", "encoder.embedding_hidden_mapping_in"),
    *weight_and_bias("pooler", "pooler"),
]

_BERT = MappingTable([*EMBEDDINGS, *POOLER], {"blocks": _BERT_LAYER}, IGNORED, _UNUSED, prefix="bert.")
_ROBERTA = _BERT._replace(prefix="roberta.")
_DISTILBERT = MappingTable(EMBEDDINGS, {"blocks": _DISTILBERT_LAYER}, IGNORED, _UNUSED, prefix="distilbert.")
_ALBERT = MappingTable(_ALBERT_ROWS, {"blocks": _ALBERT_LAYER}, IGNORED, _UNUSED, prefix="albert.")
_ELECTRA = MappingTable(
    [*EMBEDDINGS, *weight_and_bias("widen", "embeddings_project")],
    {"blocks": _BERT_LAYER},
    IGNORED,
    _ELECTRA_UNUSED,
    prefix="electra.",
)


def with_mask_head(table: MappingTable, dense: str, norm: str, bias: str, decoder: str) -> MappingTable:
    """Add the masked-language-model head; its last layer, the decoder, is tied to the embedding."""
    tokens = f"{table.prefix}embeddings.word_embeddings.weight"
    return table.with_head(
        *weight_and_bias("mask_head.dense", dense),
        *weight_and_bias("mask_head.norm", norm),
        MappingRow("output.bias", bias),
        copies=((f"{decoder}.weight", tokens), (f"{decoder}.bias", bias)),
    )


_BERT_MASK = with_mask_head(
    _BERT,
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
)
_ROBERTA_MASK = with_mask_head(
    _ROBERTA,
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    bias="lm_head.bias",
    decoder="lm_head.decoder",
)
_DISTILBERT_MASK = with_mask_head(
    _DISTILBERT,
    dense="vocab_transform",
    norm="vocab_layer_norm",
    bias="vocab_projector.bias",
    decoder="vocab_projector",
)
_ALBERT_MASK = with_mask_head(
    _ALBERT,
    dense="predictions.dense",
    norm="predictions.LayerNorm",
    bias="predictions.bias",
    decoder="predictions.decoder",
)
_ELECTRA_MASK = with_mask_head(
    _ELECTRA,
    dense="generator_predictions.dense",
    norm="generator_predictions.LayerNorm",
    bias="generator_lm_head.bias",
    decoder="generator_lm_head",
)

# -- configs ----------------------------------------------------------------------------------------------------------

BERT_KEYS = [
    *ENCODER_KEYS,
    ConfigKey("segments", "type_vocab_size", 2),
    ConfigKey("max_len", "max_position_embeddings", 512),
    ConfigKey("vocab", "vocab_size", 30522),
]
_ROBERTA_KEYS = replace_defaults(BERT_KEYS, vocab=50265)
_DISTILBERT_KEYS = [
    ConfigKey("width", "dim", 768),
    ConfigKey("heads", "n_heads", 12),
    ConfigKey("layers", "n_layers", 6),
    ConfigKey("feedforward", "hidden_dim", 3072),
    ConfigKey("dropout", "dropout", 0.1),
    ConfigKey("activation", "activation", "gelu", ACTIVATIONS),
    ConfigKey("max_len", "max_position_embeddings", 512),
    ConfigKey("vocab", "vocab_size", 30522),
]
_ALBERT_KEYS = replace_defaults(
    [*BERT_KEYS, ConfigKey("embedding_width", "embedding_size", 128), ConfigKey("groups", "num_hidden_groups", 1)],
    **{"vocab": 30000, "width": 4096, "heads": 64, "feedforward": 16384, "activation": "gelu_new", "dropout": 0.0},
)
_ELECTRA_KEYS = replace_defaults(
    [*BERT_KEYS, ConfigKey("embedding_width", "embedding_size", 128)], width=256, heads=4, feedforward=1024
)


def read_bert_config(
    settings: ForeignConfig,
    head: Head,
    keys: ConfigKeys = BERT_KEYS,
    pooler: Literal["tanh", "relu", "gelu"] = "tanh",
    **fixed: Any,
) -> BertConfig:
    settings.require("position_embedding_type", "absolute")
    settings.require("is_decoder", False)
    settings.require("add_cross_attention", False)
    settings.require("pruned_heads", {})
    if TEXT_HEADS[head].shares_embedding:
        settings.require("tie_word_embeddings", True)
    has_pooler = head == "none" and pooler == "tanh" and settings.get_bool("add_pooling_layer", True)
    return BertConfig(
        **read_fields(keys, settings),
        **fixed,
        **read_label_fields(settings, head),
        head=head,
        pooler=pooler if TEXT_HEADS[head].is_per_text or has_pooler else "none",
    )


def read_label_fields(settings: ForeignConfig, head: Head) -> dict[str, Any]:
    """The labels of a head, and what the outputs of a classifier are."""
    labels = read_labels(settings) if TEXT_HEADS[head].has_labels else ()
    problem_type = read_problem_type(settings, labels) if TEXT_HEADS[head].is_per_text else "single_label"
    return {"labels": labels, "problem_type": problem_type}


def write_label_keys(config: BertConfig, head: Head) -> dict[str, Any]:
    keys = write_labels(config.labels) if TEXT_HEADS[head].has_labels else {}
    return keys | (write_problem_type(config.problem_type, config.labels) if TEXT_HEADS[head].is_per_text else {})


def write_bert_config(config: BertConfig, head: Head, keys: ConfigKeys = BERT_KEYS) -> dict[str, Any]:
    return {
        "model_type": "bert",
        **write_fields(keys, config),
        "type_vocab_size": config.segments or 1,
        "attention_probs_dropout_prob": 0.0,
        **write_label_keys(config, head),
    }


# The activation of this head does not depend on the config.
MASK_ACTIVATION: dict[Head, dict[str, Any]] = {"mask": {"hidden_act": "gelu"}}


def require_mask_activation(settings: ForeignConfig, head: Head) -> None:
    for key, value in MASK_ACTIVATION.get(head, {}).items():
        settings.require(key, value)


def _read_roberta(settings: ForeignConfig, head: Head) -> BertConfig:
    """RoBERTa differs from BERT in its positions, which start after the padding id."""
    require_mask_activation(settings, head)
    offset = settings.get_natural("pad_token_id", 1) + 1
    rows = settings.get_count("max_position_embeddings", 512)
    if rows <= offset:
        raise settings.unsupported("max_position_embeddings", f"the first {offset} positions are never used")
    bert = read_bert_config(settings.replace({"max_position_embeddings": rows - offset}), head, _ROBERTA_KEYS)
    return replace(bert, position_offset=offset)


def _write_roberta(config: BertConfig, head: Head) -> dict[str, Any]:
    offset = config.position_offset or 1
    overrides = {
        "model_type": "roberta",
        "pad_token_id": offset - 1,
        "max_position_embeddings": config.max_len + offset,
    }
    return write_bert_config(config, head) | overrides | MASK_ACTIVATION.get(head, {})


_read_distilbert = partial(read_bert_config, keys=_DISTILBERT_KEYS, pooler="relu", norm_eps=1e-12, segments=0)


def _write_distilbert(config: BertConfig, head: Head) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        **write_fields(_DISTILBERT_KEYS, config),
        "attention_dropout": 0.0,
        **write_label_keys(config, head),
    }


def _read_albert(settings: ForeignConfig, head: Head) -> BertConfig:
    settings.require("inner_group_num", 1)
    return read_bert_config(settings, head, _ALBERT_KEYS)


def _write_albert(config: BertConfig, head: Head) -> dict[str, Any]:
    overrides = {
        "model_type": "albert",
        "embedding_size": config.embedding_width or config.width,
        "num_hidden_groups": config.groups or config.layers,
    }
    return write_bert_config(config, head) | overrides


def _read_electra(settings: ForeignConfig, head: Head) -> BertConfig:
    require_mask_activation(settings, head)
    bert = read_bert_config(settings, head, _ELECTRA_KEYS, pooler="gelu")
    # Embeddings are projected only if the widths differ.
    return replace(bert, embedding_width=0) if bert.embedding_width == bert.width else bert


def _write_electra(config: BertConfig, head: Head) -> dict[str, Any]:
    overrides = {"model_type": "electra", "embedding_size": config.embedding_width or config.width}
    return write_bert_config(config, head) | overrides | MASK_ACTIVATION.get(head, {})


# -- classes ----------------------------------------------------------------------------------------------------------


CLASSIFIER = weight_and_bias("output", "classifier")
_SUFFIXES: dict[Head, str] = {
    "none": "Model",
    "mask": "ForMaskedLM",
    "classify": "ForSequenceClassification",
    "answer": "ForQuestionAnswering",
    "tag": "ForTokenClassification",
}


def head_tables(table: MappingTable, mask: MappingTable, classify: MappingTable) -> dict[Head, MappingTable]:
    """The mapping tables of a family, by head; those of answers and tags have one linear layer."""
    return {
        "none": table,
        "mask": mask,
        "classify": classify,
        "answer": table.with_head(*weight_and_bias("output", "qa_outputs")),
        "tag": table.with_head(*CLASSIFIER),
    }


def encoder_classes(name: str, read: Any, write: Any, tables: Mapping[Head, MappingTable]) -> dict[str, ForeignClass]:
    """The classes of a family, one per head."""
    return {
        name + suffix: ForeignClass(tables[head], partial(read, head=head), partial(write, head=head))
        for head, suffix in _SUFFIXES.items()
    }


# The classification heads of RoBERTa and ELECTRA have their own hidden layer where BERT has the pooler.
TWO_LAYERS = [*weight_and_bias("pooler", "classifier.dense"), *weight_and_bias("output", "classifier.out_proj")]
_ROBERTA_CLASSIFY = _ROBERTA._replace(rows=EMBEDDINGS).with_head(*TWO_LAYERS)
_DISTILBERT_CLASSIFY = _DISTILBERT.with_head(*weight_and_bias("pooler", "pre_classifier"), *CLASSIFIER)
_ALBERT_CLASSIFY = _ALBERT.with_head(*CLASSIFIER)
_ELECTRA_CLASSIFY = _ELECTRA.with_head(*TWO_LAYERS)
_TABLES = {
    "Bert": head_tables(_BERT, _BERT_MASK, _BERT.with_head(*CLASSIFIER)),
    "Roberta": head_tables(_ROBERTA, _ROBERTA_MASK, _ROBERTA_CLASSIFY),
    "DistilBert": head_tables(_DISTILBERT, _DISTILBERT_MASK, _DISTILBERT_CLASSIFY),
    "Albert": head_tables(_ALBERT, _ALBERT_MASK, _ALBERT_CLASSIFY),
    "Electra": head_tables(_ELECTRA, _ELECTRA_MASK, _ELECTRA_CLASSIFY),
}
BERT_LIKE_CLASSES = {
    **encoder_classes("Bert", read_bert_config, write_bert_config, _TABLES["Bert"]),
    **encoder_classes("Roberta", _read_roberta, _write_roberta, _TABLES["Roberta"]),
    **encoder_classes("DistilBert", _read_distilbert, _write_distilbert, _TABLES["DistilBert"]),
    **encoder_classes("Albert", _read_albert, _write_albert, _TABLES["Albert"]),
    **encoder_classes("Electra", _read_electra, _write_electra, _TABLES["Electra"]),
}
