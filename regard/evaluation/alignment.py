"""Word alignments from cross-attention, and their alignment error rate.

Row t of a cross-attention belongs to the token that it predicts. Heads are averaged; the weights of the pieces of a
source word are summed, those of the pieces of a target word averaged. Each target word is linked to the source word
with the largest weight. Special tokens around the two texts, such as `<eos>`, are left out.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from regard.data.text.readers import Link, errors_at_line, numbered_lines, parse_links
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import (
    Ids,
    attention_names,
    mutual_information,
    record_teacher_forced,
    require_attention,
)
from regard.pipelines import Translator


def align(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    layer: str | None = None,
    *,
    truncate: bool = False,
) -> list[list[Link]]:
    """Align the words of each pair by one cross-attention (by default, see `sharpest_layer`).

    >>> align(translator, [("The cat sleeps.", "Le chat dort.")], "decoder.1.cross")  # doctest: +SKIP
    [[(0, 0), (1, 1), (2, 2)]]
    """
    if layer is None:
        layer = sharpest_layer(translator, pairs, truncate=truncate)
    return _align(translator, pairs, [layer], truncate)[layer]


def best_layer(translator: Translator, pairs: Sequence[tuple[str, str]], gold: Sequence[Sequence[Link]]) -> str:
    """Name of the cross-attention with the lowest alignment error rate on these pairs (use validation data)."""
    require_attention(translator)
    by_layer = _align(translator, pairs, attention_names(translator, "cross"), truncate=False)
    return min(by_layer, key=lambda layer: alignment_error_rate(by_layer[layer], gold))


def sharpest_layer(
    translator: Translator, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, sample: int = 64
) -> str:
    """Name of the cross-attention with the largest mutual information: the choice without gold alignments.

    `mutual_information` of rows and columns is averaged over the first `sample` non-empty pairs.
    """
    require_attention(translator)
    layers = attention_names(translator, "cross")
    pairs = [pair for pair in pairs if _is_nonempty(pair)][:sample]
    if len(layers) == 1 or not pairs:
        return layers[-1]
    totals = dict.fromkeys(layers, 0.0)
    for _, maps in _maps(translator, pairs, layers, truncate):
        for layer, weights in maps.items():
            totals[layer] += mutual_information(weights)
    return max(totals, key=lambda layer: totals[layer])


def alignment_error_rate(predicted: Sequence[Sequence[Link]], gold: Sequence[Sequence[Link]]) -> float:
    """1 - 2 |A ∩ S| / (|A| + |S|) over all pairs (Och and Ney 2003, all gold links sure); 0 is perfect.

    >>> alignment_error_rate([[(0, 0), (1, 1)]], [[(0, 0), (1, 2)]])
    0.5
    """
    if len(predicted) != len(gold):
        raise RegardError(
            f"There are {len(predicted)} alignments, but {len(gold)} gold alignments.", "Pass one per sentence pair."
        )
    shared = sum(len(set(links) & set(gold_links)) for links, gold_links in zip(predicted, gold))
    total = sum(len(set(links)) for alignments in (predicted, gold) for links in alignments)
    return 1 - 2 * shared / total if total else 0.0


def format_links(links: Sequence[Link]) -> str:
    """Format links in Pharaoh format.

    >>> format_links([(0, 0), (2, 1)])
    '0-0 2-1'
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def read_links(file: str | Path) -> list[list[Link]]:
    """Read alignments in Pharaoh format ("0-0 2-1"), one line per sentence pair."""
    alignments = []
    for number, line in numbered_lines(file):
        with errors_at_line(file, number):
            alignments.append(parse_links(line))
    return alignments


def _align(
    translator: Translator, pairs: Sequence[tuple[str, str]], layers: list[str], truncate: bool
) -> dict[str, list[list[Link]]]:
    """The alignment of each pair by each layer. A pair with an empty text has no links."""
    links: dict[str, list[list[Link]]] = {layer: [[] for _ in pairs] for layer in layers}
    translator = translator.with_target()
    special = translator.special
    # Positions of special tokens. Rows: forced tokens after <sos>, and <eos> last. Columns: before and after the text.
    first_row = len(special.make_decoder_input([])) - 1
    first_column, trailing = len(special.prefix), len(special.suffix)
    for i, maps in _maps(translator, pairs, layers, truncate):
        columns = _pieces_in_words(translator.source_tokenizer, pairs[i][0])
        rows = _pieces_in_words(translator.target_tokenizer, pairs[i][1])
        for layer, weights in maps.items():
            text = weights[first_row:-1, first_column : weights.shape[1] - trailing]
            links[layer][i] = _links(text, rows, columns)
    return links


def _links(
    weights: Float[np.ndarray, "T S"], rows: Bool[np.ndarray, "T+cut words"], columns: Bool[np.ndarray, "S+cut words"]
) -> list[Link]:
    """Links of words from the weights of pieces. Pieces removed by truncation have no weights."""
    rows, columns = rows[: len(weights)], columns[: weights.shape[1]]
    # A piece that spans several words is shared between them.
    columns_sum = columns / np.maximum(columns.sum(1, keepdims=True), 1)
    rows_mean = rows / np.maximum(rows.sum(0), 1)
    word_weights = rows_mean.T @ weights @ columns_sum
    if not word_weights.size:
        return []
    best = word_weights.argmax(1)
    return sorted((int(source), target) for target, source in enumerate(best) if rows[:, target].any())


def _pieces_in_words(tokenizer: Tokenizer, text: str) -> Bool[np.ndarray, "pieces words"]:
    """Whether each piece overlaps each word."""
    pieces = np.array([span for _, span in tokenizer.encode_as_pieces(text)], int).reshape(-1, 1, 2)
    word_spans = np.array(find_spans(text, text.split()), int).reshape(1, -1, 2)
    return (pieces[..., 0] < word_spans[..., 1]) & (word_spans[..., 0] < pieces[..., 1])


def find_spans(text: str, words: list[str]) -> list[tuple[int, int]]:
    """Character span of each word in the text.

    >>> find_spans("a bab", ["a", "b", "ab"])
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
    """Index of each pair without an empty text, and its weights in each layer, averaged over heads."""
    encoded: dict[int, tuple[Ids, Ids]] = {}
    for i, (source, target) in enumerate(pairs):
        if _is_nonempty((source, target)):
            encoded[i] = (
                translator.encode_source(source, name=f"line {i + 1}", truncate=truncate),
                translator.encode_target(target, name=f"line {i + 1}", truncate=truncate),
            )
    # Batches of pairs of similar length, padded to the longest text, with up to batch_tokens positions.
    order = sorted(encoded, key=lambda i: max(map(len, encoded[i])))
    while order:
        max_len, batch = max(map(len, encoded[order[-1]])) + 2, [order.pop()]
        while order and (len(batch) + 1) * max_len <= batch_tokens:
            batch.append(order.pop())
        recording = record_teacher_forced(translator, [encoded[i] for i in batch], layers)
        means = {layer: recording[layer].weights().mean(1).cpu().numpy() for layer in layers}
        for b, i in enumerate(batch):
            source_ids, target_ids = encoded[i]
            rows = len(translator.with_target().special.make_decoder_input(target_ids))
            yield i, {layer: mean[b, :rows, : len(source_ids)] for layer, mean in means.items()}


def _is_nonempty(pair: tuple[str, str]) -> bool:
    return all(text.strip() for text in pair)
