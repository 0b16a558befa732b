"""Concat without a tanh: large arguments, odd blocks, who takes it; test_attend.py compares all masks and shapes."""

import pytest
import torch

from regard.attention import Concat, attend, causal, explain, padding, use
from regard.attention.kernels import chunked, concat_cpu
from tests.attention.helpers import random


def outputs(kernel, score, tensors, grad, **given):
    tensors = [x.detach().requires_grad_() for x in tensors]
    score.zero_grad()
    with use(kernel):
        out = attend(*tensors, score=score, **given)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in tensors), *(p.grad.clone() for p in score.parameters())]


def tensors(T=9, S=11, H=2):
    return random(2, H, T, 4), random(2, H, S, 4, seed=1), random(2, H, S, 4, seed=2)


@pytest.mark.parametrize("size", [0.0, 1.0, 39.0, 41.0, 1000.0])
def test_arguments_of_any_size(size):
    """a and b of opposite signs, so large that their exponentials are no numbers, still add up to a small a + b."""
    torch.manual_seed(0)
    score = Concat(4, 4, 6)
    with torch.no_grad():
        score.weight_q[0], score.weight_k[0] = size, -size
    q, k, v = (x.float() for x in tensors())
    q[..., 0] = k[..., 0] = 1.0  # a has +size in it, b −size: the sum knows nothing of either
    grad = random(2, 2, 9, 4, seed=3).float()
    expected = outputs("reference", score.double(), [x.double() for x in (q, k, v)], grad.double(), mask=causal())
    found = outputs("concat_cpu", score.float(), (q, k, v), grad, mask=causal())
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        # The sum itself has lost a few digits of size before anybody takes its tanh.
        assert (one.double() - other).norm() <= (2e-6 + 2e-7 * size) * (1 + other.norm())


@pytest.mark.parametrize("block", [1, 100, 1000, 10_000])
@pytest.mark.parametrize("heads", [None, 3])
def test_blocks_of_any_size_give_the_same(monkeypatch, block, heads):
    monkeypatch.setitem(chunked.BLOCK, "cpu", block)
    score = Concat(4, 4, 5, heads=heads).double()
    given = {"mask": causal() & padding(torch.tensor([11, 4]))}
    grad = random(2, 3, 9, 4, seed=3)
    expected = outputs("reference", score, tensors(H=3), grad, **given)
    for one, other in zip(outputs("concat_cpu", score, tensors(H=3), grad, **given), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_who_takes_it():
    def kernel(score, dtype=torch.float32):
        with explain() as choices:
            attend(*(x.to(dtype) for x in tensors()), score=score.to(dtype))
        return choices[0].kernel

    class Louder(Concat):
        def pair(self, q, k):
            return 2 * super().pair(q, k)

    assert kernel(Concat(4, 4, 5)) == "concat_cpu"
    assert kernel(Louder(4, 4, 5)) == "chunked"  # its pairs are its own affair
    assert kernel(Concat(4, 4, 5), torch.float16) == "chunked"


def test_no_tanh_is_computed(monkeypatch):
    seen = []
    monkeypatch.setattr(Concat, "pair", lambda self, q, k: seen.append(1))
    out = attend(*(x.float().requires_grad_() for x in tensors()), score=Concat(4, 4, 5))
    out.sum().backward()
    assert not seen
    assert concat_cpu.LIMIT < 44  # e^{2·44} is the last number in float32
