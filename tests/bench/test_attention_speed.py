"""Attention beside its peers: who takes part, what is counted, what is the same."""

import pytest
import torch

from regard.attention import SCORES, attend, causal, padding
from regard.attention.reference import reference
from regard.bench import Shape, bench_attention
from regard.bench.attention_speed import MASKS, Case
from regard.bench.peers import Cannot, attentions, sdpa
from regard.errors import RegardError

TINY = Shape(tokens=16, heads=2, width=8, hidden=4)
CPU = torch.device("cpu")


def case(score="scaled_dot", mask="none", length=8, backward=False):
    return Case(score, mask, length, backward, TINY, CPU, torch.float32)


def test_every_score_takes_part():
    report = bench_attention("cpu", [8], masks=["causal"], shape=TINY, compiled=False, rounds=1)
    ours = [row for row in report.rows if row.ours]
    assert [row.case.split(",")[0] for row in ours[:-1:2]] == list(SCORES)
    assert all(row.seconds for row in report.rows)
    assert all(row.note.startswith("kernel ") for row in ours[:-1])
    assert {row.entrant for row in report.rows} == {"Regard", "formula, eager", "SDPA"}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
def test_peers_compute_the_same(score, mask):
    one = case(score, mask)
    q, k, v = one.inputs()
    made, masked = one.make_score(), one.make_mask()
    wanted = attend(q, k, v, score=made, mask=masked)
    for name, make in attentions(made, masked, q, k, compiled=False):
        assert torch.allclose(make()(q, k, v), wanted, atol=1e-5), name


@pytest.mark.parametrize("mask", MASKS)
def test_pairs_are_those_that_the_mask_allows(mask):
    one = case(mask=mask, length=7)
    p = torch.arange(7)
    masked = one.make_mask()
    allowed = torch.ones(7, 7, dtype=torch.bool) if masked is None else masked.block(p, p)
    assert one.pairs() == allowed.expand(one.batch, 1, 7, 7).sum()


def test_sdpa_knows_dot_products_alone():
    with pytest.raises(Cannot):
        sdpa(case("cosine").make_score(), None)


def test_backward_reaches_everything():
    one = case("concat", backward=True)
    score, inputs = one.make_score(), one.inputs()
    given = []

    def attention(q, k, v):
        given.append((q.requires_grad, k.requires_grad, v.requires_grad))
        return reference(q, k, v, score)

    one.step(attention, score, *inputs)()
    assert given == [(True, True, True)]
    assert all(p.requires_grad for p in score.parameters())


def test_lengths_are_from_half_to_all():
    one = case(mask="padding", length=8)
    assert one.lengths().tolist() == [4, 8]
    assert case(length=16).lengths().tolist() == [12]
    assert isinstance(one.make_mask(), type(padding(torch.tensor([1]))))
    assert case().make_mask() is None
    assert type(case(mask="causal").make_mask()) is type(causal())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scores": ["dott"]}, "No score is called 'dott'"),
        ({"masks": ["cuasal"]}, "No mask is called 'cuasal'"),
        ({"lengths": [0]}, "A length of 0"),
    ],
)
def test_what_is_not_known_is_said(given, said):
    with pytest.raises(RegardError, match=said):
        bench_attention("cpu", **given)
