"""Dispatch: the choice of a kernel, refused inputs, empty inputs, and the state that context managers set."""

import os
import subprocess
import sys
import threading

import jaxtyping
import pytest
import torch

import regard.attention
from regard.attention import (
    Concat,
    Dot,
    General,
    Location,
    attend,
    causal,
    dispatch,
    explain,
    padding,
    use,
    weights,
    window,
)
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, EncoderBlock
from tests.attention.helpers import Slope, random


def kernel(T, S, B=4, H=2, **given):
    with explain() as choices:
        attend(random(B, H, T, 4), random(B, H, S, 4), random(B, H, S, 4), **given)
    (choice,) = choices
    assert choice.q == (B, H, T, 4)
    return choice.kernel


def test_which_kernel():
    lengths = padding(torch.tensor([1, 2, 3, 0]))
    assert kernel(16, 16) == "short"
    assert kernel(1, 16, B=1) == "sdpa"
    assert kernel(100, 100, mask=causal()) == "sdpa"
    assert kernel(100, 100, mask=causal() & lengths) == "sdpa"
    assert kernel(70, 100, mask=causal()) == "sdpa"
    assert kernel(10, 100, mask=causal()) == "chunked"
    assert kernel(1, 100, mask=causal()) == "sdpa"
    assert kernel(100, 100, mask=window(3)) == "chunked"
    assert kernel(100, 100, mask=causal() | lengths) == "chunked"
    assert kernel(100, 100, bias=Slope(2).double()) == "chunked"
    assert kernel(16, 16, bias=Slope(2).double()) == "short"
    assert kernel(16, 16, score=Concat(4, 4, 5).double()) == "concat_cpu"
    assert kernel(16, 16, score=Concat(4, 4, 5).double(), bias=Slope(2).double()) == "chunked"
    assert kernel(100, 100, score=General(4, 4).double()) == "sdpa"
    assert kernel(0, 5) == "reference"


def test_a_kernel_can_be_asked_for():
    with use("chunked"):
        assert kernel(16, 16) == "chunked"
    assert kernel(16, 16) == "short"
    with pytest.raises(RegardError, match=r"Unknown kernel 'fast'.*chunked, reference"), use("fast"):
        pass
    with pytest.raises(RegardError, match="varlen takes packed"), use("varlen"):
        kernel(2, 2)


# Dispatch state: what the context managers set


def test_contexts_nest_and_restore_the_state_around_them():
    outputs = []
    with use("chunked"), explain() as outer:
        with use("reference"), explain() as inner, dispatch.observe(lambda call, out: outputs.append(out)):
            kernel(16, 16)
        kernel(16, 16)
    kernel(16, 16)
    assert [choice.kernel for choice in inner] == ["reference"]
    assert [choice.kernel for choice in outer] == ["reference", "chunked"]
    assert len(outputs) == 1
    assert dispatch._thread.state == dispatch.DispatchState()


class Halve:
    """An intervention: half of the queries before the kernel, half of the output after it."""

    def before(self, call):
        return call._replace(q=call.q / 2)

    def after(self, call, out):
        return out / 2


def test_observers_see_what_interventions_leave():
    q, k, v = random(1, 1, 3, 4), random(1, 1, 3, 4, seed=1), random(1, 1, 3, 4, seed=2)
    seen = []
    with dispatch.observe(lambda call, out: seen.append((call.q, out))), dispatch.intervene(Halve()):
        out = attend(q, k, v)
    torch.testing.assert_close(out, attend(q / 2, k, v) / 2)
    assert torch.equal(seen[0][0], q / 2)
    assert torch.equal(seen[0][1], out)


@pytest.mark.parametrize(
    "context",
    [lambda: use("chunked"), explain, lambda: dispatch.observe(print), lambda: dispatch.intervene(Halve())],
    ids=["use", "explain", "observe", "intervene"],
)
def test_an_exception_restores_the_state(context):
    with pytest.raises(RegardError, match="do not fit"), context():
        attend(*random(3, 1, 1, 2, 4).unbind(), k_offsets=None, mask=padding(torch.tensor([1, 2, 3])))
    assert dispatch._thread.state == dispatch.DispatchState()
    assert dispatch._traced_kernel is None
    assert kernel(16, 16) == "short"


def test_each_thread_has_its_own_state():
    both_inside, found = threading.Barrier(2), {}

    def run(name):
        outputs = []
        with use(name), explain() as choices, dispatch.observe(lambda call, out: outputs.append(out)):
            both_inside.wait()
            for _ in range(20):
                attend(*torch.zeros(3, 1, 2, 16, 4))
            both_inside.wait()
        found[name] = {choice.kernel for choice in choices}, len(choices), len(outputs)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("chunked", "reference")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: ({name}, 20, 20) for name in ("chunked", "reference")}
    assert dispatch._traced_kernel is None


def test_compiled_code_follows_the_forced_kernel(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=count)
    given = torch.randn(3, 1, 2, 100, 4)
    expected, seen = attend(*given), []
    torch.testing.assert_close(compiled(*given), expected)
    with explain():
        torch.testing.assert_close(compiled(*given), expected)
    with dispatch.observe(lambda call, out: seen.append(out)):
        torch.testing.assert_close(compiled(*given), expected)
    torch.testing.assert_close(compiled(*given), expected)
    assert len(graphs) == 1
    assert len(seen) == 1
    with use("reference"):
        torch.testing.assert_close(compiled(*given), expected)
    assert len(graphs) == 2
    assert not any("scaled_dot_product" in target for target in graphs[1])
    torch.testing.assert_close(compiled(*given), expected)
    assert len(graphs) == 2


