"""BART, Marian, T5 and their relatives: what their configs say in our words and back, and the tables of their names.

The five classes of BART's making differ only in what `KINDS` lists. Which of the embeddings are one is read off the
tensors: a copy under another name is the same embedding, another tensor is another one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.interop.foreign_config import Key, Settings, in_words, misfits, read_keys, their_name, write_keys
from regard.interop.huggingface.single_stack import ACTIVATIONS, GATES, Weights
from regard.interop.weight_mapping import Change, Row, Table, block_rows, both, read_model, shapes_of, write_weights
from regard.layers.blocks import NormPlacement
from regard.layers.positions import Sinusoidal
from regard.models.transformer import TransformerConfig


class BartKind(NamedTuple):
    """What a class of BART's making has in its code rather than in its config."""

    model_type: str
    norm: NormPlacement
    embedding_norm: bool
    positions: Literal["learned", "sinusoidal_halves"]
    offset: int
    """unused rows of the table of positions"""


KINDS = {
    "BartForConditionalGeneration": BartKind("bart", "post", True, "learned", 2),
    "MBartForConditionalGeneration": BartKind("mbart", "pre", True, "learned", 2),
    "PegasusForConditionalGeneration": BartKind("pegasus", "pre", False, "sinusoidal_halves", 0),
    "BlenderbotForConditionalGeneration": BartKind("blenderbot", "pre", False, "learned", 0),
    "MarianMTModel": BartKind("marian", "post", False, "sinusoidal_halves", 0),
}
T5 = "T5ForConditionalGeneration"
# Saved without its output layer, which is the embedding, and with shorter names.
BARE = {"BartModel": "BartForConditionalGeneration"}
CLASSES = (*KINDS, *BARE, T5)


# -- the tables ------------------------------------------------------------------------------------------------------

FLAT = Change(lambda theirs: [theirs[0].flatten()], lambda ours: [ours[0][None]])
# One of ours is three of theirs, which are equal.
COPIES = Change(lambda theirs: theirs[:1], lambda ours: [ours[0].clone() for _ in range(3)])

_SHARED, _OUTPUT, _OUTPUT_BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_SINUSOIDS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


# No class has all of these; rows of what a model does not have are passed over.
_BART_ROWS = [
    Row("source_embedding.positions.weight", "model.encoder.embed_positions.weight"),
    Row("target_embedding.positions.weight", "model.decoder.embed_positions.weight"),
    *both("source_embedding.norm", "model.encoder.layernorm_embedding"),
    *both("target_embedding.norm", "model.decoder.layernorm_embedding"),
    *both("encoder_norm", "model.encoder.layer_norm"),
    *both("decoder_norm", "model.decoder.layer_norm"),
    Row("output.weight", _OUTPUT),
    Row("output.bias", _OUTPUT_BIAS, FLAT),
]
_SELF = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
_BART_LAYERS = {
    "encoder": block_rows(
        "model.encoder.layers.{i}",
        attention=_SELF,
        feedforward=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        ours="encoder.{i}",
    ),
    "decoder": block_rows(
        "model.decoder.layers.{i}",
        attention=_SELF,
        cross=("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj"),
        feedforward=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        ours="decoder.{i}",
    ),
}
_ONE = Table([Row("source_embedding.tokens.weight", _SHARED), *_BART_ROWS], _BART_LAYERS)
# Where the output layer is not tied to the embedding, transformers ties nothing, and the copies are saved too.
_ONE_UNTIED = _ONE._replace(
    rows=[Row("source_embedding.tokens.weight", (_SHARED, _SOURCE, _TARGET), COPIES), *_BART_ROWS]
)
_TWO = _ONE._replace(
    rows=[
        Row("source_embedding.tokens.weight", _SOURCE),
        Row("target_embedding.tokens.weight", _TARGET),
        *_BART_ROWS,
    ]
)


