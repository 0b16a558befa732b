"""Saving of models and checkpoints, on unreliable disks and from several ranks, and loading of checkpoints.

The checkpoint of a sharded run has a safetensors file per rank; any number of ranks can load it. Format and resharding
are those of torch.distributed.checkpoint with its safetensors storage; nothing is pickled.
"""

import copy
import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, distribute_tensor

from regard.errors import RegardError
from regard.files import write_atomically
from regard.pipelines.folder import write_model
from regard.training.checkpoint import (
    FACTS,
    Checkpoint,
    CheckpointStore,
    DamagedCheckpointError,
    is_sharded,
    load_checkpoint,
    read_checkpoint_facts,
    sha256,
)
from regard.training.log import RunLog
from regard.training.optimizers import sharded_weight
from regard.training.workers import Workers, report_dead_ranks

# Saves in a row that may fail before the run ends.
MAX_FAILURES = 3


class RunSaver:
    """Writes models and checkpoints of a run. A failure is a warning at first; the third in a row is an error.

    A model that could not be written is kept in memory, and no checkpoint is written before it: a run that is resumed
    from the last checkpoint then repeats the validation that selected the model.
    """

    def __init__(self, store: CheckpointStore, run_log: RunLog, saved_step: int | None) -> None:
        self.store, self.run_log = store, run_log
        self.saved_step = saved_step
        """step of the last checkpoint; None if there is none"""
        self.failures = 0
        self.unsaved: dict[Path, Any] = {}
        """pipelines that could not be written yet, by their folder"""

    def save_model(self, folder: Path, pipeline: Any) -> None:
        """Write a model folder."""
        self.unsaved[folder] = pipeline
        try:
            self._write_models()
        except RegardError as error:
            # The model in training changes with the next update.
            self.unsaved[folder] = dataclasses.replace(
                pipeline, model=copy.deepcopy(pipeline.model).cpu(), training=copy.deepcopy(pipeline.training)
            )
            self._fail(f"the model could not be saved: {error.message}", error)

    def save_checkpoint(self, checkpoint: Checkpoint, step: int, *, is_last: bool = False) -> bool:
        """Write a checkpoint, after all models, and return whether it succeeded; `is_last`: a failure is an error."""
        try:
            self._write_models()
            self.store.save(checkpoint, step)
        except RegardError as error:
            self._handle_failure(step, error, is_last)
            return False
        self._succeed(step)
        return True

    def save_shards(self, shards: "AsyncSaver", checkpoint: Checkpoint, step: int, *, is_last: bool = False) -> None:
        """Start to write a sharded checkpoint, after all models; `is_last`: wait for it, and a failure is an error.

        All ranks call it together; only rank 0 has models and counts failures.
        """
        self.wait_for_shards(shards)
        failure: RegardError | None = None
        try:
            self._write_models()
        except RegardError as error:
            failure = error
        if not any(shards.workers.any(failure is not None)):
            shards.save(checkpoint, step)
        if failure is not None:
            self._handle_failure(step, failure, is_last)
        if is_last:
            self.wait_for_shards(shards, is_last=True)

    def wait_for_shards(self, shards: "AsyncSaver", *, is_last: bool = False) -> None:
        """Wait for the sharded checkpoint that is being written; a failure is handled as in `save_checkpoint`."""
        try:
            if shards.wait():
                self._succeed(shards.step)
        except RegardError as error:
            if shards.workers.rank:
                return
            self._handle_failure(shards.step, error, is_last)

    def _handle_failure(self, step: int, error: RegardError, is_last: bool) -> None:
        if is_last or self.saved_step is None:
            raise self._error(error) from None
        self._fail(f"the checkpoint of step {step} could not be saved: {error.message}", error)

    def _succeed(self, step: int) -> None:
        if self.failures:
            self.run_log.print_lines(f"step {step}: saved again; nothing is lost.")
        self.saved_step, self.failures = step, 0

    def _write_models(self) -> None:
        for folder in list(self.unsaved):
            try:
                write_model(folder, self.unsaved[folder])
            except OSError as error:  # other than in a write, which names the file
                raise RegardError(f"{folder}: cannot be written: {error.strerror}.") from None
            del self.unsaved[folder]

    def _fail(self, what: str, error: RegardError) -> None:
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            raise self._error(error) from None
        self.run_log.warn(
            f"{what} Training continues, the next save tries again (failure {self.failures} of {MAX_FAILURES}). The "
            f"last checkpoint is step {self.saved_step}."
        )

    def _error(self, error: RegardError) -> RegardError:
        if self.saved_step is None:
            return error
        return RegardError(
            f"{error.message.removesuffix('.')}; everything up to step {self.saved_step} is saved.",
            "Free some space or repair the disk, and run the same command to resume.",
        )


