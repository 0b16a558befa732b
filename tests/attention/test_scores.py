"""Scores: formulas, gradients, and transformed queries and keys."""

import jaxtyping
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.attention import (
    SCORES,
    Concat,
    Cosine,
    Disentangled,
    Dot,
    DotLike,
    General,
    Location,
    ScaledDot,
    Score,
    SoftCap,
    attend,
    causal,
    explain,
    local,
    make_score,
    padding,
    use,
    weights,
)
from regard.attention.reference import reference
from regard.errors import RegardError
from regard.kernels import score_blocks
from regard.models import TransformerConfig
from regard.models.parameters import count_parameters
from tests.attention.helpers import SCORE_NAMES, Slope, Tanh, assert_all_close, random, scores

Q, K = random(2, 3, 4), random(2, 5, 4, seed=1)


def score_each_pair(function):
    return torch.stack([torch.stack([torch.stack([function(s, h) for h in ks]) for s in qs]) for qs, ks in zip(Q, K)])


def test_scores_equal_their_formulas():
    torch.manual_seed(0)
    general, concat, joint = General(4, 4).double(), Concat(4, 4, 7).double(), Concat(4, 4, 7, joint=True).double()
    w_q, w_k, w_a = concat.weight_q, concat.weight_k, concat.weight_a[:, 0]
    expected = {
        Dot(): score_each_pair(lambda s, h: s @ h),
        ScaledDot(): score_each_pair(lambda s, h: s @ h / 2),
        Cosine(3.0): score_each_pair(lambda s, h: 3 * torch.cosine_similarity(s, h, dim=0)),
        Cosine(3.0, learned=True).double(): score_each_pair(lambda s, h: 3 * torch.cosine_similarity(s, h, dim=0)),
        general: score_each_pair(lambda s, h: s @ general.weight @ h),
        concat: score_each_pair(lambda s, h: torch.tanh(s @ w_q + h @ w_k) @ w_a),
        joint: score_each_pair(lambda s, h: torch.tanh(torch.cat((s, h)) @ joint.weight) @ joint.weight_a[:, 0]),
    }
    for score, matrix in expected.items():
        torch.testing.assert_close(score(Q, K), matrix, atol=1e-6, rtol=1e-6)


def test_location_depends_only_on_positions():
    score = Location(4, max_keys=6).double()
    torch.testing.assert_close(score(Q, K), Q @ score.weight[:5].T)
    torch.testing.assert_close(score(Q, K), score(Q, random(2, 5, 9)))
    with pytest.raises(RegardError, match="7 keys, but W_a has 6 rows"):
        score(Q, random(2, 7, 4))


def relative_index(p, s):
    return (p[:, None] - s).clamp(-2, 2) + 2


def test_disentangled_score_equals_its_formula():
    keys, queries = random(2, 5, 4, seed=2), random(2, 5, 4, seed=3)
    score = Disentangled(keys, queries, relative_index)
    q, k = random(1, 2, 3, 4), random(1, 2, 6, 4, seed=1)
    expected = torch.empty(1, 2, 3, 6, dtype=torch.float64)
    for h in range(2):
        for t in range(3):
            for s in range(6):
                i = min(max(t + 3 - s, -2), 2) + 2  # query t is at position t + 3
                both = q[0, h, t] @ k[0, h, s], q[0, h, t] @ keys[h, i], queries[h, i] @ k[0, h, s]
                expected[0, h, t, s] = sum(both) / 12**0.5
    torch.testing.assert_close(score(q, k), expected)
    torch.testing.assert_close(score.select_heads([1])(q[:, 1:], k[:, 1:]), expected[:, 1:])
    torch.testing.assert_close(weights(q, k, score=score), expected.softmax(-1))


