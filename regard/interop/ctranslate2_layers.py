"""Layers of a Transformer in the specification of CTranslate2: rows of mapping tables, activations, tokens."""

from typing import Any

import torch
from torch import Tensor

from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.interop.foreign_config import describe_unsupported, unsupported_fields
from regard.interop.weight_mapping import CONCATENATED, FUSED_QKV, MappingRow, MappingTable, write_weights
from regard.layers.positions import Sinusoidal

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
        MappingRow(f"{name}.inner.{part}", (f"{path}/linear_0_noact/{part}", f"{path}/linear_0/{part}"), CONCATENATED)
        for part in ("weight", "bias")
    ]
    if not is_gated:
        inner = linear_rows(f"{name}.inner", f"{path}/linear_0")
    return [*inner, *linear_rows(f"{name}.outer", f"{path}/linear_1")]


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
