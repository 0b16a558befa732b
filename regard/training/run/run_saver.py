"""Saving of checkpoints and models on unreliable disks: a failed save is repeated with the next one."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.pipelines.folder.model_folder import write_model
from regard.training.checkpoint import Checkpoint
from regard.training.log import RunLog
from regard.training.run.checkpoint_store import CheckpointStore
from regard.training.runtime.sharded_checkpoint import AsyncSaver

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

    def save_shards(self, shards: AsyncSaver, checkpoint: Checkpoint, step: int, *, is_last: bool = False) -> None:
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

    def wait_for_shards(self, shards: AsyncSaver, *, is_last: bool = False) -> None:
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
