"""Encoder-only models and their heads."""

import pytest
import torch

from regard.attention import SCORES, record
from regard.errors import RegardError
from regard.layers.feedforward import activate
from regard.layers.packed import Padded, pack
from regard.models.bert import Bert, BertConfig, bert_base, bert_small

TEXTS = [[2, 4, 5, 3], [2, 6, 3], [2, 3]]


def small(**changes) -> Bert:
    torch.manual_seed(0)
    sizes = dict(width=16, heads=4, layers=4, feedforward=32, dropout=0.0, vocab=11, max_len=32)
    return Bert(BertConfig(**(sizes | changes))).eval()


@pytest.mark.parametrize("score", SCORES)
def test_packed_and_single_texts_agree(score):
    model = small(score=score, norm_eps=1e-5)
    alone = torch.cat([model(pack([text])) for text in TEXTS])
    torch.testing.assert_close(model(pack(TEXTS)), alone)
    assert alone.shape == (9, 11)


def test_every_token_attends_to_every_other():
    model = small(norm_eps=1e-5)
    changed = model(pack([[2, 4, 9, 3]]))
    assert (model(pack(TEXTS[:1])) - changed).abs().amax(-1).gt(1e-6).all()


def test_output_shape_of_each_head():
    labels = ("bad", "good", "so so")
    assert small(head="classify", pooler="tanh", labels=labels)(pack(TEXTS)).shape == (3, 3)
    assert small(head="answer")(pack(TEXTS)).shape == (9, 2)
    assert small(head="none")(pack(TEXTS)).shape == (9, 16)
    with pytest.raises(RegardError, match="needs a pooler"):
        small(head="classify", labels=labels)


def test_classifier_reads_the_first_token():
    model = small(head="classify", pooler="relu", labels=("a", "b"))
    encoded = model.encode(pack(TEXTS))
    expected = model.output(model.pooler(encoded[[0, 4, 7]]).relu())
    torch.testing.assert_close(model(pack(TEXTS)), expected)
    padded = model(pack(TEXTS, total=16, count=9))  # one row per text, including padding and empty texts
    assert padded.shape == (9, 2)
    torch.testing.assert_close(padded[:3], expected)


@pytest.mark.parametrize("score", SCORES)
def test_attention_pooling_matches_its_formula(score):
    model = small(head="classify", pooling="query", labels=("a", "b"), score=score, positions="rotary")
    alone = torch.cat([model(pack([text])) for text in TEXTS])
    torch.testing.assert_close(model(pack(TEXTS)), alone)
    padded = model(pack(TEXTS, total=16, count=9))
    assert padded.shape == (9, 2)
    torch.testing.assert_close(padded[:3], alone)
    encoded = model.encode(pack(TEXTS[:1]))
    with record(model) as recording:
        model(pack(TEXTS[:1]))
    recorded = recording["query_pool.attention"]
    assert recorded.kind == "cross"
    weights = recorded.weights()[0]  # heads, one query, tokens
    assert weights.shape == (4, 1, 4)
    attention = model.query_pool.attention
    _, values = attention.keys_values(encoded, None)
    context = torch.einsum("hqs,shd->qhd", weights, values)
    torch.testing.assert_close(model.output(attention.out(context.flatten(1))), model(pack(TEXTS[:1])))


def test_pooling_query_gets_a_gradient():
    model = small(head="classify", pooling="query", labels=("a", "b")).train()
    model(pack(TEXTS)).square().sum().backward()
    assert model.query_pool.question.grad.abs().sum() > 0
    assert small(head="none", pooling="query").query_pool is not None
    for head in ("mask", "answer"):
        with pytest.raises(RegardError, match="is for classification; the head"):
            small(head=head, pooling="query")


def test_gated_activations_work_with_every_head():
    """The linear layer of the head has the activation of the gates."""
    for activation in ("swiglu", "geglu", "geglu_exact"):
        assert small(activation=activation)(pack(TEXTS)).shape[-1] == 11
        model = small(activation=activation, head="tag", head_transform=True, labels=("a", "b"))
        x = model.encode(pack(TEXTS))
        hidden = activate({"swiglu": "silu", "geglu": "gelu_tanh"}.get(activation, "gelu"), model.mask_head.dense(x))
        torch.testing.assert_close(model(pack(TEXTS)), model.output(model.mask_head.norm(hidden)))


def test_mean_pooling_ignores_other_texts_and_padding():
    model = small(head="classify", pooling="mean", pooler="tanh", labels=("a", "b"))
    rows = [[2, 4, 3, 5], [7], [6, 8]]
    expected = torch.cat([model.pool(model.encode(pack([row])), pack([row])) for row in rows])
    torch.testing.assert_close(model.pool(model.encode(pack(rows)), pack(rows)), expected)
    padded = Padded(torch.tensor([row + [0] * (4 - len(row)) for row in rows]), torch.tensor([4, 1, 2]))
    torch.testing.assert_close(model.pool(model.encode(padded), padded), expected)


def test_disentangled_attention_without_positions_has_the_scores_of_the_contents():
    model = small(relative="disentangled", relative_buckets=8, relative_distance=0, positions="none", norm_eps=1e-5)
    before = model(pack(TEXTS))
    with torch.no_grad():
        model.relative.norm.weight.zero_()
        for block in model.blocks:
            block.attention.query.bias.zero_()
            block.attention.key_value.bias.zero_()
        expected = model(pack(TEXTS))  # keys and queries of positions are zero
        model.relative = None
        torch.testing.assert_close(model(pack(TEXTS)), expected)
    assert not torch.allclose(before, expected)


def test_inconsistent_options_are_errors():
    with pytest.raises(RegardError, match="scaled dot product"):
        small(relative="disentangled", score="dot")
    with pytest.raises(RegardError, match="share weights"):
        small(groups=2, sliding_windows=(1,))
    with pytest.raises(RegardError, match="relative_distance is 0"):
        small(relative="bias", relative_distance=0)
    with pytest.raises(RegardError, match="relative_buckets is 2"):
        small(relative="bias", relative_buckets=2)
    with pytest.raises(RegardError, match="relative_buckets is 7"):
        small(relative="disentangled", relative_buckets=7)


def test_segments_change_the_output():
    model = small()
    tokens = pack([[2, 4, 3, 5, 3]])
    segments = torch.tensor([0, 0, 0, 1, 1])
    assert not torch.allclose(model(tokens), model(tokens, segments))
    torch.testing.assert_close(model(tokens), model(tokens, torch.zeros_like(segments)))
    assert small(segments=0)(tokens).shape == (5, 11)


def test_layers_share_weights_in_groups():
    shared, unshared = small(groups=2, embedding_width=8), small(embedding_width=8)
    assert len(shared.blocks) == 2
    assert sum(p.numel() for p in shared.blocks.parameters()) * 2 == sum(
        p.numel() for p in unshared.blocks.parameters()
    )
    assert shared.output.weight.shape == (11, 8)
    with record(shared) as recording:
        shared(pack(TEXTS))
    assert [len(recorded.calls) for recorded in recording.values()] == [2, 2]
    with pytest.raises(RegardError, match=r"model.groups is 3; it must divide model.layers \(4\)"):
        small(groups=3)


def test_named_sizes():
    with torch.device("meta"):
        assert 109e6 < sum(p.numel() for p in Bert(bert_base(vocab=30522)).parameters()) < 111e6
    assert bert_small().width == 384
