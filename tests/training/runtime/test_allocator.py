"""The arrangement with the C library."""

import platform
import subprocess
import sys

import pytest

from regard.training.runtime.allocator import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library has these settings")
def test_a_block_that_was_freed_is_used_again():
    """Without it every large block is mapped afresh, page fault by page fault.

    Blocks of 48 MB: up to 32 MiB glibc learns by itself. The heap may grow once or twice before it settles.
    """
    script = """
import resource, sys, torch
from regard.training.runtime.allocator import keep_freed_memory
if sys.argv[1] == "kept": assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    run = [sys.executable, "-c", script]
    kept, fresh = (
        int(subprocess.run([*run, way], capture_output=True, check=True).stdout) for way in ("kept", "fresh")
    )
    assert kept < fresh / 4


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
