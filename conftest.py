"""Names that the examples in docstrings use without importing them, and packages that the tests need in .ci/run."""

import gc
import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch

# Where there is no GPU, kernels in Triton are tested in its interpreter; it looks here when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Compiled CPU kernels check every index, which a cache of their own keeps apart from the usual code; it is read when
# numba is imported.
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "numba"))
# Packages without which tests are skipped. In .ci/run that is an error.
OPTIONAL = ["triton", "numba", "pyarrow", "datasets", "ray", "wandb", "zstandard", "ctranslate2", "onnx", "gguf"]
OPTIONAL += ["onnxruntime"]
SERVING = ["fastapi", "uvicorn", "openai", "schemathesis", "libretranslatepy"]
missing = [name for name in (*OPTIONAL, *SERVING) if not importlib.util.find_spec(name)]
if os.environ.get("REGARD_BROWSER") == "1" and missing:
    raise pytest.UsageError(f"Missing packages, without which tests would be skipped: {', '.join(missing)}.")
collect_ignore_glob = ["regard/serve", "tests/serve"] if set(SERVING) & set(missing) else []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt imported modules and collected tests, which stay until the end, from garbage collection; make it rarer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(7000, 10, 10)
        gc.enable()


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace |= {"torch": torch, "nn": torch.nn, "np": np}
