"""Availability of Triton, stand-ins for its names, and helpers for operators whose kernels are written in it.

Kernels run on a CUDA device or, for tests without one, in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

import importlib.util
import inspect
import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.derivatives import is_transformed, once_differentiable

# Constants, so that torch.compile can trace the functions below. Triton is not installed with CPU and macOS builds.
_AVAILABLE = importlib.util.find_spec("triton") is not None
_INTERPRETED = _AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"


def triton_available() -> bool:
    """Whether Triton is installed, outside of transforms of `torch.func`, which its kernels do not support."""
    return _AVAILABLE and not is_transformed()


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return _INTERPRETED


class StandIn:
    """Stands for an object of Triton in a module with kernels, until their first launch replaces it there.

    Such a module is imported on machines without Triton too, and by programs that launch no kernel.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = cache(make)


class constexpr(StandIn):
    """`tl.constexpr`: a constant of the module, or the annotation of a parameter, which Triton knows by this name."""

    def __init__(self, value: Any) -> None:
        super().__init__(lambda: tl.make().constexpr(value))


class Kernel(StandIn):
    """A function with the decorator `triton.jit`."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function = inspect.unwrap(function)  # Triton compiles its source, without the shape checks of tests
        super().__init__(lambda: triton.make().jit(**options)(self.function))

    def __getitem__(self, grid: Any) -> Any:
        self.import_names()
        return self.make()[grid]

    def import_names(self) -> None:
        """Replace all stand-ins in the module of this kernel, and in those from which it imports other kernels."""
        names = self.function.__globals__
        stand_ins = {name: value for name, value in names.copy().items() if isinstance(value, StandIn)}
        for value in stand_ins.values():
            if isinstance(value, Kernel) and value.function.__globals__ is not names:
                value.import_names()
        names.update({name: value.make() for name, value in stand_ins.items()})


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel(function) if function else partial(Kernel, **options)


triton: Any = StandIn(lambda: import_module("triton"))
triton.jit = _jit
tl: Any = StandIn(lambda: import_module("triton.language"))
tl.constexpr = constexpr
gdc_wait: Any = StandIn(lambda: import_module("triton.language.extra.cuda").gdc_wait)
gdc_launch_dependents: Any = StandIn(lambda: import_module("triton.language.extra.cuda").gdc_launch_dependents)


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Options of a kernel that may start before the previous one on the stream ends (programmatic dependent launch).

    Such a kernel has a parameter PDL. It calls gdc_wait before it reads what previous kernels wrote and before it
    writes, and then allows the next kernel to start. This takes a quarter off a CUDA graph of small kernels.
    """
    if _INTERPRETED or not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def contiguous_rows(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """x with a contiguous last axis; copied only if necessary.

    >>> contiguous_rows(torch.zeros(2, 3).T).stride()
    (2, 1)
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def next_power_of_two(n: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least n and `minimum`, as tile sizes must be.

    >>> next_power_of_two(33), next_power_of_two(3, minimum=16)
    (64, 16)
    """
    return max(minimum, 1 << (n - 1).bit_length())


class Operator:
    """A custom operator for torch.compile that is called as a plain function in eager mode.

    Going through torch's dispatcher costs about 50 µs of CPU time per call with gradients, which is longer than a
    small kernel runs.

    >>> @operator("regard::double_example")
    ... def double(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> double.register_fake(torch.empty_like)
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.operator = torch.library.custom_op(name, function, mutates_args=())
        self.eager = function

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Register the function that returns uninitialized outputs of the right shape, dtype and strides."""
        self.operator.register_fake(function)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Register the backward pass, as `torch.library.register_autograd` does; it is not differentiated again."""
        backward = once_differentiable(backward)
        self.operator.register_autograd(backward, setup_context=setup_context)
        forward = self.eager

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(*inputs):  # type: ignore[override]
                return forward(*inputs)

            @staticmethod
            def setup_context(ctx, inputs, output):
                setup_context(ctx, inputs, output)

            @staticmethod
            def backward(ctx, *grads):
                return backward(ctx, *grads)

        self.eager = Differentiable.apply

    def __call__(self, *inputs: Any) -> Any:
        # Tensor subclasses (fake, functional) go through the dispatcher.
        is_eager = type(inputs[0]) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
        return (self.eager if is_eager else self.operator)(*inputs)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator that makes an `Operator` of a function; its annotations define the operator's schema."""
    return lambda function: Operator(name, function)
