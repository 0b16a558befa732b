"""Encoder-only models of transformers in both directions; ModernBERT, MPNet and DeBERTa-v2 are defined here."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.interop.foreign_config import (
    ConfigKey,
    ForeignConfig,
    foreign_value,
    read_fields,
    replace_defaults,
    write_fields,
)
from regard.interop.huggingface.bert import (
    BERT_KEYS,
    BERT_LIKE_CLASSES,
    CLASSIFIER,
    EMBEDDINGS,
    IGNORED,
    MASK_ACTIVATION,
    POOLER,
    TWO_LAYERS,
    encoder_classes,
    head_tables,
    read_bert_config,
    read_label_fields,
    require_mask_activation,
    with_mask_head,
    write_bert_config,
    write_label_keys,
)
from regard.interop.huggingface.rope import (
    layer_windows,
    read_layer_types,
    read_rope_by_layer_type,
    write_rope_by_layer_type,
)
from regard.interop.huggingface.single_stack import (
    ACTIVATIONS,
    Weights,
    read_single_stack,
    write_single_stack,
)
from regard.interop.weight_mapping import (
    SWAPPED_HALVES,
    MappingRow,
    MappingTable,
    attention_rows,
    block_rows,
    weight_and_bias,
)
from regard.models.bert import TEXT_HEADS, BertConfig, Head

# -- ModernBERT -------------------------------------------------------------------------------------------------------

_MODERNBERT_ROWS = [
    MappingRow("embedding.tokens.weight", "embeddings.tok_embeddings.weight"),
    *weight_and_bias("embedding.norm", "embeddings.norm"),
    *weight_and_bias("norm", "final_norm"),
]
_MODERNBERT_LAYER = [
    *weight_and_bias("blocks.{i}.attention_norm", "layers.{i}.attn_norm"),
    *attention_rows("blocks.{i}.attention", "layers.{i}.attn", ("Wqkv", "Wo")),
    *weight_and_bias("blocks.{i}.feedforward_norm", "layers.{i}.mlp_norm"),
    *weight_and_bias("blocks.{i}.feedforward.fc1", "layers.{i}.mlp.Wi", SWAPPED_HALVES),
    *weight_and_bias("blocks.{i}.feedforward.fc2", "layers.{i}.mlp.Wo"),
]
_MODERNBERT_TABLE = MappingTable(
    _MODERNBERT_ROWS, {"blocks": _MODERNBERT_LAYER}, unused=("head.*", "decoder.*", "classifier.*"), prefix="model."
)
_MODERNBERT_TRANSFORM = [
    *weight_and_bias("mask_head.dense", "head.dense"),
    *weight_and_bias("mask_head.norm", "head.norm"),
]
_MODERNBERT_CLASSIFY = _MODERNBERT_TABLE.with_head(*_MODERNBERT_TRANSFORM, *CLASSIFIER)
_MODERNBERT_MASK = _MODERNBERT_TABLE.with_head(
    *_MODERNBERT_TRANSFORM,
    MappingRow("output.bias", "decoder.bias"),
    copies=(("decoder.weight", "model.embeddings.tok_embeddings.weight"),),
)
_MODERNBERT_TABLES: dict[Head, MappingTable] = {
    "none": _MODERNBERT_TABLE,
    "mask": _MODERNBERT_MASK,
    "classify": _MODERNBERT_CLASSIFY,
    "answer": _MODERNBERT_CLASSIFY,
    "tag": _MODERNBERT_CLASSIFY,
}

_MODERNBERT_ACTIVATIONS = {"gelu": "geglu_exact", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu"}
_MODERNBERT_KEYS = [
    ConfigKey("width", "hidden_size", 768),
    ConfigKey("heads", "num_attention_heads", 12),
    ConfigKey("layers", "num_hidden_layers", 22),
    ConfigKey("feedforward", "intermediate_size", 1152),
    ConfigKey("dropout", "mlp_dropout", 0.0),
    ConfigKey("norm_eps", "norm_eps", 1e-5),
    ConfigKey("activation", "hidden_activation", "gelu", _MODERNBERT_ACTIVATIONS),
    ConfigKey("max_len", "max_position_embeddings", 8192),
    ConfigKey("vocab", "vocab_size", 50368),
]
_MODERNBERT_POOLING = {"cls": "first", "mean": "mean"}
# Keys and values of the rotary base in layers with full and with local attention.
_MODERNBERT_ROPE_DEFAULTS = (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))


def _read_modernbert(settings: ForeignConfig, head: Head) -> BertConfig:
    fields = read_fields(_MODERNBERT_KEYS, settings)
    # The head has the activation of the gates.
    hidden = settings.get_choice("hidden_activation", ACTIVATIONS, "gelu")
    if head != "none" and settings.get_choice("classifier_activation", ACTIVATIONS, "gelu") != hidden:
        raise settings.unsupported("classifier_activation", "it must be the same as hidden_activation")
    if TEXT_HEADS[head].shares_embedding:
        settings.require("tie_word_embeddings", True)
        settings.require("decoder_bias", True)
    biases = settings.get_bool("attention_bias", False), settings.get_bool("mlp_bias", False)
    bias = {(True, True): "all", (True, False): "attention", (False, True): "feedforward", (False, False): "none"}
    period = settings.get_count("global_attn_every_n_layers", 3)
    windows = read_layer_types(
        settings,
        fields["layers"],
        settings.get_natural("sliding_window", settings.get_count("local_attention", 128) // 2),
        [bool(i % period) for i in range(fields["layers"])],
    )
    settings.require("rope_scaling", None)
    rope = read_rope_by_layer_type(settings, *_MODERNBERT_ROPE_DEFAULTS)
    if len(rope) > 2:
        raise settings.unsupported("rope_parameters", "expected rope_type default")
    return BertConfig(
        **fields,
        **rope,
        **read_label_fields(settings, head),
        norm="pre",
        norm_kind="layer" if settings.get_bool("norm_bias", False) else "layer_without_bias",
        first_norm=False,
        bias=bias[biases],  # type: ignore[arg-type]
        positions="rotary",
        sliding_windows=windows,
        segments=0,
        head=head,
        pooling=settings.get_choice("classifier_pooling", _MODERNBERT_POOLING, "cls")  # type: ignore[arg-type]
        if TEXT_HEADS[head].is_per_text
        else "first",
        head_transform=head not in ("none", "mask"),
        head_bias=settings.get_bool("classifier_bias", False),
    )


def _write_modernbert(config: BertConfig, head: Head) -> dict[str, Any]:
    windows = layer_windows(config) or (0,) * config.layers
    table = {
        "model_type": "modernbert",
        **write_fields(_MODERNBERT_KEYS, config),
        **write_rope_by_layer_type(config, *_MODERNBERT_ROPE_DEFAULTS),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "local_attention": 2 * max(windows) or 128,
        "attention_bias": config.bias in ("all", "attention"),
        "mlp_bias": config.bias in ("all", "feedforward"),
        "norm_bias": config.norm_kind == "layer",
        "classifier_bias": config.head_bias,
        "classifier_activation": foreign_value(_MODERNBERT_ACTIVATIONS, config.activation),
        "classifier_pooling": foreign_value(_MODERNBERT_POOLING, config.pooling),
        **write_label_keys(config, head),
    }
    # Versions before 5 know a period only.
    period = next((n for n in range(1, config.layers + 1) if _is_period(n, windows)), None)
    return table | ({} if period is None else {"global_attn_every_n_layers": period})


def _is_period(n: int, windows: tuple[int, ...]) -> bool:
    """Whether every n-th layer from the first one, and no other, has full attention."""
    return all((window == 0) == (i % n == 0) for i, window in enumerate(windows))


MODERNBERT_CLASSES = encoder_classes("ModernBert", _read_modernbert, _write_modernbert, _MODERNBERT_TABLES)

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
    return table | MASK_ACTIVATION.get(head, {})


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
    if TEXT_HEADS[head].shares_embedding:
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
    return replace(config, pooler=pooler if TEXT_HEADS[head].is_per_text else "none")


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


# -- all classes ------------------------------------------------------------------------------------------------------

# Of several matching classes, the one that a model was imported from is written, or else the first.
_WRITTEN_CLASSES = {**BERT_LIKE_CLASSES, **RELATIVE_CLASSES, **MODERNBERT_CLASSES}
WRITTEN_ENCODERS = {name: written for name, written in _WRITTEN_CLASSES.items() if not name.startswith("Electra")}
ENCODER_CLASSES = dict(_WRITTEN_CLASSES)
# Their second head (next sentence or sentence order) is left out.
ENCODER_CLASSES |= {f"{name}ForPreTraining": ENCODER_CLASSES[f"{name}ForMaskedLM"] for name in ("Bert", "Albert")}
# The head that detects replaced tokens is left out.
ENCODER_CLASSES["ElectraForPreTraining"] = ENCODER_CLASSES["ElectraModel"]
# The same as RoBERTa, with other tokenizers.
ENCODER_CLASSES |= {
    name.replace("Roberta", other): foreign_class
    for other in ("XLMRoberta", "Camembert")
    for name, foreign_class in ENCODER_CLASSES.items()
    if name.startswith("Roberta")
}


def read_encoder_model(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> tuple[BertConfig, SpecialTokens, Weights]:
    """Read a model of the class `name`: config, special ids and weights.

    `table` is config.json, `tokens` are the special ids of the tokenizer by role.
    """
    config, weights = read_single_stack(ENCODER_CLASSES[name], ForeignConfig(table, origin), tensors)
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


def write_encoder_model(
    config: BertConfig, special: SpecialTokens, weights: Mapping[str, Tensor], preferred: str = ""
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json (empty) and the tensors of the matching class; an error if none matches.

    Classes of ELECTRA are written only if `preferred`, the class that the model was imported from, is one of them.
    """
    classes = _WRITTEN_CLASSES if preferred.startswith("Electra") else WRITTEN_ENCODERS
    name, table, tensors = write_single_stack(classes, config, weights, preferred)
    if table.setdefault("pad_token_id", special.pad) != special.pad:
        raise RegardError(
            f"{name}: position_offset = {config.position_offset} must be one more than the padding id ({special.pad}).",
            "Train with supported settings to export the model.",
        )
    ids = {"bos_token_id": special.begin, "eos_token_id": special.end}
    return {"architectures": [name]} | table | ids, {}, tensors
