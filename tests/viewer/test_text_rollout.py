"""Rollout of texts against the recursion of Abnar and Zuidema, written out for one matrix over all tokens."""

import dataclasses

import numpy as np
import pytest

from regard.errors import RegardError
from tests.viewer.text_models import cached_look


def residual(weights):
    return 0.5 * weights + 0.5 * np.eye(len(weights))


@pytest.mark.parametrize("form", ["gpt", "bert", "albert"])
def test_rollout_of_a_text_is_a_product_of_layers(form):
    look = cached_look(form)
    expected = np.linalg.multi_dot([residual(one.weights.mean(0)) for one in reversed(look.maps.values())])
    np.testing.assert_allclose(look.rollout()["text"], expected, atol=1e-6)


def test_rollout_of_a_translator_is_a_product_over_source_and_target():
    look = cached_look("transformer")
    source, target = (len(look.maps[name].columns) for name in ("encoder.0.attention", "decoder.0.attention"))
    matrix = np.eye(source + target)

    def block(rows, columns, weights):
        whole = np.eye(source + target)
        whole[rows, rows] *= 0.5
        whole[rows, columns] += 0.5 * weights
        return whole

    sources, targets = slice(0, source), slice(source, None)
    for name, one in look.maps.items():
        rows = sources if name.startswith("encoder") else targets
        columns = targets if one.kind == "masked" else sources
        matrix = block(rows, columns, one.weights.mean(0)) @ matrix
    rollout = look.rollout()
    np.testing.assert_allclose(rollout["source"], matrix[targets, sources], atol=1e-6)
    np.testing.assert_allclose(rollout["target"], matrix[targets, targets], atol=1e-6)
    np.testing.assert_allclose(rollout["source"].sum(1) + rollout["target"].sum(1), 1)


def test_rollout_needs_all_layers():
    look = cached_look("transformer")
    some = dataclasses.replace(look, maps={"decoder.1.cross": look.maps["decoder.1.cross"]})
    with pytest.raises(RegardError, match="all attentions"):
        some.rollout()
    with pytest.raises(RegardError, match="Transformer"):
        cached_look("luong").rollout()
