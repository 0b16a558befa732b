"""Export of Transformers to CTranslate2, which runs them on CPUs and GPUs without PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.interop.foreign_config import in_words, misfits
from regard.interop.optional_packages import need
from regard.interop.weight_mapping import CUT, STACKED, Row, Table, write_weights
from regard.layers.positions import Sinusoidal
from regard.models.transformer import Transformer, TransformerConfig
from regard.pipelines import Translator, write_tokenizers

# -- the tables: our names, and the places in their specification -----------------------------------------------------


def _linear(ours: str, theirs: str) -> list[Row]:
    return [Row(f"{ours}.{part}", f"{theirs}/{part}") for part in ("weight", "bias")]


def _norm(ours: str, theirs: str) -> list[Row]:
    return [Row(f"{ours}.weight", f"{theirs}/gamma"), Row(f"{ours}.bias", f"{theirs}/beta")]


def _attention(ours: str, theirs: str, cross: bool = False) -> list[Row]:
    if cross:
        maps = [*_linear(f"{ours}.query", f"{theirs}/linear_0"), *_linear(f"{ours}.key_value", f"{theirs}/linear_1")]
    else:
        maps = [
            Row((f"{ours}.query.{part}", f"{ours}.key_value.{part}"), f"{theirs}/linear_0/{part}", CUT)
            for part in ("weight", "bias")
        ]
    return [
        *maps,
        *_linear(f"{ours}.out", f"{theirs}/linear_{2 if cross else 1}"),
    ]


def _feedforward(ours: str, theirs: str, gated: bool) -> list[Row]:
    inner = [
        Row(f"{ours}.inner.{part}", (f"{theirs}/linear_0_noact/{part}", f"{theirs}/linear_0/{part}"), STACKED)
        for part in ("weight", "bias")
    ]
    if not gated:
        inner = _linear(f"{ours}.inner", f"{theirs}/linear_0")
    return [*inner, *_linear(f"{ours}.outer", f"{theirs}/linear_1")]


def _table(gated: bool) -> Table:
    rows = [
        Row("source_embedding.tokens.weight", "encoder/embeddings_0/weight"),
        Row("source_embedding.positions.weight", "encoder/position_encodings/encodings"),
        *_norm("source_embedding.norm", "encoder/layernorm_embedding"),
        *_norm("encoder_norm", "encoder/layer_norm"),
        Row("target_embedding.tokens.weight", "decoder/embeddings/weight"),
        Row("target_embedding.positions.weight", "decoder/position_encodings/encodings"),
        *_norm("target_embedding.norm", "decoder/layernorm_embedding"),
        *_norm("decoder_norm", "decoder/layer_norm"),
        *_linear("output", "decoder/projection"),
    ]
    encoder = [
        *_attention("encoder.{i}.attention", "encoder/layer_{i}/self_attention"),
        *_norm("encoder.{i}.attention_norm", "encoder/layer_{i}/self_attention/layer_norm"),
        *_feedforward("encoder.{i}.feedforward", "encoder/layer_{i}/ffn", gated),
        *_norm("encoder.{i}.feedforward_norm", "encoder/layer_{i}/ffn/layer_norm"),
        Row("encoder_bias.table.weight", "encoder/layer_{i}/self_attention/relative_attention_bias"),
    ]
    decoder = [
        *_attention("decoder.{i}.attention", "decoder/layer_{i}/self_attention"),
        *_norm("decoder.{i}.attention_norm", "decoder/layer_{i}/self_attention/layer_norm"),
        *_attention("decoder.{i}.cross", "decoder/layer_{i}/attention", cross=True),
        *_norm("decoder.{i}.cross_norm", "decoder/layer_{i}/attention/layer_norm"),
        *_feedforward("decoder.{i}.feedforward", "decoder/layer_{i}/ffn", gated),
        *_norm("decoder.{i}.feedforward_norm", "decoder/layer_{i}/ffn/layer_norm"),
        Row("decoder_bias.table.weight", "decoder/layer_{i}/self_attention/relative_attention_bias"),
    ]
    return Table(rows, {"encoder": encoder, "decoder": decoder})


_PLAIN, _GATED = _table(gated=False), _table(gated=True)

# Our activations: theirs, and whether there is a gate.
_ACTIVATIONS = {
    "relu": ("RELU", False),
    "gelu": ("GELU", False),
    "gelu_tanh": ("GELUTanh", False),
    "silu": ("SWISH", False),
    "swiglu": ("SWISH", True),
    "geglu": ("GELUTanh", True),
}
# The values that CTranslate2 supports, for the fields in which it does not support all. It has QK-norm, but normalizes
# the queries of the cross-attention over all heads at once instead of each head's by itself.
CHOICES: dict[str, tuple] = {
    "activation": tuple(_ACTIVATIONS),
    "qk_norm": (False,),
    **dict.fromkeys(("encoder_score", "decoder_score", "cross_score"), ("scaled_dot", "dot")),
}
_NORM_EPS = {"layer": 1e-5, "rms": 1e-6}  # theirs, where nothing is said


def export_ctranslate2(translator: Translator, folder: str | Path) -> None:
    """Writes a model folder for CTranslate2, in float32, with its tokenizer.

    To translate with it as Regard does:

        import ctranslate2, tokenizers
        runner, tokenizer = ctranslate2.Translator("out"), tokenizers.Tokenizer.from_file("out/tokenizer.json")
        pieces = tokenizer.encode("The cat chased the mouse.", add_special_tokens=False).tokens
        never = [["<pad>"], ["<sos>"]]
        (result,) = runner.translate_batch([pieces], beam_size=5, min_decoding_length=0, suppress_sequences=never)
        tokenizer.decode([tokenizer.token_to_id(piece) for piece in result.hypotheses[0]])

    CTranslate2 adds the `<eos>` that ends a source. If the two sides have different tokenizers, the target's is
    target_tokenizer.json. If the model's outputs begin with a forced token (BART's `<s>`), pass it as target_prefix.
    """
    library = need("ctranslate2", "ctranslate2")
    folder, model, special = Path(folder), translator.model, translator.special
    if (folder / "model.bin").exists():
        raise RegardError(f"{folder}: there is a model already.", "Name another folder.")
    if not isinstance(model, Transformer):
        raise RegardError("CTranslate2 runs Transformers, and this is a recurrent model.", "Train a Transformer.")
    config = model.config
    found = misfits(config, CHOICES)
    if found:
        raise RegardError(
            f"CTranslate2 does not support {in_words(config, found)}.",
            "Export to onnx, or train with --for ctranslate2.",
        )
    if special.end not in (None, special.eos):
        raise RegardError("In CTranslate2 a source ends as a target does, and here it does not.", "Export to onnx.")
    spec = _specification(library.specs, config)
    table = _GATED if _ACTIVATIONS[config.activation][1] else _PLAIN
    counts = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for place, tensor in write_weights(table, counts, _weights(model)).items():
        scope, _, name = place.rpartition("/")
        setattr(library.specs.model_spec.index_spec(spec, scope), name, tensor.numpy())
    names = _names(translator.target_tokenizer, config.target_vocab)
    spec.register_source_vocabulary(_names(translator.source_tokenizer, config.source_vocab))
    spec.register_target_vocabulary(names)
    spec.config.unk_token = names[special.unk]
    spec.config.bos_token = names[special.sos if special.begin is None else special.begin]
    spec.config.eos_token = names[special.eos]
    spec.config.decoder_start_token = names[special.sos]
    spec.config.add_source_bos = special.begin is not None
    spec.config.add_source_eos = special.end is not None
    if config.norm_eps != _NORM_EPS[config.norm_kind]:
        spec.config.layer_norm_epsilon = config.norm_eps
    spec.validate()
    spec.optimize()  # which here means that tied weights are written once
    write_tokenizers(folder, *translator.tokenizers)
    spec.save(str(folder))


def _specification(specs: Any, config: TransformerConfig) -> Any:
    """Theirs of a model of this config, without its weights."""
    activation, gated = _ACTIVATIONS[config.activation]
    common: dict[str, Any] = dict(
        num_heads=config.heads,
        num_heads_kv=config.kv_heads if config.kv_heads not in (0, config.heads) else None,
        head_dim=config.head_width or None,
        pre_norm=config.norm == "pre",
        rms_norm=config.norm_kind == "rms",
        activation=getattr(specs.Activation, activation),
        ffn_glu=gated,
        layernorm_embedding=config.embedding_norm,
        relative_attention_bias=config.positions == "relative",
        rotary_dim=0 if config.positions == "rotary" else None,  # 0: all of a head
        rotary_interleave=False,
    )
    encoder = specs.transformer_spec.TransformerEncoderSpec(config.encoder_layers, **common)
    decoder = specs.transformer_spec.TransformerDecoderSpec(config.decoder_layers, **common)
    encoder.scale_embeddings = decoder.scale_embeddings = config.width**0.5 if config.embedding_scale else 1.0
    if config.output_scale:
        decoder.scale_outputs = config.width**-0.5
    own = [(layer.self_attention, config.encoder_score) for layer in encoder.layer]
    own += [(layer.self_attention, config.decoder_score) for layer in decoder.layer]
    for attention, score in [*own, *((layer.attention, config.cross_score) for layer in decoder.layer)]:
        if score == "dot":
            attention.queries_scale = 1.0
    if config.positions == "relative":
        for attention, _ in own:
            attention.relative_attention_max_distance = np.int32(config.relative_distance)
    return specs.TransformerSpec(encoder, decoder)


def _weights(model: Transformer) -> dict[str, Tensor]:
    """The weights, tied ones under each of their names; positions as a table of numbers, wherever they come from."""
    config = model.config
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for side in ("source", "target"):
        name = f"{side}_embedding.positions.weight"
        if config.positions == "learned":
            weights[name] = weights[name][config.position_offset :]
        elif config.positions in ("sinusoidal", "sinusoidal_halves"):
            halves = config.positions == "sinusoidal_halves"
            weights[name] = Sinusoidal(config.width, config.max_len, halves).table
        elif config.positions == "none":
            weights[name] = torch.zeros(config.max_len, config.width)
    return weights


def _names(tokenizer: Tokenizer, size: int) -> list[str]:
    """What stands for each id; ids beyond the tokeniser's have names that are no tokens."""
    known = tokenizer.vocab_size
    names = (tokenizer.library.id_to_token(i) for i in range(known))
    return [*map(str, names), *(f"<unused {i}>" for i in range(known, size))]
