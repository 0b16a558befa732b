"""Allocator settings of glibc."""

import platform
import subprocess
import sys

import pytest

from regard.allocator import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library has these settings")
def test_freed_blocks_are_reused():
    """By default every large block is mapped anew, with a page fault per page.

    The blocks have 48 MB, because glibc adapts to blocks of up to 32 MiB by itself. The heap may grow at first.
    """
    script = """
import resource, sys, torch
from regard.allocator import keep_freed_memory
if sys.argv[1] == "kept": assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(60): torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    run = [sys.executable, "-c", script]
    kept, fresh = (
        int(subprocess.run([*run, mode], capture_output=True, check=True).stdout) for mode in ("kept", "fresh")
    )
    assert kept < fresh / 4


def test_without_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
