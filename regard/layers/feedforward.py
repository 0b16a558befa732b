"""The position-wise network of two layers: FFN(x) = W2 act(W1 x)."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["relu", "gelu", "relu2", "swiglu"]


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between them; swiglu has a gate: W2 (silu(W1 x) * W3 x).

    >>> FeedForward(8, 32)(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(self, width: int, hidden: int, activation: Activation = "relu", bias: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.inner = nn.Linear(width, hidden * (2 if activation == "swiglu" else 1), bias=bias)
        self.outer = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        hidden = self.inner(x)
        match self.activation:
            case "relu":
                hidden = hidden.relu()
            case "gelu":
                hidden = nn.functional.gelu(hidden)
            case "relu2":
                hidden = hidden.relu().square()
            case "swiglu":
                value, gate = hidden.chunk(2, dim=-1)
                hidden = value * nn.functional.silu(gate)
        return self.outer(hidden)
