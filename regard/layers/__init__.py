"""Layers: modules with parameters from which the models are built."""

from regard.layers.attention import MultiHeadAttention
from regard.layers.blocks import BlockConfig, PostNormBlock, PreNormBlock
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import FeedForward
from regard.layers.norms import RMSNorm, make_norm
from regard.layers.packed import Packed, Padded, pack
from regard.layers.positions import POSITIONS, PositionalEncoding, register_positions
from regard.layers.recurrent import Recurrent, TimeMajorLayout

__all__ = [
    "POSITIONS",
    "BlockConfig",
    "Embedding",
    "FeedForward",
    "MultiHeadAttention",
    "Packed",
    "Padded",
    "PositionalEncoding",
    "PostNormBlock",
    "PreNormBlock",
    "RMSNorm",
    "Recurrent",
    "TimeMajorLayout",
    "make_norm",
    "pack",
    "register_positions",
]
