"""BART, Marian, T5, mT5 and similar encoder-decoders of transformers: import, export, and the class of a config."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.interop.foreign_config import ForeignConfig, describe_unsupported, unsupported_fields
from regard.interop.huggingface.bart import (
    BART_SEPARATE,
    BART_SHARED,
    BART_SHARED_UNTIED,
    BART_VARIANTS,
    SINUSOIDS,
    conform,
    read_bart_config,
    write_bart_config,
)
from regard.interop.huggingface.m2m100_sinusoids import M2M100, is_m2m100
from regard.interop.huggingface.single_stack import ACTIVATIONS, GATED_ACTIVATIONS, Weights
from regard.interop.huggingface.t5 import (
    MT5,
    T5,
    T5_GATED,
    T5_PLAIN,
    read_t5_config,
    write_t5_config,
)
from regard.interop.huggingface.tied_embeddings import BARE_CLASSES
from regard.interop.weight_mapping import MappingTable, read_model_weights, write_weights
from regard.layers.positions import Sinusoidal
from regard.models.transformer import TransformerConfig

MBART = "MBartForConditionalGeneration"
ENCODER_DECODER_CLASSES = (*BART_VARIANTS, *BARE_CLASSES, T5, MT5)


def mapping_table(config: TransformerConfig) -> MappingTable:
    """The mapping table of a model whose config a class supports."""
    if config.positions == "relative":
        return T5_GATED if config.activation in GATED_ACTIVATIONS.values() else T5_PLAIN
    if not config.shared_vocab:
        return BART_SEPARATE
    return BART_SHARED if config.tied else BART_SHARED_UNTIED


def _counts(config: TransformerConfig) -> dict[str, int]:
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


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
        config = read_t5_config(name, settings, tensors)
    else:
        config = read_bart_config(BART_VARIANTS[name], settings, tensors)
    weights = read_model_weights(config, mapping_table(config), _counts(config), tensors, origin)
    return config, _read_special(name, settings, tokens), weights


def _read_special(name: str, settings: ForeignConfig, tokens: Mapping[str, int]) -> SpecialTokens:
    extra = {key: settings.table.get(f"{key}_token_id") for key in ("decoder_start", "forced_bos")}
    ids = dict(tokens) | {key: index for key, index in extra.items() if type(index) is int}
    if name in (T5, MT5):  # by default its decoder starts with the padding
        ids = {"pad": 0, "decoder_start": ids.get("pad", 0)} | ids
    if name == MBART and "eos" in ids:  # without start token, the decoder starts with the language of the translation
        ids = {"decoder_start": ids["eos"]} | ids
    for key in ("pad", "eos", "decoder_start"):
        if key not in ids:
            raise RegardError(f"{settings.origin}: {key}_token_id is missing.", f"Add {key}_token_id to the file.")
    forced = ids.get("forced_bos")
    if forced is None and settings.get_bool("force_bos_token_to_be_generated", False):  # the key of early BART configs
        forced = ids.get("bos")
    return SpecialTokens(
        pad=ids["pad"],
        unk=ids.get("unk", ids["pad"]),
        sos=ids["decoder_start"],
        eos=ids["eos"],
        begin=ids.get("begin"),
        end=ids.get("end"),
        forced=forced,
    )


# -- export -----------------------------------------------------------------------------------------------------------


def class_for(config: TransformerConfig) -> str:
    """The class of transformers that computes the same as a model of this config; an error if there is none.

    >>> class_for(TransformerConfig(norm="post", shared_vocab=True))
    'MarianMTModel'
    """
    name, fields = nearest_translator(config)
    if fields:
        raise RegardError(
            f"No class of transformers computes what this model does; the nearest, {name}, does not support "
            f"{describe_unsupported(config, fields)}.",
            "Export to onnx, or train with --for huggingface.",
        )
    return name


def nearest_translator(
    config: TransformerConfig, names: Sequence[str] = (*BART_VARIANTS, T5)
) -> tuple[str, dict[str, tuple]]:
    """The class with the fewest unsupported fields, and those fields with the values that it supports.

    >>> nearest_translator(TransformerConfig(positions="rotary", shared_vocab=True))
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
    if preferred == M2M100 and is_m2m100(config, special.pad, weights) and not nearest_translator(config, [M2M100])[1]:
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
        table = common | write_t5_config(name, config)
        return table, generation, write_weights(mapping_table(config), _counts(config), weights)
    variant = BART_VARIANTS[name]
    adapted = dict(weights)
    if name != M2M100:
        config, adapted = conform(variant, config, adapted)
    tensors = write_weights(mapping_table(config), _counts(config), adapted)
    if name == M2M100:  # it computes them
        tensors = {key: tensor for key, tensor in tensors.items() if key not in SINUSOIDS}
    if variant.model_type == "pegasus":  # it expects them in the file
        tensors |= {name: Sinusoidal(config.width, config.max_len, split_halves=True).table for name in SINUSOIDS}
    begin = special.begin if special.begin is not None else special.sos
    return common | {"bos_token_id": begin} | write_bart_config(variant, config), generation, tensors
