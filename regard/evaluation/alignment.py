"""Which word became which: word alignments out of cross-attention, and how far they are from the right ones.

Row t of a cross-attention belongs to the token that it predicts. Heads are averaged; the weights of the pieces of a
source word are summed, those of the pieces of a target word averaged; the link of a target word is to the source word
with the greatest weight. Special tokens around the two texts, such as `<eos>`, are left out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from regard.data.text.readers import numbered_lines
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import Ids, attentions, force, information, need_attention
from regard.pipelines import Translator

Link = tuple[int, int]
"""The number of a source word and of a target word, from 0."""
Words = Callable[[str], list[str]]
"""How a text falls into words."""

_PHARAOH = re.compile(r"(\d+)-(\d+)")


def align(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    layer: str | None = None,
    *,
    words: Words = str.split,
    truncate: bool = False,
) -> list[list[Link]]:
    """The word alignment of each pair by one cross-attention, by its name; without one, by the clearest.

    >>> align(translator, [("The cat sleeps.", "Le chat dort.")], "decoder.1.cross")  # doctest: +SKIP
    [[(0, 0), (1, 1), (2, 2)]]
    """
    if layer is None:
        layer = clearest_layer(translator, pairs, truncate=truncate)
    return _align(translator, pairs, [layer], words, truncate)[layer]


def best_layer(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Sequence[Link]],
    *,
    words: Words = str.split,
) -> str:
    """The cross-attention with the least alignment error rate on these pairs, which should be validation data."""
    need_attention(translator)
    by_layer = _align(translator, pairs, attentions(translator, "cross"), words, truncate=False)
    return min(by_layer, key=lambda layer: alignment_error_rate(by_layer[layer], gold))


def clearest_layer(
    translator: Translator, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, sample: int = 64
) -> str:
    """The cross-attention whose rows tell most about where they look: the choice where no gold alignment is known.

    It has the greatest mutual information (see `information`), averaged over the first `sample` pairs with any text.
    """
    need_attention(translator)
    layers = attentions(translator, "cross")
    pairs = [pair for pair in pairs if _filled(pair)][:sample]
    if len(layers) == 1 or not pairs:
        return layers[-1]
    totals = dict.fromkeys(layers, 0.0)
    for _, maps in _maps(translator, pairs, layers, truncate):
        for layer, weights in maps.items():
            totals[layer] += information(weights)
    return max(totals, key=lambda layer: totals[layer])


def alignment_error_rate(predicted: Sequence[Sequence[Link]], gold: Sequence[Sequence[Link]]) -> float:
    """1 - 2 |A ∩ S| / (|A| + |S|) over all pairs (Och and Ney 2003, all gold links being sure). 0 is perfect.

    >>> alignment_error_rate([[(0, 0), (1, 1)]], [[(0, 0), (1, 2)]])
    0.5
    """
    if len(predicted) != len(gold):
        raise RegardError(f"{len(predicted)} alignments, but {len(gold)} gold ones.", "Give one line for each pair.")
    both = sum(len(set(mine) & set(right)) for mine, right in zip(predicted, gold))
    total = sum(len(set(links)) for side in (predicted, gold) for links in side)
    return 1 - 2 * both / total if total else 0.0


def format_links(links: Sequence[Link]) -> str:
    """Links in Pharaoh format.

    >>> format_links([(0, 0), (2, 1)])
    '0-0 2-1'
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def read_links(file: str | Path) -> list[list[Link]]:
    """Reads alignments in Pharaoh format, one line a pair: "0-0 2-1"."""
    return [list(_parse(line, f"{file}, line {number}")) for number, line in numbered_lines(file)]


def _parse(line: str, place: str) -> Iterator[Link]:
    for link in line.split():
        found = _PHARAOH.fullmatch(link)
        if found is None:
            raise RegardError(f"{place}: {link!r} is no link.", 'Write word numbers from 0, like "0-0 1-2".')
        yield int(found[1]), int(found[2])


