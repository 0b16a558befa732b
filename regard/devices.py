"""Devices: names in configs and on the command line, the torch device they stand for, and instructions of the CPU."""

import re
from pathlib import Path
from typing import Literal

import torch

from regard.errors import RegardError
from regard.ranges import check_value

Device = Literal["auto", "cpu", "cuda", "mps"]

LIMITED_ISA = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
"""the environment variable that limits the instructions of oneDNN, for machines on which its CPU detection is wrong"""


def find_device(name: str) -> torch.device:
    """The device of this name; "auto" selects CUDA, MPS or CPU, in this order, and "cuda:1" the second GPU.

    >>> find_device("cpu").type
    'cpu'
    """
    if isinstance(name, str) and re.fullmatch(r"cuda:\d{1,3}", name):
        count = torch.cuda.device_count()
        if int(name[5:]) >= count:
            gpus = "1 GPU" if count == 1 else f"{count} GPUs"
            raise RegardError(f"Device {name} is not available: this machine has {gpus}.", "Use device auto or cpu.")
        return torch.device(name)
    check_value(Device, name, "device")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[name]:
        raise RegardError(f"Device {name} is not available on this machine.", "Use device auto or cpu.")
    return torch.device(name)


def cpu_flags() -> frozenset[str]:
    """Instruction sets and features that the processor reports; empty if they are unknown."""
    try:
        match = re.search(
            r"^(flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE
        )
    except OSError:
        return frozenset()
    return frozenset(match[2].split()) if match else frozenset()
