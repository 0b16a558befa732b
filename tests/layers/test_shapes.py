"""While testing, the shapes in signatures are checked: what they say is true."""

import jaxtyping
import pytest
import torch

from regard.attention import attend
from regard.layers.embeddings import Embedding


def test_a_layer_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="positions"):
        Embedding(10, 4)(torch.tensor([4, 5]), torch.tensor([0, 1, 2]))


def test_attend_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'v'"):
        attend(torch.ones(1, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4, dtype=torch.long))
