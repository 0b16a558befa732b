"""BERT, RoBERTa, DistilBERT and ALBERT: the tables of their names, and their configs in our words and back."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.interop.foreign_config import Key, Keys, Settings, read_keys, with_defaults, write_keys
from regard.interop.huggingface.single_stack import (
    ACTIVATIONS,
    ENCODER_KEYS,
    Kind,
    Weights,
    read_labels,
    read_one_stack,
    write_labels,
    write_one_stack,
)
from regard.interop.weight_mapping import Row, Table, block_rows, both
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
    "encoder.albert_layer_groups.{i}.albert_layers.0",  # {i} is a group of layers that have the same weights
    attention=("attention.query", "attention.key", "attention.value", "attention.dense"),
    feedforward=("ffn", "ffn_output"),
    norms=("attention.LayerNorm", "full_layer_layer_norm"),
)
_POOLER = both("pooler", "pooler.dense")
_ALBERT_ROWS = [*_EMBEDDINGS, *both("widen", "encoder.embedding_hidden_mapping_in"), *both("pooler", "pooler")]

_BERT = Table([*_EMBEDDINGS, *_POOLER], {"blocks": _BERT_LAYER}, _BESIDE, _UNUSED, prefix="bert.")
_ROBERTA = _BERT._replace(prefix="roberta.")
_DISTILBERT = Table(_EMBEDDINGS, {"blocks": _DISTILBERT_LAYER}, _BESIDE, _UNUSED, prefix="distilbert.")
_ALBERT = Table(_ALBERT_ROWS, {"blocks": _ALBERT_LAYER}, _BESIDE, _UNUSED, prefix="albert.")


def _with_mask_head(table: Table, dense: str, norm: str, bias: str, decoder: str) -> Table:
    """A table with the head that names masked tokens; its last layer, the decoder, is the embedding."""
    tokens = f"{table.prefix}embeddings.word_embeddings.weight"
    return table.with_head(
        *both("mask_head.dense", dense),
        *both("mask_head.norm", norm),
        Row("output.bias", bias),
        twins=((f"{decoder}.weight", tokens), (f"{decoder}.bias", bias)),
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

# -- the configs -----------------------------------------------------------------------------------------------------

_BERT_KEYS = [
    *ENCODER_KEYS,
    Key("segments", "type_vocab_size", 2),
    Key("max_len", "max_position_embeddings", 512),
    Key("vocab", "vocab_size", 30522),
]
_ROBERTA_KEYS = with_defaults(_BERT_KEYS, vocab=50265)
_DISTILBERT_KEYS = [
    Key("width", "dim", 768),
    Key("heads", "n_heads", 12),
    Key("layers", "n_layers", 6),
    Key("feedforward", "hidden_dim", 3072),
    Key("dropout", "dropout", 0.1),
    Key("activation", "activation", "gelu", ACTIVATIONS),
    Key("max_len", "max_position_embeddings", 512),
    Key("vocab", "vocab_size", 30522),
]
_ALBERT_KEYS = with_defaults(
    [*_BERT_KEYS, Key("embedding_width", "embedding_size", 128), Key("groups", "num_hidden_groups", 1)],
    **{"vocab": 30000, "width": 4096, "heads": 64, "feedforward": 16384, "activation": "gelu_new", "dropout": 0.0},
)


def _read_bert(
    settings: Settings, head: Head, keys: Keys = _BERT_KEYS, pooler: Literal["tanh", "relu"] = "tanh", **fixed: Any
) -> BertConfig:
    settings.must_be("position_embedding_type", "absolute")
    settings.must_be("is_decoder", False)
    settings.must_be("add_cross_attention", False)
    settings.must_be("pruned_heads", {})
    if head == "mask":
        settings.must_be("tie_word_embeddings", True)
    bare = head == "none" and pooler == "tanh" and settings.flag("add_pooling_layer", True)
    return BertConfig(
        **read_keys(keys, settings),
        **fixed,
        head=head,
        pooler=pooler if head == "classify" or bare else "none",
        labels=read_labels(settings) if head == "classify" else (),
    )


def _write_bert(config: BertConfig, head: Head, keys: Keys = _BERT_KEYS) -> dict[str, Any]:
    return {
        "model_type": "bert",
        **write_keys(keys, config),
        "type_vocab_size": config.segments or 1,
        "attention_probs_dropout_prob": 0.0,
        **(write_labels(config.labels) if head == "classify" else {}),
    }


def _read_roberta(settings: Settings, head: Head) -> BertConfig:
    """BERT but for its positions, which are counted from the padding's id on."""
    if head == "mask":
        settings.must_be("hidden_act", "gelu")  # which this head has whatever the other layers have
    offset = settings.number("pad_token_id", 1) + 1
    rows = settings.size("max_position_embeddings", 512)
    if rows <= offset:
        raise settings.refusal("max_position_embeddings", f"the first {offset} positions are never used")
    bert = _read_bert(settings.over({"max_position_embeddings": rows - offset}), head, _ROBERTA_KEYS)
    return replace(bert, position_offset=offset)


