"""Linear layers as functions of a matrix of rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from regard.kernels.cpu.int8_linear import int8_linear
from regard.layers.float8_linear import Float8Linear
from regard.layers.int8_linear import Int8Linear

Projection = Callable[[Float[Tensor, "R I"]], Float[Tensor, "R O"]]


def activation_dtype(module: Any) -> torch.dtype:
    """The dtype of the inputs and outputs of a linear layer, quantized or not.

    >>> activation_dtype(Int8Linear.from_linear(nn.Linear(8, 3)))
    torch.float32
    """
    return module.dtype if isinstance(module, Int8Linear | Float8Linear) else module.weight.dtype


def make_projection(module: Any, channels: Int[Tensor, "U"] | None = None) -> Projection:
    """The function of a linear layer, or of some of its output channels, without the overhead of calling a module.

    >>> make_projection(nn.Linear(8, 3))(torch.randn(5, 8)).shape
    torch.Size([5, 3])
    >>> make_projection(nn.Linear(8, 3), torch.tensor([0, 2]))(torch.randn(5, 8)).shape
    torch.Size([5, 2])
    """
    weight = module.dequantize() if isinstance(module, Float8Linear) else module.weight
    bias, scale = module.bias, module.scale if isinstance(module, Int8Linear) else None
    if channels is not None:
        weight, bias, scale = (None if x is None else x[channels] for x in (weight, bias, scale))
    if scale is not None:
        return lambda x: int8_linear(x, weight, scale, bias)
    return lambda x: linear(x, weight, bias)


def make_joint_projection(modules: Sequence[Any]) -> Callable[[Float[Tensor, "R I"]], tuple[Tensor, ...]]:
    """The function of several linear layers with the same input; int8 weights are concatenated, others stay shared.

    >>> q, kv = make_joint_projection([nn.Linear(8, 3), nn.Linear(8, 6)])(torch.randn(5, 8))
    >>> q.shape, kv.shape
    (torch.Size([5, 3]), torch.Size([5, 6]))
    """
    if not all(isinstance(module, Int8Linear) for module in modules):
        projections = [make_projection(module) for module in modules]
        return lambda x: tuple(projection(x) for projection in projections)
    biases = [module.bias for module in modules]
    joint = Int8Linear(
        torch.cat([module.weight for module in modules]),
        torch.cat([module.scale for module in modules]),
        None if biases[0] is None else torch.cat(biases),
    )
    projection, sizes = make_projection(joint), [len(module.weight) for module in modules]
    return lambda x: projection(x).split(sizes, dim=1)
