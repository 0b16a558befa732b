"""What runs the code: second derivatives and transforms of `torch.func`, which kernels do not support, or a tracer."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.errors import RegardError


def is_transformed() -> bool:
    """Whether the code runs inside a transform of `torch.func` or in forward-mode differentiation.

    >>> torch.func.vmap(lambda x: x + is_transformed())(torch.zeros(2))
    tensor([1., 1.])
    """
    if torch.compiler.is_compiling():  # which traces transforms itself
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def check_first_derivative(*_: Any) -> None:
    """Raise if the current backward pass is recorded for a second one (`create_graph=True`); also a tensor hook."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RegardError(
            "Second derivatives (create_graph=True) need plain torch operations: fast kernels have only first ones.",
            'Run the forward pass inside `with regard.attention.use("reference")`; on a GPU in float64.',
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a backward pass that torch cannot differentiate again: raise where it would have to.

    torch's decorator raises only if the gradient of the output depends on an input. For a scalar that is linear in the
    output it does not, and the second derivative would silently be zero.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        check_first_derivative()
        return backward(ctx, *grads)

    return checked


def is_exporting() -> bool:
    """Whether torch.export traces the code.

    In torch 2.11 `torch.compiler.is_exporting()` is also true under torch.compile.

    >>> is_exporting()
    False
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
