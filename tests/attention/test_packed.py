"""Packed sequences: packed, padded and one by one are the same, forward and backward."""

import copy

import jaxtyping
import pytest
import torch

from regard.attention import (
    Cosine,
    Location,
    Offsets,
    ScaledDot,
    attend,
    causal,
    explain,
    padding,
    use,
    weights,
    window,
)
from regard.attention.kernels import unpacked, varlen
from regard.attention.masks import Form
from regard.attention.reference import reference_packed
from regard.errors import RegardError
from tests.attention.helpers import OnGPU, Slope, random, scores
from tests.attention.test_attend import TOLERANCE, check, outputs_and_gradients


def offsets_of(lengths, spare=0):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Offsets(starts, total=sum(lengths), max_len=max(lengths) + spare)


# Lengths of queries and keys; None: the same offsets for both.
CASES = {
    "alike": ([5, 4, 5], None),
    "full": ([4, 4], None),
    "mixed, with empty ones": ([1, 0, 30, 2, 7, 0, 0], None),
    "cross": ([3, 5, 4], [4, 2, 6]),
    "cross, mixed": ([1, 9, 0, 3, 17, 2], [8, 0, 3, 20, 1, 0]),
    "cross, full": ([3, 3], [5, 5]),
    "one": ([1], None),
    "even": ([4, 4], None),
    "cross, even": ([3, 3], [5, 5]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_by_one(case, dtype):
    q_lengths, k_lengths = CASES[case]
    tight = "even" in case  # the bound on the lengths is what all of them are
    q_offsets = offsets_of(q_lengths, spare=0 if tight else 2)
    k_offsets = q_offsets if k_lengths is None else offsets_of(k_lengths, spare=0 if tight else 1)
    assert q_offsets.even == k_offsets.even == tight
    H, G, D, Dv = 4, 2, 6, 5
    tensors = (
        random(q_offsets.total, H, D),
        random(k_offsets.total, G, D, seed=1),
        random(k_offsets.total, G, Dv, seed=2),
    )
    grad = random(q_offsets.total, H, Dv, seed=3)
    given = q_offsets, k_offsets
    limit = torch.tensor([3] * len(q_lengths))
    masks = {"none": None, "padding": padding(limit), "padding|~padding": padding(limit) | ~padding(limit - 1)}
    if k_lengths is None:
        masks |= {"causal": causal(), "window": window(2), "~causal": ~causal(), "both": causal() & padding(limit)}
    torch.manual_seed(4)
    longest = max(k_lengths or q_lengths)
    for score_name, score in scores(D, D, longest - 3, H).items():  # Location has just as many places as keys
        for mask_name, mask in masks.items():
            for with_bias in (False, True) if k_lengths is None else (False,):
                exact, exact_bias = copy.deepcopy(score).double(), Slope(H).double() if with_bias else None
                expected = outputs_and_gradients(
                    lambda q, k, v, s=exact, b=exact_bias, m=mask: reference_packed(q, k, v, s, m, b, *given),
                    tensors,
                    exact,
                    exact_bias,
                    grad,
                )
                near, near_bias = copy.deepcopy(score).to(dtype), Slope(H).to(dtype) if with_bias else None
                found = outputs_and_gradients(
                    lambda q, k, v, s=near, b=near_bias, m=mask: attend(
                        q, k, v, score=s, mask=m, bias=b, q_offsets=q_offsets, k_offsets=k_offsets
                    ),
                    [x.to(dtype) for x in tensors],
                    near,
                    near_bias,
                    grad.to(dtype),
                )
                try:
                    check(found, expected, TOLERANCE[dtype])
                except AssertionError as wrong:
                    raise AssertionError(f"{score_name}, {mask_name}, bias {with_bias}: {wrong}") from wrong


def test_plain_tensors_are_offsets_too():
    x, starts = random(5, 2, 4), torch.tensor([0, 2, 5])
    found = attend(x, x, x, mask=causal(), q_offsets=starts, k_offsets=starts.clone())
    torch.testing.assert_close(found, attend(x, x, x, mask=causal(), q_offsets=Offsets.of(starts), k_offsets=starts))
    one = x[2:].transpose(0, 1)[None]
    torch.testing.assert_close(found[2:], attend(one, one, one, mask=causal())[0].transpose(0, 1))


def test_weights_of_packed_input_are_a_rectangle():
    q_offsets, k_offsets = offsets_of([2, 0, 3]), offsets_of([1, 2, 4], spare=1)
    q, k = random(5, 2, 4), random(7, 1, 4, seed=1)
    found = weights(q, k, score=Cosine(5.0), q_offsets=q_offsets, k_offsets=k_offsets)
    assert found.shape == (3, 2, 3, 5)
    for b in range(3):
        t, s = q_offsets.lengths[b], k_offsets.lengths[b]
        one = (x[o.starts[b] : o.starts[b + 1]].transpose(0, 1)[None] for x, o in ((q, q_offsets), (k, k_offsets)))
        torch.testing.assert_close(found[b, :, :t, :s], weights(*one, score=Cosine(5.0))[0])
        assert (found[b, :, t:] == 0).all()
        assert (found[b, :, :, s:] == 0).all()


def test_mixed_lengths_waste_little():
    """A rectangle of 64 × 128 for 64 short sentences and one long one would be thirty times the tokens."""
    offsets = offsets_of([3] * 64 + [128, 0, 0, 0])
    x = random(offsets.total, 1, 4)
    with explain() as choices:
        attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
    assert sorted(choice.q for choice in choices) == [(1, 1, 128, 4), (64, 1, 3, 4)]


@pytest.mark.parametrize("lengths", [[3, 5, 4], [1, 0, 30, 2, 7]])
def test_offsets_that_were_used_in_inference_mode_serve_autograd(lengths):
    offsets, fresh = offsets_of(lengths), offsets_of(lengths)
    x = random(offsets.total, 2, 4).requires_grad_()

    def gradient(of: Offsets) -> torch.Tensor:
        found = (
            attend(x, x, x, q_offsets=of, k_offsets=of) + (x * x)[of.rows].sum() + (x * of.cells[:, None, None]).sum()
        )
        return torch.autograd.grad(found.square().sum(), x)[0]

    with torch.inference_mode():
        attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
        kept = [offsets.valid, offsets.rows, offsets.cells]
    assert not any(one.is_inference() for one in kept)
    assert torch.equal(gradient(offsets), gradient(fresh))


@pytest.mark.parametrize("lengths", [[3, 5, 4], [1, 0, 30, 2, 7]])
@pytest.mark.parametrize("mask", [None, causal()])
def test_compiled_it_is_the_same(lengths, mask, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    offsets = offsets_of(lengths, spare=1)
    q, k, v = (random(offsets.total, 2, 4, seed=i).requires_grad_() for i in range(3))

    def function(q, k, v, starts):
        o = Offsets(starts, total=offsets.total, max_len=offsets.max_len)
        return attend(q, k, v, mask=mask, q_offsets=o, k_offsets=o)

    def gradients(function):
        return torch.autograd.grad(function(q, k, v, offsets.starts).sin().sum(), (q, k, v))

    torch._dynamo.reset()
    check(gradients(torch.compile(function, backend="aot_eager", fullgraph=True)), gradients(function), 1e-11)


def stand_in(calls):
    """What varlen_attn does, sequence by sequence, with its rules."""

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        calls.append(window_size)
        assert q.shape[1:] == k.shape[1:] == v.shape[1:]
        assert q.shape[-1] % 8 == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        left, right = window_size
        out = torch.full_like(q, torch.nan)  # whatever an empty sequence leaves behind
        for b in range(len(cu_q) - 1):
            t, s = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            T, S = t.stop - t.start, s.stop - s.start
            assert max_q >= T
            assert max_k >= S
            if S == 0:
                continue
            distance = torch.arange(S) - (torch.arange(T)[:, None] + S - T)
            allowed = torch.ones(T, S, dtype=torch.bool)
            allowed &= distance >= -left if left >= 0 else allowed
            allowed &= distance <= right if right >= 0 else allowed
            scores = torch.einsum("thd,shd->hts", q[t], k[s]) * scale
            scores = scores.masked_fill(~allowed, -torch.inf)
            out[t] = torch.einsum("hts,shd->thd", scores.softmax(-1), v[s])
        return out

    return varlen_attn


@pytest.mark.parametrize("case", CASES)
def test_varlen_says_the_same_to_its_kernel(case, monkeypatch):
    q_lengths, k_lengths = CASES[case]
    q_offsets = offsets_of(q_lengths, spare=2)
    k_offsets = q_offsets if k_lengths is None else offsets_of(k_lengths)
    calls = []
    monkeypatch.setattr(varlen, "varlen_attn", stand_in(calls), raising=False)

    q, k, v = (
        random(q_offsets.total, 4, 6),
        random(k_offsets.total, 2, 6, seed=1),
        random(k_offsets.total, 2, 9, seed=2),
    )
    masks = [None] if k_lengths else [None, causal(), window(3), causal() & window(2)]
    torch.manual_seed(0)
    for name, score in scores(6, 6, max(k_lengths or q_lengths) - 3, 4).items():
        if "concat" in name:
            continue
        for mask in masks:
            score = score.double()
            with use("varlen"):
                found = attend(q, k, v, score=score, mask=mask, q_offsets=q_offsets, k_offsets=k_offsets)
            expected = reference_packed(q, k, v, score, mask, None, q_offsets, k_offsets)
            torch.testing.assert_close(found, expected)
    assert set(calls) == ({(-1, -1)} if k_lengths else {(-1, -1), (-1, 0), (2, 0), (1, 0)})


def test_errors(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # our own words, not the shape checker's
    x, offsets, other = random(5, 2, 4), offsets_of([2, 3]), offsets_of([3, 2])
    with pytest.raises(RegardError, match="both q_offsets and k_offsets"):
        attend(x, x, x, q_offsets=offsets)
    for given in ({"mask": causal()}, {"mask": ~window(2)}, {"bias": Slope(2)}):
        with pytest.raises(RegardError, match="needs the same offsets"):
            attend(x, x, x, q_offsets=offsets, k_offsets=other, **given)
    with pytest.raises(RegardError, match=r"q \(4, 2, 4\).*The offsets end at 5 and 5, for 2 and 2 sequences"):
        attend(x[:4], x, x, q_offsets=offsets, k_offsets=offsets)
    with pytest.raises(RegardError, match="With offsets give"):
        attend(x[None], x[None], x[None], q_offsets=offsets, k_offsets=offsets)
    with pytest.raises(RegardError, match="3 keys, but W_a has 2 rows"):
        attend(x, x, x, score=Location(4, 2), q_offsets=offsets, k_offsets=offsets)


@pytest.mark.parametrize(
    ("max_len", "mask", "taken"), [(9, None, True), (8, None, False), (8, causal(), False), (8, window(3), True)]
)
def test_sequences_of_one_length_are_left_to_the_kernels_of_rectangles(max_len, mask, taken):
    x = torch.zeros(16, 2, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    offsets = Offsets(torch.tensor([0, 8, 16]), 16, max_len)
    assert varlen.takes(varlen.Call(x, x, x, ScaledDot(), Form.of(mask), None, offsets, offsets)) == taken


def test_sequences_of_one_length_do_not_move():
    offsets = offsets_of([4, 4, 4])
    q, k, v = torch.randn(3, 12, 2, 8)
    seen = []
    unpacked.run(
        unpacked.Call(q, k, v, ScaledDot(), Form(), None, offsets, offsets), lambda call: seen.append(call) or call.q
    )
    assert [x.data_ptr() for x in seen[0][:3]] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("max_len", [0, 8])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "window"])
@pytest.mark.parametrize("name", scores(4, 4, 3, 2))
def test_no_sequences_at_all(name, mask, max_len):
    """Outputs, weights and gradients of nothing are empty; parameters of the score get zeros."""
    score = scores(4, 4, 8, 2)[name]
    allowed = {"none": None, "causal": causal(), "padding": padding(torch.zeros(0, dtype=int)), "window": window(2)}
    offsets = Offsets(torch.zeros(1, dtype=torch.int32), total=0, max_len=max_len)
    q, k, v = (torch.zeros(0, 2, width, requires_grad=True) for width in (4, 4, 5))
    for bias in (None, Slope(2)):
        where = {"score": score, "mask": allowed[mask], "bias": bias, "q_offsets": offsets, "k_offsets": offsets}
        out = attend(q, k, v, **where)
        assert out.shape == (0, 2, 5)
        out.sum().backward()
        assert v.grad is not None
        assert all(p.grad is None or not p.grad.any() for p in score.parameters())
        assert weights(q, k, **where).shape == (0, 2, max_len, max_len)


def test_no_sequences_by_a_plain_tensor_of_offsets():
    q = torch.zeros(0, 2, 4)
    assert attend(q, q, q, q_offsets=torch.tensor([0]), k_offsets=torch.tensor([0])).shape == (0, 2, 4)
    assert weights(q, q, q_offsets=torch.tensor([0]), k_offsets=torch.tensor([0])).shape == (0, 2, 0, 0)
