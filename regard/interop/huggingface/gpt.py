"""Language models of transformers: all classes; mapping tables and configs of GPT-2, GPT-NeoX and OPT, both ways."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.interop.foreign_config import ConfigKey, ForeignConfig, read_fields, write_fields
from regard.interop.huggingface.llama import LLAMA_CLASSES, OUTPUT
from regard.interop.huggingface.rope import read_rope, write_rope
from regard.interop.huggingface.single_stack import (
    ACTIVATIONS,
    ForeignClass,
    Weights,
    read_single_stack,
    write_single_stack,
)
from regard.interop.weight_mapping import (
    FUSED_QKV,
    TRANSPOSED,
    TRANSPOSED_QKV,
    MappingRow,
    MappingTable,
    block_rows,
    qkv_by_head,
    weight_and_bias,
)
from regard.models.gpt import GPTConfig

# -- mapping tables ---------------------------------------------------------------------------------------------------

_QUERY, _KEY_VALUE = "blocks.{i}.attention.query", "blocks.{i}.attention.key_value"

_GPT2 = MappingTable(
    [
        MappingRow("embedding.tokens.weight", "wte.weight"),
        MappingRow("embedding.positions.weight", "wpe.weight"),
        *weight_and_bias("norm", "ln_f"),
    ],
    {
        "blocks": [
            *weight_and_bias("blocks.{i}.attention_norm", "h.{i}.ln_1"),
            MappingRow((f"{_QUERY}.weight", f"{_KEY_VALUE}.weight"), "h.{i}.attn.c_attn.weight", TRANSPOSED_QKV),
            MappingRow((f"{_QUERY}.bias", f"{_KEY_VALUE}.bias"), "h.{i}.attn.c_attn.bias", FUSED_QKV),
            MappingRow("blocks.{i}.attention.out.weight", "h.{i}.attn.c_proj.weight", TRANSPOSED),
            MappingRow("blocks.{i}.attention.out.bias", "h.{i}.attn.c_proj.bias"),
            *weight_and_bias("blocks.{i}.feedforward_norm", "h.{i}.ln_2"),
            MappingRow("blocks.{i}.feedforward.fc1.weight", "h.{i}.mlp.c_fc.weight", TRANSPOSED),
            MappingRow("blocks.{i}.feedforward.fc1.bias", "h.{i}.mlp.c_fc.bias"),
            MappingRow("blocks.{i}.feedforward.fc2.weight", "h.{i}.mlp.c_proj.weight", TRANSPOSED),
            MappingRow("blocks.{i}.feedforward.fc2.bias", "h.{i}.mlp.c_proj.bias"),
        ]
    },
    ignored=("*h.*.attn.bias", "*h.*.attn.masked_bias"),  # the causal mask and its large negative value
    prefix="transformer.",
)
_GPT2_LM = _GPT2.with_head(OUTPUT, copies=[("lm_head.weight", "transformer.wte.weight")])

_OPT = MappingTable(
    [
        MappingRow("embedding.tokens.weight", "decoder.embed_tokens.weight"),
        MappingRow("embedding.positions.weight", "decoder.embed_positions.weight"),
        *weight_and_bias("norm", "decoder.final_layer_norm"),
    ],
    {
        "blocks": block_rows(
            "decoder.layers.{i}",
            attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
            feedforward=("fc1", "fc2"),
            norms=("self_attn_layer_norm", "final_layer_norm"),
        )
    },
    prefix="model.",
).with_head(OUTPUT, copies=[("lm_head.weight", "model.decoder.embed_tokens.weight")])


def _neox_table(config: GPTConfig) -> MappingTable:
    """GPT-NeoX has one tensor with the query, key and value rows of each head."""
    block, attention = "layers.{i}", "layers.{i}.attention"
    conversion = qkv_by_head(config.heads)
    table = MappingTable(
        [MappingRow("embedding.tokens.weight", "embed_in.weight"), *weight_and_bias("norm", "final_layer_norm")],
        {
            "blocks": [
                *(
                    MappingRow(
                        (f"{_QUERY}.{part}", f"{_KEY_VALUE}.{part}"), f"{attention}.query_key_value.{part}", conversion
                    )
                    for part in ("weight", "bias")
                ),
                *weight_and_bias("blocks.{i}.attention.out", f"{attention}.dense"),
                *weight_and_bias("blocks.{i}.feedforward.fc1", f"{block}.mlp.dense_h_to_4h"),
                *weight_and_bias("blocks.{i}.feedforward.fc2", f"{block}.mlp.dense_4h_to_h"),
                *weight_and_bias("blocks.{i}.attention_norm", f"{block}.input_layernorm"),
                *weight_and_bias("blocks.{i}.feedforward_norm", f"{block}.post_attention_layernorm"),
            ]
        },
        ignored=("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"),
        prefix="gpt_neox.",
    )
    head = MappingRow("output.weight", "embed_out.weight")
    return table.with_head(head, copies=[("embed_out.weight", "gpt_neox.embed_in.weight")])


# -- configs ----------------------------------------------------------------------------------------------------------

_GPT2_KEYS = [
    ConfigKey("width", "n_embd", 768),
    ConfigKey("heads", "n_head", 12),
    ConfigKey("layers", "n_layer", 12),
    ConfigKey("dropout", "resid_pdrop", 0.1),
    ConfigKey("norm_eps", "layer_norm_epsilon", 1e-5),
    ConfigKey("activation", "activation_function", "gelu_new", ACTIVATIONS),
    ConfigKey("tied", "tie_word_embeddings", True),
    ConfigKey("max_len", "n_positions", 1024),
    ConfigKey("vocab", "vocab_size", 50257),
]


def _read_gpt2(settings: ForeignConfig, has_head: bool = True) -> GPTConfig:
    settings.require("scale_attn_by_inverse_layer_idx", False)
    settings.require("add_cross_attention", False)
    fields = read_fields(_GPT2_KEYS, settings)
    return GPTConfig(
        **fields | ({} if has_head else {"tied": True}),
        feedforward=settings.get_count("n_inner", 4 * fields["width"]),
        norm_kind="layer",
        positions="learned",
        score="scaled_dot" if settings.get_bool("scale_attn_weights", True) else "dot",
        qk_norm=False,
        bias="all",
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        **write_fields(_GPT2_KEYS, config),
        "n_inner": config.feedforward,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": config.score != "dot",
    }


_NEOX_KEYS = [
    ConfigKey("width", "hidden_size", 6144),
    ConfigKey("heads", "num_attention_heads", 64),
    ConfigKey("layers", "num_hidden_layers", 44),
    ConfigKey("feedforward", "intermediate_size", 24576),
    ConfigKey("dropout", "hidden_dropout", 0.0),
    ConfigKey("norm_eps", "layer_norm_eps", 1e-5),
    ConfigKey("activation", "hidden_act", "gelu", ACTIVATIONS),
    ConfigKey("tied", "tie_word_embeddings", False),
    ConfigKey("parallel", "use_parallel_residual", True),
    ConfigKey("max_len", "max_position_embeddings", 2048),
    ConfigKey("vocab", "vocab_size", 50432),
]


def _read_neox(settings: ForeignConfig) -> GPTConfig:
    # Names of earlier versions.
    old_names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    old_keys = {new: settings.table[old] for new, old in old_names.items() if settings.table.get(old) is not None}
    fields = read_fields(_NEOX_KEYS, settings)
    settings.require("head_dim", fields["width"] // fields["heads"])  # transformers would use it for the rates only
    return GPTConfig(
        **fields,
        **read_rope(settings.replace(old_keys), partial=0.25),
        norm_kind="layer",
        positions="rotary",
        qk_norm=False,
        bias="all" if settings.get_bool("attention_bias", True) else "feedforward",
    )


def _write_neox(config: GPTConfig) -> dict[str, Any]:
    rope = write_rope(config)
    rope["rope_parameters"]["partial_rotary_factor"] = config.rotary_share
    old_keys = {"rotary_emb_base": config.rotary_base, "rotary_pct": config.rotary_share}
    rope = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "model_type": "gpt_neox",
        **write_fields(_NEOX_KEYS, config),
        **rope,
        **old_keys,
        "attention_bias": config.bias == "all",
    }


_OPT_KEYS = [
    ConfigKey("width", "hidden_size", 768),
    ConfigKey("heads", "num_attention_heads", 12),
    ConfigKey("layers", "num_hidden_layers", 12),
    ConfigKey("feedforward", "ffn_dim", 3072),
    ConfigKey("dropout", "dropout", 0.1),
    ConfigKey("activation", "activation_function", "relu", ACTIVATIONS),
    ConfigKey("tied", "tie_word_embeddings", True),
    ConfigKey("max_len", "max_position_embeddings", 2048),
    ConfigKey("vocab", "vocab_size", 50272),
]


def _read_opt(settings: ForeignConfig) -> GPTConfig:
    fields = read_fields(_OPT_KEYS, settings)
    settings.require("do_layer_norm_before", True)
    settings.require("_remove_final_layer_norm", False)
    settings.require("layer_norm_elementwise_affine", True)
    settings.require("word_embed_proj_dim", fields["width"])
    return GPTConfig(
        **fields,
        norm_kind="layer",
        norm_eps=1e-5,
        positions="learned",
        position_offset=2,
        qk_norm=False,
        bias="all" if settings.get_bool("enable_bias", True) else "none",
    )


def _write_opt(config: GPTConfig) -> dict[str, Any]:
    fields = {"attention_dropout": 0.0, "word_embed_proj_dim": config.width, "enable_bias": config.bias == "all"}
    return {"model_type": "opt", **write_fields(_OPT_KEYS, config), **fields}


# -- classes ----------------------------------------------------------------------------------------------------------


GPT_CLASSES = {
    "GPT2LMHeadModel": ForeignClass(_GPT2_LM, _read_gpt2, _write_gpt2),
    # Saved without its output layer, which is tied to the embedding.
    "GPT2Model": ForeignClass(_GPT2, partial(_read_gpt2, has_head=False), _write_gpt2),
    "GPTNeoXForCausalLM": ForeignClass(_neox_table, _read_neox, _write_neox),
    "OPTForCausalLM": ForeignClass(_OPT, _read_opt, _write_opt),
    **LLAMA_CLASSES,
}


def read_gpt_model(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> tuple[GPTConfig, SpecialTokens, Weights]:
    """Read a model of the class `name`: config, special ids and weights.

    `table` is config.json, `tokens` are the special ids by role.
    """
    config, weights = read_single_stack(GPT_CLASSES[name], ForeignConfig(table, origin), tensors)
    if "eos" not in tokens:
        raise RegardError(f"{origin}: eos_token_id is missing.", "Add eos_token_id to the file.")
    eos = tokens["eos"]
    sos = tokens.get("bos", eos)
    special = SpecialTokens(
        pad=tokens.get("pad", eos), unk=tokens.get("unk", eos), sos=sos, eos=eos, begin=tokens.get("begin")
    )
    return config, special, weights


def write_gpt_model(
    config: GPTConfig, special: SpecialTokens, weights: Mapping[str, Tensor], preferred: str = ""
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json and the tensors of the matching class; an error if no class matches.

    Of several classes that match, `preferred` is chosen.
    """
    name, table, tensors = write_single_stack(GPT_CLASSES, config, weights, preferred)
    if name == "LlamaForCausalLM" and config.width % config.heads:
        raise RegardError(
            f"{name}: width = {config.width} is not a multiple of heads = {config.heads}.",
            "Train with supported settings to export the model.",
        )
    ids = {"bos_token_id": special.sos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    return {"architectures": [name]} | table | ids, ids, tensors
