"""Memory that training takes, estimated before anything is written or allocated."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from regard.errors import RegardError
from regard.models import ModelConfig
from regard.models.parameters import count_parameters
from regard.pipelines import find_device, pipeline_kind
from regard.training.recipe import Recipe

# float32: the weight, its gradient and Adam's two moments.
BYTES_PER_PARAMETER = 16
# A tokenizer of more entries than this is rare; one of fewer than it may have is not.
LIKELY_VOCABULARY = 32_000
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_sizes(recipe: Recipe, task: Any, dataset: Any) -> None:
    """Refuse a model whose sizes do not fit each other or the data, or that this machine has no memory for.

    `task` is an entry of TASKS, and `dataset` what it has read. Tokenizers need not be trained yet.
    """
    config = recipe.model
    tokenizers: tuple[Any, ...] = ()
    if pipeline_kind(config).sides:
        likely = SimpleNamespace(vocab_size=min(recipe.tokenizer.vocab_size, LIKELY_VOCABULARY))
        tokenizers = (likely, likely)
    config = task.complete_config(config, dataset, tokenizers)
    config.check()
    check_memory(config, find_device(recipe.train.device))


def check_memory(config: ModelConfig, device: torch.device) -> None:
    """Refuse a model that takes more memory to train than the device has.

    >>> from regard.models import GPTConfig
    >>> check_memory(GPTConfig(vocab=100), torch.device("cpu"))
    """
    numbers = count_parameters(config).numbers
    needed, present = numbers * BYTES_PER_PARAMETER, device_memory(device)
    if present is not None and needed > present:
        raise RegardError(
            f"A model of {numbers:,} parameters takes {needed / 1e9:,.0f} GB to train (weights, gradients, optimizer), "
            f"and this machine has {present / 1e9:,.0f} GB.",
            "Make the model narrower, or give it fewer layers.",
        )


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory that a process can use on a device; None if it cannot be found out.

    >>> device_memory(torch.device("cpu")) > 10**8
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for path in _LIMITS:  # of a container
        try:
            found = min(found, int(path.read_text()))
        except (OSError, ValueError):
            continue
    return found
