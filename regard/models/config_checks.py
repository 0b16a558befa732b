"""Checks of config values that depend on each other, and the maximum input length of a model."""

from typing import Any

from regard.errors import RegardError
from regard.layers.positions import POSITIONS


def check_heads(width: int, heads: int, kv_heads: int = 0, head_width: int = 0, *, rotary: bool = False) -> None:
    """Raise if the numbers of heads do not fit the width. 0 for `kv_heads` or `head_width` means the default.

    >>> check_heads(10, 4)
    Traceback (most recent call last):
    regard.errors.RegardError: model.width is 10; it must be a multiple of model.heads (4). Change one of them.
    """
    if width % heads and not head_width:
        raise RegardError(
            f"model.width is {width}; it must be a multiple of model.heads ({heads}).", "Change one of them."
        )
    if kv_heads and heads % kv_heads:
        raise RegardError(f"model.kv_heads is {kv_heads}; it must divide model.heads ({heads}).", "Change one of them.")
    head_width = head_width or width // heads
    if rotary and head_width % 2:
        raise RegardError(
            f"A head is {head_width} wide; rotary positions need an even number.",
            "Change model.width, model.heads or model.positions.",
        )


def check_relative_bias(buckets: int, distance: int) -> None:
    """Raise if the buckets of a relative position bias are inconsistent.

    >>> check_relative_bias(32, 16)
    Traceback (most recent call last):
    regard.errors.RegardError: model.relative_distance is 16; it must be above half of model.relative_buckets (32). \
Increase model.relative_distance, or reduce model.relative_buckets.
    """
    if buckets < 4:
        raise RegardError(f"model.relative_buckets is {buckets}; it must be at least 4.", "Increase it.")
    if distance <= buckets // 2:
        raise RegardError(
            f"model.relative_distance is {distance}; it must be above half of model.relative_buckets ({buckets}).",
            "Increase model.relative_distance, or reduce model.relative_buckets.",
        )


def length_limit(config: Any) -> int | None:
    """Maximum number of input tokens of a model with this config; None if unlimited.

    Learned positions and the score "location" have tables of `max_len` rows. Sinusoidal, rotary and relative positions,
    models without positions and recurrent models run at any length.

    >>> from regard.models import TransformerConfig
    >>> length_limit(TransformerConfig(positions="learned")), length_limit(TransformerConfig(positions="rotary"))
    (256, None)
    """
    names = ("score", "encoder_score", "decoder_score", "cross_score")
    attends = getattr(config, "attention", "") != "none"
    has_location = attends and any(getattr(config, name, None) == "location" for name in names)
    extrapolates = getattr(POSITIONS.get(getattr(config, "positions", "")), "extrapolates", True)
    return config.max_len if has_location or not extrapolates else None
