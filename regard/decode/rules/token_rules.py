"""Rules about tokens that depend on the output so far: repetition penalty, repeated n-grams, suppressed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig

# Marks unused positions of a context.
_PADDING = -1


@dataclass(frozen=True)
class TokenRules:
    """The rules of B sentences, with the definitions of transformers.

    The tokens so far are those of the prompt (language models) or `<sos>` (encoder-decoders), and the output.

    >>> config = DecodeConfig(method="greedy", no_repeat_ngram_size=2)
    >>> rules = TokenRules.from_config(config, [[7, 5, 6, 5]], torch.device("cpu"))
    >>> rules.banned(torch.zeros((1, 1, 0), dtype=torch.long), 8).nonzero().tolist()  # 5 6 occurred already
    [[0, 0, 6]]
    """

    config: DecodeConfig
    context: Int[Tensor, "B C"]
    """Tokens before the output, padded on the left."""
    begin: int = 0
    """Position of the first output token that is not forced."""

    @classmethod
    def from_config(
        cls, config: DecodeConfig, contexts: Sequence[Sequence[int]], device: torch.device, begin: int = 0
    ) -> "TokenRules | None":
        """The rules of sentences with these contexts; None if the config has none."""
        if not has_token_rules(config):
            return None
        length = max(map(len, contexts), default=0)
        padded = [[*[_PADDING] * (length - len(context)), *context] for context in contexts]
        return cls(config, torch.tensor(padded, dtype=torch.long, device=device).view(len(contexts), length), begin)

    def select_sentences(self, rows: Int[Tensor, "B2"]) -> "TokenRules":
        """The rules of these sentences."""
        return replace(self, context=self.context[rows])

    def penalize(self, scores: Float[Tensor, "B K V"], ids: Int[Tensor, "B K T"]) -> Float[Tensor, "B K V"]:
        """Scores with the repetition penalty (Keskar et al. 2019): positive ones divided, negative ones multiplied."""
        penalty = self.config.repetition_penalty
        if penalty == 1:
            return scores
        used = _mark(self._tokens(ids), scores.shape[-1])
        return torch.where(used, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def banned(self, ids: Int[Tensor, "B K T"], vocab: int) -> Bool[Tensor, "B K V"]:
        """The tokens that must not follow: they would repeat an n-gram or complete a suppressed sequence."""
        tokens, config = self._tokens(ids), self.config
        size = config.no_repeat_ngram_size
        following = tokens.new_full((*tokens.shape[:2], 1), _PADDING)
        if 0 < size <= tokens.shape[-1]:
            windows = tokens.unfold(-1, size, 1)
            prefix = tokens[..., None, tokens.shape[-1] - size + 1 :]
            repeats = (windows[..., :-1] == prefix).all(-1) & (windows[..., 0] >= 0)
            following = windows[..., -1].masked_fill(~repeats, _PADDING)
        banned = _mark(following, vocab)
        for *start, last in config.suppress_sequences:
            if len(start) <= tokens.shape[-1] and last < vocab:
                end = tokens[..., tokens.shape[-1] - len(start) :]
                banned[..., last] |= (end == torch.tensor(start, dtype=torch.long, device=end.device)).all(-1)
        if ids.shape[-1] == self.begin:
            banned[..., [token for token in config.begin_suppress_tokens if token < vocab]] = True
        return banned

    def _tokens(self, ids: Int[Tensor, "B K T"]) -> Int[Tensor, "B K C+T"]:
        return torch.cat((self.context[:, None].expand(-1, ids.shape[1], -1), ids), dim=-1)


TOKEN_RULES = ("repetition_penalty", "no_repeat_ngram_size", "suppress_sequences", "begin_suppress_tokens")
"""options of `DecodeConfig` that exclude or penalize tokens"""


def has_token_rules(config: DecodeConfig) -> bool:
    """Whether a config has rules that the decoding engine does not implement.

    >>> has_token_rules(DecodeConfig(suppress_sequences=((5,),))), has_token_rules(DecodeConfig(repetition_penalty=1.2))
    (False, True)
    """
    return bool(
        config.repetition_penalty != 1
        or config.no_repeat_ngram_size
        or config.begin_suppress_tokens
        or any(len(sequence) > 1 for sequence in config.suppress_sequences)
    )


def _mark(tokens: Int[Tensor, "B K n"], vocab: int) -> Bool[Tensor, "B K V"]:
    """A mask of the tokens in each row."""
    index = tokens.masked_fill((tokens < 0) | (tokens >= vocab), vocab)
    marks = torch.zeros((*tokens.shape[:2], vocab + 1), dtype=torch.bool, device=tokens.device)
    return marks.scatter_(-1, index, True)[..., :vocab]
