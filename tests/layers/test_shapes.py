"""The test suite checks the shapes that signatures declare (jaxtyping)."""

import jaxtyping
import pytest
import torch

from regard.attention import attend
from regard.layers.embeddings import Embedding


def test_shapes_of_a_layer_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="positions"):
        Embedding(10, 4)(torch.tensor([4, 5]), torch.tensor([0, 1, 2]))


def test_types_of_attend_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'v'"):
        attend(torch.ones(1, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4, dtype=torch.long))
