"""Sinusoids of M2M100 and NLLB: they differ from those of Regard, which reads them as learned positions."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from regard.models.transformer import TransformerConfig

M2M100 = "M2M100ForConditionalGeneration"


def m2m100_positions(width: int, length: int, pad: int) -> Tensor:
    """The sinusoids of M2M100: all sines, then all cosines. The last rate is 1/10000, the first position pad + 1."""
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(pad + 1, pad + 1 + length).float()[:, None] * rates
    return torch.cat((angles.sin(), angles.cos(), torch.zeros(length, width % 2)), dim=1)


def is_m2m100(config: TransformerConfig, pad: int, weights: Mapping[str, Tensor]) -> bool:
    """Whether M2M100 computes the same as a model of learned positions: they are its sinusoids, without output bias."""
    if config.positions != "learned" or config.position_offset or not config.bias or config.output_bias:
        return False
    table = m2m100_positions(config.width, config.max_len, pad)
    return all(torch.equal(weights[f"{side}_embedding.positions.weight"], table) for side in ("source", "target"))
