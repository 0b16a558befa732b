"""Precision of matrix products: bfloat16 where it is safe and faster, float32 elsewhere."""

import contextlib
import dataclasses
import faulthandler
import os
import signal
import time
import warnings
from typing import Literal

import torch

from regard.devices import LIMITED_ISA, cpu_flags, find_device
from regard.errors import RegardError
from regard.models import Seq2SeqConfig
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks.task import Autocast

# On a CPU, smaller models gain little from bfloat16, and the settings of the demo were tuned in float32.
MIN_WIDTH = 256


def resolve_precision(recipe: Recipe, previous: Literal["float32", "bfloat16"] | None = None) -> Recipe:
    """The recipe with precision "auto" replaced by the choice for this machine.

    A resumed run keeps its `previous` precision, if this machine supports it. Explicit bfloat16 that would crash the
    process is an error.

    >>> resolve_precision(Recipe(train=TrainConfig(device="cpu", precision="float32"))).train.precision
    'float32'
    """
    config, device = recipe.train, find_device(recipe.train.device)
    chosen = config.precision
    if chosen == "auto":
        is_cuda, is_cpu = device.type == "cuda", device.type == "cpu"
        if previous:
            prefers_bfloat16 = previous == "bfloat16"
        else:
            prefers_bfloat16 = is_cuda or (is_cpu and _benefits_from_bfloat16(recipe))
        uses_bfloat16 = prefers_bfloat16 and (is_cuda or (is_cpu and is_bfloat16_safe()))
        chosen = "bfloat16" if uses_bfloat16 else "float32"
    elif chosen == "bfloat16" and device.type == "cpu" and not is_bfloat16_safe():
        raise RegardError(
            "This CPU advertises bfloat16 matrix products but crashes with an illegal instruction when they run.",
            "Set train.precision to float32.",
        )
    return dataclasses.replace(recipe, train=dataclasses.replace(config, precision=chosen))


def make_autocast(config: TrainConfig, device: torch.device) -> Autocast:
    """The context manager for forward passes: autocast to bfloat16, or nothing. The precision must not be "auto"."""
    if config.precision != "bfloat16":
        return contextlib.nullcontext
    # The cache of cast weights would outlive a captured CUDA graph.
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _benefits_from_bfloat16(recipe: Recipe) -> bool:
    """Whether bfloat16 is faster on this CPU: it needs instructions for it and a wide model; recurrent cells run in
    float32."""
    model = recipe.model
    return not isinstance(model, Seq2SeqConfig) and model.width >= MIN_WIDTH and has_bfloat16_instructions()


def has_bfloat16_instructions() -> bool:
    """Whether the CPU reports instructions for bfloat16 matrix products (AVX512-BF16 or AMX)."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"})


def is_bfloat16_safe() -> bool:
    """Try a bfloat16 product in a forked process: on some virtual machines it is an illegal instruction.

    On such machines oneDNN detects instructions that the CPU does not have. The product is then tried once more with
    oneDNN limited to AVX512-BF16. The limit only takes effect before the first oneDNN call of the process, which the
    second try shows too.
    """
    if not hasattr(os, "fork"):
        return False
    if _bfloat16_works_in_child():
        return True
    name, value = LIMITED_ISA
    if name in os.environ:
        return False
    os.environ[name] = value
    if _bfloat16_works_in_child():
        return True
    del os.environ[name]
    return False


def _bfloat16_works_in_child(timeout: float = 20.0) -> bool:
    with warnings.catch_warnings():
        # Forking a multi-threaded process causes a warning, but the product below needs no other thread.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            torch.set_num_threads(1)
            x = torch.ones(64, 64, dtype=torch.bfloat16)
            torch.nn.functional.linear(x, x)
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
