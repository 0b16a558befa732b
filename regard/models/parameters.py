"""Number of parameters of a model, from its config alone: no weights are made, whatever the sizes."""

import dataclasses
from typing import Any, NamedTuple

import torch

from regard.errors import RegardError
from regard.models import FAMILIES, BertConfig, ModelConfig, TransformerConfig, ViTConfig, family_of


class ParameterCount(NamedTuple):
    """Parameters of a model: how many tensors, and how many numbers in all of them."""

    tensors: int
    numbers: int


def stack_heights(config: ModelConfig) -> dict[str, int]:
    """The layers of each stack that a model of this config has, by the name of the field.

    >>> from regard.models import ViTConfig
    >>> stack_heights(ViTConfig())
    {'layers': 12}
    """
    names = ["groups" if getattr(config, "groups", 0) else "layers"]  # ALBERT: each group is one layer
    if isinstance(config, TransformerConfig):
        names = ["encoder_layers", "decoder_layers"]
    if isinstance(config, ViTConfig):
        names += ["segmenter_layers"] * (config.head == "segment" and config.segmenter == "queries")
        names += ["decoder_layers"] * (config.head == "pixels")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a model of this config, tied ones once.

    A stack of any height costs no more than a low one: models with two and three layers are built without memory
    (on torch's meta device), and every further layer adds what the third did.

    >>> from regard.models import GPTConfig
    >>> count_parameters(GPTConfig(width=8, heads=2, feedforward=8, layers=10_000, vocab=5)).numbers
    4080048
    """
    if isinstance(config, BertConfig) and config.groups:
        config = dataclasses.replace(config, layers=config.groups, groups=0)
    heights = stack_heights(config)
    plain: Any = config
    low = dataclasses.replace(plain, **{name: min(height, 2) for name, height in heights.items()})
    least = _count(low)
    tensors, numbers = least
    for name, height in heights.items():
        if height > 2:
            higher = _count(dataclasses.replace(low, **{name: 3}))
            tensors += (higher.tensors - least.tensors) * (height - 2)
            numbers += (higher.numbers - least.numbers) * (height - 2)
    return ParameterCount(tensors, numbers)


def _count(config: Any) -> ParameterCount:
    try:
        with torch.device("meta"):
            parameters = list(FAMILIES[family_of(config)].model(config).parameters())
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        # A tensor whose size in bytes does not fit into 64 bits.
        raise RegardError(
            f"A model of these sizes is too large to be built ({str(error).splitlines()[0]}).",
            "Choose smaller sizes.",
        ) from None
    return ParameterCount(len(parameters), sum(one.numel() for one in parameters))
