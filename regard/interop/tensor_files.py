"""Tensor files of a Hugging Face folder: safetensors, single or sharded, or a pickle that holds only tensors."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard import config_reader
from regard.errors import RegardError

SAFETENSORS_FILE, PICKLE_FILE = "model.safetensors", "pytorch_model.bin"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; an empty one if the file does not exist."""
    return config_reader.read_json(path, unique_keys=False) if path.exists() else {}


def has_tensors(folder: Path) -> bool:
    """Whether a folder contains the weights of a model."""
    names = (SAFETENSORS_FILE, PICKLE_FILE)
    return any((folder / f"{name}{ending}").exists() for name in names for ending in ("", ".index.json"))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, by name. No code in the files is executed."""
    for name in (SAFETENSORS_FILE, PICKLE_FILE):
        if (folder / name).exists():
            return read_tensor_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.exists():
            return _read_shards(index)
    raise RegardError(f"{folder}: the weights are missing.", f"Expected {SAFETENSORS_FILE} or {PICKLE_FILE}.")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Read the tensors of several files, which an index lists."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) and "/" not in name for name in shards.values()):
        raise RegardError(f"{index}: not a valid weight index.", "Replace it with an intact copy.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(shards.values())):
        shard = read_tensor_file(index.parent / file)
        missing = sorted(name for name, listed in shards.items() if listed == file and name not in shard)
        if missing:
            raise RegardError(
                f"{index.parent / file}: missing tensors: {', '.join(missing)}.", "Check that the file is complete."
            )
        tensors |= shard
    return tensors


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """Read all tensors of one file, by name."""
    if not os.path.isfile(path):  # unlike Path.is_file, no error for an invalid name
        raise RegardError(f"{path}: the file is missing.", "Check that the folder is complete.")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except SafetensorError as error:
        raise RegardError(f"{path}: the file is damaged ({error}).", "Replace it with an intact copy.") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise RegardError(f"{path}: expected a dictionary of tensors by name.", "Check that it is the right file.")
    return tensors


def _load_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # raised for anything but tensors, before any of it is executed
        raise RegardError(
            f"{path}: the pickle holds more than tensors; opening it could execute code.",
            f"Get the weights as {SAFETENSORS_FILE}.",
        ) from None
    except Exception as error:  # damaged pickles raise almost anything
        detail = str(error) or type(error).__name__
        raise RegardError(f"{path}: the file is damaged ({detail}).", "Replace it with an intact copy.") from None
