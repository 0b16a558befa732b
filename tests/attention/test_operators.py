"""Operators of ours: compilers and fake tensors meet an operator, everybody else a plain function."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention.triton_here import Operator, operator


class Seen(TorchDispatchMode):
    """The names of what the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def scaled() -> Operator:
    @operator("regard::scaled_for_a_test")
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @operator("regard::scaled_backward_for_a_test")
    def backward(grad: torch.Tensor, factor: float) -> torch.Tensor:
        return grad * factor

    def keep(ctx, inputs, output):
        _, ctx.factor = inputs

    scaled.register_fake(lambda x, factor: torch.empty_like(x))
    backward.register_fake(lambda grad, factor: torch.empty_like(grad))
    scaled.register_autograd(lambda ctx, grad: (backward(grad, ctx.factor), None), setup_context=keep)
    return scaled


def both(function, x):
    out = function(x, 3.0)
    return out, *torch.autograd.grad(out, x, torch.ones_like(out))


def test_called_as_they_are_without_the_dispatcher(scaled):
    x = torch.arange(4.0, requires_grad=True)
    with Seen() as seen:
        out, grad = both(scaled, x)
    assert out.tolist() == [0, 3, 6, 9]
    assert grad.tolist() == [3, 3, 3, 3]
    assert not [name for name in seen.names if name.startswith("regard")]


def test_fake_tensors_meet_the_operator(scaled):
    with FakeTensorMode(), Seen() as seen:
        out, grad = both(scaled, torch.empty(4, requires_grad=True))
    assert out.shape == grad.shape == (4,)
    names = [name for name in seen.names if name.startswith("regard")]
    assert names == ["regard::scaled_for_a_test", "regard::scaled_backward_for_a_test"]


def test_compilers_see_one_operator(scaled):
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = torch.arange(4.0, requires_grad=True)
    torch._dynamo.reset()
    out, grad = both(torch.compile(scaled, backend=backend, fullgraph=True), x)
    assert graphs == [["regard.scaled_for_a_test.default"]]
    assert (out.tolist(), grad.tolist()) == ([0, 3, 6, 9], [3, 3, 3, 3])


def test_torchs_rules_are_kept(scaled):
    torch.library.opcheck(scaled.operator, (torch.randn(3, requires_grad=True), 2.0))
