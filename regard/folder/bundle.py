"""What every kind of model with its tokenisers has in common."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.layers.packed import Packed, pack


class ModelWithTokenizers:
    """The device that the model is on, ids as it takes them, and the way to disk."""

    model: Any

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def packed(self, sequences: Sequence[Sequence[int]]) -> Packed:
        """Sequences of ids as one batch on the model's device."""
        return pack(sequences).to(self.device)

    def save(self, path: str | Path) -> None:
        """Writes the model folder that `load` opens."""
        from regard.folder.files import save  # which knows all kinds of models

        save(path, self)  # type: ignore[arg-type]
