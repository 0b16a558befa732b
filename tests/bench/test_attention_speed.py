"""Benchmark of attention: cases, peers and counted work."""

import pytest
import torch

from regard.attention import SCORES, attend, causal, padding
from regard.attention.reference import reference
from regard.bench import AttentionShape, bench_attention
from regard.bench.attention_speed import MASKS, AttentionCase
from regard.bench.peers import Unsupported, peer_attentions, sdpa
from regard.errors import RegardError

TINY = AttentionShape(tokens=16, heads=2, width=8, hidden=4)
CPU = torch.device("cpu")


def make_case(score="scaled_dot", mask="none", length=8, backward=False):
    return AttentionCase(score, mask, length, backward, TINY, CPU, torch.float32)


def test_every_score_is_measured():
    report = bench_attention("cpu", [8], masks=["causal"], shape=TINY, compiled=False, rounds=1)
    regard_rows = [row for row in report.rows if row.is_regard]
    assert [row.case.split(",")[0] for row in regard_rows[:-1:2]] == list(SCORES)
    assert all(row.seconds for row in report.rows)
    assert all(row.note.startswith("kernel ") for row in regard_rows[:-1])
    assert {row.implementation for row in report.rows} == {"Regard", "formula, eager", "SDPA"}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
def test_peers_compute_the_same_output(score, mask):
    case = make_case(score, mask)
    q, k, v = case.inputs()
    score_module, mask_expression = case.make_score(), case.make_mask()
    expected = attend(q, k, v, score=score_module, mask=mask_expression)
    for name, make in peer_attentions(score_module, mask_expression, q, k, compiled=False):
        assert torch.allclose(make()(q, k, v), expected, atol=1e-5), name


@pytest.mark.parametrize("mask", MASKS)
def test_pairs_counts_what_the_mask_allows(mask):
    case = make_case(mask=mask, length=7)
    p = torch.arange(7)
    expression = case.make_mask()
    allowed = torch.ones(7, 7, dtype=torch.bool) if expression is None else expression.block(p, p)
    assert case.pairs() == allowed.expand(case.batch, 1, 7, 7).sum()


def test_sdpa_supports_only_dot_products():
    with pytest.raises(Unsupported):
        sdpa(make_case("cosine").make_score(), None)


def test_backward_reaches_all_inputs_and_parameters():
    case = make_case("concat", backward=True)
    score, inputs = case.make_score(), case.inputs()
    requires_grad = []

    def attention(q, k, v):
        requires_grad.append((q.requires_grad, k.requires_grad, v.requires_grad))
        return reference(q, k, v, score)

    case.step(attention, score, *inputs)()
    assert requires_grad == [(True, True, True)]
    assert all(p.requires_grad for p in score.parameters())


def test_lengths_range_from_half_to_full():
    case = make_case(mask="padding", length=8)
    assert case.lengths().tolist() == [4, 8]
    assert make_case(length=16).lengths().tolist() == [12]
    assert isinstance(case.make_mask(), type(padding(torch.tensor([1]))))
    assert make_case().make_mask() is None
    assert type(make_case(mask="causal").make_mask()) is type(causal())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": ["dott"]}, "No score is called 'dott'"),
        ({"masks": ["cuasal"]}, "No mask is called 'cuasal'"),
        ({"lengths": [0]}, r"Lengths must be at least 1 \(got 0\)"),
    ],
)
def test_unknown_names_and_lengths_raise(options, message):
    with pytest.raises(RegardError, match=message):
        bench_attention("cpu", **options)
