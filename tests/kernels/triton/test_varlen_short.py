"""The CUDA kernel for short packed sequences against the reference: on a GPU, or in Triton's interpreter."""

import jaxtyping
import pytest
import torch

from regard.attention import Location, Offsets, ScaledDot, attend, causal, padding, use
from regard.attention.backends import varlen_short
from regard.attention.backends.call import Call
from regard.attention.masks import MaskParts
from regard.attention.reference import reference, reference_packed
from regard.kernels.triton import varlen_short as kernels
from regard.kernels.triton.support import is_interpreted, triton_available
from regard.kernels.triton.varlen_short import varlen_short_forward
from tests.attention.helpers import FakeCudaTensor, random

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs Triton")

DEVICE = "cpu" if is_interpreted() else "cuda"
# The interpreter cannot multiply bf16; float16 takes the same path through the kernel.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3} | ({} if is_interpreted() else {torch.bfloat16: 1e-2})


def make_offsets(lengths, spare=0):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Offsets(starts.to(DEVICE), total=sum(lengths), max_len=max(lengths) + spare)


def offsets_to_cpu(offsets):
    return Offsets(offsets.starts.cpu(), offsets.total, offsets.max_len)


def assert_norms_close(actual, expected, tolerance):
    for x, y in zip(actual, expected, strict=True):
        assert torch.isfinite(x).all()
        assert (x.double().cpu() - y).norm() <= tolerance * y.norm()


# Lengths of queries, of keys (None: self-attention), heads of queries, of keys, widths of keys, of values, mask.
CASES = {
    "single": ([1], None, 1, 1, 16, 16, None),
    "similar": ([5, 4, 5], None, 2, 2, 32, 32, None),
    "causal, with empty sequences": ([1, 0, 30, 0, 7, 0], None, 2, 2, 64, 64, causal()),
    "odd widths, grouped heads": ([3, 17], None, 4, 2, 20, 9, causal()),
    "several tiles of queries": ([70, 128], None, 1, 1, 16, 32, causal()),
    "cross": ([1, 9, 0, 3, 17, 2, 0], [8, 0, 3, 40, 1, 0, 5], 2, 1, 32, 24, None),
    "wide": ([33], [12], 1, 1, 128, 128, None),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_reference(case, dtype, monkeypatch):
    # Fewer programs than tasks, so that each program handles several.
    monkeypatch.setattr(kernels, "_programs", lambda x, tasks, tiling: min(tasks, 3))
    q_lengths, k_lengths, H, G, D, Dv, mask = CASES[case]
    q_offsets = make_offsets(q_lengths)
    k_offsets = q_offsets if k_lengths is None else make_offsets(k_lengths, spare=3)
    # Keys and values are views of one tensor, as in layers.
    q, grad = random(q_offsets.total, H, D), random(q_offsets.total, H, Dv, seed=3)
    keys_values = random(k_offsets.total, G, D + Dv, seed=1).to(dtype)
    exact = [x.to(dtype).double().requires_grad_() for x in (q, keys_values[..., :D], keys_values[..., D:])]
    inputs = [x.to(DEVICE, dtype).requires_grad_() for x in (q, keys_values)]
    with use("varlen_short"):
        out = attend(
            *(inputs[0], inputs[1][..., :D], inputs[1][..., D:]), mask=mask, q_offsets=q_offsets, k_offsets=k_offsets
        )
    grads = torch.autograd.grad(out, inputs, grad.to(DEVICE, dtype))
    offsets = offsets_to_cpu(q_offsets), offsets_to_cpu(k_offsets)
    expected = reference_packed(*exact, ScaledDot(), mask, None, *offsets)
    dq, dk, dv = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    assert_norms_close([out, *grads], [expected, dq, torch.cat((dk, dv), -1)], TOLERANCE[dtype])


def test_queries_without_keys_get_zero_outputs_and_gradients():
    q_offsets, k_offsets = make_offsets([2, 3]), make_offsets([0, 2])
    q, k, v = (random(n, 1, 16, seed=i).float().to(DEVICE).requires_grad_() for i, n in enumerate((5, 2, 2)))
    with use("varlen_short"):
        out = attend(q, k, v, q_offsets=q_offsets, k_offsets=k_offsets)
    out.sum().backward()
    assert (out[:2] == 0).all()
    assert (q.grad[:2] == 0).all()
    # Keys without queries.
    q, k, v = (random(n, 1, 16, seed=i).float().to(DEVICE).requires_grad_() for i, n in enumerate((2, 5, 5)))
    with use("varlen_short"):
        attend(q, k, v, q_offsets=k_offsets, k_offsets=q_offsets).sum().backward()
    assert all((x.grad[:2] == 0).all() for x in (k, v))
    assert (v.grad[2:] != 0).all()


def test_large_scores_do_not_overflow():
    offsets = make_offsets([3])
    x = (100 * random(3, 1, 16)).float().to(DEVICE)
    with use("varlen_short"):
        out = attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
    torch.testing.assert_close(out, x)  # each query attends only to itself


def test_location_has_keys_for_every_head():
    offsets = make_offsets([4, 2])
    q, k = random(6, 4, 16).float().to(DEVICE), random(6, 2, 16, seed=1).float().to(DEVICE)
    score = Location(16, max_keys=8, heads=4).to(DEVICE)
    with use("varlen_short"):
        out = attend(q, k, k, score=score, q_offsets=offsets, k_offsets=offsets)
    cpu_offsets = offsets_to_cpu(offsets)
    expected = reference_packed(q.cpu(), k.cpu(), k.cpu(), score.cpu(), None, None, cpu_offsets, cpu_offsets)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_opcheck():
    """Fake outputs have the right shapes, compiled gradients are registered, and inputs are not modified."""
    offsets = make_offsets([3, 0, 5])
    q, k, v = (random(8, 2, 16, seed=i).float().to(DEVICE).requires_grad_() for i in range(3))
    torch.library.opcheck(varlen_short_forward.operator, (q, k, v, offsets.starts, offsets.starts, 5, 5, 0.25, True))


def test_compiles_to_one_graph(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    offsets = make_offsets([3, 0, 5])
    tensors = [random(8, 2, 16, seed=i).float().to(DEVICE).requires_grad_() for i in range(3)]

    def function(q, k, v, starts):
        o = Offsets(starts, total=8, max_len=5)
        return attend(q, k, v, mask=causal(), q_offsets=o, k_offsets=o)

    def gradients(function):
        with use("varlen_short"):
            return torch.autograd.grad(function(*tensors, offsets.starts).sin().sum(), tensors)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(function))


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"max_len": 129}, False),
        ({"width": 72}, False),
        ({"width": 72, "max_len": 64}, True),
        ({"width": 136, "max_len": 64}, False),
        ({"dtype": torch.float32}, False),
        ({"parts": MaskParts(causal=True)}, True),
        ({"parts": MaskParts(window=3)}, False),
    ],
    ids=str,
)
def test_supported_packed_calls(changes, supported):
    case = {"max_len": 128, "width": 64, "dtype": torch.bfloat16, "parts": MaskParts()} | changes
    x = torch.zeros(4, 2, case["width"], dtype=case["dtype"]).as_subclass(FakeCudaTensor)
    offsets = Offsets(torch.tensor([0, 4]), 4, case["max_len"])
    call = Call(x, x, x, ScaledDot(), case["parts"], None, offsets, offsets)
    assert varlen_short.supports(call) == supported


