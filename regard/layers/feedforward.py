"""Position-wise feed-forward network: FFN(x) = W2 act(W1 x), or gated."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from regard.kernels.triton import linear_relu

Activation = Literal["relu", "gelu", "gelu_tanh", "relu2", "silu", "swiglu", "geglu"]
EncoderActivation = Literal["relu", "gelu", "gelu_tanh", "relu2", "silu", "swiglu", "geglu", "geglu_exact"]
# quick_gelu: x · sigmoid(1.702 x) (CLIP)
VisionActivation = Literal["relu", "gelu", "gelu_tanh", "relu2", "silu", "swiglu", "geglu", "quick_gelu"]

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu2": lambda x: nn.functional.relu(x).square(),
    "silu": nn.functional.silu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "tanh": nn.functional.tanh,
}
# Gated linear units: SwiGLU (Llama), GEGLU with the tanh approximation of GELU (T5 1.1) and without it (ModernBERT).
_GATES = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_exact": "gelu"}


def activate(name: str, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Apply an activation function, given its name; for a gated one, the activation of its gate.

    >>> activate("relu2", torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    return _FUNCTIONS[_GATES.get(name, name)](x)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them; the kinds of GLU are gated: W2 (W1 x * act(W3 x)).

    The weight of `fc1` holds W1 and, below it, W3.

    >>> FeedForward(8, 32)(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self, width: int, hidden: int, activation: VisionActivation | EncoderActivation = "relu", bias: bool = True
    ) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(width, hidden * (2 if activation in _GATES else 1), bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    @property
    def is_gated(self) -> bool:
        return self.activation in _GATES

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        if self.activation == "relu" and linear_relu.supports(x, self.fc1.weight, self.fc1.bias):
            return self.fc2(linear_relu.linear_relu(x, self.fc1.weight, self.fc1.bias))
        hidden = self.fc1(x)
        return self.fc2(self.apply_gate(hidden) if self.is_gated else activate(self.activation, hidden))

    def apply_gate(self, hidden: Float[Tensor, "*n G"]) -> Float[Tensor, "*n F"]:
        """The product of W1 x and the activated gate W3 x."""
        value, gate = hidden.chunk(2, dim=-1)
        return value * activate(self.activation, gate)