def load_like(path: Path, like: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> Checkpoint:
    """Load a checkpoint, sharded or not, with tensors that are sharded like the current ones.

    `like` are the weights by name, `parameters` those of the optimizer in its order. Names are `model.*`, `average.*`
    and `optimizer.<index>.*`, as in `gather_state`. The number of ranks that saved the checkpoint does not matter.
    """
    patterns = _Patterns(like, [sharded_weight(p) for p in parameters])
    if is_sharded(path):
        return Checkpoint(_load_shards(path, patterns), read_checkpoint_facts(path))
    checkpoint = load_checkpoint(path)
    for name, tensor in checkpoint.tensors.items():
        checkpoint.tensors[name] = _place_like(tensor, patterns.find(name, tensor.shape))
    return checkpoint


def _place_like(full: Tensor, pattern: Tensor | None) -> Tensor:
    """A tensor that all ranks have read, so that none has to send it, with the shards of `pattern`."""
    if not isinstance(pattern, DTensor):
        return full
    return distribute_tensor(full.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None)


class _Patterns:
    """The current weights, after which the tensors of a checkpoint are sharded."""

    def __init__(self, like: Mapping[str, Tensor], parameters: list[Tensor]) -> None:
        self.like, self.parameters = like, parameters

    def find(self, name: str, shape: torch.Size) -> Tensor | None:
        """The weight to which a tensor of a checkpoint belongs.

        None for a tensor of another size: steps are scalars, and others belong to another model, which `restore_state`
        reports.
        """
        part, _, rest = name.partition(".")
        index = rest.split(".", 1)[0]
        if part == "optimizer":
            is_known = index.isdecimal() and len(index) < 10 and int(index) < len(self.parameters)
            pattern = self.parameters[int(index)] if is_known else None
        else:
            pattern = self.like.get(rest)
        return pattern if pattern is not None and pattern.shape == shape else None


def _load_shards(folder: Path, patterns: _Patterns) -> dict[str, Tensor]:
    reader, tensors = HuggingFaceStorageReader(str(folder)), {}
    try:
        metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for name, entry in metadata.items():
            # Each value is stored once. So the files bound the memory, whatever offsets they claim.
            is_complete = math.prod(entry.size) == sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if not is_complete or any(offset < 0 for chunk in entry.chunks for offset in chunk.offsets):
                raise DamagedCheckpointError(folder, f"parts of {name} are missing")
            pattern, dtype = patterns.find(name, entry.size), entry.properties.dtype
            if pattern is None:
                tensors[name] = torch.empty(entry.size, dtype=dtype)
            else:
                tensors[name] = torch.empty_like(pattern, dtype=dtype, requires_grad=False)
    except RegardError:
        raise
    except Exception as error:  # the reader does not check the offsets and names in the files
        raise DamagedCheckpointError(folder, f"{type(error).__name__}: {error}") from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended in one process
            load_distributed(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except (SafetensorError, CheckpointException, KeyError, ValueError, OSError) as error:
        raise DamagedCheckpointError(folder, str(error)) from None
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):  # read as a whole
            tensors[name] = _place_like(tensor, patterns.find(name, tensor.shape))
    return tensors


class AsyncSaver:
    """Saves sharded checkpoints in the background; training continues as soon as the tensors are copied to the CPU."""

    def __init__(self, workers: Workers, store: CheckpointStore) -> None:
        self.workers, self.store = workers, store
        self.group = dist.new_group(backend="gloo", timeout=workers.timeout)
        """a group of its own, since its operations run at the same time as those of the updates"""
        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.step = 0
        """step of the last checkpoint"""

    def save(self, checkpoint: Checkpoint, step: int) -> None:
        """Save a checkpoint, of which this rank has its shards; after `wait`. All ranks call it together."""
        if self.workers.rank == 0:
            self.store.start(step)
        self.workers.wait()
        copies = BlockingAsyncStager(cache_staged_state_dict=False).stage(dict(checkpoint.tensors))
        self.pending = self.executor.submit(self._write, copies, dict(checkpoint.facts), step)
        self.step = step

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any], step: int) -> None:
        folder, rank = self.store.path(step), dist.get_rank(self.group)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)  # flushes the files
        save_distributed(tensors, storage_writer=writer, process_group=self.group)
        results: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(results, _checksums(folder, f"shard-{rank + 1:05}-*.safetensors"), group=self.group)
        for result in results:
            if isinstance(result, str):
                raise RegardError(result)
        if rank == 0:
            content = json.dumps(facts).encode()
            write_atomically(folder / FACTS, content)
            checksums = {name: digest for result in results for name, digest in result.items()}
            self.store.finish(step, checksums | {FACTS: hashlib.sha256(content).hexdigest()})

    def wait(self) -> bool:
        """Wait until the last save is on disk; False if there is none to wait for.

        An error of the save is raised here; one in the last files, which only rank 0 writes, is raised on rank 0 alone.
        """
        if self.pending is None:
            return False
        pending, self.pending = self.pending, None
        try:
            with report_dead_ranks():
                pending.result()
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise RegardError(f"The checkpoint could not be written: {first}.") from None
        return True


def _checksums(folder: Path, pattern: str) -> dict[str, str] | str:
    """The checksums of files by name, or what is wrong: an exception would leave the other ranks waiting."""
    try:
        return {path.name: sha256(path) for path in sorted(folder.glob(pattern))}
    except OSError as error:
        return f"{error.filename}: {error.strerror}."
