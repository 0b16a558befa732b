"""Training in tests uses one core, because several tests run in parallel."""

import os

import pytest


@pytest.fixture(autouse=True, scope="package")
def _one_core():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _pid: {0}, raising=False)
        yield
