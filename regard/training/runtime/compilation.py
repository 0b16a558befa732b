"""Compiled training: block by block, so that what is compiled for the first layer serves all others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.layers.blocks import DecoderBlock, EncoderBlock
from regard.layers.embeddings import Embedding

# Of each kind the methods that are compiled: where the time goes, and where the layers are alike.
REGIONS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("forward",),
    EncoderBlock: ("forward", "forward_first"),
    DecoderBlock: ("forward",),
}


def compiled_features(model: nn.Module) -> Callable[..., Tensor]:
    """`model.features`, whose blocks run compiled while it does; whoever else uses the model finds it as it was.

    Compiling a whole model takes a minute and more, and again for each bound on the lengths. Blocks are compiled once,
    and a second time when that bound changes, then for all of them. A model without blocks is compiled as a whole.
    """
    places = [(module, name) for module in model.modules() for name in REGIONS.get(type(module), ())]
    whole: Callable[..., Tensor] = model.features  # type: ignore[assignment]
    if not places:
        return torch.compile(whole, dynamic=False)
    compiled = [torch.compile(getattr(module, name)) for module, name in places]

    def features(*inputs: Any) -> Tensor:
        for (module, name), fast in zip(places, compiled):
            setattr(module, name, fast)
        try:
            return whole(*inputs)
        finally:
            for module, name in places:
                delattr(module, name)  # the class has its own

    return features
