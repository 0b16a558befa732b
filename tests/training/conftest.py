"""Training in tests runs on one thread: several tests run side by side, and threads of one wait for the others'."""

import os

import pytest


@pytest.fixture(autouse=True, scope="package")
def _one_core():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _pid: {0}, raising=False)
        yield
