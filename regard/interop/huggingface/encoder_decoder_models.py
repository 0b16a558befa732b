"""BART, Marian, T5, mT5 and similar encoder-decoders of transformers: mapping tables and configs in both directions.

The classes derived from BART differ only in what `BART_VARIANTS` lists. The tensors decide which embeddings are
shared: an equal tensor under another name is the same embedding.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.interop.foreign_config import (
    ConfigKey,
    ForeignConfig,
    describe_unsupported,
    foreign_value,
    read_fields,
    replace_defaults,
    unsupported_fields,
    write_fields,
)
from regard.interop.huggingface.single_stack import ACTIVATIONS, GATED_ACTIVATIONS, Weights
from regard.interop.weight_mapping import (
    Conversion,
    MappingRow,
    MappingTable,
    block_rows,
    parameter_shapes,
    read_model_weights,
    weight_and_bias,
    write_weights,
)
from regard.layers.blocks import NormPlacement
from regard.layers.positions import Sinusoidal
from regard.models.transformer import TransformerConfig


class BartVariant(NamedTuple):
    """Properties of a BART-like class that are in its code instead of its config."""

    model_type: str
    norm: NormPlacement
    embedding_norm: bool
    positions: Literal["learned", "sinusoidal_halves"]
    offset: int
    """unused rows at the start of the position table"""


BART_VARIANTS = {
    "BartForConditionalGeneration": BartVariant("bart", "post", True, "learned", 2),
    "MBartForConditionalGeneration": BartVariant("mbart", "pre", True, "learned", 2),
    "PegasusForConditionalGeneration": BartVariant("pegasus", "pre", False, "sinusoidal_halves", 0),
    "BlenderbotForConditionalGeneration": BartVariant("blenderbot", "pre", False, "learned", 0),
    "MarianMTModel": BartVariant("marian", "post", False, "sinusoidal_halves", 0),
    # NLLB. Its sinusoids differ from those of Regard, which reads them as learned positions.
    "M2M100ForConditionalGeneration": BartVariant("m2m_100", "pre", False, "learned", 0),
}
M2M100 = "M2M100ForConditionalGeneration"
T5 = "T5ForConditionalGeneration"
# Computes what T5 1.1 does; its config has other defaults and does not scale the input of the output layer.
MT5 = "MT5ForConditionalGeneration"
# Saved without its output layer, which is tied to the embedding, and with shorter names.
BARE_CLASSES = {"BartModel": "BartForConditionalGeneration"}
ENCODER_DECODER_CLASSES = (*BART_VARIANTS, *BARE_CLASSES, T5, MT5)


# -- mapping tables ---------------------------------------------------------------------------------------------------

FLATTENED = Conversion(lambda foreign: [foreign[0].flatten()], lambda native: [native[0][None]])
# One tensor of Regard is stored as three equal foreign tensors.
THREE_COPIES = Conversion(lambda foreign: foreign[:1], lambda native: [native[0].clone() for _ in range(3)])

_SHARED, _OUTPUT, _OUTPUT_BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_SINUSOIDS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


# No class has all of these; rows of parameters that a model does not have are skipped.
_BART_ROWS = [
    MappingRow("source_embedding.positions.weight", "model.encoder.embed_positions.weight"),
    MappingRow("target_embedding.positions.weight", "model.decoder.embed_positions.weight"),
    *weight_and_bias("source_embedding.norm", "model.encoder.layernorm_embedding"),
    *weight_and_bias("target_embedding.norm", "model.decoder.layernorm_embedding"),
    *weight_and_bias("encoder_norm", "model.encoder.layer_norm"),
    *weight_and_bias("decoder_norm", "model.decoder.layer_norm"),
    MappingRow("output.weight", _OUTPUT),
    MappingRow("output.bias", _OUTPUT_BIAS, FLATTENED),
]
_SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
_BART_LAYERS = {
    "encoder": block_rows(
        "model.encoder.layers.{i}",
        attention=_SELF_ATTENTION,
        feedforward=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        block="encoder.{i}",
    ),
    "decoder": block_rows(
        "model.decoder.layers.{i}",
        attention=_SELF_ATTENTION,
        cross=("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj"),
        feedforward=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        block="decoder.{i}",
    ),
}
_BART_SHARED = MappingTable([MappingRow("source_embedding.tokens.weight", _SHARED), *_BART_ROWS], _BART_LAYERS)
# If the output layer is not tied to the embedding, transformers ties no embedding, and the copies are saved too.
_BART_SHARED_UNTIED = _BART_SHARED._replace(
    rows=[MappingRow("source_embedding.tokens.weight", (_SHARED, _SOURCE, _TARGET), THREE_COPIES), *_BART_ROWS]
)
_BART_SEPARATE = _BART_SHARED._replace(
    rows=[
        MappingRow("source_embedding.tokens.weight", _SOURCE),
        MappingRow("target_embedding.tokens.weight", _TARGET),
        *_BART_ROWS,
    ]
)


def _t5_layers(is_gated: bool) -> dict[str, Sequence[MappingRow]]:
    def attention(layer: str) -> list[str]:
        return [f"{layer}.{name}" for name in "qkvo"]

    def feedforward(layer: str) -> tuple[str | tuple[str, str], str]:
        inner = (f"{layer}.wi_1", f"{layer}.wi_0") if is_gated else f"{layer}.wi"
        return inner, f"{layer}.wo"

    return {
        "encoder": block_rows(
            "encoder.block.{i}.layer",
            attention=attention("0.SelfAttention"),
            feedforward=feedforward("1.DenseReluDense"),
            norms=("0.layer_norm", "1.layer_norm"),
            block="encoder.{i}",
        ),
        "decoder": block_rows(
            "decoder.block.{i}.layer",
            attention=attention("0.SelfAttention"),
            cross=attention("1.EncDecAttention"),
            feedforward=feedforward("2.DenseReluDense"),
            norms=("0.layer_norm", "1.layer_norm", "2.layer_norm"),
            block="decoder.{i}",
        ),
    }


_T5_ROWS = [
    MappingRow("source_embedding.tokens.weight", "shared.weight"),
    # The first block of each stack holds the position bias that all its blocks use.
    MappingRow("encoder_bias.table.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    MappingRow("decoder_bias.table.weight", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    MappingRow("encoder_norm.weight", "encoder.final_layer_norm.weight"),
    MappingRow("decoder_norm.weight", "decoder.final_layer_norm.weight"),
    MappingRow("output.weight", _OUTPUT),
]
# Early files have a position bias for the cross-attention, which transformers does not use.
_T5_IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_T5_COPIES = (("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight"))
_T5_PLAIN = MappingTable(_T5_ROWS, _t5_layers(is_gated=False), _T5_IGNORED, copies=_T5_COPIES)
_T5_GATED = _T5_PLAIN._replace(layers=_t5_layers(is_gated=True))


def mapping_table(config: TransformerConfig) -> MappingTable:
    """The mapping table of a model whose config a class supports."""
    if config.positions == "relative":
        return _T5_GATED if config.activation in GATED_ACTIVATIONS.values() else _T5_PLAIN
    if not config.shared_vocab:
        return _BART_SEPARATE
    return _BART_SHARED if config.tied else _BART_SHARED_UNTIED


def _counts(config: TransformerConfig) -> dict[str, int]:
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


_BART_KEYS = [
    ConfigKey("width", "d_model", 1024),
    ConfigKey("encoder_layers", "encoder_layers", 12),
    ConfigKey("decoder_layers", "decoder_layers", 12),
    ConfigKey("dropout", "dropout", 0.1),
    ConfigKey("activation", "activation_function", "gelu", ACTIVATIONS),
    ConfigKey("embedding_scale", "scale_embedding", False),
    ConfigKey("max_len", "max_position_embeddings", 1024),
    ConfigKey("source_vocab", "vocab_size", 50265),
]
_M2M100_KEYS = replace_defaults(_BART_KEYS, activation="relu", embedding_scale=True, source_vocab=128112)
_T5_KEYS = [
    ConfigKey("width", "d_model", 512),
    ConfigKey("heads", "num_heads", 8),
    ConfigKey("head_width", "d_kv", 64),
    ConfigKey("feedforward", "d_ff", 2048),
    ConfigKey("encoder_layers", "num_layers", 6),
    ConfigKey("dropout", "dropout_rate", 0.1),
    ConfigKey("norm_eps", "layer_norm_epsilon", 1e-6),
    ConfigKey("relative_buckets", "relative_attention_num_buckets", 32),
    ConfigKey("relative_distance", "relative_attention_max_distance", 128),
    ConfigKey("max_len", "n_positions", 512),
    ConfigKey("source_vocab", "vocab_size", 32128),
]
_MT5_KEYS = replace_defaults(_T5_KEYS, source_vocab=250112, heads=6, feedforward=1024, encoder_layers=8)


# -- import -----------------------------------------------------------------------------------------------------------


def read_encoder_decoder(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> tuple[TransformerConfig, SpecialTokens, Weights]:
    """Read a model of the class `name`: config, special ids and weights.

    `table` is config.json, updated by generation_config.json; `tokens` are the special ids by role.
    """
    settings, tensors = ForeignConfig(table, origin), dict(tensors)
    settings.require("tie_encoder_decoder", False)
    settings.require("is_decoder", False)
    settings.require("is_encoder_decoder", True)
    settings.require("pruned_heads", {})
    if name in BARE_CLASSES:
        tensors = {f"model.{key}": tensor for key, tensor in tensors.items()}
    name = BARE_CLASSES.get(name, name)
    if name in (T5, MT5):
        config = _read_t5(name, settings, tensors)
    else:
        config = _read_bart(BART_VARIANTS[name], settings, tensors)
    weights = read_model_weights(config, mapping_table(config), _counts(config), tensors, origin)
    return config, _read_special(name, settings, tokens), weights


def _read_bart(variant: BartVariant, settings: ForeignConfig, tensors: Weights) -> TransformerConfig:
    settings.require("normalize_before", variant.norm == "pre")
    settings.require("normalize_embedding", variant.embedding_norm)
    _require_output(settings, tensors)
    shared, tied = _bart_embeddings(settings, tensors)
    is_large = variant.model_type == "blenderbot"  # its defaults are larger
    is_m2m100 = variant.model_type == "m2m_100"
    fields = read_fields(_M2M100_KEYS if is_m2m100 else _BART_KEYS, settings)
    vocab = fields["source_vocab"]
    if variant.positions == "sinusoidal_halves":
        _drop_sinusoids(tensors, fields["width"], settings.origin)
    if is_m2m100:
        table = _m2m100_positions(fields["width"], fields["max_len"], settings.get_natural("pad_token_id", 1))
        tensors |= {name: table.clone() for name in _SINUSOIDS}
    return TransformerConfig(
        **fields,
        heads=_common_value(settings, "encoder_attention_heads", "decoder_attention_heads", 32 if is_large else 16),
        feedforward=_common_value(settings, "encoder_ffn_dim", "decoder_ffn_dim", 10240 if is_large else 4096),
        norm=variant.norm,
        positions=variant.positions,
        position_offset=variant.offset,
        embedding_norm=variant.embedding_norm,
        output_bias=_OUTPUT_BIAS in tensors,
        tied=tied,
        target_vocab=vocab if shared else settings.get_count("decoder_vocab_size", vocab),
        shared_vocab=shared,
    )


def _read_t5(name: str, settings: ForeignConfig, tensors: Weights) -> TransformerConfig:
    _require_output(settings, tensors)
    is_gated, function = _t5_activation(settings, "gated-gelu" if name == MT5 else "relu")
    fields = read_fields(_MT5_KEYS if name == MT5 else _T5_KEYS, settings)
    # T5 is tied and scales the input of its output layer, T5 1.1 does neither: older configs have one key for both.
    is_scaled = settings.get_bool("scale_decoder_outputs", settings.get_bool("tie_word_embeddings", True))
    return TransformerConfig(
        **fields,
        decoder_layers=settings.get_count("num_decoder_layers", fields["encoder_layers"]),
        norm="pre",
        norm_kind="rms",
        activation=(GATED_ACTIVATIONS if is_gated else ACTIVATIONS)[function],  # type: ignore[arg-type]
        positions="relative",
        encoder_score="dot",
        decoder_score="dot",
        cross_score="dot",
        bias=False,
        embedding_scale=False,
        output_scale=name == T5 and is_scaled,
        tied=_drop_copy(tensors, _OUTPUT, "shared.weight"),
        target_vocab=fields["source_vocab"],
        shared_vocab=True,
    )


def _t5_activation(settings: ForeignConfig, default: str) -> tuple[bool, str]:
    """Whether the feed-forward layer is gated, and its activation: from "gated-gelu", or from newer separate keys."""
    key, value = "feed_forward_proj", settings.table.get("feed_forward_proj") or default
    gate, _, function = str(value).rpartition("-")
    if value == "gated-gelu":
        function = "gelu_new"
    if settings.table.get("dense_act_fn") is not None:
        key, function = "dense_act_fn", settings.table["dense_act_fn"]
    supported = GATED_ACTIVATIONS if gate == "gated" else ACTIVATIONS
    if gate not in ("", "gated") or function not in supported:
        description = "gated activation" if gate == "gated" else "activation"
        raise settings.unsupported(key, f"expected the {description} to be one of {', '.join(supported)}")
    return gate == "gated", function


def _read_special(name: str, settings: ForeignConfig, tokens: Mapping[str, int]) -> SpecialTokens:
    extra = {key: settings.table.get(f"{key}_token_id") for key in ("decoder_start", "forced_bos")}
    ids = dict(tokens) | {key: index for key, index in extra.items() if type(index) is int}
    if name in (T5, MT5):  # by default its decoder starts with the padding
        ids = {"pad": 0, "decoder_start": ids.get("pad", 0)} | ids
    for key in ("pad", "eos", "decoder_start"):
        if key not in ids:
            raise RegardError(f"{settings.origin}: {key}_token_id is missing.", f"Add {key}_token_id to the file.")
    forced = ids.get("forced_bos")
    if forced is None and settings.get_bool("force_bos_token_to_be_generated", False):  # the key of early BART configs
        forced = ids.get("bos")
    if name == M2M100 and forced is None:
        raise RegardError(
            f"{settings.origin}: forced_bos_token_id is missing; it is the token of the target language.",
            "Add forced_bos_token_id to generation_config.json.",
        )
    return SpecialTokens(
        pad=ids["pad"],
        unk=ids.get("unk", ids["pad"]),
        sos=ids["decoder_start"],
        eos=ids["eos"],
        begin=ids.get("begin"),
        end=ids.get("end"),
        forced=forced,
    )


def _common_value(settings: ForeignConfig, key: str, other: str, default: int) -> int:
    """An integer that must be the same for two keys."""
    value = settings.get_count(key, default)
    if settings.get_count(other, default) != value:
        raise settings.replace({other: settings.get(other, default)}).unsupported(
            other, f"encoder and decoder must agree, and {key} = {value}"
        )
    return value


def _require_output(settings: ForeignConfig, tensors: Weights) -> None:
    """Raise an error if the output layer is missing, and is not the embedding."""
    has_head = settings.get("architectures") not in [[name] for name in BARE_CLASSES]
    if has_head and _OUTPUT not in tensors and not settings.get_bool("tie_word_embeddings", True):
        raise settings.unsupported("tie_word_embeddings", f"{_OUTPUT} is missing")


def _bart_embeddings(settings: ForeignConfig, tensors: Weights) -> tuple[bool, bool]:
    """Whether encoder and decoder share an embedding, and whether the output is tied to it; copies are removed."""
    if _SHARED not in tensors and _SOURCE in tensors and _TARGET in tensors:
        return False, _drop_copy(tensors, _OUTPUT, _TARGET)
    if not (_drop_copy(tensors, _SOURCE, _SHARED) and _drop_copy(tensors, _TARGET, _SHARED)):
        raise settings.unsupported(
            "tie_word_embeddings", "encoder and decoder have embeddings that differ from the shared one"
        )
    tied = _drop_copy(tensors, _OUTPUT, _SHARED)
    if not tied and _SHARED in tensors:
        tensors |= {_SOURCE: tensors[_SHARED], _TARGET: tensors[_SHARED]}
    return True, tied


def _drop_copy(tensors: Weights, copy: str, original: str) -> bool:
    """Remove `copy` if it equals `original`; whether it is absent now."""
    if copy in tensors and not (original in tensors and torch.equal(tensors[copy], tensors[original])):
        return False
    tensors.pop(copy, None)
    return True


def _drop_sinusoids(tensors: Weights, width: int, origin: str) -> None:
    """Remove tables of sinusoids, which Regard computes; other values under their names are an error."""
    for name in _SINUSOIDS:
        table = tensors.pop(name, None)
        if table is None:
            continue
        expected = Sinusoidal(width, len(table), split_halves=True).table
        # The tolerance allows for files in float16 and bfloat16, of which the latter has eight bits.
        if table.shape != expected.shape or not torch.allclose(table.float(), expected, atol=4e-3):
            raise RegardError(f"{origin}: {name} does not hold sinusoids.", "Such a model cannot be imported.")


def _m2m100_positions(width: int, length: int, pad: int) -> Tensor:
    """The sinusoids of M2M100: all sines, then all cosines. The last rate is 1/10000, the first position pad + 1."""
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(pad + 1, pad + 1 + length).float()[:, None] * rates
    return torch.cat((angles.sin(), angles.cos(), torch.zeros(length, width % 2)), dim=1)


# -- export -----------------------------------------------------------------------------------------------------------


def class_for(config: TransformerConfig) -> str:
    """The class of transformers that computes the same as a model of this config; an error if there is none.

    >>> class_for(TransformerConfig(norm="post", shared_vocab=True))
    'MarianMTModel'
    """
    name, fields = nearest_class(config)
    if fields:
        raise RegardError(
            f"No class of transformers computes what this model does; the nearest, {name}, does not support "
            f"{describe_unsupported(config, fields)}.",
            "Export to onnx, or train with --for huggingface.",
        )
    return name


def nearest_class(
    config: TransformerConfig, names: Sequence[str] = (*BART_VARIANTS, T5)
) -> tuple[str, dict[str, tuple]]:
    """The class with the fewest unsupported fields, and those fields with the values that it supports.

    >>> nearest_class(TransformerConfig(positions="rotary", shared_vocab=True))
    ('PegasusForConditionalGeneration', {'positions': ('sinusoidal', 'sinusoidal_halves')})
    """
    fields = {name: unsupported_fields(config, _supported_values(name, config)) for name in names}
    name = min(fields, key=lambda candidate: len(fields[candidate]))
    return name, fields[name]


def _supported_values(name: str, config: TransformerConfig) -> dict[str, tuple]:
    """The values that a class supports, by field; all values of the other fields are supported."""
    scores = ("encoder_score", "decoder_score", "cross_score")
    values: dict[str, tuple] = {"kv_heads": (0, config.heads), "qk_norm": (False,)}
    if name == T5:
        values |= {"norm": ("pre",), "norm_kind": ("rms",), "bias": (False,)}
        values |= {"activation": (*dict.fromkeys((*ACTIVATIONS.values(), *GATED_ACTIVATIONS.values())),)}
        values |= {"positions": ("relative",), **dict.fromkeys(scores, ("dot",))}
        values |= {"embedding_scale": (False,), "embedding_norm": (False,), "output_bias": (False,)}
        values |= {"shared_vocab": (True,)}
    else:
        variant = BART_VARIANTS[name]
        values |= {"norm": (variant.norm,), "norm_kind": ("layer",), "norm_eps": (1e-5,)}
        values |= {"activation": (*dict.fromkeys(ACTIVATIONS.values()),)}
        # A table of learned positions can also hold sinusoids.
        positions = ("sinusoidal", "sinusoidal_halves", *(["learned"] if variant.positions == "learned" else []))
        values |= {"positions": positions, **dict.fromkeys(scores, ("scaled_dot",))}
        values |= {"head_width": (0, config.width // config.heads)}
        values |= {"embedding_norm": (variant.embedding_norm,), "output_scale": (False,)}
        values |= {"shared_vocab": (True, False) if variant.model_type == "marian" else (True,)}
    return values


def write_encoder_decoder(
    config: TransformerConfig, special: SpecialTokens, weights: Mapping[str, Tensor], preferred: str = ""
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json and the tensors of the matching class; an error if no class matches.

    Of several classes that compute the same, mT5 and M2M100 are written only if they are `preferred`.
    """
    name = class_for(config)
    if name == T5 and preferred == MT5 and not config.output_scale:
        name = MT5
    if preferred == M2M100 and _is_m2m100(config, special, weights):
        name = M2M100
    common = {
        "architectures": [name],
        "is_encoder_decoder": True,
        "pad_token_id": special.pad,
        "eos_token_id": special.eos,
        "decoder_start_token_id": special.sos,
        "forced_bos_token_id": special.forced,
        "forced_eos_token_id": special.eos,
    }
    # Tokens that Regard never generates.
    excluded = sorted({special.pad, special.sos} - {special.eos})
    generation = {key: common[key] for key in common if key.endswith("token_id")}
    generation |= {"max_length": config.max_len + 1, "num_beams": 5, "early_stopping": True, "length_penalty": 1.0}
    generation |= {"bad_words_ids": [[token] for token in excluded]}
    if name in (T5, MT5):
        table = common | _write_t5_config(name, config)
        return table, generation, write_weights(mapping_table(config), _counts(config), weights)
    variant = BART_VARIANTS[name]
    adapted = dict(weights)
    if name != M2M100:
        config, adapted = conform(variant, config, adapted)
    tensors = write_weights(mapping_table(config), _counts(config), adapted)
    if name == M2M100:  # it computes them
        tensors = {key: tensor for key, tensor in tensors.items() if key not in _SINUSOIDS}
    if variant.model_type == "pegasus":  # it expects them in the file
        tensors |= {name: Sinusoidal(config.width, config.max_len, split_halves=True).table for name in _SINUSOIDS}
    begin = special.begin if special.begin is not None else special.sos
    return common | {"bos_token_id": begin} | _write_bart_config(variant, config), generation, tensors


