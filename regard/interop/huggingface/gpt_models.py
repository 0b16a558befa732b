"""GPT-2, Llama, Qwen2 and Qwen3: the tables of their names, and their configs in our words and back."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor

from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.interop.foreign_config import Key, Settings, read_keys, with_defaults, write_keys
from regard.interop.huggingface.single_stack import ACTIVATIONS, GATES, Kind, Weights, read_one_stack, write_one_stack
from regard.interop.weight_mapping import CUT, TRANSPOSED, TRANSPOSED_CUT, Row, Table, block_rows, both
from regard.layers.multihead import BiasPlacement
from regard.layers.positions import FEW_TURNS, MANY_TURNS
from regard.models.gpt import GPTConfig

# -- the tables ------------------------------------------------------------------------------------------------------

_QUERY, _KEY_VALUE = "blocks.{i}.attention.query", "blocks.{i}.attention.key_value"

_GPT2 = Table(
    [
        Row("embedding.tokens.weight", "wte.weight"),
        Row("embedding.positions.weight", "wpe.weight"),
        *both("norm", "ln_f"),
    ],
    {
        "blocks": [
            *both("blocks.{i}.attention_norm", "h.{i}.ln_1"),
            Row((f"{_QUERY}.weight", f"{_KEY_VALUE}.weight"), "h.{i}.attn.c_attn.weight", TRANSPOSED_CUT),
            Row((f"{_QUERY}.bias", f"{_KEY_VALUE}.bias"), "h.{i}.attn.c_attn.bias", CUT),
            Row("blocks.{i}.attention.out.weight", "h.{i}.attn.c_proj.weight", TRANSPOSED),
            Row("blocks.{i}.attention.out.bias", "h.{i}.attn.c_proj.bias"),
            *both("blocks.{i}.feedforward_norm", "h.{i}.ln_2"),
            Row("blocks.{i}.feedforward.inner.weight", "h.{i}.mlp.c_fc.weight", TRANSPOSED),
            Row("blocks.{i}.feedforward.inner.bias", "h.{i}.mlp.c_fc.bias"),
            Row("blocks.{i}.feedforward.outer.weight", "h.{i}.mlp.c_proj.weight", TRANSPOSED),
            Row("blocks.{i}.feedforward.outer.bias", "h.{i}.mlp.c_proj.bias"),
        ]
    },
    beside=("*h.*.attn.bias", "*h.*.attn.masked_bias"),  # the causal mask, and its minus infinity
    prefix="transformer.",
)
# Llama has biases or not, as its config says; Qwen2 has those of queries, keys and values; Qwen3 has the two norms.
_LLAMA = Table(
    [Row("embedding.tokens.weight", "embed_tokens.weight"), Row("norm.weight", "norm.weight")],
    {
        "blocks": [
            *block_rows(
                "layers.{i}",
                attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
                feedforward=(("mlp.up_proj", "mlp.gate_proj"), "mlp.down_proj"),  # the value, then its gate
                norms=("input_layernorm", "post_attention_layernorm"),
            ),
            Row("blocks.{i}.attention.query_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
            Row("blocks.{i}.attention.key_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
        ]
    },
    beside=("*rotary_emb.inv_freq",),
    prefix="model.",
)
_OUTPUT = Row("output.weight", "lm_head.weight")
_GPT2_WRITER = _GPT2.with_head(_OUTPUT, twins=[("lm_head.weight", "transformer.wte.weight")])
_LLAMA_WRITER = _LLAMA.with_head(_OUTPUT, twins=[("lm_head.weight", "model.embed_tokens.weight")])

# -- the configs -----------------------------------------------------------------------------------------------------

_GPT2_KEYS = [
    Key("width", "n_embd", 768),
    Key("heads", "n_head", 12),
    Key("layers", "n_layer", 12),
    Key("dropout", "resid_pdrop", 0.1),
    Key("norm_eps", "layer_norm_epsilon", 1e-5),
    Key("activation", "activation_function", "gelu_new", ACTIVATIONS),
    Key("tied", "tie_word_embeddings", True),
    Key("max_len", "n_positions", 1024),
    Key("vocab", "vocab_size", 50257),
]
_LLAMA_KEYS = [
    Key("width", "hidden_size", 4096),
    Key("heads", "num_attention_heads", 32),
    Key("layers", "num_hidden_layers", 32),
    Key("feedforward", "intermediate_size", 11008),
    Key("norm_eps", "rms_norm_eps", 1e-6),
    Key("activation", "hidden_act", "silu", GATES),
    Key("tied", "tie_word_embeddings", False),
    Key("max_len", "max_position_embeddings", 2048),
    Key("vocab", "vocab_size", 32000),
]
_QWEN_KEYS = with_defaults(_LLAMA_KEYS, feedforward=22016, max_len=32768, vocab=151936)


def _read_gpt2(settings: Settings, bare: bool = False) -> GPTConfig:
    settings.must_be("scale_attn_by_inverse_layer_idx", False)
    settings.must_be("add_cross_attention", False)
    known = read_keys(_GPT2_KEYS, settings)
    return GPTConfig(
        **known | ({"tied": True} if bare else {}),
        feedforward=settings.size("n_inner", 4 * known["width"]),
        norm_kind="layer",
        positions="learned",
        score="scaled_dot" if settings.flag("scale_attn_weights", True) else "dot",
        qk_norm=False,
        bias="all",
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        **write_keys(_GPT2_KEYS, config),
        "n_inner": config.feedforward,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": config.score != "dot",
    }


LlamaKind = Literal["llama", "qwen2", "qwen3"]
# Which linear maps of Llama have a bias: (of attention, of feed-forward).
_BIASES: dict[tuple[bool, bool], BiasPlacement] = {
    (False, False): "none",
    (True, False): "attention",
    (False, True): "feedforward",
    (True, True): "all",
}


def _rotary(settings: Settings) -> dict[str, Any]:
    """How the positions turn. transformers 5 keeps all of it in one table, before that it was in several keys."""
    key = "rope_scaling" if settings.table.get("rope_scaling") else "rope_parameters"
    table = settings.table.get(key) or {}
    if not isinstance(table, dict):
        raise settings.refusal(key, "it should be a table")
    rope = Settings(table, settings.origin)
    kind = rope.table.get("rope_type", rope.table.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise settings.refusal(key, "it knows rotary positions of the types default, linear and llama3")
    for place in (settings, rope):
        place.must_be("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {"rotary_base": rope.fraction("rope_theta", settings.fraction("rope_theta", 10000.0))}
    if kind != "default":
        found["rotary_factor"] = rope.fraction("factor", 0.0)
        if found["rotary_factor"] < 1:
            raise settings.refusal(key, "its factor should be 1 or more")
    if kind == "llama3":
        rope.must_be("low_freq_factor", FEW_TURNS)
        rope.must_be("high_freq_factor", MANY_TURNS)
        found["rotary_context"] = rope.size("original_max_position_embeddings")
    return found


def _rope(config: GPTConfig) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rotary_factor == 1.0:
        return table
    table |= {"rope_type": "linear", "factor": config.rotary_factor}
    if config.rotary_context:
        table |= {"rope_type": "llama3", "low_freq_factor": FEW_TURNS, "high_freq_factor": MANY_TURNS}
        table |= {"original_max_position_embeddings": config.rotary_context}
    return table


def _refuse_windows(settings: Settings, layers: int) -> None:
    """Windows that some layer uses."""
    types = settings.table.get("layer_types")
    if types is not None:
        if types != ["full_attention"] * layers:
            raise settings.refusal("layer_types", "it knows full_attention, in each layer")
    elif settings.flag("use_sliding_window", False) and settings.number("max_window_layers", 28) < layers:
        raise settings.refusal("use_sliding_window", "in its layers every token attends to all before it")


def _read_llama(settings: Settings, kind: LlamaKind) -> GPTConfig:
    known = read_keys(_LLAMA_KEYS if kind == "llama" else _QWEN_KEYS, settings)
    attention, feedforward = (settings.flag(key, False) for key in ("attention_bias", "mlp_bias"))
    if kind != "llama":
        _refuse_windows(settings, known["layers"])
    return GPTConfig(
        **known,
        **_rotary(settings),
        dropout=0.0,
        norm_kind="rms",
        positions="rotary",
        kv_heads=settings.size("num_key_value_heads", known["heads"] if kind == "llama" else 32),
        head_width=settings.number("head_dim", 128 if kind == "qwen3" else 0),
        qk_norm=kind == "qwen3",
        bias="qkv" if kind == "qwen2" else _BIASES[attention, feedforward and kind == "llama"],
    )


def _write_llama(config: GPTConfig, kind: LlamaKind) -> dict[str, Any]:
    table = {
        "model_type": kind,
        **write_keys(_LLAMA_KEYS, config),
        "rope_parameters": _rope(config),
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_width or config.width // config.heads,
    }
    if kind != "qwen2":
        table["attention_bias"] = config.bias in ("attention", "all")
    if kind == "llama":
        table["mlp_bias"] = config.bias in ("feedforward", "all")
    return table


# -- the classes -----------------------------------------------------------------------------------------------------


def _llama(kind: LlamaKind) -> Kind:
    return Kind(_LLAMA_WRITER, partial(_read_llama, kind=kind), partial(_write_llama, kind=kind))


CLASSES = {
    "GPT2LMHeadModel": Kind(_GPT2_WRITER, _read_gpt2, _write_gpt2),
    # Saved without its output layer, which is the embedding.
    "GPT2Model": Kind(_GPT2, partial(_read_gpt2, bare=True), _write_gpt2),
    "LlamaForCausalLM": _llama("llama"),
    "Qwen2ForCausalLM": _llama("qwen2"),
    "Qwen3ForCausalLM": _llama("qwen3"),
}


def read_gpt_like(
    name: str, table: Mapping[str, Any], tokens: Mapping[str, int], theirs: Mapping[str, Tensor], origin: str
) -> tuple[GPTConfig, Special, Weights]:
    """A model of the class `name`: our config, its special ids, and its weights under our names.

    `table` is config.json, `tokens` the special ids by what they are for.
    """
    config, weights = read_one_stack(CLASSES[name], Settings(table, origin), theirs)
    if "eos" not in tokens:
        raise RegardError(f"{origin}: nothing says which token ends a text.", "Add eos_token_id to it.")
    eos = tokens["eos"]
    sos = tokens.get("bos", eos)
    special = Special(
        pad=tokens.get("pad", eos), unk=tokens.get("unk", eos), sos=sos, eos=eos, begin=tokens.get("begin")
    )
    return config, special, weights


def write_gpt_like(
    config: GPTConfig, special: Special, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], Weights]:
    """config.json, generation_config.json and the tensors of the class that fits; an error where none does."""
    name, table, tensors = write_one_stack(CLASSES, config, weights)
    if name == "LlamaForCausalLM" and config.width % config.heads:
        raise RegardError(
            f"{name} wants a width that divides into its heads, not {config.width} into heads = {config.heads}.",
            "Train with other choices to export there.",
        )
    ids = {"bos_token_id": special.sos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    return {"architectures": [name]} | table | ids, ids, tensors