def test_the_reference_is_exported_with_a_dynamic_length(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # shapes are symbols there
    block = EncoderBlock(BlockConfig(8, 2, 16), "scaled_dot", "masked").eval()

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x, None)

    length = torch.export.Dim("length", min=2, max=64)
    with use("reference"), torch.no_grad():
        exported = torch.export.export(Whole(), (torch.randn(1, 5, 8),), dynamic_shapes=({1: length},), strict=False)
        x = torch.randn(1, 9, 8)
        torch.testing.assert_close(exported.module()(x), block(x, None))


def test_no_queries_or_no_keys():
    assert attend(random(2, 1, 0, 4), random(2, 1, 3, 4), random(2, 1, 3, 4)).shape == (2, 1, 0, 4)
    nothing = random(2, 1, 0, 4)
    assert torch.equal(attend(random(2, 1, 3, 4), nothing, nothing), torch.zeros(2, 1, 3, 4, dtype=torch.float64))
    assert weights(random(2, 1, 3, 4), nothing).shape == (2, 1, 3, 0)


def test_three_axes_are_one_head():
    q, k, v = random(2, 3, 4), random(2, 5, 4, seed=1), random(2, 5, 6, seed=2)
    out = attend(q, k, v, mask=causal())
    torch.testing.assert_close(out, attend(q[:, None], k[:, None], v[:, None], mask=causal())[:, 0])
    assert weights(q, k).shape == (2, 1, 3, 5)


@pytest.mark.parametrize("name", ["short", "sdpa", "chunked"])
def test_those_who_may_look_at_nothing_get_zeros_and_give_none(name):
    q, k, v = (random(2, 1, 4, 4, seed=i).requires_grad_() for i in range(3))
    with use(name):
        out = attend(q, k, v, mask=padding(torch.tensor([0, 2])))
    out.sum().backward()
    assert (out[0] == 0).all()
    assert all((x.grad[0] == 0).all() for x in (q, k, v))
    assert (k.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, :2] != 0).all()


def test_shapes_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # our own words, not the shape checker's
    q, k = random(2, 4, 3, 4), random(2, 4, 5, 4)
    cases = [
        ((q, k[:1], k[:1]), {}, r"q \(2, 4, 3, 4\), k \(1, 4, 5, 4\)"),
        ((q, k, k[:, :, :4]), {}, r"v \(2, 4, 4, 4\).*alike but for their width"),
        ((q, k[:, :3], k[:, :3]), {}, "multiple of those of k"),
        ((q, k[0], k[0]), {}, r"Give \(B, T, D\) or \(B, H, T, D\)"),
        ((q, k[..., :3], k), {}, "one width"),
        ((q, k[..., :3], k), {"score": Dot()}, "one width"),
        ((q, k, k), {"score": General(4, 4, heads=2)}, "The score has 2 heads"),
        ((q, k, k), {"mask": padding(torch.tensor([1, 2, 3]))}, r"given \(3,\) lengths"),
        ((q, k, k), {"score": Location(4, 3)}, "5 keys, but W_a has 3 rows"),
    ]
    for tensors, given, message in cases:
        with pytest.raises(RegardError, match=message):
            attend(*tensors, **given)


def test_weights_have_gradients():
    q, k = random(1, 2, 3, 4).requires_grad_(), random(1, 2, 3, 4, seed=1).requires_grad_()
    score = Concat(4, 4, 3, heads=2).double()
    weights(q, k, score=score, mask=causal())[..., 0].sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (q, k, *score.parameters()))


def test_public_names():
    assert sorted(regard.attention.__all__, key=str.lower) == sorted(set(regard.attention.__all__), key=str.lower)
    assert all(hasattr(regard.attention, name) for name in regard.attention.__all__)


HALF = """
import copy, torch
from regard.attention import *
from regard.attention.reference import reference
torch.manual_seed(0)
for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
    for T, S in ((7, 7), (9, 12), (70, 70)):
        q, k, v = torch.randn(2, 2, T, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 8)
        for mask in (None, causal(), padding(torch.tensor([0, 5])), causal() & padding(torch.tensor([0, 5]))):
            for score in (ScaledDot(), Cosine(10.0, learned=True), General(8, 8), Concat(8, 8, 8), Location(8, S)):
                tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
                exact = [x.detach().double().requires_grad_() for x in tensors]
                expected = reference(*exact, copy.deepcopy(score).double(), mask)
                for kernel in ("short", "sdpa", "chunked") if not isinstance(score, Concat) else ("chunked",):
                    with use(kernel):
                        found = attend(*tensors, score=score.to(dtype), mask=mask)
                    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2 * tolerance)
                    for one, other in zip(
                        torch.autograd.grad(found.sum(), tensors, allow_unused=True),
                        torch.autograd.grad(expected.sum(), exact, allow_unused=True, retain_graph=True),
                    ):
                        if other is not None:
                            # A gradient sums over all queries: its error is measured against its size as a whole.
                            assert (one.double() - other).norm() <= tolerance * other.norm(), (kernel, score, mask)
"""


def test_half_precision():
    """In a process of its own: some CPUs claim bf16 instructions that they do not have."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", HALF], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
