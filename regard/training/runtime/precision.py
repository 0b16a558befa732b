"""In which width matrix products run: bfloat16 where it is safe and pays, float32 elsewhere."""

import contextlib
import dataclasses
import faulthandler
import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Literal

import torch

from regard.errors import RegardError
from regard.models import Seq2SeqConfig
from regard.pipelines import find_device
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks.task import Autocast

# On a CPU, narrower models would gain less, and the demo's settings were chosen in float32.
LEAST_WIDTH = 256
# What oneDNN is told to be content with where its own idea of the CPU is fatal.
_MODEST = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def settle_precision(recipe: Recipe, begun: Literal["float32", "bfloat16"] | None = None) -> Recipe:
    """The recipe with `auto` replaced by what is meant on this machine; bfloat16 that would be fatal is an error.

    A run that was `begun` in one of the two goes on in it, if it can.

    >>> settle_precision(Recipe(train=TrainConfig(device="cpu", precision="float32"))).train.precision
    'float32'
    """
    config, device = recipe.train, find_device(recipe.train.device)
    chosen = config.precision
    if chosen == "auto":
        wanted = begun == "bfloat16" if begun else device.type == "cuda" or (device.type == "cpu" and _pays(recipe))
        narrow = wanted and (device.type == "cuda" or (device.type == "cpu" and survives_bfloat16()))
        chosen = "bfloat16" if narrow else "float32"
    elif chosen == "bfloat16" and device.type == "cpu" and not survives_bfloat16():
        raise RegardError(
            "This CPU advertises bfloat16 matrix products but dies of an illegal instruction when they run.",
            "Use train.precision float32.",
        )
    return dataclasses.replace(recipe, train=dataclasses.replace(config, precision=chosen))


def autocast_of(config: TrainConfig, device: torch.device) -> Autocast:
    """The context in which forward passes run, the precision being settled: bfloat16 matrix products, or nothing."""
    if config.precision != "bfloat16":
        return contextlib.nullcontext
    # The cache of cast weights would outlive a captured step.
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _pays(recipe: Recipe) -> bool:
    """Whether the CPU has instructions for it, and the model products that are wide enough; cells step in float32."""
    model = recipe.model
    return not isinstance(model, Seq2SeqConfig) and model.width >= LEAST_WIDTH and multiplies_bfloat16()


def multiplies_bfloat16() -> bool:
    """Whether the system says that the CPU multiplies bfloat16 by itself."""
    told = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", told.read_text(), re.MULTILINE) if told.exists() else None
    return flags is not None and not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags[1].split())


def survives_bfloat16() -> bool:
    """Tries a bfloat16 product in a copy of this process: on some virtual machines it is fatal.

    There, oneDNN takes the CPU for a greater one than it is; it is told to be modest, and the product tried once more.
    That helps as long as oneDNN has done nothing in this process yet: the copy knows.
    """
    if not hasattr(os, "fork"):
        return False
    if _copy_survives():
        return True
    name, value = _MODEST
    if name in os.environ:
        return False
    os.environ[name] = value
    if _copy_survives():
        return True
    del os.environ[name]
    return False


def _copy_survives(patience: float = 20.0) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads are not copied: the product below needs none of them
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
    end = time.monotonic() + patience
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
