"""What the examples in docstrings may use without importing it."""

import importlib.util
import os

import numpy as np
import pytest
import torch

# Where there is no GPU, kernels in Triton are tested in its interpreter; it looks here when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("REGARD_BROWSER") == "1" and not importlib.util.find_spec("triton"):
    raise pytest.UsageError("Triton is missing: its kernels would go untested where nothing may be skipped.")
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*_triton.py"]


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace |= {"torch": torch, "nn": torch.nn, "np": np}
