"""Decoding of one batch, or of any number of sentences in length-sorted batches."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from regard.decode.decode_config import DecodeConfig
from regard.decode.engine.engine_runner import decode_sentences
from regard.decode.engine.slot_decoder import OnToken
from regard.decode.hypotheses import NBest
from regard.decode.protocol import SPECIAL, Decodable, SourceBatch, SpecialTokens
from regard.decode.rules.lexical_constraints import LexicalConstraints
from regard.decode.shortlist import Shortlist, require_shortlist
from regard.ranges import MAX_INT


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
    token_lists, vocab = None, 0
    if shortlist is not None:
        token_lists, vocab = [row.nonzero()[:, 0].cpu().numpy() for row in shortlist], shortlist.shape[1]
    return decode_sentences(
        model,
        source_sequences(source),
        lambda rows: source,
        config,
        special=special,
        prefixes=prefixes,
        history=history,
        sample_indices=sample_indices,
        max_total_len=max_total_len,
        lexical=lexical,
        token_lists=token_lists,
        vocab=vocab,
        on_token=on_token,
        budget=MAX_INT,
        in_order=True,
    )


def source_sequences(source: SourceBatch) -> list[list[int]]:
    """The sequences of a packed batch."""
    starts, ids = source.offsets.starts.tolist(), source.ids.tolist()
    return [ids[start:end] for start, end in pairwise(starts)]


def greedy(model: Decodable, source: SourceBatch, config: DecodeConfig | None = None, **options: Any) -> list[NBest]:
    """Greedy decoding of a batch: the most probable token at every step until `<eos>`; see `decode_batch`."""
    return decode_batch(model, source, config or DecodeConfig(method="greedy"), **options)


def sample(model: Decodable, source: SourceBatch, config: DecodeConfig | None = None, **options: Any) -> list[NBest]:
    """Sampling of a batch: `n_best` independent outputs per sentence, possibly equal ones; see `decode_batch`."""
    return decode_batch(model, source, config or DecodeConfig(method="sample"), **options)


def beam(model: Decodable, source: SourceBatch, config: DecodeConfig | None = None, **options: Any) -> list[NBest]:
    """Beam search of a batch; see `decode_batch`."""
    return decode_batch(model, source, config or DecodeConfig(), **options)


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
    return decode_sentences(
        model,
        sources,
        pack,
        config,
        special=special,
        prefixes=prefixes,
        history=history,
        sample_indices=sample_indices,
        max_total_len=max_total_len,
        lexical=lexical,
        token_lists=token_lists,
        vocab=vocab,
        on_token=on_token,
        budget=budget,
        progress=progress,
    )


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
