"""Axes of attention maps: tokens of a text, with the words that they belong to."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from regard.data import Tokenizer
from regard.data.text.special_tokens import SpecialTokens
from regard.evaluation.alignment import find_spans

WordSplitter = Callable[[str], list[str]]
"""splits a text into words"""


class TokenAxis(NamedTuple):
    """An axis of an attention map: its tokens, and the index of the word that each belongs to (-1: none)."""

    name: str
    tokens: list[str]
    """pieces of the text"""
    words: list[int]
    entries: Sequence[str] = ()
    """entries of the vocabulary, such as `##ing` or `<unk>`; empty: not known"""

    def add_special_tokens(self, name: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> "TokenAxis":
        """The axis with special tokens before and after it.

        >>> TokenAxis("source", ["cat"], [0]).add_special_tokens("target", ["<sos>"])
        TokenAxis(name='target', tokens=['<sos>', 'cat'], words=[-1, 0], entries=['<sos>', 'cat'])
        """
        words = [-1] * len(before) + self.words + [-1] * len(after)
        entries = [*before, *(self.entries or self.tokens), *after]
        return TokenAxis(name, [*before, *self.tokens, *after], words, entries)


def build_axis(tokenizer: Tokenizer, text: str, ids: Sequence[int], words: WordSplitter) -> TokenAxis:
    """Axis of a text: labels are the pieces of the text or, if the tokenizer encodes it by other ids, token names.

    A model may output other pieces than the tokenizer would choose, and `<unk>`. The ids of a truncated text are its
    beginning or its end.
    """
    all_ids = tokenizer.encode(text)
    for cut in (slice(len(ids)), slice(len(all_ids) - len(ids), None)):
        if all_ids[cut] == list(ids):
            pieces = tokenizer.encode_as_pieces(text)[cut]
            labels = [piece or tokenizer.entry(i) for (piece, _), i in zip(pieces, ids)]
            break
    else:
        text, pieces = tokenizer.decode(ids), tokenizer.decode_as_pieces(ids)
        labels = [tokenizer.label(i) for i in ids]
    indices = _word_indices([span for _, span in pieces], find_spans(text, words(text)))
    return TokenAxis("", labels, indices, [tokenizer.entry(i) for i in ids])


def _word_indices(pieces: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[int]:
    """Index of the (first) word that each piece overlaps, by their character spans; -1: none.

    >>> _word_indices([(0, 2), (2, 3), (3, 4), (4, 6)], [(0, 3), (4, 6)])
    [0, 0, -1, 1]
    """
    starts, ends = (np.array([word[i] for word in words], int) for i in (0, 1))
    first = np.searchsorted(ends, [start for start, _ in pieces], side="right")
    return [int(i) if i < len(words) and starts[i] < end else -1 for i, (_, end) in zip(first, pieces)]


def pair_ranges(question_length: int, total: int, special: SpecialTokens) -> tuple[range, range]:
    """Positions of the question and of its context in the joint sequence."""
    head = 0 if special.begin is None else 1
    between = len(special.add_special_tokens([])) - head + (special.between is not None)
    first = head + question_length + between
    return range(head, head + question_length), range(first, total - (0 if special.end is None else 1))


def build_pair_axis(
    tokenizer: Tokenizer,
    texts: tuple[str, str],
    ids: Sequence[int],
    parts: tuple[range, range],
    head: int,
    words: WordSplitter,
) -> TokenAxis:
    """Axis of a question, the special tokens after it, and its context; word indices run through both texts."""
    question, context = (
        build_axis(tokenizer, text, ids[part.start - head : part.stop - head], words)
        for text, part in zip(texts, parts)
    )
    middle = [tokenizer.label(i) for i in ids[parts[0].stop - head : parts[1].start - head]]
    first = max(question.words, default=-1) + 1
    context_words = [-1 if word < 0 else word + first for word in context.words]
    return TokenAxis(
        "",
        question.tokens + middle + context.tokens,
        question.words + [-1] * len(middle) + context_words,
        [*question.entries, *middle, *context.entries],
    )


def group_weights(weights: Float[np.ndarray, "H T S"], rows: int, columns: int) -> Float[np.ndarray, "H t s"]:
    """Weights between groups of tokens, so many `rows` and `columns` each: sums of columns, means of rows.

    Rows that sum to 1 still do.

    >>> group_weights(np.array([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]]), rows=2, columns=2)
    array([[[0.75, 0.25]]])
    """
    T, S = weights.shape[1:]
    row_starts = np.arange(0, T, rows)
    sums = np.add.reduceat(np.add.reduceat(weights, np.arange(0, S, columns), axis=2), row_starts, axis=1)
    return sums / np.diff(row_starts, append=T)[:, None].astype(weights.dtype)
