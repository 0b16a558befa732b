"""The CUDA kernel for additive attention against the reference: on a GPU, or in Triton's interpreter."""

import copy

import jaxtyping
import pytest
import torch

from regard.attention import Concat, Offsets, attend, causal, explain, padding, use, window
from regard.attention.backends import concat
from regard.attention.backends.call import Call
from regard.attention.masks import MaskParts
from regard.attention.reference import reference, reference_packed
from regard.kernels.triton import concat as kernels
from regard.kernels.triton.concat import ConcatTiling, concat_forward
from regard.kernels.triton.support import is_interpreted, triton_available
from tests.attention.helpers import FakeCudaTensor, random

pytestmark = [
    pytest.mark.skipif(not triton_available(), reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns about intended infinities
]

DEVICE = "cpu" if is_interpreted() else "cuda"
# The interpreter cannot multiply bf16; float16 takes the same path through the kernel.
TOLERANCE = (
    {torch.float32: 1e-5, torch.float16: 3e-3}
    if is_interpreted()
    else {
        torch.float32: 3e-5,  # three TF32 products, and approximate powers and reciprocals
        torch.float16: 4e-3,
        torch.bfloat16: 3e-2,
    }
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let short sequences have several tiles, full and partial ones."""
    if is_interpreted():
        monkeypatch.setattr(kernels, "FORWARD_PRECISE", {256: ConcatTiling(16, 32, 4)})
        monkeypatch.setattr(kernels, "BACKWARD_PRECISE", {256: ConcatTiling(32, 16, 1)})
    elif torch.backends.cuda.matmul.allow_tf32:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def make_case(sizes, heads=None, dtype=torch.float32, scale=1.0):
    """q, k and v, the gradient of the output, a score; and q, k, v and the score in float64."""
    *shapes, D, C, hidden = sizes
    q, k, v, grad = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    torch.manual_seed(0)
    score = Concat(D, C, hidden=hidden, heads=heads)
    inputs = [(x * f).to(DEVICE, dtype).requires_grad_() for x, f in ((q, scale), (k, scale), (v, 1.0))]
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    return inputs, grad.to(DEVICE, dtype), copy.deepcopy(score).to(DEVICE), exact, score.double()


def gradients(function, tensors, score, grad):
    out = function(*tensors, score)
    return [out, *torch.autograd.grad(out, [*tensors, *score.parameters()], grad)]


def assert_norms_close(actual, expected, tolerance):
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        assert torch.isfinite(x).all()
        # Allow an absolute error: the terms of a gradient may cancel.
        assert (x.double().cpu() - y).norm() <= tolerance * (y.norm() + 1e-2 * y.numel() ** 0.5)


def padding_of(*lengths):
    return lambda device: padding(torch.tensor(lengths, device=device))


# B, heads of queries and of keys, T, S, widths of queries, keys and values, hidden width, mask, parameters per head.
PADDED = {
    "tiny": (1, 1, 1, 1, 2, 4, 4, 16, 16, None, False),
    "odd": (1, 1, 1, 33, 50, 5, 3, 20, 7, None, True),
    "causal, groups": (1, 2, 1, 20, 37, 8, 8, 16, 4, lambda _: causal(), False),
    "more queries than keys": (1, 1, 1, 37, 20, 8, 8, 16, 4, lambda _: causal(), False),
    "lengths, groups": (3, 2, 1, 3, 40, 8, 8, 9, 4, padding_of(40, 0, 17), True),
    "window and lengths": (2, 1, 1, 50, 50, 8, 8, 33, 4, lambda d: window(9) & padding_of(50, 20)(d), False),
    "window": (1, 1, 1, 20, 70, 8, 8, 8, 4, lambda _: window(20), False),
    "wide": (1, 1, 1, 2, 3, 8, 8, 256, 68, None, False),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, d) for c in PADDED for d in TOLERANCE if d == torch.float32 or c == "odd" or not is_interpreted()],
    ids=str,
)
def test_padded_equals_reference(case, dtype):
    B, H, G, T, S, D, C, Dv, hidden, mask, per_head = PADDED[case]
    shapes = (B, H, T, D), (B, G, S, C), (B, G, S, Dv), (B, H, T, Dv)
    inputs, grad, score, exact, exact_score = make_case((*shapes, D, C, hidden), H if per_head else None, dtype)
    device_mask, exact_mask = (mask and mask(device) for device in (DEVICE, "cpu"))
    with use("concat"), explain() as choices:
        actual = gradients(lambda q, k, v, s: attend(q, k, v, score=s, mask=device_mask), inputs, score, grad)
    assert [choice.backend for choice in choices] == ["concat"]
    expected = gradients(lambda q, k, v, s: reference(q, k, v, s, exact_mask), exact, exact_score, grad.cpu().double())
    assert_norms_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.skipif(not is_interpreted(), reason="tile sizes that only the interpreter supports")
def test_columns_in_two_halves(monkeypatch):
    monkeypatch.setattr(kernels, "BACKWARD_PRECISE", {256: ConcatTiling(16, 32, 1)})
    monkeypatch.setattr(kernels, "MIN_HALVED_COLUMNS", 32)
    test_padded_equals_reference("causal, groups", torch.float32)


# Lengths of queries, of keys (None: self-attention), mask, lengths of an additional padding().
PACKED = {
    "causal, with empty sequences": ([1, 0, 20, 0, 7], None, causal(), None),
    "cross": ([9, 0, 3, 34, 2], [0, 3, 40, 1, 0], None, None),
    "cross, padding": ([5, 19], [18, 9], None, [17, 0]),
}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("case", PACKED)
def test_packed_equals_reference(case, per_head):
    q_lengths, k_lengths, mask, shorter = PACKED[case]

    def make_offsets(lengths, device, spare=0):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return Offsets(starts.to(device), total=sum(lengths), max_len=max(lengths) + spare)

    def mask_and_offsets(device):
        q_offsets = make_offsets(q_lengths, device)
        k_offsets = q_offsets if k_lengths is None else make_offsets(k_lengths, device, spare=30)
        return mask if shorter is None else padding_of(*shorter)(device), q_offsets, k_offsets

    device_mask, q_offsets, k_offsets = mask_and_offsets(DEVICE)
    N, M, H, G, Dv = q_offsets.total, k_offsets.total, 2, 1, 12
    shapes = (N, H, 8), (M, G, 6), (M, G, Dv), (N, H, Dv)
    inputs, grad, score, exact, exact_score = make_case((*shapes, 8, 6, 4), H if per_head else None)
    with use("concat"):
        actual = gradients(
            lambda q, k, v, s: attend(q, k, v, score=s, mask=device_mask, q_offsets=q_offsets, k_offsets=k_offsets),
            inputs,
            score,
            grad,
        )
    exact_mask, *offsets = mask_and_offsets("cpu")
    expected = gradients(
        lambda q, k, v, s: reference_packed(q, k, v, s, exact_mask, None, *offsets),
        exact,
        exact_score,
        grad.cpu().double(),
    )
    assert_norms_close(actual, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_arguments_that_overflow_exp(scale):
    """Some tiles (with scale 100 all) are computed with a plain tanh, also for large a and b of opposite signs."""
    shapes = (1, 1, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8)
    inputs, grad, score, exact, exact_score = make_case((*shapes, 8, 8, 8), scale=scale)
    with torch.no_grad():
        for one in (score, exact_score):
            one.weight_k.copy_(-one.weight_q)  # a + b is small where q and k are similar
        for q, k in (inputs[:2], exact[:2]):
            k.copy_((q + q.sign()).to(inputs[0].dtype))
    with use("concat"):
        actual = gradients(lambda q, k, v, s: attend(q, k, v, score=s), inputs, score, grad)
    expected = gradients(lambda q, k, v, s: reference(q, k, v, s), exact, exact_score, grad.cpu().double())
    assert_norms_close(actual, expected, 2 * TOLERANCE[torch.float32])


def test_small_gradients_of_large_arguments():
    """Two of four tanh are saturated; the gradients of the others, divided by a large denominator, do not vanish."""
    a, b = (random(1, 1, 4, 20, seed=i).float() for i in range(2))
    a[:, :, :2] = b[:, :, :2] = 6.5
    w, v, grad = (
        random(1, 4, seed=2).float(),
        random(1, 1, 20, 16, seed=3).float(),
        1e-16 * random(1, 1, 20, 16, seed=4),
    )
    inputs = [x.to(DEVICE).requires_grad_() for x in (a, b, w, v)]
    out, *_ = concat_forward(*inputs, None, None, None, 20, 20, False, 0)
    actual = torch.autograd.grad(out, inputs, grad.float().to(DEVICE))
    exact = [x.double().requires_grad_() for x in (a, b, w, v)]
    tanh = (exact[0].mT[..., :, None, :] + exact[1].mT[..., None, :, :]).tanh()
    expected = torch.autograd.grad((tanh @ exact[2][0]).softmax(-1) @ exact[3], exact, grad)
    for x, y in zip(actual, expected):
        assert (x.double().cpu() - y).norm() <= TOLERANCE[torch.float32] * y.norm()


def test_queries_without_keys_get_zero_outputs_and_gradients():
    shapes = (2, 1, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4)
    (q, k, v), grad, score, *_ = make_case((*shapes, 4, 4, 4))
    with use("concat"):
        out = attend(q, k, v, score=score, mask=padding_of(0, 2)(DEVICE))
    out.backward(grad)
    assert (out[0] == 0).all()
    assert all((x.grad[0] == 0).all() for x in (q, k, v))
    assert (k.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, :2] != 0).all()


def test_results_are_bitwise_reproducible():
    shapes = (1, 2, 20, 8), (1, 1, 20, 8), (1, 1, 20, 8), (1, 2, 20, 8)
    inputs, grad, score, *_ = make_case((*shapes, 8, 8, 4))
    with use("concat"):
        first, second = (gradients(lambda q, k, v, s: attend(q, k, v, score=s), inputs, score, grad) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


def test_opcheck():
    """Fake outputs have the right shapes, compiled gradients are registered, and inputs are not modified."""
    a, b, w, v = (random(*s).float().to(DEVICE) for s in ((1, 2, 4, 5), (1, 1, 4, 6), (2, 4), (1, 1, 6, 8)))
    tensors = [x.requires_grad_() for x in (a, b, w, v)]
    torch.library.opcheck(concat_forward.operator, (*tensors, None, None, None, 5, 6, False, 0))


def test_compiles_to_one_graph(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    shapes = (8, 2, 8), (8, 1, 8), (8, 1, 8), (8, 2, 8)
    tensors, grad, score, *_ = make_case((*shapes, 8, 8, 4))
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=DEVICE)

    def function(q, k, v, score):
        offsets = Offsets(starts, total=8, max_len=5)
        return attend(q, k, v, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with use("concat"):
        torch.testing.assert_close(gradients(compiled, tensors, score, grad), gradients(function, tensors, score, grad))


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"dtype": torch.float64}, False),
        ({"width": 257}, False),
        ({"hidden": 1025}, False),
        ({"rows": 1 << 20}, True),
        ({"rows": 1 << 22}, False),
        ({"parts": MaskParts(causal=True, window=3, lengths=torch.tensor([1]))}, True),
        ({"parts": MaskParts(rest=~causal())}, False),
        ({"bias": torch.nn.Identity()}, False),
    ],
    ids=str,
)
def test_supported_calls(changes, supported, monkeypatch):
    monkeypatch.setattr(kernels, "_has_tf32", lambda x: True)
    case = {
        "width": 256,
        "hidden": 1024,
        "rows": 4,
        "dtype": torch.bfloat16,
        "parts": MaskParts(),
        "bias": None,
    } | changes
    q, v = (
        torch.zeros(1, dtype=case["dtype"]).expand(1, 1, case["rows"], n).as_subclass(FakeCudaTensor)
        for n in (4, case["width"])
    )
    call = Call(q, q, v, Concat(4, 4, hidden=case["hidden"]), case["parts"], case["bias"])
    assert concat.supports(call) == supported
    assert not concat.supports(call._replace(q=torch.zeros(1, 1, 4, 4)))
    monkeypatch.setattr(kernels, "_has_tf32", lambda x: False)
    assert not concat.supports(call)
