"""Packed sequences: equal to single sequences, forward and backward; the backends `varlen` and `padded`."""

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
    local,
    padding,
    use,
    weights,
    window,
)
from regard.attention.backends import padded, varlen
from regard.attention.backends.call import Call
from regard.attention.masks import MaskParts
from regard.attention.reference import reference_packed
from regard.errors import RegardError
from tests.attention.helpers import (
    TOLERANCE,
    FakeCudaTensor,
    Slope,
    assert_all_close,
    outputs_and_gradients,
    random,
    scores,
)


def make_offsets(lengths, spare=0):
    """Offsets of sequences; `max_len` exceeds the longest by `spare`."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Offsets(starts, total=sum(lengths), max_len=max(lengths) + spare)


# Lengths of queries and keys; None: the same offsets for both.
CASES = {
    "similar": ([5, 4, 5], None),
    "full": ([4, 4], None),
    "mixed, with empty sequences": ([1, 0, 30, 2, 7, 0, 0], None),
    "cross": ([3, 5, 4], [4, 2, 6]),
    "cross, mixed": ([1, 9, 0, 3, 17, 2], [8, 0, 3, 20, 1, 0]),
    "cross, full": ([3, 3], [5, 5]),
    "single": ([1], None),
    "rectangular": ([4, 4], None),
    "cross, rectangular": ([3, 3], [5, 5]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_single_sequences(case, dtype):
    q_lengths, k_lengths = CASES[case]
    is_rectangular = "rectangular" in case  # all sequences have length max_len
    q_offsets = make_offsets(q_lengths, spare=0 if is_rectangular else 2)
    k_offsets = q_offsets if k_lengths is None else make_offsets(k_lengths, spare=0 if is_rectangular else 1)
    assert q_offsets.is_rectangular == k_offsets.is_rectangular == is_rectangular
    H, G, D, Dv = 4, 2, 6, 5
    tensors = (
        random(q_offsets.total, H, D),
        random(k_offsets.total, G, D, seed=1),
        random(k_offsets.total, G, Dv, seed=2),
    )
    grad = random(q_offsets.total, H, Dv, seed=3)
    offsets = q_offsets, k_offsets
    limit = torch.tensor([3] * len(q_lengths))
    masks = {"none": None, "padding": padding(limit), "padding|~padding": padding(limit) | ~padding(limit - 1)}
    if k_lengths is None:
        masks |= {
            "causal": causal(),
            "window": window(2),
            "local": local(1),
            "~causal": ~causal(),
            "both": causal() & padding(limit),
        }
    torch.manual_seed(4)
    longest = max(k_lengths or q_lengths)
    for score_name, score in scores(D, D, longest - 3, H).items():  # max_keys of Location is the number of keys
        for mask_name, mask in masks.items():
            for with_bias in (False, True) if k_lengths is None else (False,):
                exact_score, exact_bias = copy.deepcopy(score).double(), Slope(H).double() if with_bias else None
                expected = outputs_and_gradients(
                    lambda q, k, v, s=exact_score, b=exact_bias, m=mask: reference_packed(q, k, v, s, m, b, *offsets),
                    tensors,
                    exact_score,
                    exact_bias,
                    grad,
                )
                cast_score, cast_bias = copy.deepcopy(score).to(dtype), Slope(H).to(dtype) if with_bias else None
                actual = outputs_and_gradients(
                    lambda q, k, v, s=cast_score, b=cast_bias, m=mask: attend(
                        q, k, v, score=s, mask=m, bias=b, q_offsets=q_offsets, k_offsets=k_offsets
                    ),
                    [x.to(dtype) for x in tensors],
                    cast_score,
                    cast_bias,
                    grad.to(dtype),
                )
                try:
                    assert_all_close(actual, expected, TOLERANCE[dtype])
                except AssertionError as error:
                    raise AssertionError(f"{score_name}, {mask_name}, bias {with_bias}: {error}") from error


def test_offsets_may_be_plain_tensors():
    x, starts = random(5, 2, 4), torch.tensor([0, 2, 5])
    out = attend(x, x, x, mask=causal(), q_offsets=starts, k_offsets=starts.clone())
    torch.testing.assert_close(
        out, attend(x, x, x, mask=causal(), q_offsets=Offsets.from_starts(starts), k_offsets=starts)
    )
    sequence = x[2:].transpose(0, 1)[None]
    torch.testing.assert_close(out[2:], attend(sequence, sequence, sequence, mask=causal())[0].transpose(0, 1))


def test_weights_of_packed_inputs_are_padded():
    q_offsets, k_offsets = make_offsets([2, 0, 3]), make_offsets([1, 2, 4], spare=1)
    q, k = random(5, 2, 4), random(7, 1, 4, seed=1)
    matrices = weights(q, k, score=Cosine(5.0), q_offsets=q_offsets, k_offsets=k_offsets)
    assert matrices.shape == (3, 2, 3, 5)
    for b in range(3):
        t, s = q_offsets.lengths[b], k_offsets.lengths[b]
        sequence = (x[o.starts[b] : o.starts[b + 1]].transpose(0, 1)[None] for x, o in ((q, q_offsets), (k, k_offsets)))
        torch.testing.assert_close(matrices[b, :, :t, :s], weights(*sequence, score=Cosine(5.0))[0])
        assert (matrices[b, :, t:] == 0).all()
        assert (matrices[b, :, :, s:] == 0).all()


def test_mixed_lengths_are_padded_in_separate_batches():
    """One padded batch of 64 short sequences and a long one would have thirty times as many cells as tokens."""
    offsets = make_offsets([3] * 64 + [128, 0, 0, 0])
    x = random(offsets.total, 1, 4)
    with explain() as choices:
        attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
    assert sorted(choice.q for choice in choices) == [(1, 1, 128, 4), (64, 1, 3, 4)]


@pytest.mark.parametrize("lengths", [[3, 5, 4], [1, 0, 30, 2, 7]])
def test_offsets_first_used_in_inference_mode_work_with_autograd(lengths):
    offsets, fresh = make_offsets(lengths), make_offsets(lengths)
    x = random(offsets.total, 2, 4).requires_grad_()

    def gradient(offsets: Offsets) -> torch.Tensor:
        out = attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
        out = out + (x * x)[offsets.rows].sum() + (x * offsets.cells[:, None, None]).sum()
        return torch.autograd.grad(out.square().sum(), x)[0]

    with torch.inference_mode():
        attend(x, x, x, q_offsets=offsets, k_offsets=offsets)
        cached = [offsets.valid, offsets.rows, offsets.cells]
    assert not any(tensor.is_inference() for tensor in cached)
    assert torch.equal(gradient(offsets), gradient(fresh))


@pytest.mark.parametrize("lengths", [[3, 5, 4], [1, 0, 30, 2, 7]])
@pytest.mark.parametrize("mask", [None, causal()])
def test_compiled_gradients_equal_eager_ones(lengths, mask, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checker cannot be compiled
    offsets = make_offsets(lengths, spare=1)
    q, k, v = (random(offsets.total, 2, 4, seed=i).requires_grad_() for i in range(3))

    def function(q, k, v, starts):
        o = Offsets(starts, total=offsets.total, max_len=offsets.max_len)
        return attend(q, k, v, mask=mask, q_offsets=o, k_offsets=o)

    def gradients(function):
        return torch.autograd.grad(function(q, k, v, offsets.starts).sin().sum(), (q, k, v))

    torch._dynamo.reset()
    assert_all_close(
        gradients(torch.compile(function, backend="aot_eager", fullgraph=True)), gradients(function), 1e-11
    )


def fake_varlen_attn(calls):
    """A plain implementation of varlen_attn that checks its requirements and records the window sizes."""

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        calls.append(window_size)
        assert q.shape[1:] == k.shape[1:] == v.shape[1:]
        assert q.shape[-1] % 8 == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        left, right = window_size
        out = torch.full_like(q, torch.nan)  # the output of sequences without keys is undefined
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
def test_varlen_equals_reference(case, monkeypatch):
    q_lengths, k_lengths = CASES[case]
    q_offsets = make_offsets(q_lengths, spare=2)
    k_offsets = q_offsets if k_lengths is None else make_offsets(k_lengths)
    calls = []
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen_attn(calls), raising=False)

    q, k, v = (
        random(q_offsets.total, 4, 6),
        random(k_offsets.total, 2, 6, seed=1),
        random(k_offsets.total, 2, 9, seed=2),
    )
    masks = [None, causal(), window(3), causal() & window(2), local(2), local(1) & causal(), local(1) & window(3)]
    masks = [None] if k_lengths else masks
    torch.manual_seed(0)
    for name, score in scores(6, 6, max(k_lengths or q_lengths) - 3, 4).items():
        if "concat" in name:
            continue
        for mask in masks:
            score = score.double()
            with use("varlen"):
                out = attend(q, k, v, score=score, mask=mask, q_offsets=q_offsets, k_offsets=k_offsets)
            expected = reference_packed(q, k, v, score, mask, None, q_offsets, k_offsets)
            torch.testing.assert_close(out, expected)
    assert set(calls) == ({(-1, -1)} if k_lengths else {(-1, -1), (-1, 0), (2, 0), (1, 0), (2, 2)})


def test_invalid_offsets_and_shapes(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # test our message, not the shape checker's
    x, offsets, other = random(5, 2, 4), make_offsets([2, 3]), make_offsets([3, 2])
    with pytest.raises(RegardError, match="both q_offsets and k_offsets"):
        attend(x, x, x, q_offsets=offsets)
    for options in ({"mask": causal()}, {"mask": ~window(2)}, {"bias": Slope(2)}):
        with pytest.raises(RegardError, match="needs the same offsets"):
            attend(x, x, x, q_offsets=offsets, k_offsets=other, **options)
    with pytest.raises(RegardError, match=r"q \(4, 2, 4\).*The offsets end at 5 and 5, for 2 and 2 sequences"):
        attend(x[:4], x, x, q_offsets=offsets, k_offsets=offsets)
    with pytest.raises(RegardError, match="With offsets pass"):
        attend(x[None], x[None], x[None], q_offsets=offsets, k_offsets=offsets)
    with pytest.raises(RegardError, match="3 keys, but W_a has 2 rows"):
        attend(x, x, x, score=Location(4, 2), q_offsets=offsets, k_offsets=offsets)


@pytest.mark.parametrize(
    ("max_len", "mask", "supported"),
    [(9, None, True), (8, None, False), (8, causal(), False), (8, window(3), True), (8, local(3), True)],
)
def test_varlen_supports_only_unequal_lengths_or_windows(max_len, mask, supported):
    x = torch.zeros(16, 2, 8, dtype=torch.bfloat16).as_subclass(FakeCudaTensor)
    offsets = Offsets(torch.tensor([0, 8, 16]), 16, max_len)
    assert varlen.supports(Call(x, x, x, ScaledDot(), MaskParts.from_mask(mask), None, offsets, offsets)) == supported


def test_sequences_of_equal_length_are_not_copied():
    offsets = make_offsets([4, 4, 4])
    q, k, v = torch.randn(3, 12, 2, 8)
    calls = []
    padded.run(
        Call(q, k, v, ScaledDot(), MaskParts(), None, offsets, offsets), lambda call: calls.append(call) or call.q
    )
    assert [x.data_ptr() for x in calls[0][:3]] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("max_len", [0, 8])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "window"])
@pytest.mark.parametrize("name", scores(4, 4, 3, 2))
def test_zero_sequences(name, mask, max_len):
    """Outputs, weights and gradients are empty; gradients of the parameters of the score are zero."""
    score = scores(4, 4, 8, 2)[name]
    masks = {"none": None, "causal": causal(), "padding": padding(torch.zeros(0, dtype=int)), "window": window(2)}
    offsets = Offsets(torch.zeros(1, dtype=torch.int32), total=0, max_len=max_len)
    q, k, v = (torch.zeros(0, 2, width, requires_grad=True) for width in (4, 4, 5))
    for bias in (None, Slope(2)):
        options = {"score": score, "mask": masks[mask], "bias": bias, "q_offsets": offsets, "k_offsets": offsets}
        out = attend(q, k, v, **options)
        assert out.shape == (0, 2, 5)
        out.sum().backward()
        assert v.grad is not None
        assert all(p.grad is None or not p.grad.any() for p in score.parameters())
        assert weights(q, k, **options).shape == (0, 2, max_len, max_len)


def test_zero_sequences_with_a_plain_tensor_of_offsets():
    q = torch.zeros(0, 2, 4)
    assert attend(q, q, q, q_offsets=torch.tensor([0]), k_offsets=torch.tensor([0])).shape == (0, 2, 4)
    assert weights(q, q, q_offsets=torch.tensor([0]), k_offsets=torch.tensor([0])).shape == (0, 2, 0, 0)