# B, T, S, heads of queries, of keys, widths of keys, of values, mask.
EQUAL_LENGTHS = {
    "self": (3, 20, 20, 2, 2, 16, 16, None),
    "causal, grouped heads": (2, 17, 17, 4, 2, 16, 24, causal()),
    "cross": (2, 16, 33, 2, 1, 16, 16, None),
}


@pytest.mark.parametrize("case", EQUAL_LENGTHS)
def test_padded_sequences_of_equal_length_equal_reference(case):
    B, T, S, H, G, D, Dv, mask = EQUAL_LENGTHS[case]
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, Dv), (B, T, H, Dv)
    # The heads of a token are contiguous, as in layers.
    q, k, v, grad = (random(*shape, seed=i).transpose(1, 2) for i, shape in enumerate(shapes))
    inputs = [x.float().to(DEVICE).requires_grad_() for x in (q, k, v)]
    exact = [x.float().double().requires_grad_() for x in (q, k, v)]
    with use("varlen_short"):
        out = attend(*inputs, mask=mask)
    grads = torch.autograd.grad(out, inputs, grad.float().to(DEVICE))
    expected = reference(*exact, ScaledDot(), mask)
    assert_norms_close([out, *grads], [expected, *torch.autograd.grad(expected, exact, grad.float().double())], 1e-5)


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"T": 64, "S": 64}, True),
        ({"T": 64, "S": 65}, False),
        ({"T": 1}, False),
        ({"heads_first": True}, False),
        ({"mask": causal()}, True),
        ({"mask": causal(), "S": 40}, False),
        ({"mask": padding(torch.tensor([3, 4]))}, False),
        ({"is_padded": True}, False),
    ],
    ids=str,
)
def test_supported_padded_calls(changes, supported):
    case = {"T": 32, "S": 32, "mask": None, "heads_first": False, "is_padded": False} | changes
    tensors = []
    for rows in (case["T"], case["S"], case["S"]):
        x = torch.zeros(2, 2, rows, 16) if case["heads_first"] else torch.zeros(2, rows, 2, 16).transpose(1, 2)
        tensors.append(x.bfloat16().as_subclass(FakeCudaTensor))
    call = Call(*tensors, ScaledDot(), MaskParts.from_mask(case["mask"]), is_padded=case["is_padded"])
    assert varlen_short.supports(call) == supported
