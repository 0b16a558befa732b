"""Linear layers with quantized weights, for inference: int8 on a CPU, float8 on a GPU."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.kernels.cpu.int8_linear import int8_linear, quantize_weight

MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output channel; activations are rounded to int8 per row.

    >>> layer = Int8Linear.from_linear(nn.Linear(8, 3))
    >>> layer(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 3])
    """

    dtype = torch.float32
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @staticmethod
    @torch.no_grad()
    def from_linear(linear: nn.Linear) -> "Int8Linear":
        return Int8Linear(*quantize_weight(linear.weight), None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Float[Tensor, "*n K"]) -> Float[Tensor, "*n N"]:
        y = int8_linear(x.reshape(-1, x.shape[-1]), self.weight, self.scale, self.bias)
        return y.view(*x.shape[:-1], -1)


def quantize_float8(weight: Float[Tensor, "N K"]) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N"]]:
    """The weight as float8 (e4m3), and the scale of each output channel: weight ≈ scale[:, None] * float8.

    Scales are powers of two: the products are exact in bfloat16, so that every path computes with the same weights.
    Rounding to floating-point numbers gains nothing from a finer scale.

    >>> q, scale = quantize_float8(torch.tensor([[1.0, -2.0], [0.3, 20.5]]))
    >>> q.float() * scale[:, None]
    tensor([[ 1.0000, -2.0000],
            [ 0.3125, 20.0000]])
    """
    # amax / MAX_FLOAT8 = mantissa * 2**exponent with a mantissa in [0.5, 1). Tiny channels are rounded to 0.
    amax = weight.float().abs().amax(1)
    exponent = torch.frexp(amax / MAX_FLOAT8).exponent.clamp(min=-100)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


class Float8Linear(nn.Module):
    """A linear layer with float8 weights, one scale per output channel; activations are in `dtype`.

    >>> layer = Float8Linear.from_linear(nn.Linear(8, 3))
    >>> layer(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 3])
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @staticmethod
    @torch.no_grad()
    def from_linear(linear: nn.Linear) -> "Float8Linear":
        bias = None if linear.bias is None else linear.bias.detach()
        return Float8Linear(*quantize_float8(linear.weight), bias, linear.weight.dtype)

    def dequantize(self) -> Float[Tensor, "N K"]:
        """The weight in the dtype of the activations."""
        return self.weight.to(self.dtype).mul_(self.scale.to(self.dtype)[:, None])

    def forward(self, x: Float[Tensor, "*n K"]) -> Float[Tensor, "*n N"]:
        return nn.functional.linear(x, self.dequantize(), self.bias)
