"""Every Triton kernel compiles for a GPU, which the interpreter does not test. No GPU is needed."""

import os
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

from regard.kernels import triton as kernels
from regard.kernels.triton.support import triton_available

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
    modules = [import_module(name) for _, name, _ in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")]
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {name for name, _ in compiled} == names
    assert max(int(shared) for _, shared in compiled) <= MAX_SHARED
