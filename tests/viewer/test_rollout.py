"""Rollout through all layers, plain and for a label, each against a twin that does it step by step."""

import numpy as np
import pytest
import torch

from regard.attention import dispatch, record, use
from regard.attention.reference import repeat_heads, softmax
from regard.errors import RegardError
from regard.layers.patches import pack_images
from regard.viewer import roll_out
from tests.viewer.seeing import KINDS, images, model_of


def plain_rollout(layers):
    """From (H, T, T) weights: heads averaged, the identity added, rows divided by their sum, multiplied."""
    whole = np.eye(layers[0].shape[-1])
    for weights in layers:
        mean = sum(head for head in weights) / len(weights)
        added = mean + np.eye(len(mean))
        whole = (added / added.sum(1, keepdims=True)) @ whole
    return whole


def recorded(model, batch):
    with torch.no_grad(), record(model) as recording:
        model.pooled(model.encode(batch), batch)
    return {name: one.weights().double().numpy() for name, one in recording.items() if one.calls}


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_is_what_the_steps_give(kind):
    model, batch = model_of(kind), images(3)
    maps, prefix = recorded(model, batch), model.config.prefix
    found = roll_out(model, batch)
    for b in range(3):
        matrix = plain_rollout([maps[f"blocks.{i}.attention"][b] for i in range(3)])
        np.testing.assert_allclose(found.matrix[b], matrix, atol=1e-6)
        whole = {
            "class": matrix[0],
            "distilled": (matrix[0] + matrix[1]) / 2,
            "query": maps["pooler.attention"][b].mean(0)[0] @ matrix[prefix:] if kind == "query" else None,
        }.get(kind, matrix[prefix:].mean(0))
        np.testing.assert_allclose(found.whole[b], whole, atol=1e-6)
        np.testing.assert_allclose(found.over_patches(b), whole[prefix:].reshape(2, 3), atol=1e-6)
        np.testing.assert_allclose(found.over_patches(b, (1, 2)), matrix[prefix + 5, prefix:].reshape(2, 3), atol=1e-6)
    assert found.matrix[0].std() > 0.01  # not all alike


class Keeping:
    """The definition of attention, which keeps its weights for autograd to fill."""

    def __init__(self):
        self.weights = []

    def __call__(self, q, k, v, score, mask=None, bias=None):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        self.weights.append(softmax(score(q, k)))
        self.weights[-1].retain_grad()
        return self.weights[-1] @ v


