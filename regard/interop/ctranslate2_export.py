"""Export of Transformers to CTranslate2, which runs them on CPU and GPU without PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.interop.foreign_config import describe_unsupported, unsupported_fields
from regard.interop.weight_mapping import CONCATENATED, FUSED_QKV, MappingRow, MappingTable, write_weights
from regard.layers.positions import Sinusoidal
from regard.models.transformer import Transformer, TransformerConfig
from regard.optional_packages import require_package
from regard.pipelines import Translator, write_tokenizers

# -- mapping tables: parameter names, and paths in the specification of CTranslate2 -----------------------------------


def _linear(name: str, path: str) -> list[MappingRow]:
    return [MappingRow(f"{name}.{part}", f"{path}/{part}") for part in ("weight", "bias")]


def _norm(name: str, path: str) -> list[MappingRow]:
    return [MappingRow(f"{name}.weight", f"{path}/gamma"), MappingRow(f"{name}.bias", f"{path}/beta")]


def _attention(name: str, path: str, is_cross: bool = False) -> list[MappingRow]:
    if is_cross:
        inputs = [*_linear(f"{name}.query", f"{path}/linear_0"), *_linear(f"{name}.key_value", f"{path}/linear_1")]
    else:
        inputs = [
            MappingRow((f"{name}.query.{part}", f"{name}.key_value.{part}"), f"{path}/linear_0/{part}", FUSED_QKV)
            for part in ("weight", "bias")
        ]
    return [
        *inputs,
        *_linear(f"{name}.out", f"{path}/linear_{2 if is_cross else 1}"),
    ]


def _feedforward(name: str, path: str, is_gated: bool) -> list[MappingRow]:
    inner = [
        MappingRow(f"{name}.inner.{part}", (f"{path}/linear_0_noact/{part}", f"{path}/linear_0/{part}"), CONCATENATED)
        for part in ("weight", "bias")
    ]
    if not is_gated:
        inner = _linear(f"{name}.inner", f"{path}/linear_0")
    return [*inner, *_linear(f"{name}.outer", f"{path}/linear_1")]


def _mapping_table(is_gated: bool) -> MappingTable:
    rows = [
        MappingRow("source_embedding.tokens.weight", "encoder/embeddings_0/weight"),
        MappingRow("source_embedding.positions.weight", "encoder/position_encodings/encodings"),
        *_norm("source_embedding.norm", "encoder/layernorm_embedding"),
        *_norm("encoder_norm", "encoder/layer_norm"),
        MappingRow("target_embedding.tokens.weight", "decoder/embeddings/weight"),
        MappingRow("target_embedding.positions.weight", "decoder/position_encodings/encodings"),
        *_norm("target_embedding.norm", "decoder/layernorm_embedding"),
        *_norm("decoder_norm", "decoder/layer_norm"),
        *_linear("output", "decoder/projection"),
    ]
    encoder = [
        *_attention("encoder.{i}.attention", "encoder/layer_{i}/self_attention"),
        *_norm("encoder.{i}.attention_norm", "encoder/layer_{i}/self_attention/layer_norm"),
        *_feedforward("encoder.{i}.feedforward", "encoder/layer_{i}/ffn", is_gated),
        *_norm("encoder.{i}.feedforward_norm", "encoder/layer_{i}/ffn/layer_norm"),
        MappingRow("encoder_bias.table.weight", "encoder/layer_{i}/self_attention/relative_attention_bias"),
    ]
    decoder = [
        *_attention("decoder.{i}.attention", "decoder/layer_{i}/self_attention"),
        *_norm("decoder.{i}.attention_norm", "decoder/layer_{i}/self_attention/layer_norm"),
        *_attention("decoder.{i}.cross", "decoder/layer_{i}/attention", is_cross=True),
        *_norm("decoder.{i}.cross_norm", "decoder/layer_{i}/attention/layer_norm"),
        *_feedforward("decoder.{i}.feedforward", "decoder/layer_{i}/ffn", is_gated),
        *_norm("decoder.{i}.feedforward_norm", "decoder/layer_{i}/ffn/layer_norm"),
        MappingRow("decoder_bias.table.weight", "decoder/layer_{i}/self_attention/relative_attention_bias"),
    ]
    return MappingTable(rows, {"encoder": encoder, "decoder": decoder})


_PLAIN, _GATED = _mapping_table(is_gated=False), _mapping_table(is_gated=True)

# Activations of Regard: their name in CTranslate2, and whether they are gated.
_ACTIVATIONS = {
    "relu": ("RELU", False),
    "gelu": ("GELU", False),
    "gelu_tanh": ("GELUTanh", False),
    "silu": ("SWISH", False),
    "swiglu": ("SWISH", True),
    "geglu": ("GELUTanh", True),
}
# The supported values of fields that CTranslate2 supports in part. It has QK-norm, but normalizes the queries of the
# cross-attention over all heads at once instead of per head.
CTRANSLATE2_VALUES: dict[str, tuple] = {
    "activation": tuple(_ACTIVATIONS),
    "qk_norm": (False,),
    **dict.fromkeys(("encoder_score", "decoder_score", "cross_score"), ("scaled_dot", "dot")),
}
_NORM_EPS = {"layer": 1e-5, "rms": 1e-6}  # defaults of CTranslate2


def export_ctranslate2(translator: Translator, folder: str | Path) -> None:
    """Write a model folder for CTranslate2, in float32, with its tokenizer.

    To get the same translations as Regard:

        import ctranslate2, tokenizers
        runner, tokenizer = ctranslate2.Translator("out"), tokenizers.Tokenizer.from_file("out/tokenizer.json")
        pieces = tokenizer.encode("The cat chased the mouse.", add_special_tokens=False).tokens
        excluded = [["<pad>"], ["<sos>"]]
        (result,) = runner.translate_batch([pieces], beam_size=5, min_decoding_length=0, suppress_sequences=excluded)
        tokenizer.decode([tokenizer.token_to_id(piece) for piece in result.hypotheses[0]])

    CTranslate2 appends `<eos>` to a source. If source and target have different tokenizers, the target tokenizer is
    target_tokenizer.json. If outputs start with a forced token (BART's `<s>`), pass it as target_prefix. The sources of
    a multilingual model begin with the tag of the target language (`<2fr>`).
    """
    library = require_package("ctranslate2", "ctranslate2")
    folder, model, special = Path(folder), translator.model, translator.special
    if (folder / "model.bin").exists():
        raise RegardError(f"{folder}: the folder already contains a model.", "Choose another folder.")
    if not isinstance(model, Transformer):
        raise RegardError("CTranslate2 does not support recurrent models.", "Train a model of the family transformer.")
    config = model.config
    fields = unsupported_fields(config, CTRANSLATE2_VALUES)
    if fields:
        raise RegardError(
            f"CTranslate2 does not support {describe_unsupported(config, fields)}.",
            "Export to onnx, or train with --for ctranslate2.",
        )
    if special.other_eos:
        raise RegardError(
            f"CTranslate2 supports one end token; this model has {len(special.ends)}: {special.ends}.",
            "Export to onnx or huggingface.",
        )
    if special.end not in (None, special.eos):
        raise RegardError(
            "CTranslate2 ends a source with the same token as a target; this model does not.", "Export to onnx."
        )
    spec = _specification(library.specs, config)
    table = _GATED if _ACTIVATIONS[config.activation][1] else _PLAIN
    counts = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for path, tensor in write_weights(table, counts, _weights(model)).items():
        scope, _, name = path.rpartition("/")
        setattr(library.specs.model_spec.index_spec(spec, scope), name, tensor.numpy())
    names = _token_names(translator.target_tokenizer, config.target_vocab)
    spec.register_source_vocabulary(_token_names(translator.source_tokenizer, config.source_vocab))
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
    spec.optimize()  # writes tied weights once
    write_tokenizers(folder, *translator.tokenizers)
    spec.save(str(folder))


def _specification(specs: Any, config: TransformerConfig) -> Any:
    """The CTranslate2 specification of a model of this config, without weights."""
    activation, is_gated = _ACTIVATIONS[config.activation]
    common: dict[str, Any] = dict(
        num_heads=config.heads,
        num_heads_kv=config.kv_heads if config.kv_heads not in (0, config.heads) else None,
        head_dim=config.head_width or None,
        pre_norm=config.norm == "pre",
        rms_norm=config.norm_kind == "rms",
        activation=getattr(specs.Activation, activation),
        ffn_glu=is_gated,
        layernorm_embedding=config.embedding_norm,
        relative_attention_bias=config.positions == "relative",
        rotary_dim=0 if config.positions == "rotary" else None,  # 0: all channels of a head
        rotary_interleave=False,
    )
    encoder = specs.transformer_spec.TransformerEncoderSpec(config.encoder_layers, **common)
    decoder = specs.transformer_spec.TransformerDecoderSpec(config.decoder_layers, **common)
    encoder.scale_embeddings = decoder.scale_embeddings = config.width**0.5 if config.embedding_scale else 1.0
    if config.output_scale:
        decoder.scale_outputs = config.width**-0.5
    self_attentions = [(layer.self_attention, config.encoder_score) for layer in encoder.layer]
    self_attentions += [(layer.self_attention, config.decoder_score) for layer in decoder.layer]
    for attention, score in [*self_attentions, *((layer.attention, config.cross_score) for layer in decoder.layer)]:
        if score == "dot":
            attention.queries_scale = 1.0
    if config.positions == "relative":
        for attention, _ in self_attentions:
            attention.relative_attention_max_distance = np.int32(config.relative_distance)
    return specs.TransformerSpec(encoder, decoder)


def _weights(model: Transformer) -> dict[str, Tensor]:
    """The weights, tied ones under each of their names, and tables of positions of any kind."""
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


def _token_names(tokenizer: Tokenizer, size: int) -> list[str]:
    """The token of each id; ids without a token get placeholder names."""
    count = tokenizer.vocab_size
    names = (tokenizer.backend_tokenizer.id_to_token(i) for i in range(count))
    return [*map(str, names), *(f"<unused {i}>" for i in range(count, size))]
