"""What may come next in every slot: banned tokens, forced prefixes, lengths, a shortlist, repetition, phrases."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.phrases import LexicalConstraints, PhraseRules, allocate_beam
from regard.decode.protocol import SpecialTokens
from regard.decode.request import DecodeConfig, Request
from regard.decode.shortlist import SlotShortlist
from regard.errors import RegardError

# The maxima of about this many strided groups of tokens show which groups contain the best tokens.
_GROUPS = 256
# Marks unused positions of a context.
_PADDING = -1
TOKEN_RULES = ("repetition_penalty", "no_repeat_ngram_size", "suppress_sequences", "begin_suppress_tokens")
"""options of `DecodeConfig` that exclude or penalize tokens"""


class Constraints:
    """The constraints of B slots, whose sentences may be at different steps.

    Disallowed tokens get a log-probability of -inf; the others keep theirs. Rules about repetition and phrases are
    parts that exist only if they are needed: each excludes tokens, and is updated after each step.

    >>> constraints = Constraints(2, 0, DecodeConfig(), SpecialTokens(), torch.device("cpu"))
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
        capacity: int = 0,
    ) -> None:
        self.config, self.special, self.ends_at_limit = config, special, ends_at_limit
        self.min_len = config.min_len
        self.limit = torch.zeros(slots, dtype=torch.long, device=device)
        self.prefix = torch.full((slots, prefix_len), -1, dtype=torch.long, device=device)
        self.suppressed = frozenset(token for token, *others in config.suppress_sequences if not others)
        self.banned = tuple(sorted(banned_tokens(special, config.unknown, self.suppressed)))
        # With a shortlist, logits have a column per token of the shortlist instead of one per token of the vocabulary.
        self.shortlist: SlotShortlist | None = None
        self.banned_columns, self.end_columns = self.banned, special.ends
        self.repetition: TokenRules | None = None
        if has_token_rules(config):
            begin = int(special.forced is not None and not ends_at_limit)
            self.repetition = TokenRules(config, slots, capacity, device, begin)
        self.phrases: PhraseRules | None = None

    @property
    def hypotheses(self) -> int:
        return self.config.beam if self.config.method == "beam" else self.config.n_best

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

    def set_phrases(
        self, slots: Sequence[int], phrases: Sequence[LexicalConstraints | None], limits: Sequence[int]
    ) -> None:
        """The required and forbidden phrases of new sentences in these slots."""
        if self.phrases is None:
            self.phrases = PhraseRules(len(self.limit), self.hypotheses)
        # In beam search only the first hypothesis is used at the first step.
        used = 1 if self.config.method == "beam" else self.hypotheses
        self.phrases.set_slots(slots, phrases, limits, used)

    def _update_columns(self) -> None:
        assert self.shortlist is not None
        column_of = {token: column for column, token in enumerate(self.shortlist.tokens.tolist())}
        self.banned_columns = tuple(column_of[token] for token in self.banned if token in column_of)
        self.end_columns = tuple(column_of[token] for token in self.special.ends)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots."""
        self.limit, self.prefix = self.limit[slots], self.prefix[slots]
        if self.shortlist is not None:
            self.shortlist.select_slots(slots)
            self._update_columns()
        if self.repetition is not None:
            self.repetition.select_slots(slots)
        if self.phrases is not None:
            self.phrases.select_slots(slots.tolist())

    def release(self, slots: Sequence[int]) -> None:
        """Forget the phrases of these slots."""
        if self.phrases is not None:
            self.phrases.release(slots)

    def update(self, parents: Int[Tensor, "B K"] | None, tokens: Int[Tensor, "B K"], live: Bool[Tensor, "B K"]) -> None:
        """Extend hypotheses by tokens; `parents` are those of the new beams, if they changed."""
        if self.repetition is not None:
            self.repetition.update(parents, tokens)
        if self.phrases is not None:
            self.phrases.update(None if parents is None else parents.tolist(), tokens.tolist(), live.tolist())

    def add_required_tokens(
        self, log_p: Float[Tensor, "B K V"], top: Float[Tensor, "B K C"], ids: Int[Tensor, "B K C"]
    ) -> tuple[Float[Tensor, "B K C2"], Int[Tensor, "B K C2"]]:
        """The candidates of each beam and, in addition, the tokens that begin or continue a required phrase."""
        assert self.phrases is not None
        next_tokens = self.phrases.next_tokens()
        width = max(len(tokens) for sentence in next_tokens for tokens in sentence)
        padded = [[tokens + [-1] * (width - len(tokens)) for tokens in sentence] for sentence in next_tokens]
        added = torch.tensor(padded, dtype=torch.long, device=ids.device).view(*ids.shape[:2], width)
        columns = self.columns(torch.where(added < 0, self.special.eos, added))
        is_duplicate = (added[..., None] == ids[..., None, :]).any(-1)
        added_log_p = log_p.gather(-1, columns).masked_fill((added < 0) | is_duplicate, -torch.inf)
        return torch.cat((top, added_log_p), dim=-1), torch.cat((ids, added.clamp(min=0)), dim=-1)

    def allocate_beam(
        self, total: Float[Tensor, "B N"], ids: Int[Tensor, "B K C"], count: int
    ) -> tuple[Float[Tensor, "B P"], Int[Tensor, "B P"], Int[Tensor, "B P"]]:
        """The candidates of dynamic beam allocation: log-probabilities, best first, indices, and ranks in its order."""
        phrases, eos = self.phrases, self.special.eos
        assert phrases is not None
        check_no_nan(total)
        index, rank = torch.zeros((2, len(total), count), dtype=torch.long)
        best = torch.full((len(total), count), -torch.inf)
        totals = total.cpu()
        for slot, beams in enumerate(ids.tolist()):
            missing = np.concatenate([phrases.missing_tokens(slot, k, tokens, eos) for k, tokens in enumerate(beams)])
            kept = torch.from_numpy(allocate_beam(totals[slot].numpy(), missing, count))
            best[slot, : len(kept)], order = totals[slot][kept].sort(descending=True, stable=True)
            index[slot, : len(kept)], rank[slot, : len(kept)] = kept[order], order
        return best.to(total.device), index.to(total.device), rank.to(total.device)

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
        """The step after which the search of each slot ends: that of `<eos>`, or of the last token."""
        return (self.limit - 1).clamp(min=0) if self.ends_at_limit else self.limit

    def columns(self, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The columns of tokens in the logits."""
        return tokens if self.shortlist is None else self.shortlist.columns(tokens)

    def tokens(self, columns: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The tokens of columns of the logits."""
        return columns if self.shortlist is None else self.shortlist.tokens[columns]

    def is_end(self, tokens: Int[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
        """Where tokens end an output."""
        ends = tokens == self.special.eos
        for other in self.special.other_eos:
            ends = ends | (tokens == other)
        return ends

    def bans_eos(self, step: Int[Tensor, "B"]) -> Bool[Tensor, "B"] | None:
        """Where the output is still too short to end; None: nowhere, at no step."""
        return step < self.min_len if self.min_len else None

    @property
    def has_rules(self) -> bool:
        """Whether parts depend on the tokens so far, so that all log-probabilities are needed."""
        return self.repetition is not None or self.phrases is not None

    def log_probs(self, logits: Float[Tensor, "B K C"], step: Int[Tensor, "B"]) -> Float[Tensor, "B K C"]:
        """The log-probability of the token of every column; -inf for disallowed ones."""
        logits = self.restrict(logits)
        rules, is_beam_search = self.repetition, self.config.method == "beam"
        tokens = None if self.shortlist is None else self.shortlist.tokens
        # The repetition penalty applies to log-probabilities in beam search, like in transformers, else to logits.
        if rules is not None and not is_beam_search:
            logits = rules.penalize(logits, tokens)
        log_p = logits - log_sum_exp(logits)
        if rules is not None and is_beam_search:
            log_p = rules.penalize(log_p, tokens)
        refused = torch.zeros_like(log_p, dtype=torch.bool)
        for column in self.banned_columns:
            refused[..., column] = True
        bans_eos = self.bans_eos(step)
        if bans_eos is not None:
            for column in self.end_columns:
                refused[..., column] |= bans_eos[:, None]
        if rules is not None:
            refused |= rules.banned(step, log_p.shape[-1] if tokens is None else self._vocab, tokens)
        forced = self.forced_tokens(step)[:, None, None]
        columns = torch.arange(log_p.shape[-1], device=log_p.device)
        is_other = columns != self.columns(forced.clamp(min=0))
        if self.phrases is not None:
            by_phrases = self._refused_by_phrases(step, log_p.shape[-1]).to(log_p.device)
            refused |= by_phrases
            # A prefix may contain anything, but not every output may end at its limit.
            is_other = is_other | (by_phrases & ~self._has_prefix(step)[:, None, None])
        return log_p.masked_fill_(torch.where(forced >= 0, is_other, refused), -torch.inf)

    @property
    def _vocab(self) -> int:
        assert self.shortlist is not None
        return self.shortlist.allowed.shape[1]

    def restrict(self, logits: Float[Tensor, "B K C"]) -> Float[Tensor, "B K C"]:
        """The logits in float32, with -inf for tokens that are not in the shortlist of the slot."""
        return logits.float() if self.shortlist is None else self.shortlist.restrict(logits.float())

    def _refused_by_phrases(self, step: Int[Tensor, "B"], columns: int) -> Bool[Tensor, "B K C"]:
        assert self.phrases is not None
        vocab = columns if self.shortlist is None else self._vocab
        allowed = torch.from_numpy(self.phrases.allowed(step.tolist(), vocab, self.special.ends))
        return ~allowed if self.shortlist is None else ~allowed[..., self.shortlist.tokens.cpu()]

    def _has_prefix(self, step: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
        """Whether the prefix of each sentence has a token at this step."""
        width = self.prefix.shape[1]
        if not width:
            return torch.zeros_like(step, dtype=torch.bool)
        return (step < width) & (self.prefix.gather(1, step.clamp(max=width - 1)[:, None])[:, 0] >= 0)

    def refusal_reason(self, slot: int, beam: int, step: int, token: int) -> str:
        """The constraint that disallows a token of a hypothesis at a step: see `RefusedToken`."""
        if step < self.prefix.shape[1] and self.prefix[slot, step] >= 0:
            return "prefix"
        if step >= self.limit[slot]:
            return "limit"
        if token in self.special.ends and step < self.min_len:
            return "min_len"
        if token in self.banned:
            return "suppressed" if token in self.suppressed else "special"
        if self.phrases is None or self.phrases.phrases[slot] is None:
            return "suppressed"
        return self.phrases.refusal_reason(slot, beam, token, self.special.eos)


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


def banned_tokens(special: SpecialTokens, allow_unknown: bool, suppressed: frozenset[int]) -> set[int]:
    """Tokens that are never generated. `<eos>` is one if it is suppressed: outputs then end at their maximum length.

    >>> banned_tokens(SpecialTokens(), True, frozenset({3}))
    {0, 2, 3}
    """
    banned = {special.pad, special.sos} | (set() if allow_unknown else {special.unk})
    return (banned - set(special.ends)) | suppressed  # in some tokenizers <pad> or <sos> has the id of <eos>


def length_limits(request: Request) -> list[int]:
    """The maximum number of tokens of each output, without `<eos>`; checks the prefixes.

    A prefix raises the limit of its sentence if necessary; one beyond the maximum length of source and output together
    is an error.

    >>> length_limits(Request([[4] * 3, [4] * 5], DecodeConfig(max_ratio=1.0, max_extra=0), prefixes=[[], [4] * 7]))
    [3, 7]
    """
    lengths, prefixes, special = list(map(len, request.sources)), request.prefixes, request.special
    by_length = {length: request.config.limit(length) for length in set(lengths)}
    limits = [by_length[length] for length in lengths]
    if prefixes is not None:
        if len(prefixes) != len(lengths):
            raise RegardError(
                f"Expected one prefix per sentence: got {len(prefixes)} prefixes for {len(lengths)} sentences.",
                "Pass an empty prefix for a sentence without one.",
            )
        if any(token in (special.pad, special.sos, special.eos) for prefix in prefixes for token in prefix):
            raise RegardError("A forced prefix contains <pad>, <sos> or <eos>.", "Pass only the tokens after <sos>.")
        limits = [max(limit, len(prefix)) for limit, prefix in zip(limits, prefixes)]
    max_total_len = request.max_total_len
    if max_total_len is not None:
        for i, (length, prefix) in enumerate(zip(lengths, prefixes or ()), 1):
            if prefix and length + len(prefix) > max_total_len:
                raise RegardError(
                    f"Prefix {i} has {len(prefix)} tokens, more than the {max(0, max_total_len - length)} that fit "
                    f"after a prompt of {length} tokens (the model's limit is {max_total_len}).",
                    "Shorten the prefix or the prompt.",
                )
        limits = [max(0, min(limit, max_total_len - length)) for limit, length in zip(limits, lengths)]
    return limits


def best_tokens(
    logits: Float[Tensor, "B K V"], count: int, constraints: Constraints, step: Int[Tensor, "B"]
) -> tuple[Float[Tensor, "B K C"], Int[Tensor, "B K C"]]:
    """The log-probabilities and ids of the `count` most probable allowed tokens (at most V), best first.

    With a shortlist, V is the number of its tokens, and each slot is normalized over its own ones. Disallowed tokens
    have a log-probability of -inf; the others keep theirs. `logits` are overwritten.

    >>> from regard.decode.request import DecodeConfig
    >>> from regard.decode.protocol import SpecialTokens
    >>> constraints = Constraints(1, 0, DecodeConfig(), SpecialTokens(), torch.device("cpu"))
    >>> constraints.set_slots([0], [9], [[]])
    >>> log_p, ids = best_tokens(torch.tensor([[[0.0, 0.0, 0.0, 0.0, 2.0, 1.0]]]), 2, constraints, torch.tensor([0]))
    >>> ids
    tensor([[[4, 5]]])
    """
    B, K, V = logits.shape
    logits = constraints.restrict(logits)
    log_sum = log_sum_exp(logits)
    forced = constraints.forced_tokens(step)
    forced_log_p = logits.gather(-1, constraints.columns(forced.clamp(min=0))[:, None, None].expand(-1, K, 1))
    for column in constraints.banned_columns:
        logits[..., column] = -torch.inf
    bans_eos = constraints.bans_eos(step)
    if bans_eos is not None:
        for column in constraints.end_columns:
            logits[..., column].masked_fill_(bans_eos[:, None], -torch.inf)
    top, columns = top_logits(logits.view(B * K, V), min(count, V))
    top, ids = top.view(B, K, -1), constraints.tokens(columns).view(B, K, -1)
    is_forced = (forced >= 0)[:, None, None]
    rest = torch.full_like(top[..., 1:], -torch.inf)
    top = torch.where(is_forced, torch.cat((forced_log_p, rest), dim=-1), top)
    ids = torch.where(is_forced, forced[:, None, None], ids)
    return top - log_sum, ids


def top_logits(logits: Float[Tensor, "R V"], count: int) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """torch.topk over the last axis, faster for a large vocabulary on a CPU.

    The `count` best tokens are in the `count` groups with the largest maxima. Groups are strided (token i belongs to
    group i mod G), so that their maxima are one vectorized pass over contiguous memory.

    >>> top_logits(torch.arange(5000.0)[None], 2)[1]
    tensor([[4999, 4998]])
    """
    V = logits.shape[1]
    size = V // _GROUPS  # tokens per group
    if size < 2 * count or logits.is_cuda:
        return logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
    grouped = logits[:, : size * _GROUPS].unflatten(1, (size, _GROUPS))
    maxima = grouped.amax(1)
    group = maxima.max(1, keepdim=True)[1] if count == 1 else maxima.topk(count, dim=1)[1]
    members = grouped.gather(2, group[:, None].expand(-1, size, -1)).flatten(1)
    candidates = torch.cat((members, logits[:, size * _GROUPS :]), dim=1)
    top, index = candidates.max(1, keepdim=True) if count == 1 else candidates.topk(count, dim=1)
    within, remainder = index.div(count, rounding_mode="floor"), index - members.shape[1]
    ids = within * _GROUPS + group.gather(1, index % count)
    return top, torch.where(remainder >= 0, size * _GROUPS + remainder, ids)


def log_softmax(logits: Float[Tensor, "B K V"]) -> Float[Tensor, "B K V"]:
    """Log-softmax in float32. A row of only -inf stays -inf, where torch returns NaN. The result is a new tensor."""
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    is_empty = logits.amax(-1) == -torch.inf
    if is_empty.any():
        log_p[is_empty] = -torch.inf
    return log_p


def log_sum_exp(logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n 1"]:
    """log Σ exp(logits) of each row, or 0 for a row of only -inf, whose log-probabilities then stay -inf.

    From the softmax of the largest logit: on a CPU twice as fast as torch.logsumexp.

    >>> log_sum_exp(torch.zeros(1, 4)).exp()
    tensor([[4.]])
    """
    if logits.is_cuda:
        log_sum = logits.logsumexp(-1, keepdim=True)
        return log_sum.masked_fill_(log_sum == -torch.inf, 0.0)
    largest = logits.amax(-1, keepdim=True)
    log_sum = largest - logits.softmax(-1).amax(-1, keepdim=True).log()
    return log_sum.masked_fill_(largest == -torch.inf, 0.0)


def check_no_nan(log_p: Float[Tensor, "..."]) -> None:
    """Raise an error for NaN. argmax and topk rank NaN highest, so checking the chosen values is enough."""
    if log_p.isnan().any():
        raise RegardError(
            "The model's output contains NaN.", "Its weights are corrupt or training diverged: train it again."
        )
