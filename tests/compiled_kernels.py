"""Compiles every kernel in Triton for a GPU that need not be there, and prints each kernel's name and shared memory.

Run as a program of its own, since it tells Triton that there is such a GPU:

    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m tests.compiled_kernels 90
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard.attention import Concat, attend, causal, exact_triton, unit_rows, use
from regard.attention.masks import Form
from regard.layers import add_norm, linear_relu
from regard.training import vocabulary


class NoGPU:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_alone(self: JITFunction, grid: object):
    """In the place of a launch: nothing runs, and outputs stay as they are."""

    def launch(*args, **kwargs) -> None:
        made = self.warmup(*args, grid=grid, **kwargs)
        assert made.asm["cubin"]
        print(self.__name__, made.metadata.shared, flush=True)

    return launch


def everything() -> None:
    starts = torch.tensor([0, 40, 100], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(1, 2, 100, 64).to(dtype).requires_grad_() for _ in range(3))
        with use("concat"):
            attend(q, k, v, score=Concat(64, 64, hidden=64).to(dtype), mask=causal()).sum().backward()
        exact_triton.weights(q.detach(), k.detach(), 0.125, Form.of(causal()), None, 0, None)
    q, k, v = (torch.randn(100, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    with use("sentences"):
        attend(q, k, v, mask=causal(), q_offsets=starts, k_offsets=starts).sum().backward()
    x, weight, targets = torch.randn(16, 32).bfloat16(), torch.randn(1000, 32), torch.arange(16)
    for passes, divergence in (([x], 0.0), ([x, x], 1.0)):
        vocabulary.sweep(passes, weight, targets, 0.1, divergence, None, torch.bfloat16, True)
    x, y, weight, bias = (
        torch.randn(*shape).bfloat16().requires_grad_() for shape in ((9, 32), (9, 32), (64, 32), (64,))
    )
    linear_relu.linear_relu(x, weight, bias).sum().backward()
    total, normed = add_norm.run(x, y, torch.nn.LayerNorm(32), 0.1)
    (total + normed).sum().backward()
    q, k = unit_rows.unit_rows(q.transpose(0, 1), k.transpose(0, 1), torch.zeros(2, 1, 1), 1e-6)
    (q + k).sum().backward()


if __name__ == "__main__":
    driver.set_active(NoGPU())
    JITFunction.__getitem__ = compile_alone
    everything()
