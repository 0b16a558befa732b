"""CTranslate2 specifications of language models (GPT-2, Llama) and of text encoders (BERT)."""

from typing import Any

from torch import Tensor, nn

from regard.errors import RegardError
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
from regard.interop.weight_mapping import MappingRow, MappingTable
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig
from regard.pipelines import TextEncoder, TextGenerator

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


def decoder_specification(library: Any, generator: TextGenerator) -> Any:
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


def encoder_specification(library: Any, encoder: TextEncoder) -> Any:
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


def _common_options(specs: Any, config: GPTConfig | BertConfig) -> dict[str, Any]:
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
    table = _mapping_table(scope, ACTIVATIONS[config.activation][1])
    set_weights(library, spec, table, {"blocks": config.layers}, weights)
    if config.score == "dot":
        for layer in layers:
            layer.self_attention.queries_scale = 1.0
    if config.norm_eps != NORM_EPS[config.norm_kind]:
        spec.config.layer_norm_epsilon = config.norm_eps


def _mapping_table(scope: str, is_gated: bool) -> MappingTable:
    """Parameter names, and paths in the specification of CTranslate2."""
    is_decoder, attention, layer = scope == "decoder", "blocks.{i}.attention", f"{scope}/layer_{{i}}"
    ends = linear_rows("output", "decoder/projection") if is_decoder else linear_rows("pooler", "pooler_dense")
    rows = [
        MappingRow("embedding.tokens.weight", f"{scope}/embeddings{'' if is_decoder else '_0'}/weight"),
        MappingRow("embedding.segments.weight", f"{scope}/embeddings_1/weight"),
        MappingRow("embedding.positions.weight", f"{scope}/position_encodings/encodings"),
        *norm_rows("embedding.norm", f"{scope}/layernorm_embedding"),
        *norm_rows("norm", f"{scope}/layer_norm"),
        *ends,
    ]
    block = [
        *attention_rows(attention, f"{layer}/self_attention"),
        MappingRow(f"{attention}.query_norm.weight", f"{layer}/self_attention/q_norm/gamma"),
        MappingRow(f"{attention}.key_norm.weight", f"{layer}/self_attention/k_norm/gamma"),
        *norm_rows("blocks.{i}.attention_norm", f"{layer}/self_attention/layer_norm"),
        *feedforward_rows("blocks.{i}.feedforward", f"{layer}/ffn", is_gated),
        *norm_rows("blocks.{i}.feedforward_norm", f"{layer}/ffn/layer_norm"),
    ]
    return MappingTable(rows, {"blocks": block})
