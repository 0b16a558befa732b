"""What every kind of model that is ready to use has in common."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
from regard.models.lengths import length_limit

logger = logging.getLogger("regard")


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
        from regard.pipelines.model_folder import save  # which knows all kinds of models

        save(path, self)  # type: ignore[arg-type]


class ModelWithTokenizers(ReadyModel):
    """A model of texts: ids as it takes them, and their length."""

    _warned_of_length = False

    @property
    def models(self) -> Sequence[Any]:
        """The model, and those that vote with it."""
        return [self.model]

    @property
    def trained_length(self) -> int:
        """The most tokens of a sequence in training, special ones included."""
        return min(model.config.max_len for model in self.models)

    @property
    def length_limit(self) -> int | None:
        """The most tokens that the model can read, special ones included; None if its positions extrapolate."""
        limits = (length_limit(model.config) for model in self.models)
        return min((limit for limit in limits if limit is not None), default=None)

    def packed(self, sequences: Sequence[Sequence[int]]) -> Packed:
        """Sequences of ids as one batch on the model's device."""
        return pack(sequences).to(self.device)

    def fit_length(
        self, ids: list[int], name: str, truncate: bool, *, special: int, keep_end: bool = False
    ) -> list[int]:
        """The ids of a text to which `special` ids will be added, checked for their length.

        With `truncate` a text is cut to the length of training: its beginning is kept, or its end. Otherwise a text
        beyond that length is an error if the model cannot read it, and the reason for a warning if it can.
        """
        trained, limit = self.trained_length - special, self.length_limit
        if len(ids) <= trained:
            return ids
        if truncate:
            return ids[len(ids) - trained :] if keep_end else ids[:trained]
        if limit is not None and len(ids) > limit - special:
            hint = "Shorten it, or use --truncate to leave its beginning out."
            raise RegardError(
                f"{name} has {len(ids)} tokens, and the model takes at most {limit - special}.",
                hint if keep_end else "Split it, or use --truncate to cut it short.",
            )
        self.warn_of_length()
        return ids

    def warn_of_length(self) -> None:
        """Warns that a text is longer than those of training: once per model."""
        if not self._warned_of_length:
            self._warned_of_length = True
            logger.warning(
                "Warning: a text is longer than the %d tokens that the model was trained on; quality may be lower.",
                self.trained_length,
            )
