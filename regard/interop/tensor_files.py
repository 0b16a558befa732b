"""The tensors of a folder of Hugging Face: safetensors, in one file or several; or a pickle that holds nothing else."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard import config_reader
from regard.errors import RegardError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    return config_reader.read_json(path, unique_keys=False) if path.exists() else {}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, by name. Nothing in the files is ever executed."""
    for name in (SAFE, PICKLED):
        if (folder / name).exists():
            return read_tensor_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.exists():
            return _read_parts(index)
    raise RegardError(f"{folder}: the weights are missing.", f"There should be {SAFE} or {PICKLED}.")


def _read_parts(index: Path) -> dict[str, Tensor]:
    """The tensors of several files, which an index lists."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) and "/" not in name for name in places.values()):
        raise RegardError(f"{index}: not an index of weights.", "Put a good copy in its place.")
    found: dict[str, Tensor] = {}
    for part in sorted(set(places.values())):
        tensors = read_tensor_file(index.parent / part)
        wrong = sorted(name for name, place in places.items() if place == part and name not in tensors)
        if wrong:
            raise RegardError(f"{index.parent / part}: there is no {', '.join(wrong)}.", "Is it complete?")
        found |= tensors
    return found


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, by name."""
    if not path.is_file():
        raise RegardError(f"{path}: the file is missing.", "Is the folder complete?")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except SafetensorError as error:
        raise RegardError(f"{path}: damaged ({error}).", "Put a good copy in its place.") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise RegardError(f"{path}: it holds something else than tensors by name.", "Is it the right file?")
    return tensors


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # so says torch of whatever is no tensor, before doing anything with it
        raise RegardError(
            f"{path}: a pickle that holds more than tensors, and opening it could run a program.",
            f"Ask for the weights as {SAFE}.",
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise RegardError(f"{path}: damaged ({error}).", "Put a good copy in its place.") from None