def test_disentangled_attention_equals_the_reference_with_gradients():
    def run(backend):
        inputs = [random(2, 2, 70, 4, seed=i) for i in range(3)] + [random(2, 5, 4, seed=i) for i in (3, 4)]
        q, k, v, keys, queries = (x.requires_grad_() for x in inputs)
        with use(backend):
            out = attend(
                *(q, k, v), score=Disentangled(keys, queries, relative_index), mask=padding(torch.tensor([70, 41]))
            )
        out.backward(random(*out.shape, seed=5))
        return [out, *(x.grad for x in (q, k, v, keys, queries))]

    for found, expected in zip(run("chunked"), run("reference"), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mask", [None, padding(torch.tensor([70, 41, 0])), local(3), causal()])
@pytest.mark.parametrize("T", [70, 33, 75])
def test_disentangled_attention_without_gradients_equals_the_reference(mask, T, monkeypatch):
    monkeypatch.setitem(score_blocks.BLOCK_ELEMENTS, "cpu", 5000)  # several blocks of queries
    q, k, v = random(3, 4, T, 4), random(3, 2, 70, 4, seed=1), random(3, 2, 70, 6, seed=2)
    score = Disentangled(random(4, 5, 4, seed=3), random(4, 5, 4, seed=4), relative_index)
    with explain() as choices:
        out = attend(q, k, v, score=score, mask=mask)
    assert choices[0].backend == "disentangled"
    torch.testing.assert_close(out, reference(q, k, v, score, mask))


def test_joint_concat_has_a_name():
    score = make_score("concat_joint", 4, 6, hidden=7)
    assert type(score) is Concat
    assert score.weight.shape == (10, 7)


def test_joint_concat_equals_split_concat():
    split, joint = Concat(4, 4, 7).double(), Concat(4, 4, 7, joint=True).double()
    with torch.no_grad():
        joint.weight.copy_(torch.cat((split.weight_q, split.weight_k)))
        joint.weight_a.copy_(split.weight_a)
    torch.testing.assert_close(split(Q, K), joint(Q, K))


def test_cosine_of_a_zero_vector_is_zero():
    q = torch.zeros(1, 1, 4, requires_grad=True)
    scores = Cosine()(q, torch.ones(1, 2, 4))
    scores.sum().backward()
    assert (scores == 0).all()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_folding_and_selecting_heads(name):
    torch.manual_seed(0)
    score = scores(4, 4, 5, 3)[name].double()
    q, k = random(2, 3, 3, 4), random(2, 3, 5, 4, seed=1)
    matrix = score(q, k)
    assert matrix.shape == (2, 3, 3, 5)
    transformed_q, transformed_k, scale = score.transform(q, k)
    torch.testing.assert_close(matrix, score.pair_scores(transformed_q, transformed_k) * scale)
    if isinstance(score, DotLike):
        torch.testing.assert_close(matrix, transformed_q @ transformed_k.mT * scale)
    torch.testing.assert_close(score.select_heads([2, 0])(q[:, [2, 0]], k[:, [2, 0]]), matrix[:, [2, 0]])


@pytest.mark.parametrize(
    ("name", "backend"),
    # concat is not a dot product
    [(n, k) for n in SCORE_NAMES for k in ("batched_matmul", "sdpa", "chunked") if k == "chunked" or "concat" not in n],
)
def test_gradcheck(name, backend):
    torch.manual_seed(0)
    score = scores(3, 3, 4, 2)[name].double()

    def function(q, k, v, *parameters):
        with use(backend):
            return attend(q, k, v, score=score, mask=causal() & padding(torch.tensor([4, 2])))

    tensors = [random(2, 2, 3, 3), random(2, 2, 4, 3, seed=1), random(2, 2, 4, 3, seed=2)]
    # gradcheck perturbs the parameters in place.
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in tensors] + list(score.parameters()))


def test_custom_score_equals_reference():
    class Distance(Score):
        def pair_scores(self, q, k):
            return -torch.cdist(q, k)

    q, k, v = random(2, 1, 3, 4), random(2, 1, 5, 4, seed=1), random(2, 1, 5, 6, seed=2)
    torch.testing.assert_close(attend(q, k, v, score=Distance()), reference(q, k, v, Distance()))


@pytest.mark.parametrize("name", ["functional_call", "checkpoint"])
def test_custom_score_has_gradients_of_the_parameters_of_its_forward_pass(name):
    """Not of those that the module has during the backward pass, which recomputes the scores."""
    layer, q = nn.Module(), random(1, 2, 70, 4)
    layer.score, layer.forward = Tanh(4).double(), lambda q: attend(q, q, q, score=layer.score, bias=layer.bias)
    layer.bias = Slope(2).double()

    def gradients():
        if name == "checkpoint":
            parameters = dict(layer.named_parameters())
            out = checkpoint(layer, q, use_reentrant=False)
        else:
            parameters = {name: (2 * x).detach().requires_grad_() for name, x in layer.named_parameters()}
            out = torch.func.functional_call(layer, parameters, (q,))
        return torch.autograd.grad(out.square().sum(), list(parameters.values()))

    actual = gradients()
    with use("reference"):
        assert_all_close(actual, gradients(), 1e-11)


