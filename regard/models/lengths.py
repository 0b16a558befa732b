"""How long an input a model can read."""

from typing import Any


def length_limit(config: Any) -> int | None:
    """The most tokens that a model of this config can read; None if there is no limit.

    A table of learned positions ends at `max_len`, and so does that of the score "location". Sinusoidal, rotary and
    relative positions, models without positions and recurrent ones run at any length.

    >>> from regard.models import TransformerConfig
    >>> length_limit(TransformerConfig(positions="learned")), length_limit(TransformerConfig(positions="rotary"))
    (256, None)
    """
    names = ("score", "encoder_score", "decoder_score", "cross_score")
    attends = getattr(config, "attention", "") != "none"
    located = attends and any(getattr(config, name, None) == "location" for name in names)
    return config.max_len if located or getattr(config, "positions", None) == "learned" else None
