"""Devices: names in configs and on the command line, and the torch device they stand for."""

from typing import Literal

import torch

from regard.errors import RegardError
from regard.ranges import check_value

Device = Literal["auto", "cpu", "cuda", "mps"]


def find_device(name: Device) -> torch.device:
    """The device of this name; "auto" selects CUDA, MPS or CPU, in this order.

    >>> find_device("cpu").type
    'cpu'
    """
    check_value(Device, name, "device")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[name]:
        raise RegardError(f"Device {name} is not available on this machine.", "Use device auto or cpu.")
    return torch.device(name)
