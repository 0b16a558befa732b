"""GGUF files of random models of transformers, written as llama.cpp converts them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

WORDS = [*"abcdehinst", "th", "the", "at", "cat", "in"]
MERGES = ["t h", "th e", "a t", "c at", "i n"]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁t", "▁the", "he", "th", "the", "▁c", "▁ca", "▁cat", *"▁abcdehinst"]
VOCAB = len(PIECES)


def metadata(arch: str, config: Any) -> dict[str, Any]:
    """The metadata of a config of transformers, under the names of llama.cpp."""
    if arch == "gpt2":
        return {
            "gpt2.block_count": config.n_layer,
            "gpt2.context_length": config.n_positions,
            "gpt2.embedding_length": config.n_embd,
            "gpt2.feed_forward_length": config.n_inner,
            "gpt2.attention.head_count": config.n_head,
            "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    rope = config.rope_parameters
    values["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if getattr(config, "head_dim", None):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if arch in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    return {f"{arch}.{key}": value for key, value in values.items()}


def pieces_tokenizer() -> dict[str, Any]:
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (VOCAB - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [0.0 if i < 259 else float(258 - i) for i in range(VOCAB)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@torch.no_grad()
def write_gguf(
    path: Path, arch: str, model: Any, kind: str = "F32", changes: dict[str, Any] | None = None, **tensors: Any
) -> None:
    """Writes a model and a tokenizer; matrices are quantized, and the model gets the quantized weights.

    `changes` replaces metadata; None removes an entry.
    """
    config, qtype = model.config, gguf.GGMLQuantizationType[kind]
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], layers)
    writer = gguf.GGUFWriter(path, arch)
    table = {**metadata(arch, config), **pieces_tokenizer(), **(changes or {})}
    for key, value in table.items():
        add_value(writer, key, value)
    for name, parameter in model.named_parameters():
        data = parameter.numpy()
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            data = np.ascontiguousarray(data.T)
        is_permuted = arch == "llama" and (".q_proj." in name or ".k_proj." in name)
        if is_permuted:
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if data.ndim == 2 and kind != "F32":
            stored = gguf.quantize(data, qtype)
            writer.add_tensor(foreign_name(names, name), stored, raw_dtype=qtype)
            numbers = gguf.dequantize(stored, qtype)
            if is_permuted:
                numbers = numbers.reshape(heads, -1, 2, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
            parameter.copy_(torch.from_numpy(numbers.T.copy() if "c_" in name else numbers))
        else:
            writer.add_tensor(foreign_name(names, name), data)
    for name, data in tensors.items():
        writer.add_tensor(f"{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def foreign_name(names: Any, name: str) -> str:
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


def add_value(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
