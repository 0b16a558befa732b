"""Decoding of any number of sentences, in length-sorted batches."""

from collections.abc import Callable
from typing import Any

import torch

from regard.decode.beam_search import beam
from regard.decode.engine import decode_sentences, plain_search_reason
from regard.decode.engine.engine_runner import member_models
from regard.decode.engine_choice import note_choice
from regard.decode.hypotheses import NBest
from regard.decode.protocol import Decodable
from regard.decode.request import Request
from regard.decode.sampling import OnToken, greedy, sample
from regard.decode.shortlist import allowed_mask
from regard.layers.packed import pack


def decode_all(
    model: Decodable,
    request: Request,
    *,
    on_token: OnToken | None = None,
    progress: Callable[[int, int], None] | None = None,
    budget: int = 8192,
) -> list[NBest]:
    """Decode the sentences of a request, in batches of similar length; results are in the order of the request.

    `on_token(sentence, token)` is called for every generated token, except in beam search, where the output is known
    only at the end. `progress(done, total)` is called as sentences are finished. `budget` limits
    sentences * hypotheses * longest source of a batch.

    >>> from regard.decode import DecodeConfig
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> len(decode_all(model, Request([[4, 5, 3], [6, 3], [7, 3]], DecodeConfig(beam=2))))
    3
    """
    reason = plain_search_reason(model, request)
    note_choice(reason, len(request))
    if not reason:
        return decode_sentences(model, request, on_token=on_token, progress=progress, budget=budget)
    results: list[NBest] = [NBest() for _ in request.sources]
    done = 0
    for batch in _length_batches([len(source) for source in request.sources], budget // request.hypotheses):
        on_batch_token = None if on_token is None else lambda row, token, batch=batch: on_token(batch[row], token)
        for i, n_best in zip(batch, _decode_batch(model, request.select(batch), on_batch_token)):
            results[i] = n_best
        done += len(batch)
        if progress is not None:
            progress(done, len(request))
    return results


def _decode_batch(model: Any, request: Request, on_token: OnToken | None) -> list[NBest]:
    """Decode a request in one batch with the method of its config."""
    token_lists = request.token_lists()
    common: dict[str, Any] = {
        "special": request.special,
        "prefixes": request.prefixes,
        "history": request.history,
        "max_total_len": request.max_total_len,
        "lexical": request.lexical,
        "shortlist": None if token_lists is None else allowed_mask(token_lists, request.vocab),
    }
    source = pack(request.sources).to(_device(model))
    try:
        if request.config.method == "greedy":
            return greedy(model, source, request.config, **common, on_token=on_token)
        if request.config.method == "sample":
            indices = request.sample_indices
            return sample(model, source, request.config, **common, sample_indices=indices, on_token=on_token)
        return beam(model, source, request.config, **common)
    finally:
        for constraints in request.lexical or ():
            constraints.clear_caches()


def _device(model: Any) -> torch.device:
    """The device of a model; the CPU for one without parameters."""
    parameters = getattr(member_models(model)[0], "parameters", None)
    return torch.device("cpu") if parameters is None else next(parameters()).device


def _length_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Batches of sentence indices within the budget, longest first, so that running out of memory shows at once."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first sentence of a batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