def _t5_layers(gated: bool) -> dict[str, Sequence[Row]]:
    def attention(layer: str) -> list[str]:
        return [f"{layer}.{name}" for name in "qkvo"]

    def feedforward(layer: str) -> tuple[str | tuple[str, str], str]:
        inner = (f"{layer}.wi_1", f"{layer}.wi_0") if gated else f"{layer}.wi"
        return inner, f"{layer}.wo"

    return {
        "encoder": block_rows(
            "encoder.block.{i}.layer",
            attention=attention("0.SelfAttention"),
            feedforward=feedforward("1.DenseReluDense"),
            norms=("0.layer_norm", "1.layer_norm"),
            ours="encoder.{i}",
        ),
        "decoder": block_rows(
            "decoder.block.{i}.layer",
            attention=attention("0.SelfAttention"),
            cross=attention("1.EncDecAttention"),
            feedforward=feedforward("2.DenseReluDense"),
            norms=("0.layer_norm", "1.layer_norm", "2.layer_norm"),
            ours="decoder.{i}",
        ),
    }


_T5_ROWS = [
    Row("source_embedding.tokens.weight", "shared.weight"),
    # The first block of each stack holds what all of them use.
    Row("encoder_bias.table.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    Row("decoder_bias.table.weight", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    Row("encoder_norm.weight", "encoder.final_layer_norm.weight"),
    Row("decoder_norm.weight", "decoder.final_layer_norm.weight"),
    Row("output.weight", _OUTPUT),
]
# Early files have a bias for the cross-attention, which nothing has ever read.
_T5_BESIDE = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_T5_TWINS = (("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight"))
_T5_PLAIN = Table(_T5_ROWS, _t5_layers(gated=False), _T5_BESIDE, twins=_T5_TWINS)
_T5_GATED = _T5_PLAIN._replace(layers=_t5_layers(gated=True))


def table_of(config: TransformerConfig) -> Table:
    """The table of a model whose config is one that some class can have."""
    if config.positions == "relative":
        return _T5_GATED if config.activation in GATES.values() else _T5_PLAIN
    if not config.shared_vocab:
        return _TWO
    return _ONE if config.tied else _ONE_UNTIED


def _counts(config: TransformerConfig) -> dict[str, int]:
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


_BART_KEYS = [
    Key("width", "d_model", 1024),
    Key("encoder_layers", "encoder_layers", 12),
    Key("decoder_layers", "decoder_layers", 12),
    Key("dropout", "dropout", 0.1),
    Key("activation", "activation_function", "gelu", ACTIVATIONS),
    Key("embedding_scale", "scale_embedding", False),
    Key("max_len", "max_position_embeddings", 1024),
    Key("source_vocab", "vocab_size", 50265),
]
_T5_KEYS = [
    Key("width", "d_model", 512),
    Key("heads", "num_heads", 8),
    Key("head_width", "d_kv", 64),
    Key("feedforward", "d_ff", 2048),
    Key("encoder_layers", "num_layers", 6),
    Key("dropout", "dropout_rate", 0.1),
    Key("norm_eps", "layer_norm_epsilon", 1e-6),
    Key("relative_buckets", "relative_attention_num_buckets", 32),
    Key("relative_distance", "relative_attention_max_distance", 128),
    Key("max_len", "n_positions", 512),
    Key("source_vocab", "vocab_size", 32128),
]


# -- from theirs to ours ---------------------------------------------------------------------------------------------


def read_encoder_decoder(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], theirs: Mapping[str, Tensor], origin: str
) -> tuple[TransformerConfig, Special, Weights]:
    """A model of the class `name`: our config, its special ids, and its weights under our names.

    `table` is config.json and what generation_config.json adds to it, `tokens` the special ids by what they are for.
    """
    settings, tensors = Settings(table, origin), dict(theirs)
    settings.must_be("tie_encoder_decoder", False)
    settings.must_be("is_decoder", False)
    settings.must_be("pruned_heads", {})
    if name in BARE:
        tensors = {f"model.{key}": tensor for key, tensor in tensors.items()}
    name = BARE.get(name, name)
    config = _read_t5(settings, tensors) if name == T5 else _read_bart(KINDS[name], settings, tensors)
    weights = read_model(config, table_of(config), _counts(config), tensors, origin)
    return config, _read_special(name, settings, tokens), weights


