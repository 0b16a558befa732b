"""Copies of a model in the precision of decoding: int8 on a CPU; bfloat16, float16 or float8 on a GPU."""

import copy
import sys
import time
from collections.abc import Iterator, Set
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from regard.decode.ensemble import Ensemble
from regard.decode.request import Precision
from regard.errors import RegardError
from regard.layers.quantized import Float8Linear, Int8Linear

# The share of the time that may be spent on reading all weights, to find changes that PyTorch does not count.
CHECK_SHARE = 0.05
# Every call reads one cache line of weights out of this many.
SAMPLE_STRIDE = 65
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
    """Identifies the current values of the weights: changes when one of them is modified or replaced.

    PyTorch does not count changes through `p.data` or a NumPy view. They are found by a hash of the values: of all of
    them if that takes at most CHECK_SHARE of the time, and otherwise of one line in SAMPLE_STRIDE, which changes with
    every tensor, head or row.
    """
    tensors = [tensor for module in iterate_modules(model) for tensor in _weights(module)]
    pointers = tuple([tensor.data_ptr() for tensor in tensors])
    versions = pointers, tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])
    known, now = _hashes.get(model), time.monotonic()
    is_known = known is not None and known.versions == versions
    if known is None or not is_known or now >= known.next_check or _hash(tensors, SAMPLE_STRIDE) != known.sample:
        full = _hash(tensors)
        seconds = time.monotonic() - now
        _hashes[model] = known = _WeightHash(versions, full, _hash(tensors, SAMPLE_STRIDE), now + seconds / CHECK_SHARE)
    return *versions, known.full


class _WeightHash(NamedTuple):
    versions: tuple[Any, ...]
    full: int
    sample: int
    next_check: float
    """when all values are read again"""


_hashes: "WeakKeyDictionary[nn.Module, _WeightHash]" = WeakKeyDictionary()


def _weights(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers; buffers that are not stored are computed from the configuration."""
    buffers = {**module._buffers}
    for name in module._non_persistent_buffers_set:
        buffers.pop(name, None)
    return [tensor for tensor in (*module._parameters.values(), *buffers.values()) if tensor is not None]


def _hash(tensors: list[Tensor], stride: int = 1) -> int:
    """A hash of the values of tensors, or of a sample of them where compiled kernels are available."""
    if not tensors:
        return 0
    is_on_cpu = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    if is_on_cpu and "numba" in sys.modules:
        from regard.kernels.cpu.memory_hash import hash_memory

        # The last one to three bytes of int8 weights of odd sizes are left out.
        addresses, words = [tensor.data_ptr() for tensor in tensors], [tensor.nbytes // 4 for tensor in tensors]
        return int(hash_memory(np.array(addresses), np.array(words), stride))
    if stride > 1:
        return 0
    rows = [tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1).view(torch.uint8) for tensor in tensors]
    sums = [bytes_.sum(axis, dtype=torch.int32) for bytes_ in rows for axis in (0, 1) if bytes_.numel()]
    return hash(torch.cat(sums).cpu().numpy().tobytes())


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
