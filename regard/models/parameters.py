"""Parameters of a model without memory: their count from a config alone, and models without initial weights."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.errors import RegardError
from regard.models import FAMILIES, BertConfig, ModelConfig, TransformerConfig, ViTConfig, family_name


class SkipInitialization(TorchFunctionMode):
    """Context in which new parameters are meta tensors and are not initialized; computed buffers are not affected.

    >>> with SkipInitialization():
    ...     torch.nn.Linear(2, 3).weight.device
    device(type='meta')
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Meta tensors have no memory to fill, and torch would import torch._dynamo, which takes a second.
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        if function in _FILL_METHODS and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs | {"device": "meta"} if function is torch.empty else kwargs))


_FILL_METHODS = (Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_)
# Positions without a computed table.
_UNTABULATED = ("rotary", "learned", "relative", "none")
# Larger buffers are not computed.
_MAX_BUFFER_ELEMENTS = 2**24


@contextmanager
def shapes_only(config: Any) -> Iterator[None]:
    """Context in which a model of this config is built without memory, for the shapes of its parameters.

    >>> from regard.models import GPT, GPTConfig
    >>> config = GPTConfig(width=8, heads=2, feedforward=8, vocab=10**9)
    >>> with shapes_only(config):
    ...     GPT(config).embedding.tokens.weight.shape
    torch.Size([1000000000, 8])
    """
    length = 1
    if isinstance(config, ViTConfig):
        length = max(1, config.image_height // config.patch) * max(1, config.image_width // config.patch)
    elif getattr(config, "positions", "") not in _UNTABULATED:
        length = config.max_len
    with ExitStack() as stack:
        if config.width * length > _MAX_BUFFER_ELEMENTS:
            stack.enter_context(torch.device("meta"))  # for buffers too; it imports torch._dynamo
        stack.enter_context(SkipInitialization())
        yield


class ParameterCount(NamedTuple):
    """Parameters of a model: the number of tensors, and the number of elements in all of them."""

    tensors: int
    elements: int


def layer_counts(config: ModelConfig) -> dict[str, int]:
    """The number of layers of each stack of a model, by the name of the config field.

    >>> from regard.models import ViTConfig
    >>> layer_counts(ViTConfig())
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

    The cost does not depend on the number of layers: models with two and three layers are built without memory (on
    torch's meta device), and every further layer adds as much as the third.

    >>> from regard.models import GPTConfig
    >>> count_parameters(GPTConfig(width=8, heads=2, feedforward=8, layers=10_000, vocab=5)).elements
    4080048
    """
    if isinstance(config, BertConfig) and config.groups:
        config = dataclasses.replace(config, layers=config.groups, groups=0)
    layers = layer_counts(config)
    plain: Any = config
    small = dataclasses.replace(plain, **{name: min(count, 2) for name, count in layers.items()})
    base = _count(small)
    tensors, elements = base
    for name, count in layers.items():
        if count > 2:
            larger = _count(dataclasses.replace(small, **{name: 3}))
            tensors += (larger.tensors - base.tensors) * (count - 2)
            elements += (larger.elements - base.elements) * (count - 2)
    return ParameterCount(tensors, elements)


def _count(config: Any) -> ParameterCount:
    try:
        with shapes_only(config):
            parameters = list(FAMILIES[family_name(config)].model(config).parameters())
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        if isinstance(error, TypeError) and "verflow" not in str(error):
            raise  # an error in a custom component
        # A tensor whose size in bytes does not fit into 64 bits.
        raise RegardError(
            f"A model of these sizes is too large to be built ({str(error).splitlines()[0]}).",
            "Choose a smaller width, vocabulary or number of layers.",
        ) from None
    return ParameterCount(len(parameters), sum(parameter.numel() for parameter in parameters))