def _read_bart(kind: BartKind, settings: Settings, theirs: Weights) -> TransformerConfig:
    settings.must_be("normalize_before", kind.norm == "pre")
    settings.must_be("normalize_embedding", kind.embedding_norm)
    shared, tied = _bart_embeddings(settings, theirs)
    known = read_keys(_BART_KEYS, settings)
    vocab = known["source_vocab"]
    if kind.positions == "sinusoidal_halves":
        _take_sinusoids(theirs, known["width"], settings.origin)
    return TransformerConfig(
        **known,
        heads=_same(settings, "encoder_attention_heads", "decoder_attention_heads", 16),
        feedforward=_same(settings, "encoder_ffn_dim", "decoder_ffn_dim", 4096),
        norm=kind.norm,
        positions=kind.positions,
        position_offset=kind.offset,
        embedding_norm=kind.embedding_norm,
        output_bias=_OUTPUT_BIAS in theirs,
        tied=tied,
        target_vocab=vocab if shared else settings.size("decoder_vocab_size", vocab),
        shared_vocab=shared,
    )


def _read_t5(settings: Settings, theirs: Weights) -> TransformerConfig:
    gated, function = _t5_activation(settings)
    known = read_keys(_T5_KEYS, settings)
    return TransformerConfig(
        **known,
        decoder_layers=settings.size("num_decoder_layers", known["encoder_layers"]),
        norm="pre",
        norm_kind="rms",
        activation=(GATES if gated else ACTIVATIONS)[function],  # type: ignore[arg-type]
        positions="relative",
        encoder_score="dot",
        decoder_score="dot",
        cross_score="dot",
        bias=False,
        embedding_scale=False,
        # The first T5 is tied and scales what its output layer sees, 1.1 does neither: one key has long said both.
        output_scale=settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True)),
        tied=_take_copy(theirs, _OUTPUT, "shared.weight"),
        target_vocab=known["source_vocab"],
        shared_vocab=True,
    )


def _t5_activation(settings: Settings) -> tuple[bool, str]:
    """Whether the feed-forward network has a gate, and the function in it: "gated-gelu" or, said anew, its parts."""
    key, stated = "feed_forward_proj", settings.table.get("feed_forward_proj") or "relu"
    gate, _, function = str(stated).rpartition("-")
    if stated == "gated-gelu":
        function = "gelu_new"
    if settings.table.get("dense_act_fn") is not None:
        key, function = "dense_act_fn", settings.table["dense_act_fn"]
    known = GATES if gate == "gated" else ACTIVATIONS
    if gate not in ("", "gated") or function not in known:
        raise settings.refusal(key, f"it knows {', '.join(known)}{' as a gate' * (gate == 'gated')}")
    return gate == "gated", function


def _read_special(name: str, settings: Settings, tokens: Mapping[str, int]) -> Special:
    stated = {key: settings.table.get(f"{key}_token_id") for key in ("decoder_start", "forced_bos")}
    known = dict(tokens) | {key: index for key, index in stated.items() if type(index) is int}
    if name == T5:  # which starts from the padding, if nothing else is said
        known = {"pad": 0, "decoder_start": known.get("pad", 0)} | known
    for key in ("pad", "eos", "decoder_start"):
        if key not in known:
            raise RegardError(f"{settings.origin}: no {key}_token_id.", "Without it no text can be written.")
    forced = known.get("forced_bos")
    if forced is None and settings.flag("force_bos_token_to_be_generated", False):  # as the first BARTs said it
        forced = known.get("bos")
    return Special(
        pad=known["pad"],
        unk=known.get("unk", known["pad"]),
        sos=known["decoder_start"],
        eos=known["eos"],
        begin=known.get("begin"),
        end=known.get("end"),
        forced=forced,
    )


def _same(settings: Settings, key: str, other: str, default: int) -> int:
    """A number that two keys must agree on."""
    value = settings.size(key, default)
    if settings.size(other, value) != value:
        raise settings.refusal(other, f"there is one number for both sides, and {key} = {value}")
    return value


def _bart_embeddings(settings: Settings, theirs: Weights) -> tuple[bool, bool]:
    """Whether both sides have one embedding, and whether the output layer is it; copies are brought into one form."""
    if _SHARED not in theirs and _SOURCE in theirs and _TARGET in theirs:
        return False, _take_copy(theirs, _OUTPUT, _TARGET)
    if not (_take_copy(theirs, _SOURCE, _SHARED) and _take_copy(theirs, _TARGET, _SHARED)):
        raise settings.refusal("tie_word_embeddings", "the two sides have an embedding each besides a shared one")
    tied = _take_copy(theirs, _OUTPUT, _SHARED)
    if not tied and _SHARED in theirs:
        theirs |= {_SOURCE: theirs[_SHARED], _TARGET: theirs[_SHARED]}
    return True, tied


