"""Compile every Triton kernel for a GPU architecture, without a GPU, and print its name and shared memory in bytes.

Run in a separate process, because it replaces Triton's driver:

    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m tests.kernels.compiled_kernels 90
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard.attention import Concat, attend, causal, dispatch, use
from regard.decode.protocol import SpecialTokens
from regard.decode.request import DecodeConfig
from regard.decode.rules import Constraints
from regard.decode.search import BeamSearch, StepwiseSearch
from regard.kernels.triton import (
    add_norm,
    cross_entropy,
    decode_attention,
    exact_weights,
    l2_normalize,
    linear_relu,
    search_update,
    skinny_linear,
    start_step,
    topk_log_softmax,
)


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
    dispatch.is_interpreted = lambda: True  # tensors on the CPU stand for those on a GPU
    starts = torch.tensor([0, 40, 100], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(1, 2, 100, 64).to(dtype).requires_grad_() for _ in range(3))
        with use("concat"):
            attend(q, k, v, score=Concat(64, 64, hidden=64).to(dtype), mask=causal()).sum().backward()
        exact_weights.exact_weights(q.detach(), k.detach(), 0.125, causal=True)
    q, k, v = (torch.randn(100, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    with use("varlen_short"):
        attend(q, k, v, mask=causal(), q_offsets=starts, k_offsets=starts).sum().backward()
    x, weight, targets = torch.randn(16, 32).bfloat16(), torch.randn(1000, 32), torch.arange(16)
    for passes, divergence in (([x], 0.0), ([x, x], 1.0)):
        cross_entropy.cross_entropy(passes, weight, targets, 0.1, divergence, None, torch.bfloat16, True, -1)
    x, y, weight, bias = (
        torch.randn(*shape).bfloat16().requires_grad_() for shape in ((9, 32), (9, 32), (64, 32), (64,))
    )
    linear_relu.linear_relu(x, weight, bias).sum().backward()
    norm = torch.nn.LayerNorm(32)
    total, normalized = add_norm.add_norm(x, y, norm.weight, norm.bias, norm.eps, 0.1)
    (total + normalized).sum().backward()
    q, k = l2_normalize.l2_normalize(q.transpose(0, 1), k.transpose(0, 1), torch.zeros(2, 1, 1), 1e-6)
    (q + k).sum().backward()
    launch_decoding_kernels()


def launch_decoding_kernels() -> None:
    positions, rotary = torch.tensor([15], dtype=torch.int32), torch.randn(1024, 64)
    for dtype in (torch.bfloat16, torch.float32):
        for K, S in ((1, 1024), (1, 128), (4, 128)):
            cache, ancestors = torch.zeros(1, 2, S, K, 64, dtype=dtype), torch.zeros(1, K, S, dtype=torch.int32)
            decode_attention.decode_attention(
                *(torch.zeros(K, 6 * 64, dtype=dtype), cache, cache, ancestors if K > 1 else None, positions),
                heads=2,
                scale=0.125,
                bias=torch.zeros(2, S),
                rotary=rotary[:S],
            )
            q = torch.zeros(K, 2 * 64, dtype=dtype)
            decode_attention.decode_cross_attention(q, cache[..., 0, :], cache[..., 0, :], positions, heads=2, scale=1)
        norm = skinny_linear.RowNorm(torch.ones(512), torch.zeros(512), 1e-5, "layer")
        for rows in (1, 4, 16):
            x, weight = torch.zeros(rows, 512), torch.zeros(512, 512, dtype=dtype)
            options = {"norm": norm, "activation": "gelu", "residual": x, "residual_norm": norm}
            skinny_linear.skinny_linear(x, weight, norm.bias, **options)
            weight = weight.to(torch.float8_e4m3fn)
            skinny_linear.skinny_linear(x.to(dtype), weight, scale=torch.ones(512), **options)
        for rows, k in ((300, 1), (300, 8), (1, 1), (1, 16)):
            logits, forced = torch.zeros(rows, 32000, dtype=dtype), torch.zeros(rows, dtype=torch.int32)
            topk_log_softmax.topk_log_softmax(logits, k, banned=(0, 1), eos=2, forced=forced, ban_eos=forced.bool())
    launch_search_updates()


def launch_search_updates() -> None:
    config, special, device = DecodeConfig(beam=4, n_best=2, length_penalty=0.6), SpecialTokens(), torch.device("cpu")
    constraints = Constraints(3, 0, config, special, device)
    state = BeamSearch(3, 20, config, constraints, device)
    top, positions = torch.zeros(3, 4, 8), torch.zeros(3, dtype=torch.long)
    search_update.beam_update(
        *(top, top.long(), positions, constraints.limit),
        **{name: getattr(state, name) for name in state.tensors()},
        eos=special.eos,
        length_penalty=config.length_penalty,
        enough=config.enough,
        early_stopping=config.early_stopping,
    )
    tables = start_step.StepTables(torch.zeros(9, 64), torch.zeros(9, 64), 1.0, 0, special.eos, 0)
    start_step.start_step(state.last, state.step, state.done, positions, constraints.limit, top[..., 0].long(), tables)
    greedy = StepwiseSearch(3, 20, DecodeConfig(method="greedy"), constraints, device)
    names = ("step", "done", "live", "last", "tokens", "token_log_p", "lengths")
    tensors = {name: getattr(greedy, name) for name in names}
    search_update.greedy_update(greedy.last, top[:, 0, :1].contiguous(), **tensors, eos=special.eos)


if __name__ == "__main__":
    driver.set_active(CompileOnlyDriver())
    JITFunction.__getitem__ = compile_only
    for module in (
        decode_attention,
        search_update,
        skinny_linear,
        start_step,
        topk_log_softmax,
    ):
        module.dependent_launch = lambda x: {"PDL": True, "launch_pdl": True}
    launch_every_kernel()
