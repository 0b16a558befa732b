"""Rows of length 1 and their gradients beside torch's own: on a GPU, or without one in Triton's interpreter."""

import pytest
import torch
from torch import nn

from regard.attention import Cosine, scores, triton_here, unit_rows
from regard.attention.unit_rows import unit_rows as brought
from tests.attention.helpers import OnGPU

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"
# How far gradients may lie from the exact ones, which are rounded once.
CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def exact(q, k, log_scale, grads, eps=1e-6):
    given = [x.detach().double().requires_grad_() for x in (q, k, log_scale) if x is not None]
    q, k = (nn.functional.normalize(x, dim=-1, eps=eps) for x in given[:2])
    outs = q if log_scale is None else q * given[2].exp(), k
    return *outs, *torch.autograd.grad(outs, given, [grad.double() for grad in grads])


def found(q, k, log_scale, grads, eps=1e-6):
    outs = brought(q, k, log_scale, eps)
    return *outs, *torch.autograd.grad(outs, [x for x in (q, k, log_scale) if x is not None], grads)


# Of q and of k: heads, rows and numbers of axes may differ.
SHAPES = [
    ((5, 16), (7, 16)),
    ((3, 70, 8), (1, 70, 8)),
    ((2, 3, 65, 40), (2, 1, 9, 40)),
    ((2, 3, 1, 8), (2, 3, 130, 8)),
    ((2, 3, 0, 8), (2, 3, 5, 8)),
    ((2, 3, 4, 8), (2, 3, 0, 8)),
]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("scaled", ["no", "one", "heads"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_equals_torchs_own(shapes, scaled, dtype, monkeypatch):
    monkeypatch.setattr(unit_rows, "CELLS", 512)
    torch.manual_seed(0)
    q, k = (random(*shape, dtype=dtype) for shape in shapes)
    grads = [torch.randn_like(x) for x in (q, k)]
    numbers = (shapes[0][-3], 1, 1) if scaled == "heads" and len(shapes[0]) > 2 else (1,)
    log_scale = None if scaled == "no" else random(*numbers)
    for one, other in zip(found(q, k, log_scale, grads), exact(q, k, log_scale, grads), strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= CLOSE[dtype] * (other.norm() + 1e-9)


def test_any_strides():
    """Heads of a projection side by side, and halves of one: what layers give."""
    torch.manual_seed(0)
    both = torch.randn(2, 9, 2, 3, 16, device=DEVICE)
    views = both[:, :, 0].transpose(1, 2), both[..., ::2][:, :, 1], both[:, :, 1, 0]
    for q, k in ((views[0], views[2]), (views[2], views[0]), (views[1], views[1].transpose(1, 2))):
        q, k = (x.detach().requires_grad_() for x in (q, k))
        grads = [torch.randn_like(x).mT.contiguous().mT for x in (q, k)]
        for one, other in zip(found(q, k, None, grads), exact(q, k, None, grads), strict=True):
            torch.testing.assert_close(one, other.float(), atol=1e-6, rtol=1e-5)


def test_a_vector_without_direction_stays_what_it_is():
    x = torch.tensor([[0.0, 0.0], [3e-7, 4e-7]], device=DEVICE, requires_grad=True)
    for out in brought(x, x, None, 1e-6):
        assert out.flatten().tolist() == pytest.approx([0.0, 0.0, 0.3, 0.4])
        [dx] = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
        assert dx.flatten().tolist() == pytest.approx([1e6] * 4)


@pytest.mark.parametrize("heads", [None, 4])
def test_cosine_through_it_is_cosine(heads, monkeypatch):
    torch.manual_seed(0)
    score = Cosine(10.0, learned=True, heads=heads).to(DEVICE)
    q, k = random(2, 4, 5, 16), random(2, 4, 6, 16)
    given = [q, k, *score.parameters()]
    results = []
    for takes in (True, False):
        monkeypatch.setattr(scores.unit_rows, "takes", lambda q, k, takes=takes: takes)
        out = score(q, k)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_what_it_takes():
    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype).as_subclass(OnGPU)

    assert unit_rows.takes(zeros(2, 4, 3, 8), zeros(2, 1, 5, 8))
    assert not unit_rows.takes(torch.zeros(3, 8), torch.zeros(3, 8))
    assert not unit_rows.takes(zeros(3, 8), zeros(3, 9))
    assert not unit_rows.takes(zeros(3, 8), zeros(3, 8, dtype=torch.float32))
    assert not unit_rows.takes(zeros(3, 2000), zeros(3, 2000))


@pytest.mark.parametrize("log_scale", [None, (1,), (3, 1, 1)], ids=str)
def test_compilers_see_one_operator_a_way(log_scale):
    torch.manual_seed(0)
    q, k = random(2, 3, 5, 16), random(2, 1, 4, 16)
    log_scale = None if log_scale is None else random(*log_scale)
    grads = [torch.randn_like(x) for x in (q, k)]
    function = torch.compile(brought, backend="aot_eager", fullgraph=True)
    given = [x for x in (q, k, log_scale) if x is not None]
    outs = function(q, k, log_scale, 1e-6)
    for one, other in zip(
        [*outs, *torch.autograd.grad(outs, given, grads)], exact(q, k, log_scale, grads), strict=True
    ):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


def test_operators_are_what_they_say():
    q, k, log_scale = torch.randn(3, 5, 16), torch.randn(5, 2, 16).transpose(0, 1), torch.zeros(3, 1, 1)
    for scale in (None, log_scale):
        q, k, scale = (None if x is None else x.to(DEVICE) for x in (q, k, scale))
        torch.library.opcheck(unit_rows.forward.operator, (q, k, scale, 1e-6))
        torch.library.opcheck(unit_rows.backward.operator, (q, k, q, k, scale, 1e-6))
