"""Matrix products of int8 weights and activations on a CPU: weights have one scale per output channel, activations one
per row, so that the result of a row does not depend on the other rows. Reference: torch.nn.functional.linear.
"""

from functools import cache

import torch
from jaxtyping import Float, Int8
from torch import Tensor


@cache
def weight_levels() -> int:
    """The largest magnitude of quantized weights: 127, or 63 where the processor's products of 127 would saturate.

    Processors without VNNI instructions add two products of 8-bit numbers in 16 bits.
    """
    x, weight = torch.full((4, 64), 127, dtype=torch.int8), torch.full((32, 64), 127, dtype=torch.int8)
    is_exact = bool((torch._int_mm(x, weight.t()) == 64 * 127 * 127).all())
    return 127 if is_exact else 63


def quantize_weight(weight: Float[Tensor, "N K"]) -> tuple[Int8[Tensor, "N K"], Float[Tensor, "N"]]:
    """The weight as int8, and the scale of each output channel: weight ≈ scale[:, None] * int8.

    >>> q, scale = quantize_weight(torch.tensor([[1.0, -2.0]]))
    >>> bool((q * scale[:, None] - torch.tensor([[1.0, -2.0]])).abs().max() < 0.02)
    True
    """
    levels = weight_levels()
    scale = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * levels) / levels
    return (weight.float() / scale[:, None]).round_().to(torch.int8), scale


def quantize_rows(x: Float[Tensor, "M K"]) -> tuple[Int8[Tensor, "M K"], Float[Tensor, "M 1"]]:
    """Activations as int8, and the scale of each row.

    >>> quantize_rows(torch.tensor([[0.5, -1.0], [0.0, 0.0]]))[0]
    tensor([[  64, -127],
            [   0,    0]], dtype=torch.int8)
    """
    scale = x.abs().amax(1, keepdim=True).mul_(1 / 127).clamp_(min=1e-30)
    return (x * scale.reciprocal()).round_().to(torch.int8), scale


def int8_linear(
    x: Float[Tensor, "M K"],
    weight: Int8[Tensor, "N K"],
    scale: Float[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "M N"]:
    """x @ (scale * weight).T + bias, with x rounded to int8 per row.

    >>> weight = torch.tensor([[1.0, -2.0]])
    >>> int8_linear(torch.tensor([[3.0, 1.0]]), *quantize_weight(weight)).round(decimals=1)
    tensor([[1.]])
    """
    q, row_scale = quantize_rows(x)
    y = torch._int_mm(q, weight.t()).float().mul_(row_scale).mul_(scale)
    return y if bias is None else y.add_(bias)
