"""Export to CTranslate2, which runs models on CPU and GPU without PyTorch: translators, language models, encoders."""

from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError, require_package
from regard.files import check_output_folder
from regard.interop.foreign_config import describe_unsupported, unsupported_fields
from regard.interop.weight_mapping import CONCATENATED, FUSED_QKV, MappingRow, MappingTable, write_weights
from regard.layers.positions import Sinusoidal
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.pipelines import Pipeline, TextEncoder, TextGenerator, Translator, check_storable, write_tokenizers
from regard.pipelines.translation import language_tokens_of

# Activations of Regard: their name in CTranslate2, and whether they are gated.
ACTIVATIONS = {
    "relu": ("RELU", False),
    "gelu": ("GELU", False),
    "gelu_tanh": ("GELUTanh", False),
    "silu": ("SWISH", False),
    "swiglu": ("SWISH", True),
    "geglu": ("GELUTanh", True),
}
NORM_EPS = {"layer": 1e-5, "rms": 1e-6}  # defaults of CTranslate2


_SCORES = ("scaled_dot", "dot")
# The supported values of fields that CTranslate2 supports in part.
DECODER_VALUES: dict[str, tuple] = {
    "norm": ("pre",),
    "norm_kind": ("layer", "rms"),
    "activation": tuple(ACTIVATIONS),
    "score": _SCORES,
    "rotary_factor": (1.0,),
    "rotary_share": (1.0,),
    "qk_norm_joint": (False,),
    "parallel": (False,),
    **dict.fromkeys(("unrotated_layers", "sliding_windows"), ((),)),
    **dict.fromkeys(("score_width", "score_cap", "logit_cap"), (0.0,)),
}
ENCODER_VALUES: dict[str, tuple] = {
    "norm_kind": ("layer", "rms"),
    "first_norm": (True,),
    "activation": tuple(ACTIVATIONS),
    "bias": ("all",),
    "relative": ("none",),
    "rotary_base": (10000.0,),
    "sliding_windows": ((),),
    "score": _SCORES,
    "qk_norm": (False,),
    "pooling": ("first",),
    "head": ("none", "mask"),
    **dict.fromkeys(("embedding_width", "groups"), (0,)),
}
_HINT = "Export to onnx."
_POOLERS = {"tanh": "Tanh", "relu": "RELU", "gelu": "GELU"}


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
    spec = specification(pipeline, library)
    spec.validate()
    spec.optimize()  # writes tied weights once
    write_tokenizers(folder, *pipeline.tokenizers)
    spec.save(str(folder))


@singledispatch
def specification(pipeline: Any, library: Any) -> Any:
    """The specification of a pipeline for CTranslate2, with its weights and vocabularies."""
    raise RegardError(f"CTranslate2 does not support {pipeline.description}.", "Export to onnx or huggingface.")


