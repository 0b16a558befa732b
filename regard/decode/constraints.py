"""What may come next: never `<pad>` or `<sos>`, a forced prefix first, `<eos>` neither too early nor too late."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.protocol import Source, Special
from regard.errors import RegardError


@dataclass(frozen=True)
class Constraints:
    """The constraints of B sentences. A token that may not come gets -inf; the others keep their log-probability."""

    prefix: Int[Tensor, "B P"]
    """The tokens each output must begin with, filled up with -1."""
    limit: Int[Tensor, "B"]
    """How many tokens each output may have before `<eos>`."""
    min_len: int
    special: Special
    unknown: bool = True
    """Whether `<unk>` may come."""

    @classmethod
    def of(
        cls,
        source: Source,
        config: DecodeConfig,
        special: Special,
        prefixes: Sequence[Sequence[int]] | None,
        room: int | None = None,
    ) -> "Constraints":
        """`room` limits the length of source and output together, for models whose output continues the source.

        A prefix raises the limit of its sentence where that is lower, but not beyond the room: that is an error.
        """
        lengths = source.offsets.lengths.tolist()
        prefixes = [()] * len(lengths) if prefixes is None else prefixes
        if len(prefixes) != len(lengths):
            raise RegardError(
                f"{len(prefixes)} prefixes for {len(lengths)} sentences.",
                "Give one for each; an empty one leaves a sentence free.",
            )
        if any(token in (special.pad, special.sos, special.eos) for prefix in prefixes for token in prefix):
            raise RegardError(
                "A forced prefix contains <pad>, <sos> or <eos>.", "Give only the tokens that follow <sos>."
            )
        longest = max(map(len, prefixes), default=0)
        filled = [[*prefix, *[-1] * (longest - len(prefix))] for prefix in prefixes]
        limits = [max(config.limit(length), len(prefix)) for length, prefix in zip(lengths, prefixes)]
        if room is not None:
            for number, (length, prefix) in enumerate(zip(lengths, prefixes), 1):
                if prefix and length + len(prefix) > room:
                    raise RegardError(
                        f"Prefix {number} has {len(prefix)} tokens; after a prompt of {length} the model has room for "
                        f"{max(0, room - length)}.",
                        "Shorten the prefix or the prompt.",
                    )
            limits = [max(0, min(limit, room - length)) for limit, length in zip(limits, lengths)]
        device = source.offsets.starts.device
        return cls(
            prefix=torch.tensor(filled, dtype=torch.long, device=device).view(len(lengths), longest),
            limit=torch.tensor(limits, dtype=torch.long, device=device),
            min_len=config.min_len,
            special=special,
            unknown=config.unknown,
        )

    def take(self, rows: Int[Tensor, "B2"]) -> "Constraints":
        """The constraints of these sentences only."""
        return replace(self, prefix=self.prefix[rows], limit=self.limit[rows])

    def log_probs(self, logits: Float[Tensor, "B K V"], t: int) -> Float[Tensor, "B K V"]:
        """Log-probabilities of the token at place t (from 0)."""
        log_p = log_softmax(logits)
        forced = self.forced(t)
        is_forced = forced >= 0
        only = None
        if is_forced.any():
            token = forced.clamp(min=0)[:, None, None].expand(-1, log_p.shape[1], 1)
            only = torch.full_like(log_p, -torch.inf).scatter(-1, token, log_p.gather(-1, token))
        banned = {self.special.pad, self.special.sos} | (set() if self.unknown else {self.special.unk})
        banned -= {self.special.eos}  # which may be one and the same
        for token_id in banned | ({self.special.eos} if t < self.min_len else set()):
            log_p[..., token_id] = -torch.inf
        return log_p if only is None else torch.where(is_forced[:, None, None], only, log_p)

    def forced(self, t: int) -> Int[Tensor, "B"]:
        """The one token that may come at place t, or -1 where there is a choice."""
        forced = torch.where(t >= self.limit, self.special.eos, -1)
        if t < self.prefix.shape[1]:
            forced = torch.where(self.prefix[:, t] >= 0, self.prefix[:, t], forced)
        return forced

    def why(self, row: int, t: int, token: int) -> str:
        """Which constraint refuses a token at place t: see `Refused`."""
        if t < self.prefix.shape[1] and self.prefix[row, t] >= 0:
            return "prefix"
        if t >= self.limit[row]:
            return "limit"
        return "min_len" if token == self.special.eos else "special"


def log_softmax(logits: Float[Tensor, "B K V"]) -> Float[Tensor, "B K V"]:
    """In float32, as a tensor of its own; a row of nothing but -inf stays so, where torch would give NaN."""
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    nothing = logits.amax(-1) == -torch.inf
    if nothing.any():
        log_p[nothing] = -torch.inf
    return log_p


def refuse_nan(log_p: Float[Tensor, "..."]) -> None:
    """NaN comes out on top of argmax and topk, so it is enough to look at what they chose."""
    if log_p.isnan().any():
        raise RegardError("The model's output is not a number (NaN).", "Its weights are spoilt: train it again.")
