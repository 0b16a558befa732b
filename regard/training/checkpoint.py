"""Checkpoints: the full state of a run in one file. Also the model folders of single steps."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from regard.errors import RegardError
from regard.training.optimizers import LocalShard, local_tensors, shard_like, sharded_weight

STEPS = "steps"


class DamagedCheckpointError(RegardError):
    """A checkpoint that cannot be read, or whose checksums do not match.

    >>> DamagedCheckpointError("state/step-00000500", "the checksum of state.safetensors does not match").reason
    'the checksum of state.safetensors does not match'
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        self.reason = reason
        # Deleting the file would not help: a run does not start in a folder that holds a model but no checkpoint.
        super().__init__(
            f"{path}: damaged, or not a checkpoint of Regard ({reason}).",
            "Nothing was changed. Restore an intact copy, or train again with another --out.",
        )


@dataclass
class Checkpoint:
    """Tensors by name (weights, optimizer state, EMA weights) and JSON values (step, epoch, best score)."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def to_bytes(self) -> bytes:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        return to_bytes(tensors, metadata={"facts": json.dumps(self.facts)})

    @staticmethod
    def load(path: Path) -> "Checkpoint":
        with _open(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Checkpoint(tensors, _facts(file))


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint file, without reading its tensors."""
    with _open(path) as file:
        return _facts(file)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(path, str(error)) from None


def _facts(file: Any) -> dict[str, Any]:
    facts = json.loads((file.metadata() or {})["facts"])
    if not isinstance(facts, dict):
        raise ValueError("its facts are not a table")
    return facts


def gather_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema_model: torch.nn.Module | None
) -> dict[str, Tensor]:
    """Weights, EMA weights and optimizer state as one flat dictionary of tensors."""
    tensors = {f"model.{name}": tensor for name, tensor in unique_parameters(model).items()}
    tensors |= {f"average.{name}": tensor for name, tensor in _ema_parameters(ema_model).items()}
    parameters = _optimizer_parameters(optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        like = parameters[index]
        tensors |= {f"optimizer.{index}.{key}": shard_like(v, like) for key, v in state.items() if v is not None}
    return tensors


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def restore_state(
    tensors: dict[str, Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema_model: torch.nn.Module | None,
    make_error: Callable[[str], RegardError],
) -> None:
    """Restore the tensors of `gather_state` in place; mismatched names or shapes are an error before any change."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    weights = ((unique_parameters(model), parts["model"]), (_ema_parameters(ema_model), parts["average"]))
    for current, saved in weights:
        mismatched = sorted(
            name
            for name in current.keys() | saved.keys()
            if name not in current or name not in saved or current[name].shape != saved[name].shape
        )
        if mismatched:
            raise make_error(f"{len(mismatched)} of its tensors do not match, for example {mismatched[0]}")
    # The optimizer numbers parameters group by group.
    parameters = _optimizer_parameters(optimizer)
    for name, tensor in parts["optimizer"].items():
        number, _, key = name.partition(".")
        index = int(number) if number.isdecimal() and len(number) < 10 and key else len(parameters)
        if index >= len(parameters) or (tensor.dim() and tensor.shape != sharded_weight(parameters[index]).shape):
            raise make_error(f"the optimizer state {name} does not match")
    with torch.no_grad():
        for current, saved in weights:
            for name, tensor in current.items():
                tensor.copy_(saved[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimizer"].items():
        number, key = name.split(".", 1)
        is_local = isinstance(parameters[int(number)], LocalShard)
        state.setdefault(int(number), {})[key] = local_tensors([tensor])[0] if is_local else tensor
    try:
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise make_error(f"the optimizer state does not match ({error})") from None


def _ema_parameters(ema_model: torch.nn.Module | None) -> dict[str, Tensor]:
    return {} if ema_model is None else unique_parameters(ema_model)


def unique_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name; tied weights appear once, under their first name."""
    return dict(model.named_parameters(remove_duplicate=True))


def list_step_folders(run: str | Path) -> dict[int, Path]:
    """The model folders of single steps that a run saved, by step; an error if there are none.

    >>> list_step_folders("no-such-run")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-run: no models of single steps were saved. Train with --train.keep-every N.
    """
    # config.json is written last: a folder without it is incomplete.
    folders = (path.parent for path in Path(run).glob(f"{STEPS}/*/config.json") if path.parent.name.isdecimal())
    steps = {int(folder.name): folder for folder in folders}
    if not steps:
        raise RegardError(f"{run}: no models of single steps were saved.", "Train with --train.keep-every N.")
    return dict(sorted(steps.items()))