@specification.register
def _translator_specification(translator: Translator, library: Any) -> Any:
    """The CTranslate2 specification of a translator, with its weights and vocabularies."""
    model: Any = translator.model
    special = translator.special
    config = model.config
    if not isinstance(config, TransformerConfig):
        raise RegardError("CTranslate2 does not support recurrent models.", "Train a model of the family transformer.")
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
    table = _translator_table(ACTIVATIONS[config.activation][1])
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
    common = _common_options(specs, config) | dict(
        num_heads_kv=config.kv_heads if config.kv_heads not in (0, config.heads) else None,
        head_dim=config.head_width or None,
        layernorm_embedding=config.embedding_norm,
        relative_attention_bias=config.positions == "relative",
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


@specification.register
def decoder_specification(generator: TextGenerator, library: Any) -> Any:
    """The specification of a language model, with its weights and vocabulary, for `ctranslate2.Generator`."""
    config, special, specs = generator.model.config, generator.special, library.specs
    check_config(config, DECODER_VALUES, _HINT)
    if special.other_eos:
        raise RegardError(
            f"CTranslate2 supports one end token; this model has {len(special.ends)}: {special.ends}.", _HINT
        )
    if config.qk_norm and config.norm_kind != "rms":
        raise RegardError("CTranslate2 does not support qk_norm = True with norm_kind = 'layer'.", _HINT)
    decoder = specs.transformer_spec.TransformerDecoderSpec(
        config.layers,
        **_common_options(specs, config),
        num_heads_kv=config.kv_heads if config.kv_heads not in (0, config.heads) else None,
        head_dim=config.head_width or None,
        rotary_base=config.rotary_base,
        qk_norm=config.qk_norm,
        with_encoder_attention=False,
    )
    spec = specs.TransformerDecoderModelSpec(decoder)
    decoder.scale_embeddings = config.width**0.5 if config.embedding_scale else 1.0
    _set_stack(library, spec, decoder.layer, generator.model, "decoder")
    names = token_names(generator.tokenizer, config.vocab)
    spec.register_vocabulary(names)
    spec.config.bos_token = names[special.sos if special.begin is None else special.begin]
    spec.config.eos_token, spec.config.unk_token = names[special.eos], names[special.unk]
    return spec


@specification.register
def encoder_specification(encoder: TextEncoder, library: Any) -> Any:
    """The specification of a text encoder, with its weights and vocabulary, for `ctranslate2.Encoder`.

    Its outputs are those of `encode`, and the pooler's if the model has one. The head of a masked language model is
    left out.
    """
    config, special, specs = encoder.model.config, encoder.special, library.specs
    check_config(config, ENCODER_VALUES, _HINT)
    stack = specs.transformer_spec.TransformerEncoderSpec(
        config.layers,
        **_common_options(specs, config),
        layernorm_embedding=True,
        num_source_embeddings=2 if config.segments else 1,
        embeddings_merge=specs.EmbeddingsMerge.ADD,
    )
    pooler = _POOLERS.get(config.pooler)
    activation = {} if pooler is None else {"pooling_activation": getattr(specs.Activation, pooler)}
    spec = specs.TransformerEncoderModelSpec(stack, pooling_layer=pooler is not None, **activation)
    stack.scale_embeddings = 1.0
    _set_stack(library, spec, stack.layer, encoder.model, "encoder")
    names = token_names(encoder.tokenizer, config.vocab)
    spec.register_vocabulary(names)
    spec.config.unk_token = names[special.unk]
    return spec


def _common_options(specs: Any, config: TransformerConfig | GPTConfig | BertConfig) -> dict[str, Any]:
    activation, is_gated = ACTIVATIONS[config.activation]
    return dict(
        num_heads=config.heads,
        pre_norm=config.norm == "pre",
        rms_norm=config.norm_kind == "rms",
        activation=getattr(specs.Activation, activation),
        ffn_glu=is_gated,
        rotary_dim=0 if config.positions == "rotary" else None,  # 0: all channels of a head
        rotary_interleave=False,
    )


def _set_stack(library: Any, spec: Any, layers: Any, model: nn.Module, scope: str) -> None:
    """Set the weights, the scale of the scores and the epsilon of the norms."""
    config: Any = model.config
    weights: dict[str, Tensor] = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    add_positions(config, weights, "embedding.positions.weight")
    table = _stack_table(scope, ACTIVATIONS[config.activation][1])
    set_weights(library, spec, table, {"blocks": config.layers}, weights)
    if config.score == "dot":
        for layer in layers:
            layer.self_attention.queries_scale = 1.0
    if config.norm_eps != NORM_EPS[config.norm_kind]:
        spec.config.layer_norm_epsilon = config.norm_eps


def _stack_table(scope: str, is_gated: bool) -> MappingTable:
    """Parameter names of a model with one stack, and paths in the specification of CTranslate2."""
    is_decoder = scope == "decoder"
    rows = [
        *_embedding_rows("embedding", scope, "" if is_decoder else "_0"),
        MappingRow("embedding.segments.weight", f"{scope}/embeddings_1/weight"),
        *norm_rows("norm", f"{scope}/layer_norm"),
        *(linear_rows("output", "decoder/projection") if is_decoder else linear_rows("pooler", "pooler_dense")),
    ]
    norms = [
        MappingRow(
            f"blocks.{{i}}.attention.{side}_norm.weight", f"{scope}/layer_{{i}}/self_attention/{side[0]}_norm/gamma"
        )
        for side in ("query", "key")
    ]
    return MappingTable(rows, {"blocks": [*_block_rows("blocks.{i}", f"{scope}/layer_{{i}}", is_gated), *norms]})


def _translator_table(is_gated: bool) -> MappingTable:
    """Parameter names, and paths in the specification of CTranslate2."""
    rows = [
        *_embedding_rows("source_embedding", "encoder", "_0"),
        *norm_rows("encoder_norm", "encoder/layer_norm"),
        *_embedding_rows("target_embedding", "decoder"),
        *norm_rows("decoder_norm", "decoder/layer_norm"),
        *linear_rows("output", "decoder/projection"),
    ]
    decoder = [
        *_block_rows("decoder.{i}", "decoder/layer_{i}", is_gated),
        *attention_rows("decoder.{i}.cross", "decoder/layer_{i}/attention", is_cross=True),
        *norm_rows("decoder.{i}.cross_norm", "decoder/layer_{i}/attention/layer_norm"),
    ]
    layers = {"encoder": _block_rows("encoder.{i}", "encoder/layer_{i}", is_gated), "decoder": decoder}
    for stack, block in layers.items():
        bias = f"{stack}/layer_{{i}}/self_attention/relative_attention_bias"
        block.append(MappingRow(f"{stack}_bias.table.weight", bias))
    return MappingTable(rows, layers)


def _embedding_rows(name: str, scope: str, number: str = "") -> list[MappingRow]:
    return [
        MappingRow(f"{name}.tokens.weight", f"{scope}/embeddings{number}/weight"),
        MappingRow(f"{name}.positions.weight", f"{scope}/position_encodings/encodings"),
        *norm_rows(f"{name}.norm", f"{scope}/layernorm_embedding"),
    ]


def _block_rows(name: str, path: str, is_gated: bool) -> list[MappingRow]:
    return [
        *attention_rows(f"{name}.attention", f"{path}/self_attention"),
        *norm_rows(f"{name}.attention_norm", f"{path}/self_attention/layer_norm"),
        *feedforward_rows(f"{name}.feedforward", f"{path}/ffn", is_gated),
        *norm_rows(f"{name}.feedforward_norm", f"{path}/ffn/layer_norm"),
    ]


def linear_rows(name: str, path: str) -> list[MappingRow]:
    return [MappingRow(f"{name}.{part}", f"{path}/{part}") for part in ("weight", "bias")]


def norm_rows(name: str, path: str) -> list[MappingRow]:
    return [MappingRow(f"{name}.weight", f"{path}/gamma"), MappingRow(f"{name}.bias", f"{path}/beta")]


def attention_rows(name: str, path: str, is_cross: bool = False) -> list[MappingRow]:
    if is_cross:
        inputs = [
            *linear_rows(f"{name}.query", f"{path}/linear_0"),
            *linear_rows(f"{name}.key_value", f"{path}/linear_1"),
        ]
    else:
        inputs = [
            MappingRow((f"{name}.query.{part}", f"{name}.key_value.{part}"), f"{path}/linear_0/{part}", FUSED_QKV)
            for part in ("weight", "bias")
        ]
    return [
        *inputs,
        *linear_rows(f"{name}.out", f"{path}/linear_{2 if is_cross else 1}"),
    ]


def feedforward_rows(name: str, path: str, is_gated: bool) -> list[MappingRow]:
    inner = [
        MappingRow(f"{name}.fc1.{part}", (f"{path}/linear_0_noact/{part}", f"{path}/linear_0/{part}"), CONCATENATED)
        for part in ("weight", "bias")
    ]
    if not is_gated:
        inner = linear_rows(f"{name}.fc1", f"{path}/linear_0")
    return [*inner, *linear_rows(f"{name}.fc2", f"{path}/linear_1")]


def token_names(tokenizer: Tokenizer, size: int) -> list[str]:
    """The token of each id; ids without a token get placeholder names."""
    count = tokenizer.vocab_size
    names = (tokenizer.backend_tokenizer.id_to_token(i) for i in range(count))
    return [*map(str, names), *(f"<unused {i}>" for i in range(count, size))]


def set_weights(
    library: Any, spec: Any, table: MappingTable, counts: dict[str, int], weights: dict[str, Tensor]
) -> None:
    """Store the weights in the specification, at the paths of the mapping table."""
    for path, tensor in write_weights(table, counts, weights).items():
        scope, _, name = path.rpartition("/")
        setattr(library.specs.model_spec.index_spec(spec, scope), name, tensor.numpy())


def check_config(config: Any, supported: dict[str, tuple], hint: str) -> None:
    """Raise an error that names the fields of a config that CTranslate2 does not support."""
    if fields := unsupported_fields(config, supported):
        raise RegardError(f"CTranslate2 does not support {describe_unsupported(config, fields)}.", hint)


def add_positions(config: Any, weights: dict[str, Tensor], name: str) -> None:
    """Set the table of positions, of any kind that is added to the embeddings, under this name."""
    if config.positions == "learned":
        weights[name] = weights[name][config.position_offset :]
    elif config.positions in ("sinusoidal", "sinusoidal_halves"):
        weights[name] = Sinusoidal(config.width, config.max_len, config.positions == "sinusoidal_halves").table
    elif config.positions == "none":
        weights[name] = torch.zeros(config.max_len, config.width)
    elif config.positions not in ("rotary", "relative"):
        raise RegardError(f"CTranslate2 does not support the positions {config.positions}.", "Export to onnx.")
