"""The arrangement with the C library."""

import platform
import subprocess
import sys

import pytest

from regard.train.allocator import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library has these settings")
def test_a_block_that_was_freed_is_used_again():
    """Without it every large block is mapped afresh, page fault by page fault."""
    script = """
import resource, torch
from regard.train.allocator import keep_freed_memory
assert keep_freed_memory()
def touch(): torch.ones(4_000_000)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert faults < 2000  # 16 MB are 4000 pages, five times over


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
