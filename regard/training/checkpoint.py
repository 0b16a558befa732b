"""Checkpoints: everything that a run needs to resume exactly, in one file that is written atomically.

Also the model folders of single steps, which show how a model developed.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from regard.errors import RegardError
from regard.files import write_whole
from regard.pipelines import save
from regard.pipelines.migration import migrate_names

STEPS = "steps"


@dataclass
class Checkpoint:
    """Tensors by name (weights, optimizer state, moving average) and plain facts (step, epoch, best score)."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def save(self, path: Path) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        write_whole(path, to_bytes(tensors, metadata={"facts": json.dumps(self.facts)}))

    @staticmethod
    def load(path: Path) -> "Checkpoint":
        try:
            with safe_open(path, framework="pt") as file:
                tensors = migrate_names({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
                facts = json.loads((file.metadata() or {})["facts"])
        except (SafetensorError, KeyError, ValueError, RecursionError, OSError) as error:
            raise _damaged(path, str(error)) from None
        if not isinstance(facts, dict):
            raise _damaged(path, "its facts are not a table")
        return Checkpoint(tensors, facts)


def _damaged(path: Path, why: str) -> RegardError:
    # A folder that holds a model but no checkpoint is not trained into, so deleting the file alone would not help.
    return RegardError(
        f"{path}: damaged, or not a checkpoint of Regard ({why}).",
        "Nothing was changed. Put a good copy in its place, or train again with another --out.",
    )


def gather_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema_model: torch.nn.Module | None
) -> dict[str, Tensor]:
    """Weights, optimizer state and moving average of the weights, as one flat table of tensors."""
    tensors = {f"model.{name}": tensor for name, tensor in unique_parameters(model).items()}
    tensors |= {f"average.{name}": tensor for name, tensor in _average(ema_model).items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items() if value is not None}
    return tensors


def restore_state(
    tensors: dict[str, Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema_model: torch.nn.Module | None,
    complain: Callable[[str], RegardError],
) -> None:
    """The reverse of gather_state, in place; names or shapes that do not fit are an error before anything changes."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    for own, kept in ((unique_parameters(model), parts["model"]), (_average(ema_model), parts["average"])):
        wrong = [n for n in own.keys() | kept.keys() if n not in own or n not in kept or own[n].shape != kept[n].shape]
        if wrong:
            raise complain(f"{len(wrong)} tensors do not fit, {sorted(wrong)[0]} among them")
    # The optimizer numbers weights group by group, and an earlier version may have grouped them otherwise.
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in parts["optimizer"].items():
        index = int(name.split(".", 1)[0])
        if index >= len(numbered) or (tensor.dim() and tensor.shape != numbered[index].shape):
            raise complain(f"the optimizer's {name} does not fit")
    with torch.no_grad():
        for own, kept in ((unique_parameters(model), parts["model"]), (_average(ema_model), parts["average"])):
            for name, tensor in own.items():
                tensor.copy_(kept[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimizer"].items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _average(ema_model: torch.nn.Module | None) -> dict[str, Tensor]:
    return {} if ema_model is None else unique_parameters(ema_model)


def unique_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Each weight once, under its first name: tied weights are one tensor."""
    return dict(model.named_parameters(remove_duplicate=True))


def keep_step(run: Path, bundle: Any, step: int, provenance: dict[str, Any]) -> None:
    """Keeps the model of a run as it is after a step: a model folder like any other, such as steps/000500."""
    save(run / STEPS / f"{step:06}", dataclasses.replace(bundle, training={**provenance, "step": step}))


def kept_steps(run: str | Path) -> dict[int, Path]:
    """The model folders that a run kept, by their steps; an error if there are none.

    >>> kept_steps("no-such-run")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-run: no steps were kept here. Train with --train.keep_every N.
    """
    # A folder's config.json is written last: one without is not whole.
    found = (path.parent for path in Path(run).glob(f"{STEPS}/*/config.json") if path.parent.name.isdecimal())
    steps = {int(folder.name): folder for folder in found}
    if not steps:
        raise RegardError(f"{run}: no steps were kept here.", "Train with --train.keep_every N.")
    return dict(sorted(steps.items()))
