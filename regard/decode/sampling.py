"""One token after another, none taken back: the most probable one (greedy), or one drawn at random (sample)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.constraints import Constraints, refuse_nan
from regard.decode.decode_config import DecodeConfig
from regard.decode.hypotheses import Hypothesis, NBest
from regard.decode.protocol import SPECIAL, Decodable, Source, Special
from regard.decode.search_history import Watch

# Dropping finished sentences from the batch copies the caches of the others: about what one step costs. Greedy
# decoding does it when that saves a quarter of every step to come.
KEEP_WHOLE = 0.75

Choice = Callable[[Float[Tensor, "B K V"], int, Int[Tensor, "B"]], Int[Tensor, "B K"]]
# Is told the sentence's place in the batch and each token as it is chosen: of several samples, the first one's.
OnToken = Callable[[int, int], None]


def greedy(
    model: Decodable,
    source: Source,
    config: DecodeConfig | None = None,
    *,
    special: Special = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    room: int | None = None,
    on_token: OnToken | None = None,
) -> list[NBest]:
    """The most probable token each time, until `<eos>`; one hypothesis for each sentence.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> (best,) = greedy(model, pack([[4, 5, 3]]), DecodeConfig("greedy", min_len=2, max_len=2))[0]
    >>> len(best.ids), len(best.token_logprobs)
    (2, 3)
    """
    config = config or DecodeConfig(method="greedy")
    constraints = Constraints.of(source, config, special, prefixes, room)
    watch = Watch(config, special, len(constraints.limit), 1) if history else None
    return _one_by_one(model, source, config, constraints, lambda log_p, t, rows: log_p.argmax(-1), 1, on_token, watch)


def sample(
    model: Decodable,
    source: Source,
    config: DecodeConfig | None = None,
    *,
    special: Special = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    numbers: Sequence[int] | None = None,
    room: int | None = None,
    on_token: OnToken | None = None,
) -> list[NBest]:
    """`n_best` outputs drawn independently for each sentence, by temperature, top-k and top-p; equal ones may occur.

    The draws of a sentence depend on the seed and the sentence's number (by default its place in the batch), not on
    its neighbours: whatever the batches, the same seed gives the same samples.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> [len(drawn) for drawn in sample(model, pack([[4, 3], [5, 3]]), DecodeConfig("sample", n_best=3, top_p=0.9))]
    [3, 3]
    """
    config = config or DecodeConfig(method="sample")
    constraints = Constraints.of(source, config, special, prefixes, room)
    B = len(constraints.limit)
    if B == 0:
        return []
    steps = int(constraints.limit.max()) + 1
    shape = (steps, config.n_best)  # step first, so that the first draws do not depend on the longest limit
    uniform = [np.random.default_rng((config.seed, number)).random(shape) for number in numbers or range(B)]
    u_BTK = torch.from_numpy(np.stack(uniform)).float().to(constraints.limit.device)

    def choose(log_p: Float[Tensor, "B K V"], t: int, rows: Int[Tensor, "B"]) -> Int[Tensor, "B K"]:
        return draw(log_p, u_BTK[rows, t], config.temperature, config.top_k, config.top_p)

    watch = Watch(config, special, B, config.n_best) if history else None
    return _one_by_one(model, source, config, constraints, choose, config.n_best, on_token, watch)


def draw(
    log_p: Float[Tensor, "B K V"],
    u: Float[Tensor, "B K"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, "B K"]:
    """Turn u, uniform in [0, 1), into a token: the first whose cumulated probability exceeds u.

    >>> draw(torch.tensor([[[0.5, 0.2, 0.3]]]).log(), torch.tensor([[0.6]])).item()
    1
    """
    order = None
    if top_k > 0:
        log_p, order = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    elif top_p < 1:
        log_p, order = log_p.sort(dim=-1, descending=True)
    # Unnormalised, against the largest; a row of nothing but -inf becomes one of zeros.
    largest = log_p.amax(-1, keepdim=True).clamp(min=torch.finfo(log_p.dtype).min)
    p = ((log_p - largest) / temperature).exp()
    total = p.cumsum(-1)
    if top_p < 1:
        p = p * (total - p < top_p * total[..., -1:])  # what comes before a kept token is below top_p
        total = p.cumsum(-1)
    # u stays a few roundings below 1, or a token of probability 0 at the end could be drawn.
    goal = u.clamp(max=1 - 2**-22)[..., None] * total[..., -1:]
    place = torch.searchsorted(total, goal, right=True).clamp(max=total.shape[-1] - 1)
    return (place if order is None else order.gather(-1, place)).squeeze(-1)


@torch.no_grad()  # not inference_mode: a model may keep tables that it made here and train with them later
def _one_by_one(
    model: Decodable,
    source: Source,
    config: DecodeConfig,
    constraints: Constraints,
    choose: Choice,
    samples: int,
    on_token: OnToken | None,
    watch: Watch | None,
) -> list[NBest]:
    B, K, special, device = len(constraints.limit), samples, constraints.special, constraints.limit.device
    if B == 0:
        return []
    steps = int(constraints.limit.max()) + 1
    ids = torch.full((B, K, steps), special.pad, device=device)
    log_ps = torch.zeros((B, K, steps), device=device)
    log_prob = torch.zeros((B, K), device=device)
    lengths = torch.zeros((B, K), dtype=torch.long, device=device)

    rows = torch.arange(B, device=device)  # the sentences still in the batch
    going = torch.ones((B, K), dtype=torch.bool, device=device)
    last = torch.full((B, K), special.sos, device=device)
    lowest_limit = int(constraints.limit.min())
    state = model.start(source)
    if K > 1:
        state = model.reorder(state, rows[:, None].repeat(1, K))
    for t in range(steps):
        logits, state = model.step(state, last)
        log_p = constraints.log_probs(logits, t)
        last = choose(log_p, t, rows)
        price = log_p.gather(-1, last[..., None]).squeeze(-1)
        refuse_nan(price)
        if watch is not None:
            watch.step(rows, logits, log_p, last, constraints, t)
        going = going & (price > -torch.inf)  # at -inf nothing may follow: the output ends without <eos>
        ids[rows, :, t] = torch.where(going, last, special.pad)
        log_ps[rows, :, t] = price
        log_prob[rows] += torch.where(going, price, 0.0)
        lengths[rows] += going
        going = going & (last != special.eos)
        if on_token is not None:
            for row, token, goes_on in zip(rows.tolist(), last[:, 0].tolist(), going[:, 0].tolist()):
                if goes_on:
                    on_token(row, token)
        left = going.any(1).nonzero().squeeze(1)
        if len(left) == 0:
            break
        # A finished row may stay in the batch until its limit, never beyond: the model may have no position there.
        if t >= lowest_limit or len(left) <= KEEP_WHOLE * len(rows):
            state = model.reorder(state, left[:, None] * K + torch.arange(K, device=device))
            rows, going, last, constraints = rows[left], going[left], last[left], constraints.take(left)
            lowest_limit = int(constraints.limit.min())

    score = log_prob / lengths.clamp(min=1) ** config.length_penalty
    results = gather_hypotheses(ids, log_ps, lengths, log_prob, score, special.eos)
    for result, tree in zip(results, watch.trees if watch is not None else ()):
        result.history = tree
    return results


def gather_hypotheses(
    ids: Int[Tensor, "B K T"],
    log_ps: Float[Tensor, "B K T"],
    lengths: Int[Tensor, "B K"],
    log_prob: Float[Tensor, "B K"],
    score: Float[Tensor, "B K"],
    eos: int,
) -> list[NBest]:
    """The rows of these tensors as hypotheses, best first; those with a score of -inf are left out."""
    results = []
    for sentence in zip(*(tensor.tolist() for tensor in (ids, log_ps, lengths, log_prob, score))):
        hypotheses = [
            Hypothesis([i for i in tokens[:n] if i != eos], rank, total, prices[:n])
            for tokens, prices, n, total, rank in zip(*sentence)
            if rank > -float("inf")
        ]
        results.append(NBest(sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)))
    return results