def _write_roberta(config: BertConfig, head: Head) -> dict[str, Any]:
    offset = config.position_offset or 1
    own = {"model_type": "roberta", "pad_token_id": offset - 1, "max_position_embeddings": config.max_len + offset}
    if head == "mask":
        own["hidden_act"] = "gelu"
    return _write_bert(config, head) | own


_read_distilbert = partial(_read_bert, keys=_DISTILBERT_KEYS, pooler="relu", norm_eps=1e-12, segments=0)


def _write_distilbert(config: BertConfig, head: Head) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        **write_keys(_DISTILBERT_KEYS, config),
        "attention_dropout": 0.0,
        **(write_labels(config.labels) if head == "classify" else {}),
    }


def _read_albert(settings: Settings, head: Head) -> BertConfig:
    settings.must_be("inner_group_num", 1)
    return _read_bert(settings, head, _ALBERT_KEYS)


def _write_albert(config: BertConfig, head: Head) -> dict[str, Any]:
    own = {
        "model_type": "albert",
        "embedding_size": config.embedding_width or config.width,
        "num_hidden_groups": config.groups or config.layers,
    }
    return _write_bert(config, head) | own


# -- the classes -----------------------------------------------------------------------------------------------------


def _classes(name: str, read: Any, write: Any, table: Table, mask: Table, classify: Table) -> dict[str, Kind]:
    """The classes of a family, one for each head."""
    tables: dict[tuple[str, Head], Table] = {
        ("Model", "none"): table,
        ("ForMaskedLM", "mask"): mask,
        ("ForSequenceClassification", "classify"): classify,
        ("ForQuestionAnswering", "answer"): table.with_head(*both("output", "qa_outputs")),
    }
    return {
        name + suffix: Kind(own, partial(read, head=head), partial(write, head=head))
        for (suffix, head), own in tables.items()
    }


_CLASSIFIER = both("output", "classifier")
# RoBERTa's label comes through a layer of the head, where BERT's comes through the pooler.
_ROBERTA_CLASSIFY = _ROBERTA._replace(rows=_EMBEDDINGS).with_head(
    *both("pooler", "classifier.dense"), *both("output", "classifier.out_proj")
)
_DISTILBERT_CLASSIFY = _DISTILBERT.with_head(*both("pooler", "pre_classifier"), *_CLASSIFIER)
_ALBERT_CLASSIFY = _ALBERT.with_head(*_CLASSIFIER)
# Of the classes that fit, the first is written.
CLASSES = {
    **_classes("Bert", _read_bert, _write_bert, _BERT, _BERT_MASK, _BERT.with_head(*_CLASSIFIER)),
    **_classes("Roberta", _read_roberta, _write_roberta, _ROBERTA, _ROBERTA_MASK, _ROBERTA_CLASSIFY),
    **_classes("DistilBert", _read_distilbert, _write_distilbert, _DISTILBERT, _DISTILBERT_MASK, _DISTILBERT_CLASSIFY),
    **_classes("Albert", _read_albert, _write_albert, _ALBERT, _ALBERT_MASK, _ALBERT_CLASSIFY),
}
# Their second half, whether a sentence follows another, is left out.
CLASSES |= {f"{name}ForPreTraining": CLASSES[f"{name}ForMaskedLM"] for name in ("Bert", "Albert")}
# RoBERTa with other tokenizers.
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
    config, weights = read_one_stack(CLASSES[name], Settings(table, origin), theirs)
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
