"""Maximum input length of a model."""

from typing import Any

from regard.layers.positions import POSITIONS


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