def _is_m2m100(config: TransformerConfig, special: SpecialTokens, weights: Mapping[str, Tensor]) -> bool:
    """Whether M2M100 computes the same: its sinusoids as learned positions, no output bias, a forced first token."""
    if nearest_class(config, [M2M100])[1] or config.positions != "learned" or config.position_offset:
        return False
    table = _m2m100_positions(config.width, config.max_len, special.pad)
    positions = [weights[f"{side}_embedding.positions.weight"] for side in ("source", "target")]
    has_sinusoids = all(torch.equal(tensor, table) for tensor in positions)
    return has_sinusoids and config.bias and not config.output_bias and special.forced is not None


def _write_bart_config(variant: BartVariant, config: TransformerConfig) -> dict[str, Any]:
    table: dict[str, Any] = {
        "model_type": variant.model_type,
        **write_fields(_BART_KEYS, config),
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.feedforward,
        "decoder_ffn_dim": config.feedforward,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "tie_word_embeddings": config.tied,
    }
    if variant.model_type == "marian":
        table |= {"decoder_vocab_size": config.target_vocab, "share_encoder_decoder_embeddings": config.shared_vocab}
    if variant.model_type == "blenderbot":
        table |= {"encoder_no_repeat_ngram_size": 0}
    if variant.model_type == "m2m_100":
        table |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    return table


