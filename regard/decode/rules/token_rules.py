"""Rules about tokens that depend on the output so far: repetition penalty, repeated n-grams, suppressed sequences."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig

# Marks unused positions of a context.
_PADDING = -1


class TokenRules:
    """The rules of B slots of K hypotheses, with the definitions of transformers.

    The tokens so far are those of the prompt (language models) or `<sos>` (encoder-decoders), and the output, of at
    most `capacity` in all; they are aligned on the right.

    >>> config = DecodeConfig(method="greedy", no_repeat_ngram_size=2)
    >>> rules = TokenRules(config, 1, 9, torch.device("cpu"))
    >>> rules.set_slots([0], [[7, 5, 6, 5]])
    >>> rules.banned(torch.zeros(1, dtype=torch.long), 8).nonzero().tolist()  # 5 6 occurred already
    [[0, 0, 6]]
    """

    def __init__(self, config: DecodeConfig, slots: int, capacity: int, device: torch.device, begin: int = 0) -> None:
        hypotheses = config.beam if config.method == "beam" else config.n_best
        self.config, self.begin = config, begin
        """`begin` is the position of the first output token that is not forced."""
        self.so_far = torch.full((slots, hypotheses, capacity), _PADDING, dtype=torch.long, device=device)

    def set_slots(self, slots: Sequence[int], contexts: Sequence[Sequence[int]]) -> None:
        """The tokens before the outputs of new sentences in these slots."""
        width = self.so_far.shape[-1]
        padded = [[*[_PADDING] * (width - len(context)), *context[-width:]] for context in contexts]
        rows = torch.tensor(slots, device=self.so_far.device)
        self.so_far[rows] = torch.tensor(padded, dtype=torch.long, device=self.so_far.device)[:, None]

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.so_far = self.so_far[slots]

    def update(self, parents: Int[Tensor, "B K"] | None, tokens: Int[Tensor, "B K"]) -> None:
        """Append the tokens of new hypotheses to those of their parents."""
        past = self.so_far if parents is None else self.so_far.gather(1, parents[..., None].expand_as(self.so_far))
        self.so_far = torch.cat((past[..., 1:], tokens[..., None]), dim=-1)

    def penalize(
        self, scores: Float[Tensor, "B K C"], columns: Int[Tensor, "C"] | None = None
    ) -> Float[Tensor, "B K C"]:
        """Scores with the repetition penalty (Keskar et al. 2019): positive ones divided, negative ones multiplied.

        `columns` are the tokens of the columns; by default all.
        """
        penalty = self.config.repetition_penalty
        if penalty == 1:
            return scores
        if columns is None:
            used = _mark(self.so_far, scores.shape[-1])
        else:
            used = _mark(self.so_far, int(columns.max()) + 1)[..., columns]
        return torch.where(used, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def banned(
        self, step: Int[Tensor, "B"], vocab: int, columns: Int[Tensor, "C"] | None = None
    ) -> Bool[Tensor, "B K C"]:
        """The tokens that must not follow: they would repeat an n-gram or complete a suppressed sequence."""
        tokens, config = self.so_far, self.config
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
        excluded = [token for token in config.begin_suppress_tokens if token < vocab]
        if excluded:
            banned[..., excluded] |= (step == self.begin)[:, None, None]
        return banned if columns is None else banned[..., columns]


TOKEN_RULES = ("repetition_penalty", "no_repeat_ngram_size", "suppress_sequences", "begin_suppress_tokens")
"""options of `DecodeConfig` that exclude or penalize tokens"""


def has_token_rules(config: DecodeConfig) -> bool:
    """Whether a config has rules that depend on the tokens so far.

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
