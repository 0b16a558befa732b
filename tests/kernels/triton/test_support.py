"""Custom operators: a dispatcher operator for torch.compile and fake tensors, a plain function in eager mode.

Modules with kernels are imported without Triton.
"""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.errors import RegardError
from regard.kernels.triton import support
from regard.kernels.triton.support import Operator, dependent_launch, operator
from tests.attention.helpers import FakeCudaTensor


class RecordedOperators(TorchDispatchMode):
    """Records the names of the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def scale() -> Operator:
    @operator("regard::scale_test")
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @operator("regard::scale_backward_test")
    def backward(grad: torch.Tensor, factor: float) -> torch.Tensor:
        return grad * factor

    def setup_context(ctx, inputs, output):
        _, ctx.factor = inputs

    scale.register_fake(lambda x, factor: torch.empty_like(x))
    backward.register_fake(lambda grad, factor: torch.empty_like(grad))
    scale.register_autograd(lambda ctx, grad: (backward(grad, ctx.factor), None), setup_context=setup_context)
    return scale


def output_and_gradient(function, x):
    out = function(x, 3.0)
    return out, *torch.autograd.grad(out, x, torch.ones_like(out))


def test_eager_calls_bypass_the_dispatcher(scale):
    x = torch.arange(4.0, requires_grad=True)
    with RecordedOperators() as recorded:
        out, grad = output_and_gradient(scale, x)
    assert out.tolist() == [0, 3, 6, 9]
    assert grad.tolist() == [3, 3, 3, 3]
    assert not [name for name in recorded.names if name.startswith("regard")]


def test_fake_tensors_use_the_dispatcher(scale):
    with FakeTensorMode(), RecordedOperators() as recorded:
        out, grad = output_and_gradient(scale, torch.empty(4, requires_grad=True))
    assert out.shape == grad.shape == (4,)
    names = [name for name in recorded.names if name.startswith("regard")]
    assert names == ["regard::scale_test", "regard::scale_backward_test"]


def test_compiled_graph_has_one_operator(scale):
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = torch.arange(4.0, requires_grad=True)
    torch._dynamo.reset()
    out, grad = output_and_gradient(torch.compile(scale, backend=backend, fullgraph=True), x)
    assert graphs == [["regard.scale_test.default"]]
    assert (out.tolist(), grad.tolist()) == ([0, 3, 6, 9], [3, 3, 3, 3])


def test_second_derivatives_are_refused(scale):
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RegardError, match="create_graph=True"):
        torch.autograd.grad(scale(x, 3.0).sum(), x, create_graph=True)


def test_opcheck(scale):
    torch.library.opcheck(scale.operator, (torch.randn(3, requires_grad=True), 2.0))


def test_dependent_launch_needs_a_gpu_of_compute_capability_9(monkeypatch):
    x = torch.zeros(1).as_subclass(FakeCudaTensor)
    monkeypatch.setattr(support, "_INTERPRETED", False)
    for capability, is_supported in (((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert dependent_launch(x)["PDL"] == is_supported
        assert dependent_launch(x).get("launch_pdl", False) == is_supported
    assert dependent_launch(torch.zeros(1)) == {"PDL": False}


WITHOUT_TRITON = """
import inspect, pkgutil, sys
from importlib import import_module
sys.modules["triton"] = None  # now its import fails
import torch
import regard.attention
from regard.kernels import triton as kernels
for _, name, _ in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
    module = import_module(name)
    if hasattr(module, "supports"):
        count = len(inspect.signature(module.supports).parameters)
        print(name, module.supports(*[torch.zeros(1, 1)] * count))
"""


def test_kernels_are_imported_without_triton():
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    supported = dict(line.split() for line in result.stdout.splitlines())
    assert len(supported) > 9
    assert set(supported.values()) == {"False"}
