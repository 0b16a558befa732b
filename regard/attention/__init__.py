"""Attention: scores, masks, biases, and `attend`, which runs them on the fastest backend."""

from regard.attention.bias import Bias
from regard.attention.dispatch import Choice, attend, explain, use, weights
from regard.attention.masks import Mask, causal, local, padding, window
from regard.attention.offsets import Offsets
from regard.attention.recording import Recorded, Recording, record
from regard.attention.scores import (
    SCORES,
    Concat,
    Cosine,
    Disentangled,
    Dot,
    DotLike,
    General,
    Location,
    ScaledDot,
    Score,
    SoftCap,
    make_score,
    register_score,
)

__all__ = [
    "SCORES",
    "Bias",
    "Choice",
    "Concat",
    "Cosine",
    "Disentangled",
    "Dot",
    "DotLike",
    "General",
    "Location",
    "Mask",
    "Offsets",
    "Recorded",
    "Recording",
    "ScaledDot",
    "Score",
    "SoftCap",
    "attend",
    "causal",
    "explain",
    "local",
    "make_score",
    "padding",
    "record",
    "register_score",
    "use",
    "weights",
    "window",
]
