"""What the examples in docstrings may use without importing it."""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace |= {"torch": torch, "nn": torch.nn, "np": np}
