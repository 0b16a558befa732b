"""Greedy decoding and sampling: one token per step, without search."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import Hypothesis, NBest
from regard.decode.interruption import check_interruption
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, SpecialTokens
from regard.decode.rules.constraints import Constraints, check_no_nan
from regard.decode.rules.lexical_constraints import LexicalConstraints, check_no_required
from regard.decode.search_history import SearchRecorder

# Removing finished sentences from the batch copies the caches of the others, which costs about as much as one step. It
# is done once at most this share of the sentences is unfinished.
COMPACTION_THRESHOLD = 0.75

ChooseToken = Callable[[Float[Tensor, "B K V"], int, Int[Tensor, "B"]], Int[Tensor, "B K"]]
# Called with (sentence index, token id) for every generated token; with several samples, for the first only.
OnToken = Callable[[int, int], None]


def greedy(
    model: Decodable,
    source: SourceBatch,
    config: DecodeConfig | None = None,
    *,
    special: SpecialTokens = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    max_total_len: int | None = None,
    lexical: Sequence[LexicalConstraints] | None = None,
    shortlist: Bool[Tensor, "B V"] | None = None,
    on_token: OnToken | None = None,
) -> list[NBest]:
    """Greedy decoding: the most probable token at every step until `<eos>`; one hypothesis per sentence.

    `lexical` are the forbidden phrases of each sentence; required ones need beam search. `shortlist` are the tokens
    that each output may contain.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> (best,) = greedy(model, pack([[4, 5, 3]]), DecodeConfig("greedy", min_len=2, max_len=2))[0]
    >>> len(best.ids), len(best.token_logprobs)
    (2, 3)
    """
    config = config or DecodeConfig(method="greedy")
    check_no_required(lexical, config.method)
    constraints = Constraints.from_config(source, config, special, prefixes, max_total_len, lexical, shortlist, model)
    recorder = SearchRecorder(config, special, len(constraints.limit), 1) if history else None
    return _decode_stepwise(
        model, source, config, constraints, lambda log_p, t, rows: log_p.argmax(-1), 1, on_token, recorder
    )


def sample(
    model: Decodable,
    source: SourceBatch,
    config: DecodeConfig | None = None,
    *,
    special: SpecialTokens = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    sample_indices: Sequence[int] | None = None,
    max_total_len: int | None = None,
    lexical: Sequence[LexicalConstraints] | None = None,
    shortlist: Bool[Tensor, "B V"] | None = None,
    on_token: OnToken | None = None,
) -> list[NBest]:
    """Sampling with temperature, top-k and top-p: `n_best` independent outputs per sentence, possibly equal ones.

    The random numbers of a sentence depend only on the seed and on its entry in `sample_indices` (by default its index
    in the batch), so the samples do not depend on how sentences are batched. `lexical` are the forbidden phrases of
    each sentence; required ones need beam search. `shortlist` are the tokens that each output may contain.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> [len(drawn) for drawn in sample(model, pack([[4, 3], [5, 3]]), DecodeConfig("sample", n_best=3, top_p=0.9))]
    [3, 3]
    """
    config = config or DecodeConfig(method="sample")
    check_no_required(lexical, config.method)
    constraints = Constraints.from_config(source, config, special, prefixes, max_total_len, lexical, shortlist, model)
    B = len(constraints.limit)
    if B == 0:
        return []
    steps = int(constraints.limit.max()) + 1
    shape = (steps, config.n_best)  # steps first, so that the first draws do not depend on the largest limit
    uniform = [np.random.default_rng((config.seed, index)).random(shape) for index in sample_indices or range(B)]
    draws = torch.from_numpy(np.stack(uniform)).float().to(constraints.limit.device)

    def choose(log_p: Float[Tensor, "B K V"], t: int, rows: Int[Tensor, "B"]) -> Int[Tensor, "B K"]:
        return draw(log_p, draws[rows, t], config.temperature, config.top_k, config.top_p)

    recorder = SearchRecorder(config, special, B, config.n_best) if history else None
    return _decode_stepwise(model, source, config, constraints, choose, config.n_best, on_token, recorder)


def draw(
    log_p: Float[Tensor, "B K V"],
    u: Float[Tensor, "B K"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, "B K"]:
    """Inverse transform sampling: the first token whose cumulative probability exceeds u, uniform in [0, 1).

    >>> draw(torch.tensor([[[0.5, 0.2, 0.3]]]).log(), torch.tensor([[0.6]])).item()
    1
    """
    order = None
    if top_k > 0:
        log_p, order = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    elif top_p < 1:
        log_p, order = log_p.sort(dim=-1, descending=True)
    # Unnormalized probabilities relative to the largest; a row of only -inf becomes zeros.
    largest = log_p.amax(-1, keepdim=True).clamp(min=torch.finfo(log_p.dtype).min)
    p = ((log_p - largest) / temperature).exp()
    total = p.cumsum(-1)
    if top_p < 1:
        p = p * (total - p < top_p * total[..., -1:])  # keep a token while the total before it is below top_p
        total = p.cumsum(-1)
    # u is kept below 1 by a few rounding errors, so that a last token of probability 0 is never drawn.
    threshold = u.clamp(max=1 - 2**-22)[..., None] * total[..., -1:]
    index = torch.searchsorted(total, threshold, right=True).clamp(max=total.shape[-1] - 1)
    return (index if order is None else order.gather(-1, index)).squeeze(-1)


@torch.no_grad()  # not inference_mode: a model may cache tensors here that are used in training later
def _decode_stepwise(
    model: Decodable,
    source: SourceBatch,
    config: DecodeConfig,
    constraints: Constraints,
    choose: ChooseToken,
    K: int,
    on_token: OnToken | None,
    recorder: SearchRecorder | None,
) -> list[NBest]:
    """Decode K hypotheses per sentence with `choose`, which picks the next token of every row."""
    B, special, device = len(constraints.limit), constraints.special, constraints.limit.device
    if B == 0:
        return []
    steps = int(constraints.limit.max()) + 1
    ids = torch.full((B, K, steps), special.pad, device=device)
    log_ps = torch.zeros((B, K, steps), device=device)
    log_prob = torch.zeros((B, K), device=device)
    lengths = torch.zeros((B, K), dtype=torch.long, device=device)

    rows = torch.arange(B, device=device)  # the sentences still in the batch
    is_live = torch.ones((B, K), dtype=torch.bool, device=device)
    last = torch.full((B, K), special.sos, device=device)
    min_limit, lexical = int(constraints.limit.min()), constraints.lexical
    state = model.start(source)
    if K > 1:
        state, constraints = model.reorder(state, rows[:, None].repeat(1, K)), constraints.repeat(K)
    for t in range(steps):
        check_interruption()
        logits, state = model.step(state, last)
        logits = constraints.restrict(logits)
        log_p = constraints.log_probs(logits, ids[rows, :, :t])
        last = choose(log_p, t, rows)
        token_log_p = log_p.gather(-1, last[..., None]).squeeze(-1)
        check_no_nan(token_log_p)
        if recorder is not None:
            recorder.add_step(rows, logits, log_p, last, constraints, t)
        last = constraints.unify_ends(last)
        is_live = is_live & (token_log_p > -torch.inf)  # -inf: no token is allowed, and the output ends without <eos>
        ids[rows, :, t] = torch.where(is_live, last, special.pad)
        log_ps[rows, :, t] = token_log_p
        log_prob[rows] += torch.where(is_live, token_log_p, 0.0)
        lengths[rows] += is_live
        is_token = is_live & (last != special.eos)
        is_live = is_token & (t < constraints.last_step)[:, None]
        if lexical is not None:
            constraints = constraints.advance(torch.arange(K).expand_as(last), last, is_live)
        if on_token is not None:
            for row, token, is_new in zip(rows.tolist(), last[:, 0].tolist(), is_token[:, 0].tolist()):
                if is_new:
                    on_token(row, token)
        remaining = is_live.any(1).nonzero().squeeze(1)
        if len(remaining) == 0:
            break
        # A finished row may stay in the batch only up to its limit: the model may have no positions beyond it.
        if t >= min_limit or len(remaining) <= COMPACTION_THRESHOLD * len(rows):
            state = model.reorder(state, remaining[:, None] * K + torch.arange(K, device=device))
            rows, is_live, last, constraints = (
                rows[remaining],
                is_live[remaining],
                last[remaining],
                constraints.select_sentences(remaining),
            )
            min_limit = int(constraints.limit.min())

    score = log_prob / lengths.clamp(min=1) ** config.length_penalty
    results = gather_hypotheses(ids, log_ps, lengths, log_prob, score, special.eos)
    for result, search in zip(results, recorder.histories if recorder is not None else ()):
        result.history = search
    return results


def gather_hypotheses(
    ids: Int[Tensor, "B K T"],
    log_ps: Float[Tensor, "B K T"],
    lengths: Int[Tensor, "B K"],
    log_prob: Float[Tensor, "B K"],
    score: Float[Tensor, "B K"],
    eos: int,
) -> list[NBest]:
    """Convert tensors to hypotheses, best first; rows with a score of -inf are left out."""
    results = []
    for sentence in zip(*(tensor.tolist() for tensor in (ids, log_ps, lengths, log_prob, score))):
        hypotheses = [
            Hypothesis([i for i in tokens[:n] if i != eos], rank_score, total, log_probs[:n])
            for tokens, log_probs, n, total, rank_score in zip(*sentence)
            if rank_score > -float("inf")
        ]
        results.append(NBest(sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)))
    return results