def test_make_score():
    for name, kind in SCORES.items():
        built = make_score(name, 8, 8, hidden=4, max_keys=9, heads=2)
        assert type(built) is (Concat if name == "concat_joint" else kind)
    assert make_score("cosine", 8, 8).log_scale.exp().item() == pytest.approx(10)
    assert make_score("concat", 8, 8, hidden=4).weight_a.shape == (4, 1)
    assert make_score("location", 8, 8, max_keys=9).max_keys == 9
    names = "dot, scaled_dot, cosine, general, concat, concat_joint, location"
    with pytest.raises(RegardError, match=rf"score must be one of {names} \(got 'bilinear'\)"):
        make_score("bilinear", 8, 8)
    with pytest.raises(RegardError, match="same width \\(got 8 and 6\\)"):
        make_score("dot", 8, 6)
    with pytest.raises(RegardError, match="scale must be positive"):
        Cosine(0.0)


@pytest.mark.parametrize("length", [5, 70])
def test_overridden_pairs_of_built_in_scores_count(length):
    """Kernels for the base class would ignore them."""

    class Doubled(ScaledDot):
        def pair_scores(self, q, k):
            return 2 * super().pair_scores(q, k)

    class Distant(ScaledDot):
        def pair_scores_at(self, q, k, p, s):
            return super().pair_scores_at(q, k, p, s) - (p[:, None] - s).abs()

    q, k, v = (random(1, 2, length, 4, seed=i) for i in range(3))
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    for score, pairs in ((Doubled(), q @ k.mT), (Distant(), q @ k.mT / 2 - distance / 2)):
        torch.testing.assert_close(attend(q, k, v, score=score), pairs.softmax(-1) @ v)
        torch.testing.assert_close(weights(q, k, score=score), pairs.softmax(-1))
        with pytest.raises(RegardError, match="needs a score that is a dot product"):
            SoftCap(score, 2.0)
    with pytest.raises(RegardError, match=r"Wrong overrides forward.*Override pair_scores or transform"):
        type("Wrong", (Score,), {"forward": lambda self, q, k: q @ k.mT})


@pytest.mark.parametrize("score", ["concat", Concat, torch.nn.Identity()], ids=["name", "class", "module"])
def test_values_that_are_no_scores_are_errors(monkeypatch, score):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # test our message, not the shape checker's
    x = random(1, 2, 4)
    for call in (lambda: attend(x, x, x, score=score), lambda: weights(x, x, score=score)):
        with pytest.raises(RegardError, match=r"A score is an object such as Cosine.*make_score"):
            call()


def test_score_without_a_formula_is_named():
    with pytest.raises(RegardError, match=r"The score Score has no formula\. Define its method pair_scores\(q, k\)\."):
        attend(*random(3, 2, 3, 4), score=Score())


def test_score_without_build_is_named(monkeypatch):
    class Scaled(DotLike):
        def __init__(self, factor):
            super().__init__()

    monkeypatch.setitem(SCORES, "scaled", Scaled)
    with pytest.raises(RegardError, match=r"Scaled cannot be built .*'factor'\)\. Define the class method build"):
        count_parameters(TransformerConfig(encoder_score="scaled", source_vocab=9, target_vocab=9))

    class Failing(DotLike):
        @classmethod
        def build(cls, dim_q):
            return cls()

    monkeypatch.setitem(SCORES, "failing", Failing)
    with pytest.raises(TypeError, match="unexpected keyword argument"):  # not that the model is too large
        count_parameters(TransformerConfig(encoder_score="failing", source_vocab=9, target_vocab=9))


def test_initial_scores_have_about_unit_variance():
    """For inputs of unit variance, so that the initial softmax is neither uniform nor one-hot."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 200, 64), torch.randn(1, 200, 64)
    for name in ("scaled_dot", "general", "concat", "location"):
        assert 0.4 < make_score(name, 64, 64, hidden=128)(q, k).std() < 1.6, name
