"""Compile every Triton kernel for a GPU architecture, without a GPU, and print its name and shared memory in bytes.

Run in a separate process, because it replaces Triton's driver:

    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m tests.kernels.compiled_kernels 90
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard.attention import Concat, attend, causal, use
from regard.kernels import add_norm_cuda, cross_entropy_cuda, exact_weights_cuda, l2_normalize_cuda, linear_relu_cuda


class CompileOnlyDriver:
    """The methods of a driver that Triton calls before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(self: JITFunction, grid: object):
    """Replaces the launch of a kernel: nothing runs, and outputs stay uninitialized."""

    def launch(*args, **kwargs) -> None:
        kernel = self.warmup(*args, grid=grid, **kwargs)
        assert kernel.asm["cubin"]
        print(self.__name__, kernel.metadata.shared, flush=True)

    return launch


def launch_every_kernel() -> None:
    starts = torch.tensor([0, 40, 100], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(1, 2, 100, 64).to(dtype).requires_grad_() for _ in range(3))
        with use("concat"):
            attend(q, k, v, score=Concat(64, 64, hidden=64).to(dtype), mask=causal()).sum().backward()
        exact_weights_cuda.exact_weights(q.detach(), k.detach(), 0.125, causal=True)
    q, k, v = (torch.randn(100, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    with use("varlen_short"):
        attend(q, k, v, mask=causal(), q_offsets=starts, k_offsets=starts).sum().backward()
    x, weight, targets = torch.randn(16, 32).bfloat16(), torch.randn(1000, 32), torch.arange(16)
    for passes, divergence in (([x], 0.0), ([x, x], 1.0)):
        cross_entropy_cuda.cross_entropy(passes, weight, targets, 0.1, divergence, None, torch.bfloat16, True, -1)
    x, y, weight, bias = (
        torch.randn(*shape).bfloat16().requires_grad_() for shape in ((9, 32), (9, 32), (64, 32), (64,))
    )
    linear_relu_cuda.linear_relu(x, weight, bias).sum().backward()
    norm = torch.nn.LayerNorm(32)
    total, normalized = add_norm_cuda.add_norm(x, y, norm.weight, norm.bias, norm.eps, 0.1)
    (total + normalized).sum().backward()
    q, k = l2_normalize_cuda.l2_normalize(q.transpose(0, 1), k.transpose(0, 1), torch.zeros(2, 1, 1), 1e-6)
    (q + k).sum().backward()


if __name__ == "__main__":
    driver.set_active(CompileOnlyDriver())
    JITFunction.__getitem__ = compile_only
    launch_every_kernel()
