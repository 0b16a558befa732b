"""Attention rollout, plain and gradient-weighted for a label, compared with reference implementations."""

import numpy as np
import pytest
import torch

from regard.attention import dispatch, record, use
from regard.attention.reference import repeat_heads
from regard.errors import RegardError
from regard.kernels.masked_softmax import masked_softmax
from regard.layers.patches import pack_images
from regard.viewer import attention_rollout
from tests.viewer.image_helpers import KINDS, images, model_of


def reference_rollout(layers):
    """Rollout of (H, T, T) weights per layer: mean of heads plus identity, rows normalized, product of the layers."""
    product = np.eye(layers[0].shape[-1])
    for weights in layers:
        mean = sum(head for head in weights) / len(weights)
        residual = mean + np.eye(len(mean))
        product = (residual / residual.sum(1, keepdims=True)) @ product
    return product


def record_weights(model, batch):
    with torch.no_grad(), record(model) as recording:
        model.pool(model.encode(batch), batch)
    return {name: attention.weights().double().numpy() for name, attention in recording.items() if attention.calls}


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_matches_the_reference(kind):
    model, batch = model_of(kind), images(3)
    maps, prefix = record_weights(model, batch), model.config.prefix
    rollout = attention_rollout(model, batch)
    for b in range(3):
        matrix = reference_rollout([maps[f"blocks.{i}.attention"][b] for i in range(3)])
        np.testing.assert_allclose(rollout.matrix[b], matrix, atol=1e-6)
        pooled = {
            "class": matrix[0],
            "distilled": (matrix[0] + matrix[1]) / 2,
            "query": maps["pooler.attention"][b].mean(0)[0] @ matrix[prefix:] if kind == "query" else None,
        }.get(kind, matrix[prefix:].mean(0))
        np.testing.assert_allclose(rollout.pooled[b], pooled, atol=1e-6)
        np.testing.assert_allclose(rollout.patch_weights(b), pooled[prefix:].reshape(2, 3), atol=1e-6)
        np.testing.assert_allclose(
            rollout.patch_weights(b, (1, 2)), matrix[prefix + 5, prefix:].reshape(2, 3), atol=1e-6
        )
    assert rollout.matrix[0].std() > 0.01  # not uniform


class WeightRecorder:
    """Reference attention that keeps its weights, with their gradients."""

    def __init__(self):
        self.weights = []

    def __call__(self, q, k, v, score, mask=None, bias=None):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        self.weights.append(masked_softmax(score(q, k)))
        self.weights[-1].retain_grad()
        return self.weights[-1] @ v


