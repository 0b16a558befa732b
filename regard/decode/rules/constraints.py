"""Constraints on the next token: banned tokens, forced prefixes, minimum and maximum length, repetition, phrases."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.protocol import SourceBatch, SpecialTokens, continues_source
from regard.decode.rules.lexical_constraints import LexicalConstraints, LexicalTracker
from regard.decode.rules.token_rules import TokenRules
from regard.errors import RegardError


@dataclass(frozen=True)
class Constraints:
    """Constraints of B sentences. Disallowed tokens get a log-probability of -inf; the others keep theirs."""

    prefix: Int[Tensor, "B P"]
    """Tokens that each output must begin with, padded with -1."""
    limit: Int[Tensor, "B"]
    """Maximum number of tokens of each output, without `<eos>`."""
    min_len: int
    special: SpecialTokens
    allow_unknown: bool = True
    """Whether `<unk>` is allowed."""
    lexical: LexicalTracker | None = None
    """Required and forbidden phrases, with the progress of each hypothesis."""
    shortlist: Bool[Tensor, "B V"] | None = None
    """Tokens of the shortlist of each sentence."""
    suppressed: frozenset[int] = frozenset()
    """Tokens that are never generated, in addition to special ones."""
    rules: TokenRules | None = None
    """Rules that depend on the tokens so far."""
    ends_at_limit: bool = False
    """Whether an output that has its maximum length ends there without `<eos>`, as texts of language models do."""
    is_beam_search: bool = False
    """Whether the repetition penalty applies to log-probabilities, like in transformers, instead of logits."""

    @classmethod
    def from_config(
        cls,
        source: SourceBatch,
        config: DecodeConfig,
        special: SpecialTokens,
        prefixes: Sequence[Sequence[int]] | None,
        max_total_len: int | None = None,
        lexical: Sequence[LexicalConstraints] | None = None,
        shortlist: Bool[Tensor, "B V"] | None = None,
        model: Any = None,
    ) -> "Constraints":
        """The constraints for a batch, from the decoding options, with one forced prefix per sentence and the required
        and forbidden phrases of each.

        `max_total_len` limits the length of source and output together, for models whose output continues the source;
        rules about repetition need the `model`, to know whether it is one. A prefix raises the limit of its sentence if
        necessary; a prefix beyond `max_total_len` is an error. So are required phrases that do not fit.
        """
        lengths = source.offsets.lengths.tolist()
        prefixes = [()] * len(lengths) if prefixes is None else prefixes
        if len(prefixes) != len(lengths):
            raise RegardError(
                f"Expected one prefix per sentence: got {len(prefixes)} prefixes for {len(lengths)} sentences.",
                "Pass an empty prefix for a sentence without one.",
            )
        if any(token in (special.pad, special.sos, special.eos) for prefix in prefixes for token in prefix):
            raise RegardError("A forced prefix contains <pad>, <sos> or <eos>.", "Pass only the tokens after <sos>.")
        prefix_len = max(map(len, prefixes), default=0)
        padded = [[*prefix, *[-1] * (prefix_len - len(prefix))] for prefix in prefixes]
        limits = [max(config.limit(length), len(prefix)) for length, prefix in zip(lengths, prefixes)]
        if max_total_len is not None:
            for i, (length, prefix) in enumerate(zip(lengths, prefixes), 1):
                if prefix and length + len(prefix) > max_total_len:
                    raise RegardError(
                        f"Prefix {i} has {len(prefix)} tokens, more than the {max(0, max_total_len - length)} that fit "
                        f"after a prompt of {length} tokens (the model's limit is {max_total_len}).",
                        "Shorten the prefix or the prompt.",
                    )
            limits = [max(0, min(limit, max_total_len - length)) for limit, length in zip(limits, lengths)]
        device = source.offsets.starts.device
        is_causal = continues_source(model)
        begin = int(special.forced is not None and not is_causal)
        return cls(
            prefix=torch.tensor(padded, dtype=torch.long, device=device).view(len(lengths), prefix_len),
            limit=torch.tensor(limits, dtype=torch.long, device=device),
            min_len=config.min_len,
            special=special,
            allow_unknown=config.unknown,
            lexical=None if lexical is None else LexicalTracker.start(lexical, limits, prefixes),
            shortlist=None if shortlist is None else shortlist.to(device),
            suppressed=suppressed_tokens(config),
            rules=TokenRules.from_config(
                config, source_sequences(source) if is_causal else [[special.sos]] * len(lengths), device, begin
            ),
            ends_at_limit=is_causal,
            is_beam_search=config.method == "beam",
        )

    def select_sentences(self, rows: Int[Tensor, "B2"]) -> "Constraints":
        """The constraints of these sentences."""
        lexical = None if self.lexical is None else self.lexical.select_sentences(rows.tolist())
        shortlist = None if self.shortlist is None else self.shortlist[rows]
        rules = None if self.rules is None else self.rules.select_sentences(rows)
        return replace(
            self, prefix=self.prefix[rows], limit=self.limit[rows], lexical=lexical, shortlist=shortlist, rules=rules
        )

    def repeat(self, K: int) -> "Constraints":
        """The constraints of K hypotheses per sentence instead of one."""
        return self if self.lexical is None else replace(self, lexical=self.lexical.repeat(K))

    def advance(
        self, parent: Int[Tensor, "B K"], token: Int[Tensor, "B K"], is_live: Bool[Tensor, "B K"]
    ) -> "Constraints":
        """The lexical constraints after each new hypothesis has extended a hypothesis (`parent`) by a token."""
        assert self.lexical is not None
        return replace(self, lexical=self.lexical.advance(parent.tolist(), token.tolist(), is_live.tolist()))

    def restrict(self, logits: Float[Tensor, "B K V"]) -> Float[Tensor, "B K V"]:
        """The logits, with -inf for tokens that are not in the shortlist of the sentence."""
        return logits if self.shortlist is None else logits.masked_fill(~self.shortlist[:, None], -torch.inf)

    def log_probs(self, logits: Float[Tensor, "B K V"], ids: Int[Tensor, "B K T"]) -> Float[Tensor, "B K V"]:
        """Constrained log-probabilities of the token after the output so far (`ids`)."""
        t = ids.shape[-1]
        if self.rules is not None and not self.is_beam_search:
            logits = self.rules.penalize(logits.float(), ids)
        log_p = log_softmax(logits)
        if self.rules is not None and self.is_beam_search:
            log_p = self.rules.penalize(log_p, ids)
        forced = self.forced_tokens(t)
        is_forced = forced >= 0
        only = None
        if is_forced.any():
            token = forced.clamp(min=0)[:, None, None].expand(-1, log_p.shape[1], 1)
            only = torch.full_like(log_p, -torch.inf).scatter(-1, token, log_p.gather(-1, token))
        for token_id in self._banned | (set(self.special.ends) if t < self.min_len else set()):
            log_p[..., token_id] = -torch.inf
        if self.rules is not None:
            log_p.masked_fill_(self.rules.banned(ids, log_p.shape[-1]), -torch.inf)
        if self.lexical is not None:
            allowed = self.lexical.allowed(t, log_p.shape[-1], self.special.eos)
            for other in self.special.other_eos:
                allowed[..., other] = allowed[..., self.special.eos]
            refused = ~torch.from_numpy(allowed).to(log_p.device)
            log_p.masked_fill_(refused, -torch.inf)
            if only is not None:
                only.masked_fill_(refused & ~self._has_prefix(t)[:, None, None], -torch.inf)
        return log_p if only is None else torch.where(is_forced[:, None, None], only, log_p)

    def _has_prefix(self, t: int) -> Bool[Tensor, "B"]:
        """Whether the prefix of each sentence has a token at position t."""
        return self.prefix[:, t] >= 0 if t < self.prefix.shape[1] else torch.zeros_like(self.limit, dtype=torch.bool)

    def forced_tokens(self, t: int) -> Int[Tensor, "B"]:
        """The only token allowed at position t, or -1 where there is a choice."""
        forced = torch.where(t >= self.limit, self.special.eos, -1)
        if t < self.prefix.shape[1]:
            forced = torch.where(self.prefix[:, t] >= 0, self.prefix[:, t], forced)
        return forced

    @property
    def last_step(self) -> Int[Tensor, "B"]:
        """The step after which the search of each sentence ends."""
        return last_steps(self.limit, self.ends_at_limit)

    def refusal_reason(self, row: int, beam: int, t: int, token: int) -> str:
        """The constraint that disallows a token at position t of a hypothesis: see `RefusedToken`."""
        if self._has_prefix(t)[row]:
            return "prefix"
        if t >= self.limit[row]:
            return "limit"
        if token in self.special.ends and t < self.min_len:
            return "min_len"
        if token in self._banned:
            return "suppressed" if token in self.suppressed else "special"
        if self.lexical is None:
            return "suppressed"
        return self.lexical.refusal_reason(row, beam, token, self.special.eos)

    @property
    def _banned(self) -> set[int]:
        """Tokens that are never generated."""
        return banned_tokens(self.special, self.allow_unknown, self.suppressed)

    def unify_ends(self, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The tokens, with `eos` for every other token that ends an output."""
        for other in self.special.other_eos:
            tokens = torch.where(tokens == other, self.special.eos, tokens)
        return tokens


