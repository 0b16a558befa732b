"""Concat on a CPU: large arguments, block sizes, supported calls; test_attend.py compares all masks and shapes."""

import pytest
import torch

from regard.attention import Concat, attend, causal, explain, padding, use
from regard.kernels import score_blocks
from regard.kernels.cpu import concat
from tests.attention.helpers import random


def outputs_and_gradients(backend, score, tensors, grad, **options):
    tensors = [x.detach().requires_grad_() for x in tensors]
    score.zero_grad()
    with use(backend):
        out = attend(*tensors, score=score, **options)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in tensors), *(p.grad.clone() for p in score.parameters())]


def make_tensors(T=9, S=11, H=2):
    return random(2, H, T, 4), random(2, H, S, 4, seed=1), random(2, H, S, 4, seed=2)


@pytest.mark.parametrize("size", [0.0, 1.0, 39.0, 41.0, 1000.0])
def test_arguments_of_any_magnitude(size):
    """a and b of opposite signs and so large that their exponentials overflow, with a small sum a + b."""
    torch.manual_seed(0)
    score = Concat(4, 4, 6)
    with torch.no_grad():
        score.weight_q[0], score.weight_k[0] = size, -size
    q, k, v = (x.float() for x in make_tensors())
    q[..., 0] = k[..., 0] = 1.0  # a contains +size and b −size, which cancel
    grad = random(2, 2, 9, 4, seed=3).float()
    expected = outputs_and_gradients(
        "reference", score.double(), [x.double() for x in (q, k, v)], grad.double(), mask=causal()
    )
    actual = outputs_and_gradients("concat_cpu", score.float(), (q, k, v), grad, mask=causal())
    for x, y in zip(actual, expected, strict=True):
        assert torch.isfinite(x).all()
        # The rounding error of a + b is proportional to the size of a and b.
        assert (x.double() - y).norm() <= (2e-6 + 2e-7 * size) * (1 + y.norm())


@pytest.mark.parametrize("block", [1, 100, 1000, 10_000])
@pytest.mark.parametrize("heads", [None, 3])
def test_result_does_not_depend_on_the_block_size(monkeypatch, block, heads):
    monkeypatch.setitem(score_blocks.BLOCK_ELEMENTS, "cpu", block)
    score = Concat(4, 4, 5, heads=heads).double()
    options = {"mask": causal() & padding(torch.tensor([11, 4]))}
    grad = random(2, 3, 9, 4, seed=3)
    expected = outputs_and_gradients("reference", score, make_tensors(H=3), grad, **options)
    torch.testing.assert_close(outputs_and_gradients("concat_cpu", score, make_tensors(H=3), grad, **options), expected)


def test_supported_scores_and_dtypes():
    def chosen_backend(score, dtype=torch.float32):
        with explain() as choices:
            attend(*(x.to(dtype) for x in make_tensors()), score=score.to(dtype))
        return choices[0].backend

    class DoubledConcat(Concat):
        def pair_scores(self, q, k):
            return 2 * super().pair_scores(q, k)

    assert chosen_backend(Concat(4, 4, 5)) == "concat_cpu"
    assert chosen_backend(DoubledConcat(4, 4, 5)) == "chunked"  # overrides `pair_scores`
    assert chosen_backend(Concat(4, 4, 5), torch.float16) == "chunked"


def test_no_tanh_is_computed(monkeypatch):
    calls = []
    monkeypatch.setattr(Concat, "pair_scores", lambda self, q, k: calls.append(1))
    out = attend(*(x.float().requires_grad_() for x in make_tensors()), score=Concat(4, 4, 5))
    out.sum().backward()
    assert not calls
    assert concat.MAX_ARGUMENT < 44  # e^{2·44} is about the largest finite float32
