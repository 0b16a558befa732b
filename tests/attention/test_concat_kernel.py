"""The kernel for additive attention beside the definition: on a GPU, or without one in Triton's interpreter."""

import copy

import jaxtyping
import pytest
import torch

from regard.attention import Concat, Offsets, attend, causal, explain, padding, triton_here, use, window
from regard.attention.kernels import Call, concat
from regard.attention.kernels.concat import Tiling, attend_concat
from regard.attention.masks import Form
from regard.attention.reference import reference, reference_packed
from tests.attention.helpers import OnGPU, random

pytestmark = [
    pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, at the infinities that are meant
]

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"
# The interpreter cannot multiply bf16; float16 takes the same way through the kernel.
TOLERANCE = (
    {torch.float32: 1e-5, torch.float16: 3e-3}
    if triton_here.INTERPRETED
    else {
        torch.float32: 3e-5,  # three products of TF32, and quick powers and reciprocals
        torch.float16: 4e-3,
        torch.bfloat16: 3e-2,
    }
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that short sequences have several tiles, whole ones and others."""
    if triton_here.INTERPRETED:
        monkeypatch.setattr(concat, "FORWARD_EXACT", {256: Tiling(16, 32, 4)})
        monkeypatch.setattr(concat, "BACKWARD_EXACT", {256: Tiling(32, 16, 1)})
    elif torch.backends.cuda.matmul.allow_tf32:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def made(sizes, heads=None, dtype=torch.float32, scale=1.0):
    """Queries, keys, values, what flows back, and a score; and the same in float64."""
    *shapes, D, C, hidden = sizes
    q, k, v, grad = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    torch.manual_seed(0)
    score = Concat(D, C, hidden=hidden, heads=heads)
    here = [(x * f).to(DEVICE, dtype).requires_grad_() for x, f in ((q, scale), (k, scale), (v, 1.0))]
    exact = [x.detach().cpu().double().requires_grad_() for x in here]
    return here, grad.to(DEVICE, dtype), copy.deepcopy(score).to(DEVICE), exact, score.double()


def gradients(function, tensors, score, grad):
    out = function(*tensors, score)
    return [out, *torch.autograd.grad(out, [*tensors, *score.parameters()], grad)]


def compare(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.isfinite(one).all()
        # A gradient may be nothing but what is left of terms that cancel.
        assert (one.double().cpu() - other).norm() <= tolerance * (other.norm() + 1e-2 * other.numel() ** 0.5)


def lengths(*numbers):
    return lambda device: padding(torch.tensor(numbers, device=device))


# B, heads of queries and of keys, T, S, widths of queries, keys and values, hidden width, mask, own parameters a head.
PADDED = {
    "few": (1, 1, 1, 1, 2, 4, 4, 16, 16, None, False),
    "odd": (1, 1, 1, 33, 50, 5, 3, 20, 7, None, True),
    "causal, groups": (1, 2, 1, 20, 37, 8, 8, 16, 4, lambda _: causal(), False),
    "more queries than keys": (1, 1, 1, 37, 20, 8, 8, 16, 4, lambda _: causal(), False),
    "lengths, groups": (3, 2, 1, 3, 40, 8, 8, 9, 4, lengths(40, 0, 17), True),
    "all masks": (2, 1, 1, 50, 50, 8, 8, 33, 4, lambda d: window(9) & lengths(50, 20)(d), False),
    "a window": (1, 1, 1, 20, 70, 8, 8, 8, 4, lambda _: window(20), False),
    "wide": (1, 1, 1, 2, 3, 8, 8, 256, 68, None, False),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, d) for c in PADDED for d in TOLERANCE if d == torch.float32 or c == "odd" or not triton_here.INTERPRETED],
    ids=str,
)
def test_equals_the_definition(case, dtype):
    B, H, G, T, S, D, C, Dv, hidden, mask, own = PADDED[case]
    shapes = (B, H, T, D), (B, G, S, C), (B, G, S, Dv), (B, H, T, Dv)
    here, grad, score, exact, exact_score = made((*shapes, D, C, hidden), H if own else None, dtype)
    here_mask, exact_mask = (mask and mask(device) for device in (DEVICE, "cpu"))
    with use("concat"), explain() as choices:
        found = gradients(lambda q, k, v, s: attend(q, k, v, score=s, mask=here_mask), here, score, grad)
    assert [choice.kernel for choice in choices] == ["concat"]
    expected = gradients(lambda q, k, v, s: reference(q, k, v, s, exact_mask), exact, exact_score, grad.cpu().double())
    compare(found, expected, TOLERANCE[dtype])


@pytest.mark.skipif(not triton_here.INTERPRETED, reason="tiles that only the interpreter takes")
def test_columns_in_two_halves(monkeypatch):
    monkeypatch.setattr(concat, "BACKWARD_EXACT", {256: Tiling(16, 32, 1)})
    monkeypatch.setattr(concat, "HALVED", 32)
    test_equals_the_definition("causal, groups", torch.float32)


# Lengths of queries, of keys (None: self-attention), mask, lengths that padding() gives besides.
PACKED = {
    "causal, empty ones": ([1, 0, 20, 0, 7], None, causal(), None),
    "cross": ([9, 0, 3, 34, 2], [0, 3, 40, 1, 0], None, None),
    "cross, shortened": ([5, 19], [18, 9], None, [17, 0]),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", PACKED)
def test_packed_equals_the_definition(case, own):
    q_lengths, k_lengths, mask, shorter = PACKED[case]

    def offsets_of(lengths, device, spare=0):
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return Offsets(starts.to(device), total=sum(lengths), max_len=max(lengths) + spare)

    def given(device):
        q_offsets = offsets_of(q_lengths, device)
        k_offsets = q_offsets if k_lengths is None else offsets_of(k_lengths, device, spare=30)
        return mask if shorter is None else lengths(*shorter)(device), q_offsets, k_offsets

    here_mask, q_offsets, k_offsets = given(DEVICE)
    N, M, H, G, Dv = q_offsets.total, k_offsets.total, 2, 1, 12
    shapes = (N, H, 8), (M, G, 6), (M, G, Dv), (N, H, Dv)
    here, grad, score, exact, exact_score = made((*shapes, 8, 6, 4), H if own else None)
    with use("concat"):
        found = gradients(
            lambda q, k, v, s: attend(q, k, v, score=s, mask=here_mask, q_offsets=q_offsets, k_offsets=k_offsets),
            here,
            score,
            grad,
        )
    exact_mask, *offsets = given("cpu")
    expected = gradients(
        lambda q, k, v, s: reference_packed(q, k, v, s, exact_mask, None, *offsets),
        exact,
        exact_score,
        grad.cpu().double(),
    )
    compare(found, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_numbers_that_powers_of_e_cannot_hold(scale):
    """Some tiles (at 100 all) are computed with a plain tanh; large a and b of opposite signs are no exception."""
    shapes = (1, 1, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8), (1, 1, 40, 8)
    here, grad, score, exact, exact_score = made((*shapes, 8, 8, 8), scale=scale)
    with torch.no_grad():
        for weights in (score, exact_score):
            weights.weight_k.copy_(-weights.weight_q)  # a + b is small where q and k are alike
        for q, k in (here[:2], exact[:2]):
            k.copy_((q + q.sign()).to(here[0].dtype))
    with use("concat"):
        found = gradients(lambda q, k, v, s: attend(q, k, v, score=s), here, score, grad)
    expected = gradients(lambda q, k, v, s: reference(q, k, v, s), exact, exact_score, grad.cpu().double())
    compare(found, expected, 2 * TOLERANCE[torch.float32])


def test_small_gradients_of_large_numbers():
    """Two of four tanh are saturated: the others' gradients, divided by a large common denominator, are not lost."""
    a, b = (random(1, 1, 4, 20, seed=i).float() for i in range(2))
    a[:, :, :2] = b[:, :, :2] = 6.5
    w, v, grad = (
        random(1, 4, seed=2).float(),
        random(1, 1, 20, 16, seed=3).float(),
        1e-16 * random(1, 1, 20, 16, seed=4),
    )
    given = [x.to(DEVICE).requires_grad_() for x in (a, b, w, v)]
    out, *_ = attend_concat(*given, None, None, None, 20, 20, False, 0)
    found = torch.autograd.grad(out, given, grad.float().to(DEVICE))
    exact = [x.double().requires_grad_() for x in (a, b, w, v)]
    tanh = (exact[0].mT[..., :, None, :] + exact[1].mT[..., None, :, :]).tanh()
    expected = torch.autograd.grad((tanh @ exact[2][0]).softmax(-1) @ exact[3], exact, grad)
    for one, other in zip(found, expected):
        assert (one.double().cpu() - other).norm() <= TOLERANCE[torch.float32] * other.norm()


def test_those_who_may_look_at_nothing_get_zeros_and_give_none():
    shapes = (2, 1, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4)
    (q, k, v), grad, score, *_ = made((*shapes, 4, 4, 4))
    with use("concat"):
        out = attend(q, k, v, score=score, mask=lengths(0, 2)(DEVICE))
    out.backward(grad)
    assert (out[0] == 0).all()
    assert all((x.grad[0] == 0).all() for x in (q, k, v))
    assert (k.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, 2:] == 0).all()
    assert (v.grad[1, :, :2] != 0).all()