def suppressed_tokens(config: DecodeConfig) -> frozenset[int]:
    """The tokens that a config suppresses wherever they occur."""
    return frozenset(one for one, *others in config.suppress_sequences if not others)


def banned_tokens(special: SpecialTokens, allow_unknown: bool, suppressed: frozenset[int]) -> set[int]:
    """Tokens that are never generated. `<eos>` is one if it is suppressed: outputs then end at their maximum length.

    >>> banned_tokens(SpecialTokens(), True, frozenset({3}))
    {0, 2, 3}
    """
    banned = {special.pad, special.sos} | (set() if allow_unknown else {special.unk})
    return (banned - set(special.ends)) | suppressed  # in some tokenizers <pad> or <sos> has the id of <eos>


def last_steps(limit: Int[Tensor, "B"], ends_at_limit: bool) -> Int[Tensor, "B"]:
    """The step after which the search for outputs of at most `limit` tokens ends: of `<eos>`, or of the last token."""
    return (limit - 1).clamp(min=0) if ends_at_limit else limit


def source_sequences(source: SourceBatch) -> list[list[int]]:
    """The sequences of a packed batch."""
    starts = source.offsets.starts.tolist()
    ids = source.ids.tolist()
    return [ids[start:end] for start, end in pairwise(starts)]


def log_softmax(logits: Float[Tensor, "B K V"]) -> Float[Tensor, "B K V"]:
    """Log-softmax in float32. A row of only -inf stays -inf, where torch returns NaN. The result is a new tensor."""
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    is_empty = logits.amax(-1) == -torch.inf
    if is_empty.any():
        log_p[is_empty] = -torch.inf
    return log_p


def check_no_nan(log_p: Float[Tensor, "..."]) -> None:
    """Raise an error for NaN. argmax and topk rank NaN highest, so checking the chosen values is enough."""
    if log_p.isnan().any():
        raise RegardError(
            "The model's output contains NaN.", "Its weights are corrupt or training diverged: train it again."
        )
