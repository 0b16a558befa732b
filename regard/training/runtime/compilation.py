"""torch.compile for training, block by block: layers of one type share the compiled code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.layers.blocks import DecoderBlock, EncoderBlock
from regard.layers.embeddings import Embedding

# The methods to compile, by module type: they take most of the time, and all layers of a type share the code.
REGIONS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("forward",),
    EncoderBlock: ("forward", "forward_first"),
    DecoderBlock: ("forward",),
}


def compiled_features(model: nn.Module) -> Callable[..., Tensor]:
    """A compiled version of `model.features`; the model itself is not changed.

    Compiling an entire model takes a minute or more, and again for each value of max_len. Blocks are compiled once, and
    a second time, with dynamic shapes, when max_len changes. A model without such blocks is compiled in one piece.
    """
    methods = [(module, name) for module in model.modules() for name in REGIONS.get(type(module), ())]
    eager: Callable[..., Tensor] = model.features  # type: ignore[assignment]
    if not methods:
        return torch.compile(eager, dynamic=False)
    compiled = [torch.compile(getattr(module, name)) for module, name in methods]

    def features(*inputs: Any) -> Tensor:
        for (module, name), method in zip(methods, compiled):
            setattr(module, name, method)
        try:
            return eager(*inputs)
        finally:
            for module, name in methods:
                delattr(module, name)  # uncovers the method of the class

    return features
