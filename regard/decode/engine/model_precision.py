"""Copies of a model in the precision of decoding: int8 on a CPU; bfloat16, float16 or float8 on a GPU."""

import copy
from collections.abc import Iterator, Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from regard.decode.decode_config import Precision
from regard.decode.ensemble import Ensemble
from regard.errors import RegardError
from regard.layers.float8_linear import Float8Linear
from regard.layers.int8_linear import Int8Linear

# The latest copy of each model, with the versions of the weights that it was made from.
_copies: "WeakKeyDictionary[nn.Module, tuple[Any, nn.Module]]" = WeakKeyDictionary()


def convert_model(model: Any, precision: Precision) -> Any:
    """The model in this precision: itself, or a copy that is reused until the weights change.

    >>> linear = nn.Sequential(nn.Linear(4, 4))
    >>> convert_model(linear, "auto") is linear
    True
    >>> type(convert_model(linear, "int8")[0]).__name__
    'Int8Linear'
    """
    if isinstance(model, Ensemble):
        return _convert_ensemble(model, precision)
    parameter = next(model.parameters())
    device, dtype = parameter.device.type, str(parameter.dtype).removeprefix("torch.")
    if precision in ("auto", dtype):
        return model
    if precision == "int8" and device != "cpu":
        raise RegardError(f"precision int8 is for CPUs (the model is on {device}).", "Use bfloat16 or float16.")
    if precision == "float8" and device != "cuda":
        hint = "Use int8." if device == "cpu" else "Use float16."
        raise RegardError(f"precision float8 is for CUDA GPUs (the model is on {device}).", hint)
    key = precision, device, weight_versions(model)
    cached_key, converted = _copies.get(model, (None, None))
    if cached_key != key:
        if precision == "int8":
            converted = copy_modules(model)
            _quantize(converted, Int8Linear)
        elif precision == "float8":
            converted = convert_to_float8(model, torch.bfloat16)
        else:
            converted = copy.deepcopy(model).to(getattr(torch, precision))
        _copies[model] = key, converted
    return converted


def weight_versions(model: nn.Module) -> tuple[Any, ...]:
    """Identifies the current values of the weights: changes when one of them is modified or replaced."""
    dictionaries = [d for module in iterate_modules(model) for d in (module._parameters, module._buffers) if d]
    tensors = [tensor for dictionary in dictionaries for tensor in dictionary.values() if tensor is not None]
    pointers = [tensor.data_ptr() for tensor in tensors]
    return tuple(pointers), tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def iterate_modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, shared ones several times: ten times as fast as `model.modules()`.

    >>> len(list(iterate_modules(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))))
    3
    """
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        yield module
        pending += [child for child in module._modules.values() if child is not None]


def _convert_ensemble(ensemble: Ensemble, precision: Precision) -> Ensemble:
    converted = copy.copy(ensemble)
    converted.models = [convert_model(model, precision) for model in ensemble.models]
    return converted


def convert_to_float8(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with float8 linear layers, except in the encoder; activations and all other parameters are in `dtype`.

    The weights of an encoder are read once per sentence, those of a decoder in every step.
    """
    converted = copy.deepcopy(model).to(dtype)
    encoder = getattr(converted, "encoder", None)
    _quantize(converted, Float8Linear, set() if encoder is None else set(encoder.modules()))
    return converted


def copy_modules(model: nn.Module) -> nn.Module:
    """A copy that shares all parameters with the model."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _quantize(
    model: nn.Module, layer_class: type[Int8Linear] | type[Float8Linear], kept: Set[nn.Module] = frozenset()
) -> None:
    """Replace the linear layers of a model, except the children of the modules in `kept`."""
    layers: dict[int, nn.Module] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear and parent not in kept:
                if id(module) not in layers:
                    layers[id(module)] = layer_class.from_linear(module)
                setattr(parent, name, layers[id(module)])