def _align(
    translator: Translator, pairs: Sequence[tuple[str, str]], layers: list[str], words: Words, truncate: bool
) -> dict[str, list[list[Link]]]:
    """For each layer the alignment of each pair. A pair with an empty side has no links."""
    found: dict[str, list[list[Link]]] = {layer: [[] for _ in pairs] for layer in layers}
    special = translator.special
    # The frame of special tokens. Rows: those that the decoder reads after <sos>, then <eos>. Columns: `begin`, `end`.
    first_row = len(special.begun([])) - 1
    first_column, after = (0 if token is None else 1 for token in (special.begin, special.end))
    for i, maps in _maps(translator, pairs, layers, truncate):
        columns = _pieces_in_words(translator.source_tokenizer, pairs[i][0], words)
        rows = _pieces_in_words(translator.target_tokenizer, pairs[i][1], words)
        for layer, weights in maps.items():
            text = weights[first_row:-1, first_column : weights.shape[1] - after]
            found[layer][i] = _links(text, rows, columns)
    return found


def _links(
    weights: Float[np.ndarray, "T S"], rows: Bool[np.ndarray, "T+cut words"], columns: Bool[np.ndarray, "S+cut words"]
) -> list[Link]:
    """From the weights of pieces to links of words. Pieces that were cut off (--truncate) have no weights."""
    rows, columns = rows[: len(weights)], columns[: weights.shape[1]]
    # A piece that reaches into several words is shared between them.
    columns_sum = columns / np.maximum(columns.sum(1, keepdims=True), 1)
    rows_mean = rows / np.maximum(rows.sum(0), 1)
    of_words = rows_mean.T @ weights @ columns_sum
    if not of_words.size:
        return []
    best = of_words.argmax(1)
    return sorted((int(source), target) for target, source in enumerate(best) if rows[:, target].any())


def _pieces_in_words(tokenizer: Tokenizer, text: str, words: Words) -> Bool[np.ndarray, "pieces words"]:
    """Which piece is a part of which word."""
    pieces = np.array([span for _, span in tokenizer.pieces(text)], int).reshape(-1, 1, 2)
    places = np.array(spans(text, words(text)), int).reshape(1, -1, 2)
    return (pieces[..., 0] < places[..., 1]) & (places[..., 0] < pieces[..., 1])


def spans(text: str, words: list[str]) -> list[tuple[int, int]]:
    """Where each word stands in the text.

    >>> spans("a bab", ["a", "b", "ab"])
    [(0, 1), (2, 3), (3, 5)]
    """
    spans, end = [], 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        spans.append((start, end))
    return spans


def _maps(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    layers: list[str],
    truncate: bool,
    batch_tokens: int = 4096,
) -> Iterator[tuple[int, dict[str, Float[np.ndarray, "T S"]]]]:
    """The number of each pair that has no empty side, and the mean over heads of each layer's weights for it."""
    encoded: dict[int, tuple[Ids, Ids]] = {}
    for i, (source, target) in enumerate(pairs):
        if _filled((source, target)):
            encoded[i] = (
                translator.source_ids(source, name=f"line {i + 1}", truncate=truncate),
                translator.target_ids(target, name=f"line {i + 1}", truncate=truncate),
            )
    # Pairs of like lengths go together, as many as fit into the rectangle of the longest.
    order = sorted(encoded, key=lambda i: max(map(len, encoded[i])))
    while order:
        longest, batch = max(map(len, encoded[order[-1]])) + 2, [order.pop()]
        while order and (len(batch) + 1) * longest <= batch_tokens:
            batch.append(order.pop())
        recording = force(translator, [encoded[i] for i in batch], layers)
        means = {layer: recording[layer].weights().mean(1).cpu().numpy() for layer in layers}
        for b, i in enumerate(batch):
            source_ids, target_ids = encoded[i]
            rows = len(translator.special.begun(target_ids))
            yield i, {layer: mean[b, :rows, : len(source_ids)] for layer, mean in means.items()}


def _filled(pair: tuple[str, str]) -> bool:
    return all(side.strip() for side in pair)
