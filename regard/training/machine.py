"""What a run uses of this machine: threads, precision of matrix products, and memory."""

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from regard.allocator import keep_freed_memory
from regard.devices import LIMITED_ISA, cpu_flags, find_device
from regard.errors import RegardError
from regard.models import ModelConfig
from regard.models.parameters import count_parameters
from regard.pipelines import pipeline_class
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks import TASKS
from regard.training.tasks.task import Autocast

# On a CPU, smaller models gain little from bfloat16, and the settings of the demo were tuned in float32.
MIN_WIDTH = 256
# float32: the weight, its gradient and Adam's two moments.
BYTES_PER_PARAMETER = 16
# Tokenizers rarely reach a larger vocabulary, even if tokenizer.vocab_size allows it.
TYPICAL_MAX_VOCAB = 32_000
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_RUN_LOCKS: dict[int, Any] = {}  # by process


def resolve_precision(recipe: Recipe, previous: Literal["float32", "bfloat16"] | None = None) -> Recipe:
    """The recipe with precision "auto" replaced by the choice for this machine.

    A resumed run keeps its `previous` precision, if this machine supports it. Explicit bfloat16 that would crash the
    process is an error.

    >>> resolve_precision(Recipe(train=TrainConfig(device="cpu", precision="float32"))).train.precision
    'float32'
    """
    config, device = recipe.train, find_device(recipe.train.device)
    chosen = config.precision
    if chosen == "auto":
        is_cuda, is_cpu = device.type == "cuda", device.type == "cpu"
        if previous:
            prefers_bfloat16 = previous == "bfloat16"
        else:
            prefers_bfloat16 = is_cuda or (is_cpu and _benefits_from_bfloat16(recipe))
        uses_bfloat16 = prefers_bfloat16 and (is_cuda or (is_cpu and is_bfloat16_safe()))
        chosen = "bfloat16" if uses_bfloat16 else "float32"
    elif chosen == "bfloat16" and device.type == "cpu" and not is_bfloat16_safe():
        raise RegardError(
            "This CPU advertises bfloat16 matrix products but crashes with an illegal instruction when they run.",
            "Set train.precision to float32.",
        )
    return dataclasses.replace(recipe, train=dataclasses.replace(config, precision=chosen))


def make_autocast(config: TrainConfig, device: torch.device) -> Autocast:
    """The context manager for forward passes: autocast to bfloat16, or nothing. The precision must not be "auto"."""
    if config.precision != "bfloat16":
        return contextlib.nullcontext
    # The cache of cast weights would outlive a captured CUDA graph.
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _benefits_from_bfloat16(recipe: Recipe) -> bool:
    """Whether bfloat16 is faster on this CPU: it needs instructions for it and a wide model; recurrent cells run in
    float32."""
    model = recipe.model
    return not getattr(model, "is_recurrent", False) and model.width >= MIN_WIDTH and has_bfloat16_instructions()


def has_bfloat16_instructions() -> bool:
    """Whether the CPU reports instructions for bfloat16 matrix products (AVX512-BF16 or AMX)."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"})


def is_bfloat16_safe() -> bool:
    """Try a bfloat16 product in a forked process: on some virtual machines it is an illegal instruction.

    On such machines oneDNN detects instructions that the CPU does not have. The product is then tried once more with
    oneDNN limited to AVX512-BF16. The limit only takes effect before the first oneDNN call of the process, which the
    second try shows too.
    """
    if not hasattr(os, "fork"):
        return False
    if _bfloat16_works_in_child():
        return True
    name, value = LIMITED_ISA
    if name in os.environ:
        return False
    os.environ[name] = value
    if _bfloat16_works_in_child():
        return True
    del os.environ[name]
    return False


def _bfloat16_works_in_child(timeout: float = 20.0) -> bool:
    with warnings.catch_warnings():
        # Forking a multi-threaded process causes a warning, but the product below needs no other thread.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            torch.set_num_threads(1)
            x = torch.ones(64, 64, dtype=torch.bfloat16)
            torch.nn.functional.linear(x, x)
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def check_model_size(recipe: Recipe, dataset: Any, ranks: int) -> None:
    """Raise an error for a model whose sizes contradict each other or the data, or exceed the memory of this machine.

    The task of the recipe has read `dataset`. Tokenizers need not be trained yet.
    """
    config, task = recipe.model, TASKS[recipe.task]
    tokenizers: tuple[Any, ...] = ()
    if pipeline_class(config).tokenizer_count:
        stand_in = SimpleNamespace(vocab_size=min(recipe.tokenizer.vocab_size, TYPICAL_MAX_VOCAB))
        tokenizers = (stand_in, stand_in)
    config = task.complete_config(config, dataset, tokenizers)
    config.check()
    check_memory(config, find_device(recipe.train.device), shards=ranks if recipe.train.sharding == "fsdp" else 1)


def check_memory(config: ModelConfig, device: torch.device, shards: int = 1) -> None:
    """Raise an error for a model that needs more memory to train than the device has.

    Of a model in several shards, rank 0 has one shard and a copy of all weights, for validation.

    >>> from regard.models import GPTConfig
    >>> check_memory(GPTConfig(vocab=100), torch.device("cpu"))
    """
    parameters = count_parameters(config).elements
    needed = parameters * BYTES_PER_PARAMETER if shards == 1 else parameters * (BYTES_PER_PARAMETER // shards + 4)
    available = device_memory(device)
    if available is not None and needed > available:
        raise RegardError(
            f"A model of {parameters:,} parameters needs {needed / 1e9:,.0f} GB to train (weights, gradients, "
            f"optimizer), but this machine has {available / 1e9:,.0f} GB.",
            "Reduce model.width or the number of layers.",
        )


def device_memory(device: torch.device) -> int | None:
    """Memory of a device that a process can use, in bytes; None if it is unknown.

    >>> device_memory(torch.device("cpu")) > 10**8
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for path in _CGROUP_LIMITS:  # of containers
        try:
            memory = min(memory, int(path.read_text()))
        except (OSError, ValueError):
            continue
    return memory


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


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
