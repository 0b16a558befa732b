"""The kernel for short packed sequences beside the definition: on a GPU, or without one in Triton's interpreter."""

import jaxtyping
import pytest
import torch

from regard.attention import Location, Offsets, ScaledDot, attend, causal, padding, triton_here, use
from regard.attention.kernels import Call, sentences
from regard.attention.kernels.sentences import attend_sentences
from regard.attention.masks import Form
from regard.attention.reference import reference, reference_packed
from tests.attention.helpers import OnGPU, random

pytestmark = pytest.mark.skipif(not triton_here.FOUND, reason="needs Triton")

DEVICE = "cpu" if triton_here.INTERPRETED else "cuda"
# The interpreter cannot multiply bf16; float16 takes the same way through the kernel.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3} | ({} if triton_here.INTERPRETED else {torch.bfloat16: 1e-2})


def offsets_of(lengths, spare=0):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Offsets(starts.to(DEVICE), total=sum(lengths), max_len=max(lengths) + spare)


def on_cpu(offsets):
    return Offsets(offsets.starts.cpu(), offsets.total, offsets.max_len)


def compare(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        assert (one.double().cpu() - other).norm() <= tolerance * other.norm()


# Lengths of queries, of keys (None: self-attention), heads, of which of keys, widths of keys and of values, mask.
CASES = {
    "one": ([1], None, 1, 1, 16, 16, None),
    "alike": ([5, 4, 5], None, 2, 2, 32, 32, None),
    "causal, empty ones": ([1, 0, 30, 0, 7, 0], None, 2, 2, 64, 64, causal()),
    "odd widths, groups": ([3, 17], None, 4, 2, 20, 9, causal()),
    "several tiles of queries": ([70, 128], None, 1, 1, 16, 32, causal()),
    "cross": ([1, 9, 0, 3, 17, 2, 0], [8, 0, 3, 40, 1, 0, 5], 2, 1, 32, 24, None),
    "wide": ([33], [12], 1, 1, 128, 128, None),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, dtype, monkeypatch):
    # Fewer than there are pieces of work, so that each goes from one to the next.
    monkeypatch.setattr(sentences, "_programs", lambda x, pieces, tiling: min(pieces, 3))
    q_lengths, k_lengths, H, G, D, Dv, mask = CASES[case]
    q_offsets = offsets_of(q_lengths)
    k_offsets = q_offsets if k_lengths is None else offsets_of(k_lengths, spare=3)
    # Keys and values as the layers give them: two views of one tensor.
    q, grad = random(q_offsets.total, H, D), random(q_offsets.total, H, Dv, seed=3)
    keys_values = random(k_offsets.total, G, D + Dv, seed=1).to(dtype)
    exact = [x.to(dtype).double().requires_grad_() for x in (q, keys_values[..., :D], keys_values[..., D:])]
    here = [x.to(DEVICE, dtype).requires_grad_() for x in (q, keys_values)]
    with use("sentences"):
        out = attend(
            *(here[0], here[1][..., :D], here[1][..., D:]), mask=mask, q_offsets=q_offsets, k_offsets=k_offsets
        )
    found = torch.autograd.grad(out, here, grad.to(DEVICE, dtype))
    offsets = on_cpu(q_offsets), on_cpu(k_offsets)
    expected = reference_packed(*exact, ScaledDot(), mask, None, *offsets)
    dq, dk, dv = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    compare([out, *found], [expected, dq, torch.cat((dk, dv), -1)], TOLERANCE[dtype])


def test_those_who_may_look_at_nothing_get_zeros_and_give_none():
    q_offsets, k_offsets = offsets_of([2, 3]), offsets_of([0, 2])
    q, k, v = (random(n, 1, 16, seed=i).float().to(DEVICE).requires_grad_() for i, n in enumerate((5, 2, 2)))
    with use("sentences"):
        out = attend(q, k, v, q_offsets=q_offsets, k_offsets=k_offsets)
    out.sum().backward()
    assert (out[:2] == 0).all()
    assert (q.grad[:2] == 0).all()
    # and keys that nobody asks
    q, k, v = (random(n, 1, 16, seed=i).float().to(DEVICE).requires_grad_() for i, n in enumerate((2, 5, 5)))
    with use("sentences"):
        attend(q, k, v, q_offsets=k_offsets, k_offsets=q_offsets).sum().backward()
    assert all((x.grad[:2] == 0).all() for x in (k, v))
    assert (v.grad[2:] != 0).all()


def test_large_scores_do_not_overflow():
    offsets = offsets_of([3])
    x = (100 * random(3, 1, 16)).float().to(DEVICE)
    with use("sentences"):
        out = attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
    torch.testing.assert_close(out, x)  # each looks at itself alone


def test_location_has_keys_for_every_head():
    offsets = offsets_of([4, 2])
    q, k = random(6, 4, 16).float().to(DEVICE), random(6, 2, 16, seed=1).float().to(DEVICE)
    score = Location(16, max_keys=8, heads=4).to(DEVICE)
    with use("sentences"):
        found = attend(q, k, k, score=score, q_offsets=offsets, k_offsets=offsets)
    cpu = on_cpu(offsets)
    expected = reference_packed(q.cpu(), k.cpu(), k.cpu(), score.cpu(), None, None, cpu, cpu)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_the_operator_keeps_torchs_rules():
    """The shapes it promises are those it gives, compiled gradients are its own, and nothing given is changed."""
    offsets = offsets_of([3, 0, 5])
    q, k, v = (random(8, 2, 16, seed=i).float().to(DEVICE).requires_grad_() for i in range(3))
    torch.library.opcheck(attend_sentences.operator, (q, k, v, offsets.starts, offsets.starts, 5, 5, 0.25, True))


def test_a_compiler_sees_one_graph(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    offsets = offsets_of([3, 0, 5])
    tensors = [random(8, 2, 16, seed=i).float().to(DEVICE).requires_grad_() for i in range(3)]

    def function(q, k, v, starts):
        o = Offsets(starts, total=8, max_len=5)
        return attend(q, k, v, mask=causal(), q_offsets=o, k_offsets=o)

    def gradients(function):
        with use("sentences"):
            return torch.autograd.grad(function(*tensors, offsets.starts).sin().sum(), tensors)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(function))


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"max_len": 129}, False),
        ({"width": 72}, False),
        ({"width": 72, "max_len": 64}, True),
        ({"width": 136, "max_len": 64}, False),
        ({"dtype": torch.float32}, False),
        ({"form": Form(causal=True)}, True),
        ({"form": Form(window=3)}, False),
    ],
    ids=str,
)
def test_what_it_takes(changes, taken):
    given = {"max_len": 128, "width": 64, "dtype": torch.bfloat16, "form": Form()} | changes
    x = torch.zeros(4, 2, given["width"], dtype=given["dtype"]).as_subclass(OnGPU)
    offsets = Offsets(torch.tensor([0, 4]), 4, given["max_len"])
    call = sentences.Call(x, x, x, ScaledDot(), given["form"], None, offsets, offsets)
    assert sentences.takes(call) == taken


