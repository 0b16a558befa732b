"""Setup of a training run: checks of the recipe, provenance, machine settings, encoded data and initial model."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.allocator import keep_freed_memory
from regard.attention import SCORES
from regard.data.batching.pair_batches import Batch
from regard.data.text.language_pairs import add_directions
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.devices import find_device
from regard.errors import RegardError
from regard.layers import POSITIONS
from regard.models import ModelConfig, ViTConfig, make_model
from regard.pipelines import TextEncoder, Translator, load_weights, make_pipeline, pipeline_kind, read_tokenizers
from regard.training.datasets import Dataset
from regard.training.fine_tuning import HEAD_PARAMETERS, initial_weights
from regard.training.multilingual import select_training_languages
from regard.training.pretrained_embeddings import VectorCoverage, init_embeddings
from regard.training.recipe import Recipe, TrainConfig, recipe_to_dict
from regard.training.run.run_folder import lock_folder
from regard.training.run.state import TrainState
from regard.training.runtime.workers import torchrun_rank, torchrun_size, usable_workers
from regard.training.schedules import parse_duration
from regard.training.shards.shard_folder import shard_files
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchShape, BatchSource, Task
from regard.version import __version__

# With a smaller share of the batch, a worker spends more time on exchanging gradients than it saves.
MAX_WORKERS, MIN_WORKER_TOKENS, MIN_WORKER_IMAGES = 16, 512, 8

_RUN_LOCKS: dict[int, Any] = {}  # by process


@dataclass(frozen=True)
class RunSpec:
    """Everything that an update of the weights needs; rank 0 sends it to the other workers."""

    recipe: Recipe
    out: Path
    provenance: dict[str, Any]
    model: ModelConfig
    batches: BatchSource
    checkpoint: Path | None = None
    """the checkpoint from which the run is resumed"""


@dataclass(frozen=True)
class Rank0Resources:
    """What only rank 0 needs: the validation split, the pipeline to validate and save, and notes for the plan."""

    dataset: Dataset[Any]
    batches: Iterable[Batch]
    pipeline: Any
    note: str
    is_fine_tuned: bool
    vectors: list[VectorCoverage]


def check_task_settings(recipe: Recipe, task: Task) -> None:
    """Raise an error for training settings that contradict each other or the task."""
    config = recipe.train
    if recipe.tokenizer.dropout and shard_files(recipe.data.files):
        raise RegardError(
            "tokenizer.dropout needs text; the data are token shards.", "Train on the files, or leave it out."
        )
    if config.validate_by not in ("loss", "last", *task.metrics):
        raise RegardError(
            f"train.validate_by = {config.validate_by!r} is not a metric of the task {recipe.task}.",
            f"Choose train.validate_by from: {', '.join(('loss', *task.metrics, 'last'))}.",
        )
    if config.time and config.schedule != "wsd":
        raise RegardError(
            f"train.time needs the schedule wsd, whose decay can start at any step (got {config.schedule}).",
            "Set train.schedule to wsd, or remove train.time.",
        )


def make_provenance(recipe: Recipe, dataset: Dataset[Any], start_from: str | None, origin: Any) -> dict[str, Any]:
    """The origin of a model, as stored in training.json: recipe, data fingerprints, parent model and versions.

    What an imported parent model says of its tokens and prompts (its chat template) stays true of the new one.
    """
    imported = getattr(origin, "training", {}).get("imported")
    return ({} if imported is None else {"imported": imported}) | {
        "recipe": recipe_to_dict(recipe),
        "data": dataset.fingerprints,
        "start_from": start_from,
        "versions": {"regard": __version__, "torch": torch.__version__},
    }


def choose_tokenizers(recipe: Recipe, task: Task, dataset: Dataset[Any], origin: Any) -> tuple[Any, ...]:
    """The tokenizers of a new run: those of the model to fine-tune, of token shards, or new ones."""
    if origin is None:
        return dataset.tokenizers or task.make_tokenizers(dataset, recipe.tokenizer)
    if dataset.tokenizers and any(one != other for one, other in zip(dataset.tokenizers, origin.tokenizers)):
        raise RegardError(
            "The token shards were made with other tokenizers than those of the model to fine-tune.",
            "Prepare the data again: regard prepare --tokenizer MODEL",
        )
    return origin.tokenizers


def is_extended(recipe: Recipe, state: TrainState) -> bool:
    """Whether the recipe allows more steps, or more time, than the run that wrote this state."""
    before = state.provenance["recipe"]["train"]
    more_time = bool(before["time"]) and parse_duration(recipe.train.time) > parse_duration(before["time"])
    return recipe.train.steps > before["steps"] or more_time


@contextlib.contextmanager
def open_run_folder(out: Path, dry_run: bool) -> Iterator[Path]:
    """Lock and yield the output folder; a dry run gets a temporary folder."""
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            yield Path(folder)
    else:
        with lock_folder(out):
            yield out


def count_ranks(recipe: Recipe, state: TrainState | None) -> int:
    """The number of processes to train with: the ranks of torchrun, or workers on a CPU.

    By default, a resumed run keeps its number of workers: with dropout, another number gives other results.
    """
    ranks = _fixed_ranks(recipe)
    if ranks is None:
        ranks = state.workers if state is not None else _suggest_workers(recipe)
    return ranks if state is not None or torchrun_rank() is not None else usable_workers(ranks)


def _fixed_ranks(recipe: Recipe) -> int | None:
    """The number of ranks, unless it is to be chosen."""
    if torchrun_rank() is not None:
        return torchrun_size()
    if find_device(recipe.train.device).type != "cpu" or not _is_built_in(recipe):
        return 1
    return recipe.train.workers or None


@contextlib.contextmanager
def configured_machine(config: TrainConfig) -> Iterator[None]:
    """Set this process up for a run, and restore the caller's settings afterwards.

    Threads and memory get the fastest settings measured (benchmarks/README.md). Settings and random numbers of PyTorch
    belong to the process, so a run in another thread waits until this one ends.
    """
    device, threads = find_device(config.device), torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    caller_device = torch.get_default_device().type
    with contextlib.ExitStack() as stack:
        stack.enter_context(_only_run())
        stack.enter_context(torch.random.fork_rng(gpus))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if caller_device != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if device.type == "cpu":
            keep_freed_memory()
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(1)
        if device.type == "cuda":
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
            if config.deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                was_deterministic = torch.are_deterministic_algorithms_enabled()
                warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
                stack.callback(torch.use_deterministic_algorithms, was_deterministic, warn_only=warns_only)
                torch.use_deterministic_algorithms(True)
        yield


@contextlib.contextmanager
def _only_run() -> Iterator[None]:
    """Wait until no other thread of this process trains; a forked process has no such threads."""
    lock = _RUN_LOCKS.setdefault(os.getpid(), threading.RLock())
    if not lock.acquire(blocking=False):
        print("regard: waiting for the end of another training in this process.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_built_in(recipe: Recipe) -> bool:
    """Whether all components are part of Regard; worker processes cannot import those of a user's script."""
    scores = [value for name, value in vars(recipe.model).items() if name == "score" or name.endswith("_score")]
    classes = [type(TASKS[recipe.task]), type(recipe.model), *(SCORES[score] for score in scores)]
    if positions := POSITIONS.get(getattr(recipe.model, "positions", "")):
        classes.append(positions)
    return all(cls.__module__.startswith("regard.") for cls in classes)