def test_the_same_bits_every_time():
    shapes = (1, 2, 20, 8), (1, 1, 20, 8), (1, 1, 20, 8), (1, 2, 20, 8)
    here, grad, score, *_ = made((*shapes, 8, 8, 4))
    with use("concat"):
        one, other = (gradients(lambda q, k, v, s: attend(q, k, v, score=s), here, score, grad) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, other))


def test_the_operator_keeps_torchs_rules():
    """The shapes it promises are those it gives, compiled gradients are its own, and nothing given is changed."""
    a, b, w, v = (random(*s).float().to(DEVICE) for s in ((1, 2, 4, 5), (1, 1, 4, 6), (2, 4), (1, 1, 6, 8)))
    tensors = [x.requires_grad_() for x in (a, b, w, v)]
    torch.library.opcheck(attend_concat.operator, (*tensors, None, None, None, 5, 6, False, 0))


def test_a_compiler_sees_one_graph(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    shapes = (8, 2, 8), (8, 1, 8), (8, 1, 8), (8, 2, 8)
    tensors, grad, score, *_ = made((*shapes, 8, 8, 4))
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=DEVICE)

    def function(q, k, v, score):
        offsets = Offsets(starts, total=8, max_len=5)
        return attend(q, k, v, score=score, mask=causal(), q_offsets=offsets, k_offsets=offsets)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with use("concat"):
        torch.testing.assert_close(gradients(compiled, tensors, score, grad), gradients(function, tensors, score, grad))


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float64}, False),
        ({"width": 257}, False),
        ({"hidden": 1025}, False),
        ({"rows": 1 << 20}, True),
        ({"rows": 1 << 22}, False),
        ({"form": Form(causal=True, window=3, lengths=torch.tensor([1]))}, True),
        ({"form": Form(rest=~causal())}, False),
        ({"bias": torch.nn.Identity()}, False),
    ],
    ids=str,
)
def test_what_it_takes(changes, taken, monkeypatch):
    monkeypatch.setattr(concat, "_new_enough", lambda x: True)
    given = {"width": 256, "hidden": 1024, "rows": 4, "dtype": torch.bfloat16, "form": Form(), "bias": None} | changes
    q, v = (
        torch.zeros(1, dtype=given["dtype"]).expand(1, 1, given["rows"], n).as_subclass(OnGPU)
        for n in (4, given["width"])
    )
    call = Call(q, q, v, Concat(4, 4, hidden=given["hidden"]), given["form"], given["bias"])
    assert concat.takes(call) == taken
    assert not concat.takes(call._replace(q=torch.zeros(1, 1, 4, 4)))
    monkeypatch.setattr(concat, "_new_enough", lambda x: False)
    assert not concat.takes(call)