def reference_weighted_rollout(model, image, label, monkeypatch):
    """Gradient-weighted rollout: positive part of gradient times weight, mean of heads, rows normalized; then as above.

    Pooling is one more such layer, without a residual connection.
    """
    recorder, config = WeightRecorder(), model.config
    monkeypatch.setattr(dispatch, "reference", recorder)
    with use("reference"):
        encoded = model.encode(image)
        count = encoded.shape[1] - config.prefix
        pooling_weights = torch.full((count,), 1 / count, dtype=torch.double, requires_grad=True)
        if config.pooling == "mean":
            pooled = pooling_weights @ encoded[:, config.prefix :]
            logits = model.logits(model.norm(pooled) if model.norm_is_last else pooled)
        else:
            logits = model.logits(model.pool(encoded, image))
        logits[0, label].backward()
    monkeypatch.undo()
    relevant = [(weights * weights.grad).detach()[0].clamp(min=0).mean(0) for weights in recorder.weights]
    product = torch.eye(encoded.shape[1], dtype=torch.double)
    for layer in relevant[: config.layers]:
        for t, row in enumerate(layer):
            row /= row.sum() or 1
            row[t] += 1
            row /= row.sum()
        product = layer @ product
    if config.pooling == "class":
        return product.numpy(), product[: 1 + config.distilled].mean(0).numpy()
    last = (
        relevant[-1][0] if config.pooling == "query" else (pooling_weights * pooling_weights.grad).detach().clamp(min=0)
    )
    return product.numpy(), (last / last.sum() @ product[config.prefix :]).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_rollout_matches_the_reference(kind, monkeypatch):
    model, batch, labels = model_of(kind).double(), images(3).double(), [2, 0, 1]
    rollout = attention_rollout(model, batch, labels)
    for b, label in enumerate(labels):
        matrix, row = reference_weighted_rollout(model, batch[b : b + 1], label, monkeypatch)
        np.testing.assert_allclose(rollout.matrix[b], matrix, atol=1e-9)
        np.testing.assert_allclose(rollout.pooled[b], row, atol=1e-9)
    other = attention_rollout(model, batch, [0, 1, 2])
    assert (other.patch_weights(0) - rollout.patch_weights(0)).abs().max() > 1e-3  # the map depends on the label


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [None, [0, 1]])
def test_every_row_sums_to_one(kind, labels):
    rollout = attention_rollout(model_of(kind), images(2, 16, 4), labels)  # a tall grid, unlike the training size
    assert rollout.grids == ((4, 1),) * 2
    assert rollout.patch_weights(1).shape == (4, 1)
    assert rollout.matrix.min() >= 0
    torch.testing.assert_close(rollout.matrix.sum(-1), torch.ones(2, 4 + rollout.prefix), rtol=0, atol=1e-6)
    torch.testing.assert_close(rollout.pooled.sum(-1), torch.ones(2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_images_give_the_same_rollout_as_single_images(kind):
    model = model_of(kind)
    singles = [images(1, 8, 12), images(1, 4, 8, seed=2), images(1, 16, 16, seed=3)]
    packed = pack_images([image[0] for image in singles], 4)
    for labels in (None, [0, 1, 2]):
        rollout = attention_rollout(model, packed, labels)
        assert rollout.grids == ((2, 3), (1, 2), (4, 4))
        for b, image in enumerate(singles):
            alone = attention_rollout(model, image, None if labels is None else [labels[b]])
            torch.testing.assert_close(rollout.patch_weights(b), alone.patch_weights(), rtol=0, atol=1e-4)
            torch.testing.assert_close(
                rollout.patch_weights(b, (0, 1)), alone.patch_weights(0, (0, 1)), rtol=0, atol=1e-4
            )


def test_label_without_positive_relevance_has_zero_rollout():
    """With mean pooling there is no residual, so the row is 0, not NaN."""
    model = model_of("mean")
    with torch.no_grad():
        model.output.weight[1] = 0
    rollout = attention_rollout(model, images(), [1])
    assert not rollout.pooled.any()
    torch.testing.assert_close(rollout.matrix.sum(-1), torch.ones(1, 7))


def test_label_queries_are_rolled_out_through_segmenter_and_encoder():
    model = model_of("class", head="segment", segmenter="queries", registers=1)
    batch = images(2)
    with torch.no_grad(), record(model) as recording:
        model(batch)
    maps = {name: attention.weights().double().numpy() for name, attention in recording.items()}
    rollout = attention_rollout(model, batch)
    assert rollout.queries.shape == (2, 3, 8)
    torch.testing.assert_close(rollout.queries.sum(-1), torch.ones(2, 3))
    for b in range(2):
        encoder = reference_rollout([maps[f"blocks.{i}.attention"][b] for i in range(3)])
        queries = reference_rollout([maps[f"segmenter.blocks.{i}.attention"][b] for i in range(2)])[:3, 3:]
        expected = queries / queries.sum(1, keepdims=True) @ encoder[2:]
        np.testing.assert_allclose(rollout.queries[b], expected, atol=1e-6)
        np.testing.assert_allclose(rollout.patch_weights(b, query=1), expected[1, 2:].reshape(2, 3), atol=1e-6)
        np.testing.assert_allclose(rollout.pooled[b], encoder[2:].mean(0), atol=1e-6)  # no class token is used


def test_rollout_works_with_frozen_models_and_in_inference_mode():
    model, batch = model_of(), images()
    expected = attention_rollout(model, batch, [1]).pooled
    model.requires_grad_(False)
    with torch.inference_mode():
        packed = pack_images(list(batch), 4)
        attention_rollout(model, packed)
        rollout = attention_rollout(model, packed, [1])
    torch.testing.assert_close(rollout.pooled, expected, rtol=0, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rollout_leaves_no_gradients():
    model, batch = model_of(), images()
    attention_rollout(model, batch, [0])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert batch.grad is None
    assert dispatch._thread.state == dispatch.DispatchState()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: attention_rollout(model_of(head="segment"), images(), [0]),
            "this model has the head segment",
        ),
        (lambda: attention_rollout(model_of(labels=()), images(), [0]), "needs an image classifier"),
        (lambda: attention_rollout(model_of(), images(2), [0]), "1 labels for 2 images"),
        (
            lambda: attention_rollout(model_of(), images()).patch_weights(0, (2, 0)),
            "no patch in row 2, column 0.*2 rows and 3 col",
        ),
        (lambda: attention_rollout(model_of(), images()).patch_weights(0, (0, -1)), "no patch in row 0, column -1"),
    ],
)
def test_invalid_calls_are_an_error(call, message):
    with pytest.raises(RegardError, match=message):
        call()