def _suggest_workers(recipe: Recipe) -> int:
    """One worker per core, as long as each gets a large enough share of the batch and can hold the longest example."""
    config = recipe.train
    if pipeline_kind(recipe.model).tokenizer_count:
        shares = config.batch_tokens // max(MIN_WORKER_TOKENS, recipe.model.max_len)
    elif isinstance(recipe.model, ViTConfig) and recipe.data.longest:
        max_tokens = recipe.model.prefix + (recipe.data.longest // recipe.model.patch) ** 2
        shares = config.batch_tokens // max(MIN_WORKER_TOKENS, max_tokens)
    else:
        shares = config.batch_images // MIN_WORKER_IMAGES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_WORKERS, shares))


def prepare_run(
    recipe: Recipe,
    out: Path,
    checkpoint: Path | None,
    dataset: Dataset[Any],
    origin: Any,
    provenance: dict[str, Any],
) -> tuple[RunSpec, Rank0Resources]:
    """Encode the data and build the model; its initial weights are those of the pipeline `origin`, if there is one."""
    config, task, family = recipe.train, TASKS[recipe.task], pipeline_kind(recipe.model)
    if isinstance(origin, Translator):
        origin = select_training_languages(origin, recipe.data)
    special = family.special if origin is None else origin.special
    # Special ids do not tell the formats apart: those of ALBERT are the ids of Regard.
    is_foreign = origin is not None and any(one.kind == FOREIGN_KIND for one in origin.tokenizers)
    tokenizers = read_tokenizers(out, foreign=is_foreign) if family.tokenizer_count else ()
    model_config = task.complete_config(recipe.model, dataset, tokenizers)
    shape = BatchShape(
        config.batch_tokens,
        config.seed,
        # CUDA graphs need constant shapes; on a CPU the padding would only cost time.
        constant=find_device(config.device).type == "cuda",
        images=config.batch_images,
    )
    batches, validation, note = task.encode(dataset, tokenizers, special, recipe, model_config, shape)
    spec = RunSpec(recipe, out, provenance, model_config, batches, checkpoint)
    model = build_model(spec)
    if origin is not None:
        weights = initial_weights(model, origin.model)
        load_weights(model, weights, provenance["start_from"], allow_mismatch=HEAD_PARAMETERS)
    vectors = init_embeddings(model, config, *tokenizers) if tokenizers else []
    pipeline = make_pipeline(model, tokenizers, dict(provenance), special)
    if isinstance(origin, Translator):
        # A model that is fine-tuned on some of its language pairs keeps the others.
        keeps = tokenizers[0].language_tags or not pipeline.language_pairs
        pairs = (*origin.language_pairs, *pipeline.language_pairs) if keeps else pipeline.language_pairs
        pipeline.language_pairs = add_directions(pairs, both=False)
        pipeline.language_tokens = origin.language_tokens
        pipeline.source_language, pipeline.target_language = origin.source_language, origin.target_language
    if hasattr(origin, "decoding") and type(origin) is type(pipeline):
        pipeline.decoding = origin.decoding
    if isinstance(origin, TextEncoder) and isinstance(pipeline, TextEncoder):
        pipeline.sentence = origin.sentence
    return spec, Rank0Resources(dataset, validation, pipeline, note, origin is not None, vectors)


def build_model(spec: RunSpec) -> Any:
    """The model with its random initial weights, which depend on the seed alone."""
    torch.manual_seed(spec.recipe.train.seed)
    return make_model(spec.model)