def _take_copy(theirs: Weights, copy: str, original: str) -> bool:
    """Whether `copy` is not there or says what `original` says; then it is taken away."""
    if copy in theirs and not (original in theirs and torch.equal(theirs[copy], theirs[original])):
        return False
    theirs.pop(copy, None)
    return True


def _take_sinusoids(theirs: Weights, width: int, origin: str) -> None:
    """Takes away tables of sinusoids, which are computed; other numbers under their names are an error."""
    for name in _SINUSOIDS:
        table = theirs.pop(name, None)
        if table is None:
            continue
        wanted = Sinusoidal(width, len(table), halves=True).table
        # Many files are in half precision.
        if table.shape != wanted.shape or not torch.allclose(table.float(), wanted, atol=1e-3):
            raise RegardError(f"{origin}: {name} holds no sinusoids.", "Such a model is not supported.")


# -- from ours to theirs ---------------------------------------------------------------------------------------------


def class_for(config: TransformerConfig) -> str:
    """The class of transformers that computes what a model of this config does; where there is none, an error.

    >>> class_for(TransformerConfig(norm="post", shared_vocab=True))
    'MarianMTModel'
    """
    name, found = nearest_class(config)
    if found:
        raise RegardError(
            f"No class of transformers computes what this model does; the nearest, {name}, differs in "
            f"{in_words(config, found)}.",
            "Export to onnx, or train with --for huggingface.",
        )
    return name


def nearest_class(config: TransformerConfig, names: Sequence[str] = (*KINDS, T5)) -> tuple[str, dict[str, tuple]]:
    """The class that differs in the fewest fields, and for each of these fields the values that the class supports.

    >>> nearest_class(TransformerConfig(positions="rotary", shared_vocab=True))
    ('PegasusForConditionalGeneration', {'positions': ('sinusoidal', 'sinusoidal_halves')})
    """
    found = {name: misfits(config, _choices(name, config)) for name in names}
    name = min(found, key=lambda one: len(found[one]))
    return name, found[name]


