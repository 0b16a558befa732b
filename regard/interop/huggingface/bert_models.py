"""BERT, RoBERTa, DistilBERT, ALBERT and ELECTRA of transformers: mapping tables and configs in both directions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
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
    Weights,
    read_labels,
    read_problem_type,
    read_single_stack,
    write_labels,
    write_problem_type,
    write_single_stack,
)
from regard.interop.weight_mapping import MappingRow, MappingTable, block_rows, weight_and_bias
from regard.models.bert import BertConfig, Head

# -- mapping tables ---------------------------------------------------------------------------------------------------

# Tensors of other classes of the family, which files often keep; and position indices.
_UNUSED = ("*pooler.*", "cls.*", "lm_head.*", "vocab_*", "predictions.*", "sop_classifier.*")
_ELECTRA_UNUSED = ("generator_*", "discriminator_*")
_IGNORED = ("*embeddings.position_ids",)

_EMBEDDINGS = [
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
_POOLER = weight_and_bias("pooler", "pooler.dense")
_ALBERT_ROWS = [
    *_EMBEDDINGS,
    *weight_and_bias("widen", "encoder.embedding_hidden_mapping_in"),
    *weight_and_bias("pooler", "pooler"),
]

_BERT = MappingTable([*_EMBEDDINGS, *_POOLER], {"blocks": _BERT_LAYER}, _IGNORED, _UNUSED, prefix="bert.")
_ROBERTA = _BERT._replace(prefix="roberta.")
_DISTILBERT = MappingTable(_EMBEDDINGS, {"blocks": _DISTILBERT_LAYER}, _IGNORED, _UNUSED, prefix="distilbert.")
_ALBERT = MappingTable(_ALBERT_ROWS, {"blocks": _ALBERT_LAYER}, _IGNORED, _UNUSED, prefix="albert.")
_ELECTRA = MappingTable(
    [*_EMBEDDINGS, *weight_and_bias("widen", "embeddings_project")],
    {"blocks": _BERT_LAYER},
    _IGNORED,
    _ELECTRA_UNUSED,
    prefix="electra.",
)


def _with_mask_head(table: MappingTable, dense: str, norm: str, bias: str, decoder: str) -> MappingTable:
    """Add the masked-language-model head; its last layer, the decoder, is tied to the embedding."""
    tokens = f"{table.prefix}embeddings.word_embeddings.weight"
    return table.with_head(
        *weight_and_bias("mask_head.dense", dense),
        *weight_and_bias("mask_head.norm", norm),
        MappingRow("output.bias", bias),
        copies=((f"{decoder}.weight", tokens), (f"{decoder}.bias", bias)),
    )


_BERT_MASK = _with_mask_head(
    _BERT,
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
)
_ROBERTA_MASK = _with_mask_head(
    _ROBERTA,
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    bias="lm_head.bias",
    decoder="lm_head.decoder",
)
_DISTILBERT_MASK = _with_mask_head(
    _DISTILBERT,
    dense="vocab_transform",
    norm="vocab_layer_norm",
    bias="vocab_projector.bias",
    decoder="vocab_projector",
)
_ALBERT_MASK = _with_mask_head(
    _ALBERT,
    dense="predictions.dense",
    norm="predictions.LayerNorm",
    bias="predictions.bias",
    decoder="predictions.decoder",
)
_ELECTRA_MASK = _with_mask_head(
    _ELECTRA,
    dense="generator_predictions.dense",
    norm="generator_predictions.LayerNorm",
    bias="generator_lm_head.bias",
    decoder="generator_lm_head",
)

# -- configs ----------------------------------------------------------------------------------------------------------

_BERT_KEYS = [
    *ENCODER_KEYS,
    ConfigKey("segments", "type_vocab_size", 2),
    ConfigKey("max_len", "max_position_embeddings", 512),
    ConfigKey("vocab", "vocab_size", 30522),
]
_ROBERTA_KEYS = replace_defaults(_BERT_KEYS, vocab=50265)
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
    [*_BERT_KEYS, ConfigKey("embedding_width", "embedding_size", 128), ConfigKey("groups", "num_hidden_groups", 1)],
    **{"vocab": 30000, "width": 4096, "heads": 64, "feedforward": 16384, "activation": "gelu_new", "dropout": 0.0},
)
_ELECTRA_KEYS = replace_defaults(
    [*_BERT_KEYS, ConfigKey("embedding_width", "embedding_size", 128)], width=256, heads=4, feedforward=1024
)


def _read_bert(
    settings: ForeignConfig,
    head: Head,
    keys: ConfigKeys = _BERT_KEYS,
    pooler: Literal["tanh", "relu", "gelu"] = "tanh",
    **fixed: Any,
) -> BertConfig:
    settings.require("position_embedding_type", "absolute")
    settings.require("is_decoder", False)
    settings.require("add_cross_attention", False)
    settings.require("pruned_heads", {})
    if head == "mask":
        settings.require("tie_word_embeddings", True)
    labels = read_labels(settings) if head in ("classify", "tag") else ()
    has_pooler = head == "none" and pooler == "tanh" and settings.get_bool("add_pooling_layer", True)
    return BertConfig(
        **read_fields(keys, settings),
        **fixed,
        head=head,
        pooler=pooler if head == "classify" or has_pooler else "none",
        labels=labels,
        problem_type=read_problem_type(settings, labels) if head == "classify" else "single_label",
    )


def _write_label_keys(config: BertConfig, head: Head) -> dict[str, Any]:
    if head == "tag":
        return write_labels(config.labels)
    if head != "classify":
        return {}
    return write_labels(config.labels) | write_problem_type(config.problem_type, config.labels)


def _write_bert(config: BertConfig, head: Head, keys: ConfigKeys = _BERT_KEYS) -> dict[str, Any]:
    return {
        "model_type": "bert",
        **write_fields(keys, config),
        "type_vocab_size": config.segments or 1,
        "attention_probs_dropout_prob": 0.0,
        **_write_label_keys(config, head),
    }


def _require_mask_activation(settings: ForeignConfig, head: Head) -> None:
    if head == "mask":
        settings.require("hidden_act", "gelu")  # the activation of this head does not depend on the config


def _read_roberta(settings: ForeignConfig, head: Head) -> BertConfig:
    """RoBERTa differs from BERT in its positions, which start after the padding id."""
    _require_mask_activation(settings, head)
    offset = settings.get_natural("pad_token_id", 1) + 1
    rows = settings.get_count("max_position_embeddings", 512)
    if rows <= offset:
        raise settings.unsupported("max_position_embeddings", f"the first {offset} positions are never used")
    bert = _read_bert(settings.replace({"max_position_embeddings": rows - offset}), head, _ROBERTA_KEYS)
    return replace(bert, position_offset=offset)


def _write_roberta(config: BertConfig, head: Head) -> dict[str, Any]:
    offset = config.position_offset or 1
    overrides = {
        "model_type": "roberta",
        "pad_token_id": offset - 1,
        "max_position_embeddings": config.max_len + offset,
    }
    if head == "mask":
        overrides["hidden_act"] = "gelu"
    return _write_bert(config, head) | overrides


_read_distilbert = partial(_read_bert, keys=_DISTILBERT_KEYS, pooler="relu", norm_eps=1e-12, segments=0)


def _write_distilbert(config: BertConfig, head: Head) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        **write_fields(_DISTILBERT_KEYS, config),
        "attention_dropout": 0.0,
        **_write_label_keys(config, head),
    }


def _read_albert(settings: ForeignConfig, head: Head) -> BertConfig:
    settings.require("inner_group_num", 1)
    return _read_bert(settings, head, _ALBERT_KEYS)


def _write_albert(config: BertConfig, head: Head) -> dict[str, Any]:
    overrides = {
        "model_type": "albert",
        "embedding_size": config.embedding_width or config.width,
        "num_hidden_groups": config.groups or config.layers,
    }
    return _write_bert(config, head) | overrides


def _read_electra(settings: ForeignConfig, head: Head) -> BertConfig:
    _require_mask_activation(settings, head)
    bert = _read_bert(settings, head, _ELECTRA_KEYS, pooler="gelu")
    # Embeddings are projected only if the widths differ.
    return replace(bert, embedding_width=0) if bert.embedding_width == bert.width else bert


def _write_electra(config: BertConfig, head: Head) -> dict[str, Any]:
    overrides = {"model_type": "electra", "embedding_size": config.embedding_width or config.width}
    if head == "mask":
        overrides["hidden_act"] = "gelu"
    return _write_bert(config, head) | overrides


# -- classes ----------------------------------------------------------------------------------------------------------


_CLASSIFIER = weight_and_bias("output", "classifier")


def _classes(
    name: str, read: Any, write: Any, table: MappingTable, mask: MappingTable, classify: MappingTable
) -> dict[str, ForeignClass]:
    """The classes of a family, one per head."""
    tables: dict[tuple[str, Head], MappingTable] = {
        ("Model", "none"): table,
        ("ForMaskedLM", "mask"): mask,
        ("ForSequenceClassification", "classify"): classify,
        ("ForQuestionAnswering", "answer"): table.with_head(*weight_and_bias("output", "qa_outputs")),
        ("ForTokenClassification", "tag"): table.with_head(*_CLASSIFIER),
    }
    return {
        name + suffix: ForeignClass(head_table, partial(read, head=head), partial(write, head=head))
        for (suffix, head), head_table in tables.items()
    }


# The classification heads of RoBERTa and ELECTRA have their own hidden layer where BERT has the pooler.
_TWO_LAYERS = [*weight_and_bias("pooler", "classifier.dense"), *weight_and_bias("output", "classifier.out_proj")]
_ROBERTA_CLASSIFY = _ROBERTA._replace(rows=_EMBEDDINGS).with_head(*_TWO_LAYERS)
_DISTILBERT_CLASSIFY = _DISTILBERT.with_head(*weight_and_bias("pooler", "pre_classifier"), *_CLASSIFIER)
_ALBERT_CLASSIFY = _ALBERT.with_head(*_CLASSIFIER)
_ELECTRA_CLASSIFY = _ELECTRA.with_head(*_TWO_LAYERS)
# Of several matching classes, the one that a model was imported from is written, or else the first.
_WRITTEN_CLASSES = {
    **_classes("Bert", _read_bert, _write_bert, _BERT, _BERT_MASK, _BERT.with_head(*_CLASSIFIER)),
    **_classes("Roberta", _read_roberta, _write_roberta, _ROBERTA, _ROBERTA_MASK, _ROBERTA_CLASSIFY),
    **_classes("DistilBert", _read_distilbert, _write_distilbert, _DISTILBERT, _DISTILBERT_MASK, _DISTILBERT_CLASSIFY),
    **_classes("Albert", _read_albert, _write_albert, _ALBERT, _ALBERT_MASK, _ALBERT_CLASSIFY),
    **_classes("Electra", _read_electra, _write_electra, _ELECTRA, _ELECTRA_MASK, _ELECTRA_CLASSIFY),
}
BERT_CLASSES = dict(_WRITTEN_CLASSES)
# Their second head (next sentence or sentence order) is left out.
BERT_CLASSES |= {f"{name}ForPreTraining": BERT_CLASSES[f"{name}ForMaskedLM"] for name in ("Bert", "Albert")}
# The head that detects replaced tokens is left out.
BERT_CLASSES["ElectraForPreTraining"] = BERT_CLASSES["ElectraModel"]
# The same as RoBERTa, with other tokenizers.
BERT_CLASSES |= {
    name.replace("Roberta", other): foreign_class
    for other in ("XLMRoberta", "Camembert")
    for name, foreign_class in BERT_CLASSES.items()
    if name.startswith("Roberta")
}


def read_bert_model(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> tuple[BertConfig, SpecialTokens, Weights]:
    """Read a model of the class `name`: config, special ids and weights.

    `table` is config.json, `tokens` are the special ids of the tokenizer by role.
    """
    config, weights = read_single_stack(BERT_CLASSES[name], ForeignConfig(table, origin), tensors)
    begin, end = tokens.get("begin", tokens.get("cls")), tokens.get("end", tokens.get("sep"))
    pad = config.position_offset - 1 if config.position_offset else tokens.get("pad", 0)
    special = SpecialTokens(
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


def write_bert_model(
    config: BertConfig, special: SpecialTokens, weights: Mapping[str, Tensor], preferred: str = ""
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json (empty) and the tensors of the matching class; an error if none matches.

    Classes of ELECTRA are written only if `preferred`, the class that the model was imported from, is one of them.
    """
    is_electra = preferred.startswith("Electra")
    classes = {name: one for name, one in _WRITTEN_CLASSES.items() if is_electra or not name.startswith("Electra")}
    name, table, tensors = write_single_stack(classes, config, weights, preferred)
    if table.setdefault("pad_token_id", special.pad) != special.pad:
        raise RegardError(
            f"{name}: position_offset = {config.position_offset} must be one more than the padding id ({special.pad}).",
            "Train with supported settings to export the model.",
        )
    ids = {"bos_token_id": special.begin, "eos_token_id": special.end}
    return {"architectures": [name]} | table | ids, {}, tensors
