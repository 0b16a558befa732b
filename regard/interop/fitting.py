"""Whether another program can compute what a model of ours does."""

from collections.abc import Mapping
from typing import Any


def misfits(config: Any, can: Mapping[str, tuple]) -> dict[str, tuple]:
    """The fields in which a config is nothing that `can` lists, and what it lists there.

    >>> from regard.models import TransformerConfig
    >>> misfits(TransformerConfig(heads=3), {"heads": (1, 2), "norm": ("pre", "post")})
    {'heads': (1, 2)}
    """
    return {field: values for field, values in can.items() if getattr(config, field) not in values}


def in_words(config: Any, found: Mapping[str, tuple]) -> str:
    """Misfits as a part of a sentence.

    >>> from regard.models import TransformerConfig
    >>> in_words(TransformerConfig(heads=3), {"heads": (1, 2)})
    'heads = 3 (there: 1 or 2)'
    """
    return ", ".join(
        f"{field} = {getattr(config, field)!r} (there: {' or '.join(map(repr, values))})"
        for field, values in found.items()
    )