def plain_weighted(model, image, label, monkeypatch):
    """Of each head the positive part of gradient times weight, the mean of heads, rows that sum to 1; then as ever.

    Pooling is one more such step, from which nothing is passed on as it was.
    """
    keeping, config = Keeping(), model.config
    monkeypatch.setattr(dispatch, "reference", keeping)
    with use("reference"):
        encoded = model.encode(image)
        count = encoded.shape[1] - config.prefix
        shares = torch.full((count,), 1 / count, dtype=torch.double, requires_grad=True)
        if config.pooling == "mean":
            pooled = shares @ encoded[:, config.prefix :]
            logits = model.logits(model.norm(pooled) if model.norm_is_last else pooled)
        else:
            logits = model.logits(model.pooled(encoded, image))
        logits[0, label].backward()
    monkeypatch.undo()
    relevant = [(one * one.grad).detach()[0].clamp(min=0).mean(0) for one in keeping.weights]
    whole = torch.eye(encoded.shape[1], dtype=torch.double)
    for layer in relevant[: config.layers]:
        for t, row in enumerate(layer):
            row /= row.sum() or 1
            row[t] += 1
            row /= row.sum()
        whole = layer @ whole
    if config.pooling == "class":
        return whole.numpy(), whole[: 1 + config.distilled].mean(0).numpy()
    last = relevant[-1][0] if config.pooling == "query" else (shares * shares.grad).detach().clamp(min=0)
    return whole.numpy(), (last / last.sum() @ whole[config.prefix :]).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_rollout_is_what_the_steps_give(kind, monkeypatch):
    model, batch, labels = model_of(kind).double(), images(3).double(), [2, 0, 1]
    found = roll_out(model, batch, labels)
    for b, label in enumerate(labels):
        matrix, row = plain_weighted(model, batch[b : b + 1], label, monkeypatch)
        np.testing.assert_allclose(found.matrix[b], matrix, atol=1e-9)
        np.testing.assert_allclose(found.whole[b], row, atol=1e-9)
    other = roll_out(model, batch, [0, 1, 2])
    assert (other.over_patches(0) - found.over_patches(0)).abs().max() > 1e-3  # another label, another map


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [None, [0, 1]])
def test_every_row_sums_to_one(kind, labels):
    found = roll_out(model_of(kind), images(2, 16, 4), labels)  # a tall grid, which is not the model's own
    assert found.grids == ((4, 1),) * 2
    assert found.over_patches(1).shape == (4, 1)
    assert found.matrix.min() >= 0
    torch.testing.assert_close(found.matrix.sum(-1), torch.ones(2, 4 + found.prefix), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.whole.sum(-1), torch.ones(2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_images_of_many_sizes_are_as_one_by_one(kind):
    model = model_of(kind)
    singles = [images(1, 8, 12), images(1, 4, 8, seed=2), images(1, 16, 16, seed=3)]
    packed = pack_images([one[0] for one in singles], 4)
    for labels in (None, [0, 1, 2]):
        found = roll_out(model, packed, labels)
        assert found.grids == ((2, 3), (1, 2), (4, 4))
        for b, one in enumerate(singles):
            alone = roll_out(model, one, None if labels is None else [labels[b]])
            torch.testing.assert_close(found.over_patches(b), alone.over_patches(), rtol=0, atol=1e-4)
            torch.testing.assert_close(found.over_patches(b, (0, 1)), alone.over_patches(0, (0, 1)), rtol=0, atol=1e-4)


def test_nothing_speaks_for_a_label_that_everything_speaks_against():
    """Pooled by a mean, a row has no part that it keeps for itself: it is 0, and not NaN."""
    model = model_of("mean")
    with torch.no_grad():
        model.output.weight[1] = 0
    found = roll_out(model, images(), [1])
    assert not found.whole.any()
    torch.testing.assert_close(found.matrix.sum(-1), torch.ones(1, 7))


def test_queries_of_labels_are_traced_through_their_blocks_and_the_encoder():
    model = model_of("class", head="segment", segmenter="queries", registers=1)
    batch = images(2)
    with torch.no_grad(), record(model) as recording:
        model(batch)
    maps = {name: one.weights().double().numpy() for name, one in recording.items()}
    found = roll_out(model, batch)
    assert found.queries.shape == (2, 3, 8)
    torch.testing.assert_close(found.queries.sum(-1), torch.ones(2, 3))
    for b in range(2):
        encoder = plain_rollout([maps[f"blocks.{i}.attention"][b] for i in range(3)])
        drawn = plain_rollout([maps[f"segmenter.blocks.{i}.attention"][b] for i in range(2)])[:3, 3:]
        expected = drawn / drawn.sum(1, keepdims=True) @ encoder[2:]
        np.testing.assert_allclose(found.queries[b], expected, atol=1e-6)
        np.testing.assert_allclose(found.over_patches(b, query=1), expected[1, 2:].reshape(2, 3), atol=1e-6)
        np.testing.assert_allclose(found.whole[b], encoder[2:].mean(0), atol=1e-6)  # no class token is read


def test_a_frozen_model_and_inference_mode_are_no_obstacle():
    model, batch = model_of(), images()
    expected = roll_out(model, batch, [1]).whole
    model.requires_grad_(False)
    with torch.inference_mode():
        packed = pack_images(list(batch), 4)
        roll_out(model, packed)
        found = roll_out(model, packed, [1])
    torch.testing.assert_close(found.whole, expected, rtol=0, atol=1e-6)
    assert all(one.grad is None for one in model.parameters())


def test_no_gradients_stay_behind():
    model, batch = model_of(), images()
    roll_out(model, batch, [0])
    assert all(one.grad is None for one in model.parameters())
    assert batch.grad is None
    assert dispatch._thread.state == dispatch.DispatchState()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: roll_out(model_of(head="segment"), images(), [0]),
            "this model has the head segment",
        ),
        (lambda: roll_out(model_of(labels=()), images(), [0]), "needs an image classifier"),
        (lambda: roll_out(model_of(), images(2), [0]), "1 labels for 2 images"),
        (
            lambda: roll_out(model_of(), images()).over_patches(0, (2, 0)),
            "no patch in row 2, column 0.*2 rows and 3 col",
        ),
        (lambda: roll_out(model_of(), images()).over_patches(0, (0, -1)), "no patch in row 0, column -1"),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(RegardError, match=message):
        call()
