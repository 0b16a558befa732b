"""Constraints on the next token of every slot: banned special tokens, forced prefixes, minimum and maximum length."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.engine.slot_shortlist import SlotShortlist
from regard.decode.protocol import SpecialTokens
from regard.decode.rules.constraints import banned_tokens, last_steps, suppressed_tokens


class SlotConstraints:
    """`Constraints` for B slots whose sentences may be at different steps.

    >>> constraints = SlotConstraints(2, 0, DecodeConfig(), SpecialTokens(), torch.device("cpu"))
    >>> constraints.set_slots([0, 1], [5, 2], [[], []])
    >>> constraints.forced_tokens(torch.tensor([4, 2]))  # the second sentence has its maximum length: <eos>
    tensor([-1,  3])
    """

    def __init__(
        self,
        slots: int,
        prefix_len: int,
        config: DecodeConfig,
        special: SpecialTokens,
        device: torch.device,
        ends_at_limit: bool = False,
    ) -> None:
        self.special, self.ends_at_limit = special, ends_at_limit
        self.min_len = config.min_len
        self.limit = torch.zeros(slots, dtype=torch.long, device=device)
        self.prefix = torch.full((slots, prefix_len), -1, dtype=torch.long, device=device)
        self.banned = tuple(sorted(banned_tokens(special, config.unknown, suppressed_tokens(config))))
        # With a shortlist, logits have a column per token of the shortlist instead of one per token of the vocabulary.
        self.shortlist: SlotShortlist | None = None
        self.banned_columns, self.eos_column = self.banned, special.eos

    def set_slots(self, slots: Sequence[int], limits: Sequence[int], prefixes: Sequence[Sequence[int]]) -> None:
        """The constraints of new sentences in these slots."""
        rows = torch.tensor(slots, device=self.limit.device)
        self.limit[rows] = torch.tensor(limits, device=self.limit.device)
        width = self.prefix.shape[1]
        if width:
            padded = [[*prefix, *[-1] * (width - len(prefix))] for prefix in prefixes]
            self.prefix[rows] = torch.tensor(padded, device=self.limit.device)

    def set_token_lists(
        self, slots: Sequence[int], token_lists: Sequence[Int[np.ndarray, "_"]], vocab: int
    ) -> Int[Tensor, "U"]:
        """Restrict new sentences in these slots to lists of tokens. Returns the token of each column of the logits."""
        if self.shortlist is None:
            self.shortlist = SlotShortlist(len(self.limit), vocab, self.limit.device)
        self.shortlist.set_slots(slots, token_lists)
        self._update_columns()
        return self.shortlist.tokens

    def _update_columns(self) -> None:
        assert self.shortlist is not None
        column_of = {token: column for column, token in enumerate(self.shortlist.tokens.tolist())}
        self.banned_columns = tuple(column_of[token] for token in self.banned if token in column_of)
        self.eos_column = column_of[self.special.eos]

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.limit, self.prefix = self.limit[slots], self.prefix[slots]
        if self.shortlist is not None:
            self.shortlist.select_slots(slots)
            self._update_columns()

    def forced_tokens(self, step: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        """The only token allowed at this step of each slot, or -1 where there is a choice."""
        forced = torch.where(step >= self.limit, self.special.eos, -1)
        width = self.prefix.shape[1]
        if width:
            prefix = self.prefix.gather(1, step.clamp(max=width - 1)[:, None])[:, 0]
            forced = torch.where((step < width) & (prefix >= 0), prefix, forced)
        return forced

    @property
    def last_step(self) -> Int[Tensor, "B"]:
        """The step after which the search of each slot ends."""
        return last_steps(self.limit, self.ends_at_limit)

    def columns(self, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The columns of tokens in the logits."""
        return tokens if self.shortlist is None else self.shortlist.columns(tokens)

    def tokens(self, columns: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The tokens of columns of the logits."""
        return columns if self.shortlist is None else self.shortlist.tokens[columns]

    def bans_eos(self, step: Int[Tensor, "B"]) -> Bool[Tensor, "B"] | None:
        """Where the output is still too short to end; None: nowhere, at no step."""
        return step < self.min_len if self.min_len else None
