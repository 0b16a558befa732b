"""Workers on a Ray cluster, each with a copy of the model.

Files are read and written by this process, as without a cluster: Ray carries blocks of lines to the workers and their
output back. So the order of the lines, resuming and progress are those of `process_file`, and the machines need no
shared file system.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from regard.errors import RegardError, require_package
from regard.layers.fusion import fuse_residuals
from regard.pipelines.files import MAX_LOSSES, BlockOutput, OnBatch, ProcessItems, WorkerLost

# Seconds between two checks whether the work was stopped.
_POLL_SECONDS = 0.5


def ray_processors(make_processor: Callable[[Any], ProcessItems[Any]], pipeline: Any) -> list[ProcessItems[Any]]:
    """Processors of blocks on a Ray cluster: one worker per GPU or, if the cluster has none, one per CPU core.

    `make_processor(pipeline)` is called in each worker, with a copy of the pipeline. Connects to the cluster of
    RAY_ADDRESS or of this machine (`ray start`); without one, Ray is started on this machine.
    """
    ray = require_package("ray", "ray")
    if pipeline.device.type != "cpu":
        raise RegardError(
            f"The model is on {pipeline.device}; a cluster needs it on the CPU.",
            "Load it with device cpu: the workers move their copies to their own devices.",
        )
    _connect(ray)
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
    options = {"num_cpus": 1, "num_gpus": int(kind == "GPU")}
    task = ray.put((make_processor, pipeline, "cuda" if kind == "GPU" else "cpu"))
    actor_class = ray.remote(**options)(_Actor)
    return [_RayProcessor(ray, actor_class, task) for _ in range(max(1, int(resources.get(kind, 0))))]


def _connect(ray: Any) -> None:
    """Connect to a running cluster, or start one on this machine, unless this process is connected."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RegardError(
            f"Cannot connect to a Ray cluster: {str(error).splitlines()[0]}",
            "Set RAY_ADDRESS to the address of a running cluster, or unset it to use this machine.",
        ) from None


class _Actor:
    """A process of the cluster that processes blocks."""

    process: ProcessItems[Any] | None = None

    def load(self, task: tuple[Callable[[Any], ProcessItems[Any]], Any, str]) -> None:
        """Prepare the model."""
        make_processor, pipeline, device = task
        if device == "cpu":
            torch.set_num_threads(1)  # one worker per core
        for model in pipeline.models:
            model.to(device)
            if device == "cuda":
                fuse_residuals(model)
        self.process = make_processor(pipeline)

    def run(self, items: list[Any], first: int) -> tuple[bytes, dict[str, float]]:
        """The output for a block, and its totals."""
        assert self.process is not None
        output = self.process(items, first, lambda done, total: None)
        return output.data, dict(output.totals)


class _RayProcessor:
    """Processes blocks in an actor. If it dies, there is a new one, on any machine with free resources.

    Ray could restart the actor itself, but then calls fail while it restarts, and its deaths cannot be counted.
    """

    def __init__(self, ray: Any, actor_class: Any, task: Any) -> None:
        self.ray, self.actor_class, self.task = ray, actor_class, task
        self.actor: Any = None

    def wait_until_ready(self, is_stopped: Callable[[], bool]) -> None:
        """Start an actor and wait until it has loaded the model; before, it may wait for a free machine."""
        for losses in range(1, MAX_LOSSES + 1):
            if self.actor is not None:
                self.ray.kill(self.actor)  # it may be alive but out of reach
            self.actor = self.actor_class.remote()
            try:
                return self._get(self.actor.load.remote(self.task), is_stopped)
            except WorkerLost as error:
                if losses == MAX_LOSSES:
                    raise RegardError(
                        f"A worker of the cluster cannot start: {error}.",
                        "Check that the machines have Regard in this version, and enough memory.",
                    ) from None

    def __call__(self, items: list[Any], first: int, on_batch: OnBatch) -> BlockOutput:
        def is_stopped() -> bool:
            on_batch(0, 1)  # raises an error to stop
            return False

        return BlockOutput(*self._get(self.actor.run.remote(items, first), is_stopped))

    def _get(self, reference: Any, is_stopped: Callable[[], bool]) -> Any:
        """The result of a call."""
        exceptions = self.ray.exceptions
        while not is_stopped():
            try:
                return self.ray.get(reference, timeout=_POLL_SECONDS)
            except exceptions.GetTimeoutError:
                continue
            except exceptions.RayTaskError as error:
                raise error.cause from None
            except exceptions.RayError as error:  # the process or its machine died, or its memory was exhausted
                raise WorkerLost(str(error).splitlines()[0]) from None
        return None
