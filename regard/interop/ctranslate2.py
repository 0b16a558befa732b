"""Export of Transformers to CTranslate2, which runs them on CPU and GPU without PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError, require_package
from regard.files import check_output_folder
from regard.interop.ctranslate2_layers import (
    ACTIVATIONS,
    NORM_EPS,
    add_positions,
    attention_rows,
    check_config,
    feedforward_rows,
    linear_rows,
    norm_rows,
    set_weights,
    token_names,
)
from regard.interop.ctranslate2_single_stack import decoder_specification, encoder_specification
from regard.interop.weight_mapping import MappingRow, MappingTable
from regard.models.transformer import Transformer, TransformerConfig
from regard.pipelines import Pipeline, TextEncoder, TextGenerator, Translator, check_storable, write_tokenizers
from regard.pipelines.language_choice import language_tokens_of

# -- mapping tables: parameter names, and paths in the specification of CTranslate2 -----------------------------------


def _mapping_table(is_gated: bool) -> MappingTable:
    rows = [
        MappingRow("source_embedding.tokens.weight", "encoder/embeddings_0/weight"),
        MappingRow("source_embedding.positions.weight", "encoder/position_encodings/encodings"),
        *norm_rows("source_embedding.norm", "encoder/layernorm_embedding"),
        *norm_rows("encoder_norm", "encoder/layer_norm"),
        MappingRow("target_embedding.tokens.weight", "decoder/embeddings/weight"),
        MappingRow("target_embedding.positions.weight", "decoder/position_encodings/encodings"),
        *norm_rows("target_embedding.norm", "decoder/layernorm_embedding"),
        *norm_rows("decoder_norm", "decoder/layer_norm"),
        *linear_rows("output", "decoder/projection"),
    ]
    encoder = [
        *attention_rows("encoder.{i}.attention", "encoder/layer_{i}/self_attention"),
        *norm_rows("encoder.{i}.attention_norm", "encoder/layer_{i}/self_attention/layer_norm"),
        *feedforward_rows("encoder.{i}.feedforward", "encoder/layer_{i}/ffn", is_gated),
        *norm_rows("encoder.{i}.feedforward_norm", "encoder/layer_{i}/ffn/layer_norm"),
        MappingRow("encoder_bias.table.weight", "encoder/layer_{i}/self_attention/relative_attention_bias"),
    ]
    decoder = [
        *attention_rows("decoder.{i}.attention", "decoder/layer_{i}/self_attention"),
        *norm_rows("decoder.{i}.attention_norm", "decoder/layer_{i}/self_attention/layer_norm"),
        *attention_rows("decoder.{i}.cross", "decoder/layer_{i}/attention", is_cross=True),
        *norm_rows("decoder.{i}.cross_norm", "decoder/layer_{i}/attention/layer_norm"),
        *feedforward_rows("decoder.{i}.feedforward", "decoder/layer_{i}/ffn", is_gated),
        *norm_rows("decoder.{i}.feedforward_norm", "decoder/layer_{i}/ffn/layer_norm"),
        MappingRow("decoder_bias.table.weight", "decoder/layer_{i}/self_attention/relative_attention_bias"),
    ]
    return MappingTable(rows, {"encoder": encoder, "decoder": decoder})


_PLAIN, _GATED = _mapping_table(is_gated=False), _mapping_table(is_gated=True)

# The supported values of fields that CTranslate2 supports in part. It has QK-norm, but normalizes the queries of the
# cross-attention over all heads at once instead of per head.
CTRANSLATE2_VALUES: dict[str, tuple] = {
    "activation": tuple(ACTIVATIONS),
    "qk_norm": (False,),
    **dict.fromkeys(("encoder_score", "decoder_score", "cross_score"), ("scaled_dot", "dot")),
}


def export_ctranslate2(pipeline: Pipeline, folder: str | Path) -> None:
    """Write a model folder for CTranslate2, in float32, with its tokenizer.

    Translators run as `ctranslate2.Translator`, language models as `ctranslate2.Generator`, and the encoders of text
    encoders as `ctranslate2.Encoder`. To get the same translations as Regard:

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
    check_storable(pipeline)
    library, folder = require_package("ctranslate2", "ctranslate2"), Path(folder)
    check_output_folder(folder)
    if isinstance(pipeline, TextGenerator):
        spec = decoder_specification(library, pipeline)
    elif isinstance(pipeline, TextEncoder):
        spec = encoder_specification(library, pipeline)
    elif isinstance(pipeline, Translator):
        spec = _translator_specification(library, pipeline)
    else:
        raise RegardError("CTranslate2 does not support image models.", "Export to onnx or huggingface.")
    spec.validate()
    spec.optimize()  # writes tied weights once
    write_tokenizers(folder, *pipeline.tokenizers)
    spec.save(str(folder))


def _translator_specification(library: Any, translator: Translator) -> Any:
    """The CTranslate2 specification of a translator, with its weights and vocabularies."""
    model, special = translator.model, translator.special
    if not isinstance(model, Transformer):
        raise RegardError("CTranslate2 does not support recurrent models.", "Train a model of the family transformer.")
    config = model.config
    check_config(config, CTRANSLATE2_VALUES, "Export to onnx, or train with --for ctranslate2.")
    if special.other_eos:
        raise RegardError(
            f"CTranslate2 supports one end token; this model has {len(special.ends)}: {special.ends}.",
            "Export to onnx or huggingface.",
        )
    # mBART: sources end with </s> and the language, the decoder starts with the language. Both are passed as pieces.
    tokens = language_tokens_of(translator)
    ends_with_language, starts_with_language = tokens.source == "after_end", tokens.target == "sos"
    if special.end not in (None, special.eos):
        raise RegardError(
            "CTranslate2 ends a source with the same token as a target; this model does not.", "Export to onnx."
        )
    spec = _specification(library.specs, config)
    table = _GATED if ACTIVATIONS[config.activation][1] else _PLAIN
    counts = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    set_weights(library, spec, table, counts, _weights(model))
    names = token_names(translator.target_tokenizer, config.target_vocab)
    spec.register_source_vocabulary(token_names(translator.source_tokenizer, config.source_vocab))
    spec.register_target_vocabulary(names)
    spec.config.unk_token = names[special.unk]
    spec.config.bos_token = names[special.sos if special.begin is None else special.begin]
    spec.config.eos_token = names[special.eos]
    has_start = not starts_with_language or translator.target_language is not None
    spec.config.decoder_start_token = names[special.sos] if has_start else None
    spec.config.add_source_bos = special.begin is not None
    spec.config.add_source_eos = special.end is not None and not ends_with_language
    if config.norm_eps != NORM_EPS[config.norm_kind]:
        spec.config.layer_norm_epsilon = config.norm_eps
    return spec


def _specification(specs: Any, config: TransformerConfig) -> Any:
    """The CTranslate2 specification of a model of this config, without weights."""
    activation, is_gated = ACTIVATIONS[config.activation]
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
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for side in ("source", "target"):
        add_positions(model.config, weights, f"{side}_embedding.positions.weight")
    return weights
