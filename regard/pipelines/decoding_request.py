"""Decoding requests: encoded inputs of a pipeline with their options, and how hypotheses become results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from regard.decode import DecodeConfig, LexicalConstraints, NBest, Shortlist, decode_all
from regard.decode.protocol import SourceBatch, SpecialTokens
from regard.decode.sampling import OnToken

R = TypeVar("R")


@dataclass(frozen=True)
class DecodingRequest(Generic[R]):
    """The sentences of one call of a pipeline, encoded. `run` decodes them; a server decodes them with others.

    >>> translator.prepare(["The cat sleeps."]).run()[0][0].text  # doctest: +SKIP
    'Le chat dort.'
    """

    model: Any
    sources: list[list[int]]
    pack: Callable[[list[list[int]]], SourceBatch]
    config: DecodeConfig
    special: SpecialTokens
    finish: Callable[[list[NBest]], list[R]]
    """makes the results of the pipeline from the hypotheses of each source"""
    prefixes: Sequence[Sequence[int]] | None = None
    sample_indices: Sequence[int] | None = None
    max_total_len: int | None = None
    lexical: Sequence[LexicalConstraints] | None = None
    shortlist: Shortlist | None = None
    history: bool = False

    @torch.no_grad()
    def decode(
        self, *, on_token: OnToken | None = None, progress: Callable[[int, int], None] | None = None
    ) -> list[NBest]:
        """The hypotheses of each source: see `decode_all`."""
        return decode_all(
            self.model,
            self.sources,
            self.pack,
            self.config,
            special=self.special,
            prefixes=self.prefixes,
            history=self.history,
            sample_indices=self.sample_indices,
            max_total_len=self.max_total_len,
            lexical=self.lexical,
            shortlist=self.shortlist,
            on_token=on_token,
            progress=progress,
        )

    def run(self, *, on_token: OnToken | None = None, progress: Callable[[int, int], None] | None = None) -> list[R]:
        """Decode all sources and return the results."""
        return self.finish(self.decode(on_token=on_token, progress=progress))