def _write_t5_config(name: str, config: TransformerConfig) -> dict[str, Any]:
    gated_names = {"geglu": "gated-gelu", "swiglu": "gated-silu"}
    ties = {"scale_decoder_outputs": config.output_scale, "tie_word_embeddings": config.output_scale}
    return {
        "model_type": "mt5" if name == MT5 else "t5",
        **write_fields(_T5_KEYS, config),
        "d_kv": config.head_width or config.width // config.heads,
        "num_decoder_layers": config.decoder_layers,
        "feed_forward_proj": gated_names.get(config.activation) or foreign_value(ACTIVATIONS, config.activation),
        **({"tie_word_embeddings": config.tied} if name == MT5 else ties),
    }


def conform(variant: BartVariant, config: TransformerConfig, weights: Weights) -> tuple[TransformerConfig, Weights]:
    """Adapt config and weights to what the class supports, without changing the function.

    Sinusoids are reordered, or written as a table of learned positions; missing biases become zeros; the position table
    gets the unused rows of the class.
    """
    if variant.positions == "sinusoidal_halves":
        config, weights = _sines_first(config, weights)
    elif config.positions != "learned":
        table = Sinusoidal(config.width, config.max_len, split_halves=config.positions == "sinusoidal_halves").table
        table = table[: config.max_len]
        weights |= {f"{side}_embedding.positions.weight": table.clone() for side in ("source", "target")}
        config = dataclasses.replace(config, positions="learned", position_offset=0)
    if variant.positions == "learned" and config.position_offset != variant.offset:
        for side in ("source", "target"):
            used = weights[f"{side}_embedding.positions.weight"][config.position_offset :]
            unused = used.new_zeros(variant.offset, config.width)
            weights[f"{side}_embedding.positions.weight"] = torch.cat((unused, used))
    full = dataclasses.replace(config, position_offset=variant.offset, bias=True, output_bias=True)
    missing = parameter_shapes(full).items() - {name: tensor.shape for name, tensor in weights.items()}.items()
    weights |= {name: torch.zeros(shape) for name, shape in missing if name.endswith("bias")}
    return full, weights


def _sines_first(config: TransformerConfig, weights: Weights) -> tuple[TransformerConfig, Weights]:
    """Permute the channels of a model so that all sines come before all cosines.

    Sums over channels do not depend on their order, so the permutation is applied to everything that produces or
    consumes channels: embeddings, norms, and the input and output projections of the sublayers.
    """
    if config.positions == "sinusoidal_halves":
        return config, weights
    order = torch.cat((torch.arange(0, config.width, 2), torch.arange(1, config.width, 2)))
    inputs = (".tokens.weight", ".query.weight", ".key_value.weight", ".inner.weight", "output.weight")
    inner_biases = (".query.bias", ".key_value.bias", ".inner.bias", "output.bias")
    permuted = {}
    for name, tensor in weights.items():
        if name.endswith(inputs):
            permuted[name] = tensor[:, order]
        else:
            permuted[name] = tensor if name.endswith(inner_biases) else tensor[order]
    return dataclasses.replace(config, positions="sinusoidal_halves"), permuted
