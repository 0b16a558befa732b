"""Memory needed for training, estimated before anything is written or allocated."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from regard.devices import find_device
from regard.errors import RegardError
from regard.models import ModelConfig
from regard.models.parameters import count_parameters
from regard.pipelines import pipeline_kind
from regard.training.recipe import Recipe
from regard.training.runtime.workers import torchrun_size

# float32: the weight, its gradient and Adam's two moments.
BYTES_PER_PARAMETER = 16
# Tokenizers rarely reach a larger vocabulary, even if tokenizer.vocab_size allows it.
TYPICAL_MAX_VOCAB = 32_000
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_model_size(recipe: Recipe, task: Any, dataset: Any) -> None:
    """Raise an error for a model whose sizes contradict each other or the data, or exceed the memory of this machine.

    `task` is the entry of TASKS that read `dataset`. Tokenizers need not be trained yet.
    """
    config = recipe.model
    tokenizers: tuple[Any, ...] = ()
    if pipeline_kind(config).tokenizer_count:
        stand_in = SimpleNamespace(vocab_size=min(recipe.tokenizer.vocab_size, TYPICAL_MAX_VOCAB))
        tokenizers = (stand_in, stand_in)
    config = task.complete_config(config, dataset, tokenizers)
    config.check()
    shards = torchrun_size() if recipe.train.sharding == "fsdp" else 1
    check_memory(config, find_device(recipe.train.device), shards)


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
