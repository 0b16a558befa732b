"""Linear layers with int8 weights, for inference on a CPU."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.kernels.cpu.int8_linear import int8_linear, quantize_weight


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
