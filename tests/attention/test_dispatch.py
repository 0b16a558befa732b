"""The door: which kernel is taken, what is refused, and what an empty question gets."""

import os
import subprocess
import sys

import jaxtyping
import pytest
import torch

import regard.attention
from regard.attention import Concat, Dot, General, Location, attend, causal, explain, padding, use, weights, window
from regard.errors import RegardError
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
    with pytest.raises(RegardError, match=r"'fast'.*short, sdpa, concat_cpu, chunked, reference"), use("fast"):
        pass
    with pytest.raises(RegardError, match="varlen takes packed"), use("varlen"):
        kernel(2, 2)


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
