"""MPNet and DeBERTa-v2 of transformers, encoders with relative positions: mapping tables and configs."""

from dataclasses import replace
from typing import Any, Literal

from regard.interop.foreign_config import ForeignConfig, replace_defaults
from regard.interop.huggingface.bert import (
    BERT_KEYS,
    CLASSIFIER,
    EMBEDDINGS,
    IGNORED,
    POOLER,
    TWO_LAYERS,
    encoder_classes,
    head_tables,
    read_bert_config,
    require_mask_activation,
    with_mask_head,
    write_bert_config,
)
from regard.interop.weight_mapping import MappingRow, MappingTable, block_rows, weight_and_bias
from regard.models.bert import BertConfig, Head

_UNUSED = ("*pooler.*", "cls.*", "lm_head.*", "lm_predictions.*", "mask_predictions.*")

# -- MPNet ------------------------------------------------------------------------------------------------------------

_MPNET_LAYER = block_rows(
    "encoder.layer.{i}",
    attention=("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
    feedforward=("intermediate.dense", "output.dense"),
    norms=("attention.LayerNorm", "output.LayerNorm"),
)
_MPNET_ROWS = [*EMBEDDINGS, MappingRow("relative.table.weight", "encoder.relative_attention_bias.weight")]
_MPNET = MappingTable([*_MPNET_ROWS, *POOLER], {"blocks": _MPNET_LAYER}, IGNORED, _UNUSED, prefix="mpnet.")
_MPNET_MASK = with_mask_head(
    _MPNET, dense="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head.bias", decoder="lm_head.decoder"
)
_MPNET_CLASSIFY = _MPNET._replace(rows=_MPNET_ROWS).with_head(*TWO_LAYERS)
_MPNET_KEYS = replace_defaults([key for key in BERT_KEYS if key.field != "segments"], vocab=30527)
# Fixed in the code of transformers, whatever the config has.
_MPNET_PAD, _MPNET_BUCKETS, _MPNET_DISTANCE = 1, 32, 128


def _read_mpnet(settings: ForeignConfig, head: Head) -> BertConfig:
    require_mask_activation(settings, head)
    settings.require("pad_token_id", _MPNET_PAD)
    settings.require("relative_attention_num_buckets", _MPNET_BUCKETS)
    offset, rows = _MPNET_PAD + 1, settings.get_count("max_position_embeddings", 512)
    if rows <= offset:
        raise settings.unsupported("max_position_embeddings", f"the first {offset} positions are never used")
    config = read_bert_config(
        settings.replace({"max_position_embeddings": rows - offset}), head, _MPNET_KEYS, segments=0
    )
    return replace(
        config,
        position_offset=offset,
        relative="bias",
        relative_buckets=_MPNET_BUCKETS,
        relative_distance=_MPNET_DISTANCE,
    )


def _write_mpnet(config: BertConfig, head: Head) -> dict[str, Any]:
    table = write_bert_config(config, head, _MPNET_KEYS)
    del table["type_vocab_size"]
    table |= {"model_type": "mpnet", "pad_token_id": _MPNET_PAD, "relative_attention_num_buckets": _MPNET_BUCKETS}
    table["max_position_embeddings"] = config.max_len + _MPNET_PAD + 1
    return table | ({"hidden_act": "gelu"} if head == "mask" else {})


# -- DeBERTa-v2 -------------------------------------------------------------------------------------------------------

_DEBERTA_LAYER = block_rows(
    "encoder.layer.{i}",
    attention=(
        *("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        "attention.output.dense",
    ),
    feedforward=("intermediate.dense", "output.dense"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
_DEBERTA_ROWS = [
    *EMBEDDINGS,
    MappingRow("relative.table.weight", "encoder.rel_embeddings.weight"),
    *weight_and_bias("relative.norm", "encoder.LayerNorm"),
]
_DEBERTA = MappingTable(_DEBERTA_ROWS, {"blocks": _DEBERTA_LAYER}, IGNORED, _UNUSED, prefix="deberta.")
_DEBERTA_MASK = with_mask_head(
    _DEBERTA,
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
)
_DEBERTA_CLASSIFY = _DEBERTA.with_head(*POOLER, *CLASSIFIER)
_DEBERTA_KEYS = replace_defaults(
    [key for key in BERT_KEYS if key.field != "segments"],
    **{"vocab": 128100, "width": 1536, "heads": 24, "layers": 24, "feedforward": 6144, "norm_eps": 1e-7},
)
_POOLERS: dict[str, Literal["gelu", "tanh", "relu"]] = {"gelu": "gelu", "tanh": "tanh", "relu": "relu"}
# Settings of all published models; without the key, transformers does something else.
_DEBERTA_SETTINGS = {"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"}


def _read_deberta(settings: ForeignConfig, head: Head) -> BertConfig:
    for key, expected in _DEBERTA_SETTINGS.items():
        if settings.get(key) != expected:
            raise settings.unsupported(key, f"expected {expected!r}")
    terms = settings.get("pos_att_type", "")
    terms = [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else terms
    if not isinstance(terms, list) or sorted(map(str, terms)) != ["c2p", "p2c"]:
        raise settings.unsupported("pos_att_type", "expected c2p and p2c")
    width, heads = settings.get_count("hidden_size", 1536), settings.get_count("num_attention_heads", 24)
    settings.require("conv_kernel_size", 0)
    settings.require("embedding_size", width)
    settings.require("pooler_hidden_size", width)
    settings.require("attention_head_size", width // heads)
    if head == "mask":
        settings.require("legacy", True)
    limit = settings.get("max_relative_positions", -1)
    limit = limit if type(limit) is int and limit >= 1 else settings.get_count("max_position_embeddings", 512)
    buckets = settings.get("position_buckets", -1)
    has_buckets = type(buckets) is int and buckets > 0
    if has_buckets and (buckets < 4 or limit - 1 <= buckets // 2):
        raise settings.unsupported("position_buckets", f"expected at least 4, and less than twice {limit - 1}")
    is_learned = settings.get_bool("position_biased_input", True)
    pooler = settings.get_choice("pooler_hidden_act", _POOLERS, "gelu")
    config = read_bert_config(
        settings,
        head,
        _DEBERTA_KEYS,
        segments=settings.get_natural("type_vocab_size", 0),
        positions="learned" if is_learned else "none",
        relative="disentangled",
        relative_buckets=2 * (buckets if has_buckets else limit),
        relative_distance=limit if has_buckets else 0,
    )
    return replace(config, pooler=pooler if head == "classify" else "none")


def _write_deberta(config: BertConfig, head: Head) -> dict[str, Any]:
    span = config.relative_buckets // 2
    table = write_bert_config(config, head, _DEBERTA_KEYS)
    return table | {
        "model_type": "deberta-v2",
        "type_vocab_size": config.segments,
        **_DEBERTA_SETTINGS,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": config.positions == "learned",
        "position_buckets": span if config.relative_distance else -1,
        "max_relative_positions": config.relative_distance or span,
        "pooler_hidden_size": config.width,
        "pooler_hidden_act": config.pooler if config.pooler in _POOLERS else "gelu",
        "legacy": True,
    }


RELATIVE_CLASSES = {
    **encoder_classes("MPNet", _read_mpnet, _write_mpnet, head_tables(_MPNET, _MPNET_MASK, _MPNET_CLASSIFY)),
    **encoder_classes(
        "DebertaV2", _read_deberta, _write_deberta, head_tables(_DEBERTA, _DEBERTA_MASK, _DEBERTA_CLASSIFY)
    ),
}
