"""What every kind of model that is ready to use has in common."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.data.special import Special
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack


class ReadyModel:
    """The device that the model is on, and the way to disk. What reads no text has no tokenisers and no special ids."""

    model: Any
    special: Special = Special()

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        return ()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def save(self, path: str | Path) -> None:
        """Writes the model folder that `load` opens."""
        from regard.folder.files import save  # which knows all kinds of models

        save(path, self)  # type: ignore[arg-type]


class ModelWithTokenizers(ReadyModel):
    """Ids as a model takes them."""

    def packed(self, sequences: Sequence[Sequence[int]]) -> Packed:
        """Sequences of ids as one batch on the model's device."""
        return pack(sequences).to(self.device)


def within(ids: list[int], room: int, name: str, truncate: bool, *, the_end: bool = False) -> list[int]:
    """Ids that a model has room for. Too many are an error; with `truncate` the first are kept, or those at the end.

    >>> within([1, 2, 3], 2, "the text", truncate=True), within([1, 2, 3], 2, "the text", truncate=True, the_end=True)
    ([1, 2], [2, 3])
    """
    if len(ids) <= room:
        return ids
    if truncate:
        return ids[len(ids) - room :] if the_end else ids[:room]
    hint = "Shorten it, or use --truncate to leave its beginning out."
    raise RegardError(
        f"{name} has {len(ids)} tokens, and the model takes at most {room}.",
        hint if the_end else "Split it, or use --truncate to cut it short.",
    )
