"""BART, Marian, mBART, M2M100 and similar classes of transformers: mapping tables and configs in both directions.

The classes differ only in what `BART_VARIANTS` lists. The tensors decide which embeddings are shared: an equal tensor
under another name is the same embedding.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, replace_defaults, write_fields
from regard.interop.huggingface.single_stack import ACTIVATIONS, Weights
from regard.interop.weight_mapping import (
    Conversion,
    MappingRow,
    MappingTable,
    block_rows,
    parameter_shapes,
    weight_and_bias,
)
from regard.layers.blocks import NormPlacement
from regard.layers.positions import Sinusoidal
from regard.models.transformer import TransformerConfig

OUTPUT = "lm_head.weight"
# Saved without its output layer, which is tied to the embedding, and with shorter names.
BARE_CLASSES = {"BartModel": "BartForConditionalGeneration"}
M2M100 = "M2M100ForConditionalGeneration"


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
    M2M100: BartVariant("m2m_100", "pre", False, "learned", 0),
}


# -- mapping tables ---------------------------------------------------------------------------------------------------

FLATTENED = Conversion(lambda foreign: [foreign[0].flatten()], lambda native: [native[0][None]])
# One tensor of Regard is stored as three equal foreign tensors.
THREE_COPIES = Conversion(lambda foreign: foreign[:1], lambda native: [native[0].clone() for _ in range(3)])

_SHARED, _OUTPUT_BIAS = "model.shared.weight", "final_logits_bias"
_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
SINUSOIDS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


# No class has all of these; rows of parameters that a model does not have are skipped.
_BART_ROWS = [
    MappingRow("source_embedding.positions.weight", "model.encoder.embed_positions.weight"),
    MappingRow("target_embedding.positions.weight", "model.decoder.embed_positions.weight"),
    *weight_and_bias("source_embedding.norm", "model.encoder.layernorm_embedding"),
    *weight_and_bias("target_embedding.norm", "model.decoder.layernorm_embedding"),
    *weight_and_bias("encoder_norm", "model.encoder.layer_norm"),
    *weight_and_bias("decoder_norm", "model.decoder.layer_norm"),
    MappingRow("output.weight", OUTPUT),
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
BART_SHARED = MappingTable([MappingRow("source_embedding.tokens.weight", _SHARED), *_BART_ROWS], _BART_LAYERS)
# If the output layer is not tied to the embedding, transformers ties no embedding, and the copies are saved too.
BART_SHARED_UNTIED = BART_SHARED._replace(
    rows=[MappingRow("source_embedding.tokens.weight", (_SHARED, _SOURCE, _TARGET), THREE_COPIES), *_BART_ROWS]
)
BART_SEPARATE = BART_SHARED._replace(
    rows=[
        MappingRow("source_embedding.tokens.weight", _SOURCE),
        MappingRow("target_embedding.tokens.weight", _TARGET),
        *_BART_ROWS,
    ]
)


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
M2M100_KEYS = replace_defaults(_BART_KEYS, activation="relu", embedding_scale=True, source_vocab=128112)


# -- import -----------------------------------------------------------------------------------------------------------


def read_bart_config(variant: BartVariant, settings: ForeignConfig, tensors: Weights) -> TransformerConfig:
    settings.require("normalize_before", variant.norm == "pre")
    settings.require("normalize_embedding", variant.embedding_norm)
    require_output(settings, tensors)
    shared, tied = _bart_embeddings(settings, tensors)
    is_large = variant.model_type == "blenderbot"  # its defaults are larger
    is_m2m100 = variant.model_type == "m2m_100"
    fields = read_fields(M2M100_KEYS if is_m2m100 else _BART_KEYS, settings)
    vocab = fields["source_vocab"]
    if variant.positions == "sinusoidal_halves":
        _drop_sinusoids(tensors, fields["width"], settings.origin)
    if is_m2m100:
        table = m2m100_positions(fields["width"], fields["max_len"], settings.get_natural("pad_token_id", 1))
        tensors |= {name: table.clone() for name in SINUSOIDS}
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


def _common_value(settings: ForeignConfig, key: str, other: str, default: int) -> int:
    """An integer that must be the same for two keys."""
    value = settings.get_count(key, default)
    if settings.get_count(other, default) != value:
        raise settings.replace({other: settings.get(other, default)}).unsupported(
            other, f"encoder and decoder must agree, and {key} = {value}"
        )
    return value


def require_output(settings: ForeignConfig, tensors: Weights) -> None:
    """Raise an error if the output layer is missing, and is not the embedding."""
    has_head = settings.get("architectures") not in [[name] for name in BARE_CLASSES]
    if has_head and OUTPUT not in tensors and not settings.get_bool("tie_word_embeddings", True):
        raise settings.unsupported("tie_word_embeddings", f"{OUTPUT} is missing")


def drop_copy(tensors: Weights, copy: str, original: str) -> bool:
    """Remove `copy` if it equals `original`; whether it is absent now."""
    if copy in tensors and not (original in tensors and torch.equal(tensors[copy], tensors[original])):
        return False
    tensors.pop(copy, None)
    return True


def _bart_embeddings(settings: ForeignConfig, tensors: Weights) -> tuple[bool, bool]:
    """Whether encoder and decoder share an embedding, and whether the output is tied to it; copies are removed."""
    if _SHARED not in tensors and _SOURCE in tensors and _TARGET in tensors:
        return False, drop_copy(tensors, OUTPUT, _TARGET)
    if not (drop_copy(tensors, _SOURCE, _SHARED) and drop_copy(tensors, _TARGET, _SHARED)):
        raise settings.unsupported(
            "tie_word_embeddings", "encoder and decoder have embeddings that differ from the shared one"
        )
    tied = drop_copy(tensors, OUTPUT, _SHARED)
    if not tied and _SHARED in tensors:
        tensors |= {_SOURCE: tensors[_SHARED], _TARGET: tensors[_SHARED]}
    return True, tied


def m2m100_positions(width: int, length: int, pad: int) -> Tensor:
    """The sinusoids of M2M100: all sines, then all cosines. The last rate is 1/10000, the first position pad + 1."""
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(pad + 1, pad + 1 + length).float()[:, None] * rates
    return torch.cat((angles.sin(), angles.cos(), torch.zeros(length, width % 2)), dim=1)


def is_m2m100(config: TransformerConfig, pad: int, weights: Mapping[str, Tensor]) -> bool:
    """Whether M2M100 computes the same as a model of learned positions: they are its sinusoids, without output bias."""
    if config.positions != "learned" or config.position_offset or not config.bias or config.output_bias:
        return False
    table = m2m100_positions(config.width, config.max_len, pad)
    return all(torch.equal(weights[f"{side}_embedding.positions.weight"], table) for side in ("source", "target"))


def _drop_sinusoids(tensors: Weights, width: int, origin: str) -> None:
    """Remove tables of sinusoids, which Regard computes; other values under their names are an error."""
    for name in SINUSOIDS:
        table = tensors.pop(name, None)
        if table is None:
            continue
        expected = Sinusoidal(width, len(table), split_halves=True).table
        # The tolerance allows for files in float16 and bfloat16, of which the latter has eight bits.
        if table.shape != expected.shape or not torch.allclose(table.float(), expected, atol=4e-3):
            raise RegardError(f"{origin}: {name} does not hold sinusoids.", "Such a model cannot be imported.")


# -- export -----------------------------------------------------------------------------------------------------------


def write_bart_config(variant: BartVariant, config: TransformerConfig) -> dict[str, Any]:
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
    inputs = (".tokens.weight", ".query.weight", ".key_value.weight", ".fc1.weight", "output.weight")
    fc1_biases = (".query.bias", ".key_value.bias", ".fc1.bias", "output.bias")
    permuted = {}
    for name, tensor in weights.items():
        if name.endswith(inputs):
            permuted[name] = tensor[:, order]
        else:
            permuted[name] = tensor if name.endswith(fc1_biases) else tensor[order]
    return dataclasses.replace(config, positions="sinusoidal_halves"), permuted
