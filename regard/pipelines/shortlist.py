"""Vocabulary shortlists of translators: IBM Model 1 (translation probabilities of tokens, learned from sentence pairs,
Brown et al. 1993), and the file shortlist.safetensors."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as arrays_to_bytes

from regard.decode import Shortlist
from regard.errors import RegardError
from regard.files import write_atomically

# Links (source token, target token) that are processed at once; limits memory.
CHUNK_LINKS = 1 << 22

TokenPair = tuple[Sequence[int], Sequence[int]]
"""ids of a source sentence and of its translation"""


class TranslationTable(NamedTuple):
    """Probabilities p(target | source) of all tokens that occur in the same pair, sorted by source, then target."""

    source: Int[np.ndarray, "P"]
    target: Int[np.ndarray, "P"]
    probability: Float[np.ndarray, "P"]

    def best_targets(self, source_vocab: int, count: int) -> Int[np.ndarray, "S n"]:
        """The `count` most probable targets of each source token, most probable first, padded with -1.

        >>> table = learn_translation_table([([5, 6], [8, 9]), ([5], [8])], 10)
        >>> table.best_targets(10, 1)[5:7, 0]
        array([8, 9], dtype=int32)
        """
        order = np.lexsort((self.target, -self.probability, self.source))
        source, target = self.source[order], self.target[order]
        rank = np.arange(len(source)) - np.searchsorted(source, source)
        kept = rank < count
        best = np.full((source_vocab, count), -1, np.int32)
        best[source[kept], rank[kept]] = target[kept]
        return best


def learn_translation_table(
    pairs: Sequence[TokenPair],
    target_vocab: int,
    *,
    iterations: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> TranslationTable:
    """Expectation maximization of IBM Model 1, from uniform probabilities; deterministic.

    `progress(done, total)` is called after each iteration.

    >>> table = learn_translation_table([([5, 6], [8, 9]), ([5], [8])], 10)
    >>> [(int(s), int(t), round(float(p), 2)) for s, t, p in zip(*table)]
    [(5, 8, 0.96), (5, 9, 0.04), (6, 8, 0.17), (6, 9, 0.83)]
    """
    keys = np.zeros(0, np.int64)
    for source, target, _ in _links(pairs):
        keys = np.union1d(keys, source * target_vocab + target)
    row, column = np.divmod(keys, target_vocab)
    probability = np.ones(len(keys))
    for iteration in range(iterations):
        counts = np.zeros(len(keys))
        for source, target, position in _links(pairs):
            index = np.searchsorted(keys, source * target_vocab + target)
            p = probability[index]
            share = p / np.bincount(position, p)[position]
            counts += np.bincount(index, share, len(keys))
        totals = np.bincount(row, counts)
        # A count may underflow to 0 after many iterations.
        probability = counts / np.maximum(totals[row], np.finfo(float).tiny)
        if progress is not None:
            progress(iteration + 1, iterations)
    return TranslationTable(row, column, probability)


def _links(
    pairs: Sequence[TokenPair],
) -> Iterator[tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], Int[np.ndarray, "n"]]]:
    """All links of a target token to a source token of its pair, in chunks: source id, target id, and an index of the
    target token in the chunk.
    """
    start = 0
    while start < len(pairs):
        end, total = start, 0
        while end < len(pairs) and (end == start or total + len(pairs[end][0]) * len(pairs[end][1]) <= CHUNK_LINKS):
            total += len(pairs[end][0]) * len(pairs[end][1])
            end += 1
        chunk = pairs[start:end]
        start = end
        source_lens, target_lens = (np.array([len(pair[side]) for pair in chunk]) for side in (0, 1))
        sources, targets = (np.fromiter((token for pair in chunk for token in pair[side]), np.int64) for side in (0, 1))
        per_target = np.repeat(source_lens, target_lens)  # links of each target token
        position = np.repeat(np.arange(len(targets)), per_target)
        first_link = np.cumsum(per_target) - per_target
        first_source = np.repeat(np.cumsum(source_lens) - source_lens, target_lens)
        source_index = np.arange(len(position)) + (first_source - first_link)[position]
        yield sources[source_index], targets[position], position


SHORTLIST_FILE = "shortlist.safetensors"
# Pairs that are tokenized at once.
_BLOCK = 4096


def learn_shortlist(
    translator: Any,
    pairs: Iterable[tuple[str, str]],
    per_token: int,
    frequent: int,
    progress: Callable[[int, int], None] | None,
) -> Shortlist:
    """The shortlist of a translator: see `Translator.learn_shortlist`."""
    for name, value, least in (("per_token", per_token, 1), ("frequent", frequent, 0)):
        if value < least:
            raise RegardError(f"{name} must be at least {least} (got {value}).", f"Raise {name}.")
    lines = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    if not lines:
        raise RegardError("There are no pairs with text to learn a shortlist from.", "Pass the training data.")
    special, config, longest = translator.special, translator.model.config, translator.trained_length
    encoded: list[tuple[list[int], list[int]]] = []
    for start in range(0, len(lines), _BLOCK):
        sides = zip(*lines[start : start + _BLOCK])
        sources, targets = (
            tokenizer.encode_batch(side) for tokenizer, side in zip(translator.tokenizers, sides, strict=True)
        )
        # The special tokens of a source take the part of the empty word of IBM Model 1.
        encoded += [
            (special.add_special_tokens(source[:longest]), target[:longest]) for source, target in zip(sources, targets)
        ]
    table = learn_translation_table(encoded, config.target_vocab, progress=progress)
    best = table.best_targets(config.source_vocab, per_token)
    if translator.source_tokenizer is translator.target_tokenizer:  # names and numbers are copied
        best = np.concatenate((best, np.arange(config.source_vocab, dtype=np.int32)[:, None]), axis=1)
    counts = np.bincount([token for _, target in encoded for token in target], minlength=config.target_vocab)
    order = np.argsort(-counts, kind="stable")[:frequent]
    return Shortlist(best, np.sort(order[counts[order] > 0]).astype(np.int32), config.target_vocab)


def write_shortlist(folder: Path, shortlist: Shortlist) -> None:
    """Write the shortlist of a model folder."""
    write_atomically(folder / SHORTLIST_FILE, _to_bytes(shortlist))


def shortlist_fingerprint(shortlist: Shortlist) -> str:
    """A hash of the shortlist."""
    return hashlib.sha256(_to_bytes(shortlist)).hexdigest()[:16]


def _to_bytes(shortlist: Shortlist) -> bytes:
    return arrays_to_bytes({"targets": shortlist.targets, "frequent": shortlist.frequent})


def read_shortlist(folder: Path, source_vocab: int, target_vocab: int) -> Shortlist | None:
    """The shortlist of a model folder, checked against the sizes of its vocabularies; None if there is none."""
    path = folder / SHORTLIST_FILE
    if not path.exists():
        return None
    try:
        arrays = load_file(path, backend="pread")
    except (SafetensorError, OSError, ValueError) as error:
        raise _invalid(path, f"the file is damaged ({error})") from None
    for name in ("targets", "frequent"):
        if name not in arrays:
            raise _invalid(path, f"{name} is missing")
        array, axes = arrays[name], {"targets": 2, "frequent": 1}[name]
        if array.dtype != np.int32 or array.ndim != axes:
            raise _invalid(path, f"{name} must be int32 with {axes} axes (got {array.dtype} of shape {array.shape})")
        if array.size and not (array.min() >= -1 and array.max() < target_vocab):
            wrong = array[(array < -1) | (array >= target_vocab)].flat[0]
            raise _invalid(path, f"{name} contains the token {wrong}, but the target vocabulary has {target_vocab}")
    if len(arrays["targets"]) != source_vocab:
        rows = len(arrays["targets"])
        raise _invalid(path, f"targets has {rows} rows, but the source vocabulary has {source_vocab} tokens")
    return Shortlist(arrays["targets"], arrays["frequent"], target_vocab)


def _invalid(path: Path, detail: str) -> RegardError:
    return RegardError(f"{path}: {detail}.", "Delete the file, or learn it again: regard shortlist MODEL --data …")
