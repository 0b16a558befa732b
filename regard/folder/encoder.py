"""An encoder of texts with its tokeniser, ready to use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from regard.data.special import READING, Special
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
from regard.models import Bert

# Tokens that are encoded at once.
BATCH_TOKENS = 8192


@dataclass
class TextEncoder:
    """A model that reads whole texts.

    >>> encoder = load("minilm")  # doctest: +SKIP
    >>> encoder.embed(["A cat.", "A dog."]).shape  # doctest: +SKIP
    (2, 384)
    """

    model: Bert
    tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    special: Special = READING

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.tokenizer, self.tokenizer

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def text_ids(self, text: str, *, name: str = "the text", truncate: bool = False) -> list[int]:
        """A text as the model reads it; too long a one is an error, or is cut short."""
        ids = self.tokenizer.encode(text)
        room = self.model.config.max_len - len(self.special.framed([]))
        if len(ids) > room and not truncate:
            raise RegardError(
                f"{name} has {len(ids)} tokens, and the model takes at most {room}.",
                "Split it, or use --truncate to cut it short.",
            )
        return self.special.framed(ids[:room])

    @torch.no_grad()
    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Float[np.ndarray, "B E"]:
        """A vector a text: the mean over its tokens, of length 1."""
        rows = [self.text_ids(text, name=f"text {i}", truncate=truncate) for i, text in enumerate(texts, 1)]
        vectors = np.zeros((len(rows), self.model.config.width), np.float32)
        self.model.eval()
        for batch in _by_length([len(row) for row in rows]):
            packed = self._packed([rows[i] for i in batch])
            encoded = self.model.encode(packed).float()
            means = torch.stack([one.mean(0) for one in encoded.split(packed.offsets.lengths.tolist())])
            vectors[batch] = torch.nn.functional.normalize(means, dim=-1).cpu().numpy()
        return vectors

    def _packed(self, sequences: Sequence[Sequence[int]]) -> Packed:
        return pack(sequences).to(self.device)

    def save(self, path: str | Path) -> None:
        from regard.folder.files import save  # which knows all kinds of models

        save(path, self)


def _by_length(lengths: list[int]) -> Iterator[list[int]]:
    """Indices in batches of similar lengths, longest first."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