# Sequences, queries and keys of each, heads, of which of keys, widths of keys and of values, mask.
SAME = {
    "alike": (3, 20, 20, 2, 2, 16, 16, None),
    "causal, groups": (2, 17, 17, 4, 2, 16, 24, causal()),
    "cross": (2, 16, 33, 2, 1, 16, 16, None),
}


@pytest.mark.parametrize("case", SAME)
def test_sequences_of_one_length_lie_end_to_end(case):
    B, T, S, H, G, D, Dv, mask = SAME[case]
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, Dv), (B, T, H, Dv)
    # Heads of a token side by side, as layers have them.
    q, k, v, grad = (random(*shape, seed=i).transpose(1, 2) for i, shape in enumerate(shapes))
    here = [x.float().to(DEVICE).requires_grad_() for x in (q, k, v)]
    exact = [x.float().double().requires_grad_() for x in (q, k, v)]
    with use("sentences"):
        out = attend(*here, mask=mask)
    found = torch.autograd.grad(out, here, grad.float().to(DEVICE))
    expected = reference(*exact, ScaledDot(), mask)
    compare([out, *found], [expected, *torch.autograd.grad(expected, exact, grad.float().double())], 1e-5)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"T": 64, "S": 64}, True),
        ({"T": 64, "S": 65}, False),
        ({"T": 1}, False),
        ({"heads_first": True}, False),
        ({"mask": causal()}, True),
        ({"mask": causal(), "S": 40}, False),
        ({"mask": padding(torch.tensor([3, 4]))}, False),
        ({"unpacked": True}, False),
    ],
    ids=str,
)
def test_takes_sequences_of_one_short_length(changes, taken):
    given = {"T": 32, "S": 32, "mask": None, "heads_first": False, "unpacked": False} | changes
    tensors = []
    for rows in (given["T"], given["S"], given["S"]):
        x = torch.zeros(2, 2, rows, 16) if given["heads_first"] else torch.zeros(2, rows, 2, 16).transpose(1, 2)
        tensors.append(x.bfloat16().as_subclass(OnGPU))
    call = Call(*tensors, ScaledDot(), Form.of(given["mask"]), unpacked=given["unpacked"])
    assert sentences.takes(call) == taken
