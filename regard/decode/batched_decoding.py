"""Decoding of one batch, or of any number of sentences in length-sorted batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from regard.decode.beam_search import beam
from regard.decode.decode_config import DecodeConfig
from regard.decode.engine import decode_sentences, plain_search_reason
from regard.decode.engine_choice import note_choice
from regard.decode.hypotheses import NBest
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, SpecialTokens
from regard.decode.rules.lexical_constraints import LexicalConstraints
from regard.decode.sampling import OnToken, greedy, sample
from regard.decode.shortlist import Shortlist, allowed_mask, require_shortlist


def decode_batch(
    model: Decodable,
    source: SourceBatch,
    config: DecodeConfig,
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
    """Decode one batch with the method of the config.

    `history` records the candidates of every step (`NBest.history`); the outputs are the same, bit for bit.
    `sample_indices` is used by sampling only: see `sample`. `max_total_len` limits the length of source and output
    together, for models whose output continues the source. `lexical` are the required and forbidden phrases of each
    sentence, and `shortlist` the tokens that it may contain. `on_token(sentence, token)` is called for every generated
    token, except in beam search, where the output is known only at the end.
    """
    common: dict[str, Any] = {
        "special": special,
        "prefixes": prefixes,
        "history": history,
        "max_total_len": max_total_len,
        "lexical": lexical,
        "shortlist": shortlist,
    }
    try:
        if config.method == "greedy":
            return greedy(model, source, config, **common, on_token=on_token)
        if config.method == "sample":
            return sample(model, source, config, **common, sample_indices=sample_indices, on_token=on_token)
        return beam(model, source, config, **common)
    finally:
        for one in lexical or ():
            one.clear_caches()


def decode_all(
    model: Decodable,
    sources: Sequence[Sequence[int]],
    pack: Callable[[list[list[int]]], SourceBatch],
    config: DecodeConfig,
    *,
    special: SpecialTokens = SPECIAL,
    prefixes: Sequence[Sequence[int]] | None = None,
    history: bool = False,
    sample_indices: Sequence[int] | None = None,
    max_total_len: int | None = None,
    lexical: Sequence[LexicalConstraints] | None = None,
    shortlist: Shortlist | None = None,
    on_token: OnToken | None = None,
    budget: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[NBest]:
    """Decode any number of sentences in batches of similar length; results are in the order of `sources`.

    `history`, `max_total_len`, `lexical` and `on_token`: see `decode_batch`. `sample_indices`: see `sample`; by default
    0, 1, 2, … `shortlist` is used with `config.shortlist`; sentences with required phrases may contain all tokens.
    `budget` limits sentences * hypotheses * longest source of a batch. `progress(done, total)` is called after each
    batch.

    >>> from regard.layers.packed import pack
    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model = Transformer(sizes).eval()
    >>> len(decode_all(model, [[4, 5, 3], [6, 3], [7, 3]], pack, DecodeConfig(beam=2)))
    3
    """
    token_lists, vocab = None, 0
    if config.shortlist:
        shortlist = require_shortlist(shortlist)
        token_lists, vocab = token_lists_of(shortlist, sources, special, prefixes, lexical), shortlist.target_vocab
    reason = plain_search_reason(model, config, history=history, lexical=lexical is not None, special=special)
    note_choice(reason, len(sources))
    if not reason:
        return decode_sentences(
            model,
            sources,
            config,
            special=special,
            prefixes=prefixes,
            sample_indices=sample_indices,
            max_total_len=max_total_len,
            token_lists=token_lists,
            vocab=vocab,
            on_token=on_token,
            budget=budget,
            progress=progress,
        )
    hypotheses_per_sentence = {"greedy": 1, "beam": config.beam, "sample": config.n_best}[config.method]
    results: list[NBest] = [NBest() for _ in sources]
    done = 0
    for batch in _length_batches([len(source) for source in sources], budget // hypotheses_per_sentence):
        decoded = decode_batch(
            model,
            pack([list(sources[i]) for i in batch]),
            config,
            special=special,
            prefixes=None if prefixes is None else [prefixes[i] for i in batch],
            history=history,
            sample_indices=batch if sample_indices is None else [sample_indices[i] for i in batch],
            max_total_len=max_total_len,
            lexical=None if lexical is None else [lexical[i] for i in batch],
            shortlist=None if token_lists is None else allowed_mask([token_lists[i] for i in batch], vocab),
            on_token=None if on_token is None else lambda row, token, batch=batch: on_token(batch[row], token),
        )
        for i, n_best in zip(batch, decoded):
            results[i] = n_best
        done += len(batch)
        if progress is not None:
            progress(done, len(sources))
    return results


def token_lists_of(
    shortlist: Shortlist,
    sources: Sequence[Sequence[int]],
    special: SpecialTokens,
    prefixes: Sequence[Sequence[int]] | None,
    lexical: Sequence[LexicalConstraints] | None,
) -> list[Int[np.ndarray, "_"]]:
    """The tokens that the output of each sentence may contain. Required phrases need all, however they are split."""
    forced = dict(enumerate(prefixes or ()))
    return [
        shortlist.all_tokens()
        if lexical is not None and lexical[i].required
        else shortlist.allowed_tokens(source, special, forced.get(i, ()))
        for i, source in enumerate(sources)
    ]


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
