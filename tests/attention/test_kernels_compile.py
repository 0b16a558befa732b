"""Every kernel in Triton compiles for real GPUs, which the interpreter does not tell; none is needed for that."""

import os
import subprocess
import sys

import pytest

from regard.attention import triton_here

# What a program may have at most on the GPUs with the least of it (compute capability 8.6 and 8.9).
SHARED = 99 * 1024


@pytest.mark.skipif(not triton_here.FOUND or sys.platform != "linux", reason="needs Triton")
def test_every_kernel_compiles_for_a_gpu():
    program = [sys.executable, "-W", "ignore", "-m", "tests.compiled_kernels", "90"]
    # Nothing is interpreted there. Products in bfloat16 are not looked at, but must not be fatal either.
    surroundings = os.environ | {"TRITON_INTERPRET": "0", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=surroundings)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    kernels = {"forward", "backward", "_sums", "_weights", "sentences_forward", "sentences_backward"}
    kernels |= {"vocabulary_rows", "vocabulary_twins", "relu_backward", "add_norm_forward", "add_norm_backward"}
    kernels |= {"unit_rows_forward", "unit_rows_backward", "add_up"}
    assert {name for name, _ in found} == kernels
    assert max(int(shared) for _, shared in found) <= SHARED
