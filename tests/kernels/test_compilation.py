"""Every Triton kernel compiles for a GPU, which the interpreter does not test. No GPU is needed."""

import os
import subprocess
import sys

import pytest

from regard.kernels.triton_support import triton_available

# Shared memory per program, in bytes, on the GPUs with the least of it (compute capability 8.6 and 8.9).
MAX_SHARED = 99 * 1024


@pytest.mark.skipif(not triton_available() or sys.platform != "linux", reason="needs Triton")
def test_every_kernel_compiles_for_a_gpu():
    program = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled_kernels", "90"]
    # Compile instead of interpreting. Products in bfloat16 on the CPU are not checked, but must not crash either.
    environment = os.environ | {"TRITON_INTERPRET": "0", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    result = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    compiled = [line.split() for line in result.stdout.splitlines()]
    kernels = {"concat_forward", "concat_backward", "row_log_sum_exp", "exact_weights"}
    kernels |= {"varlen_short_forward", "varlen_short_backward", "cross_entropy_rows", "r_drop_rows", "relu_backward"}
    kernels |= {"add_norm_forward", "add_norm_backward", "l2_normalize_forward", "l2_normalize_backward"}
    kernels |= {"decode_attention", "merge_splits", "decode_cross_attention", "skinny_linear"}
    kernels |= {"topk_log_softmax", "merge_parts", "beam_update", "greedy_update"}
    assert {name for name, _ in compiled} == kernels
    assert max(int(shared) for _, shared in compiled) <= MAX_SHARED