def _choices(name: str, config: TransformerConfig) -> dict[str, tuple]:
    """What the models of a class can be, field by field; of all the other fields any value will do."""
    scores = ("encoder_score", "decoder_score", "cross_score")
    can: dict[str, tuple] = {"kv_heads": (0, config.heads), "qk_norm": (False,)}
    if name == T5:
        can |= {"norm": ("pre",), "norm_kind": ("rms",), "bias": (False,)}
        can |= {"activation": (*dict.fromkeys((*ACTIVATIONS.values(), *GATES.values())),)}
        can |= {"positions": ("relative",), **dict.fromkeys(scores, ("dot",))}
        can |= {"embedding_scale": (False,), "embedding_norm": (False,), "output_bias": (False,)}
        can |= {"shared_vocab": (True,)}
    else:
        kind = KINDS[name]
        can |= {"norm": (kind.norm,), "norm_kind": ("layer",), "norm_eps": (1e-5,)}
        can |= {"activation": (*dict.fromkeys(ACTIVATIONS.values()),)}
        # A table of learned positions can hold sinusoids.
        positions = ("sinusoidal", "sinusoidal_halves", *(["learned"] if kind.positions == "learned" else []))
        can |= {"positions": positions, **dict.fromkeys(scores, ("scaled_dot",))}
        can |= {"head_width": (0, config.width // config.heads)}
        can |= {"embedding_norm": (kind.embedding_norm,), "output_scale": (False,)}
        can |= {"shared_vocab": (True, False) if kind.model_type == "marian" else (True,)}
    return can


def write_encoder_decoder(
    config: TransformerConfig, special: Special, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json and the tensors of the class that fits; an error where none does."""
    name = class_for(config)
    common = {
        "architectures": [name],
        "is_encoder_decoder": True,
        "pad_token_id": special.pad,
        "eos_token_id": special.eos,
        "decoder_start_token_id": special.sos,
        "forced_bos_token_id": special.forced,
        "forced_eos_token_id": special.eos,
    }
    # What Regard itself never writes.
    never = sorted({special.pad, special.sos} - {special.eos})
    generation = {key: common[key] for key in common if key.endswith("token_id")}
    generation |= {"max_length": config.max_len + 1, "num_beams": 5, "early_stopping": True, "length_penalty": 1.0}
    generation |= {"bad_words_ids": [[token] for token in never]}
    if name == T5:
        table = common | _t5_settings(config)
        return table, generation, write_weights(table_of(config), _counts(config), weights)
    kind = KINDS[name]
    config, conforming = conformed(kind, config, dict(weights))
    tensors = write_weights(table_of(config), _counts(config), conforming)
    if kind.model_type == "pegasus":  # which expects to find them
        tensors |= {name: Sinusoidal(config.width, config.max_len, halves=True).table for name in _SINUSOIDS}
    begin = special.begin if special.begin is not None else special.sos
    return common | {"bos_token_id": begin} | _bart_settings(kind, config), generation, tensors


def _bart_settings(kind: BartKind, config: TransformerConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_type": kind.model_type,
        **write_keys(_BART_KEYS, config),
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.feedforward,
        "decoder_ffn_dim": config.feedforward,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "tie_word_embeddings": config.tied,
    }
    if kind.model_type == "marian":
        settings |= {"decoder_vocab_size": config.target_vocab, "share_encoder_decoder_embeddings": config.shared_vocab}
    if kind.model_type == "blenderbot":
        settings |= {"encoder_no_repeat_ngram_size": 0}
    return settings


def _t5_settings(config: TransformerConfig) -> dict[str, Any]:
    gated = {"geglu": "gated-gelu", "swiglu": "gated-silu"}
    return {
        "model_type": "t5",
        **write_keys(_T5_KEYS, config),
        "d_kv": config.head_width or config.width // config.heads,
        "num_decoder_layers": config.decoder_layers,
        "feed_forward_proj": gated.get(config.activation) or their_name(ACTIVATIONS, config.activation),
        "scale_decoder_outputs": config.output_scale,
        "tie_word_embeddings": config.output_scale,
    }


def conformed(kind: BartKind, config: TransformerConfig, weights: Weights) -> tuple[TransformerConfig, Weights]:
    """The same function with a config and weights that the class can have.

    Sinusoids are brought into its order, or written out as a table of learned positions; biases that are not there are
    zeros; the table of positions gets as many unused rows as the class has.
    """
    if kind.positions == "sinusoidal_halves":
        config, weights = _in_halves(config, weights)
    elif config.positions != "learned":
        table = Sinusoidal(config.width, config.max_len, halves=config.positions == "sinusoidal_halves").table
        table = table[: config.max_len]
        weights |= {f"{side}_embedding.positions.weight": table.clone() for side in ("source", "target")}
        config = dataclasses.replace(config, positions="learned", position_offset=0)
    if kind.positions == "learned" and config.position_offset != kind.offset:
        for side in ("source", "target"):
            used = weights[f"{side}_embedding.positions.weight"][config.position_offset :]
            unused = used.new_zeros(kind.offset, config.width)
            weights[f"{side}_embedding.positions.weight"] = torch.cat((unused, used))
    whole = dataclasses.replace(config, position_offset=kind.offset, bias=True, output_bias=True)
    missing = shapes_of(whole).items() - {name: tensor.shape for name, tensor in weights.items()}.items()
    weights |= {name: torch.zeros(shape) for name, shape in missing if name.endswith("bias")}
    return whole, weights


def _in_halves(config: TransformerConfig, weights: Weights) -> tuple[TransformerConfig, Weights]:
    """The model with its channels in another order: that in which all sines come first.

    Sums over channels do not know their order, so whatever writes channels writes them in the new order, and whatever
    reads them reads them so: embeddings, norms, and the maps between the model's width and the inside of a sublayer.
    """
    if config.positions == "sinusoidal_halves":
        return config, weights
    order = torch.cat((torch.arange(0, config.width, 2), torch.arange(1, config.width, 2)))
    inward = (".tokens.weight", ".query.weight", ".key_value.weight", ".inner.weight", "output.weight")
    inside = (".query.bias", ".key_value.bias", ".inner.bias", "output.bias")
    turned = {}
    for name, tensor in weights.items():
        if name.endswith(inward):
            turned[name] = tensor[:, order]
        else:
            turned[name] = tensor if name.endswith(inside) else tensor[order]
    return dataclasses.replace(config, positions="sinusoidal_halves"), turned
