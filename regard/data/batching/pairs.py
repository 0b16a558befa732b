"""Batches of sentence pairs, packed to a constant number of tokens, with BPE-dropout."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from regard.data.batching.batch import IGNORE_INDEX, WHOLE, Batch, BatchSampler, RankSlice
from regard.data.batching.sequences import Sequences, gather_slices
from regard.data.text.special_tokens import SEQ2SEQ_TOKENS, UNK, SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import pack

SEGMENTATIONS_PER_WORD = 32


class BpeDropout:
    """Texts whose encoding is sampled in each epoch; every merge is skipped with probability p, so that words are
    segmented differently each time (BPE-dropout, Provilkov et al. 2020).

    Segmentation j of a word depends on (seed, word, j) alone; it is computed when first needed and cached. An epoch
    samples j for every occurrence of a word with the generator passed to it. So an epoch depends on its generator
    alone, not on earlier epochs, and costs little more than a table lookup per word.

    >>> texts = ["the cat chased the mouse"]
    >>> tokenizer = Tokenizer.train(texts, "bpe", vocab_size=60)
    >>> encoded = BpeDropout(tokenizer, texts, p=0.5, seed=1).sample_encoding(np.random.default_rng(1))
    >>> tokenizer.decode(encoded[0])
    'the cat chased the mouse'
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], p: float, seed: int) -> None:
        if tokenizer.kind not in ("bpe", "bytes"):
            raise RegardError(
                f"BPE-dropout needs a tokenizer of kind bpe or bytes (got {tokenizer.kind}).",
                hint="Set tokenizer.dropout to 0, or choose another tokenizer.",
            )
        if not 0 <= p <= 1:
            raise RegardError(f"The BPE-dropout probability must be between 0 and 1 (got {p}).")
        self.p, self.seed = p, seed
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        self._vocab: dict[str, int] = model["vocab"]
        # (left, right) -> (rank, merged): the merge of lowest rank is applied first
        self._merges = {
            (self._vocab[left], self._vocab[right]): (rank, self._vocab[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }

        word_ids: dict[str, int] = {}
        words: list[int] = []
        self._word_starts = np.zeros(len(texts) + 1, np.int64)
        for index, text in enumerate(texts):
            words.extend(word_ids.setdefault(word, len(word_ids)) for word in _pre_tokenize(tokenizer, text))
            self._word_starts[index + 1] = len(words)
        self._words = np.array(words, np.int64)  # the texts, as indices into _spelling
        self._spelling = list(word_ids)
        # segmentation j of word w is _pool[_start[w, j] : _start[w, j] + _length[w, j]]; -1: not yet computed
        self._start = np.full((len(word_ids), SEGMENTATIONS_PER_WORD), -1, np.int32)
        self._length = np.zeros((len(word_ids), SEGMENTATIONS_PER_WORD), np.int32)
        self._pool = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._word_starts) - 1

    def segment(self, word: str, j: int) -> list[int]:
        """Segmentation j of a word, as produced by the pre-tokenizer."""
        pieces = [self._vocab.get(character, UNK) for character in word]
        # One random number per pair considered: at most n(n - 1)/2 of them, 32 bits each.
        key = f"{self.seed} {j} {word}".encode()
        noise = hashlib.shake_128(key).digest(2 * len(pieces) * (len(pieces) - 1))
        random = iter(np.frombuffer(noise, "<u4").tolist())
        threshold = int(self.p * 2**32)
        while True:
            best: tuple[int, int, int] | None = None  # rank, position, merged
            for position, pair in enumerate(pairwise(pieces)):
                merge = self._merges.get(pair)
                if merge and next(random) >= threshold and (best is None or merge[0] < best[0]):
                    best = (merge[0], position, merge[1])
            if best is None:
                return pieces
            pieces[best[1] : best[1] + 2] = [best[2]]

    def sample_encoding(self, generator: np.random.Generator) -> Sequences:
        """Sample the encoding of all texts for one epoch."""
        choices = generator.integers(SEGMENTATIONS_PER_WORD, size=len(self._words))
        self._add_missing_segmentations(choices)
        lengths = self._length[self._words, choices]
        ids = gather_slices(self._pool, self._start[self._words, choices], lengths)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Sequences(ids, ends[self._word_starts])

    def _add_missing_segmentations(self, choices: Int[np.ndarray, "N"]) -> None:
        keys = np.unique((self._words * SEGMENTATIONS_PER_WORD + choices)[self._start[self._words, choices] < 0])
        words, indices = np.divmod(keys, SEGMENTATIONS_PER_WORD)
        added = Sequences.from_lists(
            self.segment(self._spelling[w], j) for w, j in zip(words.tolist(), indices.tolist())
        )
        self._start[words, indices] = added.starts[:-1] + len(self._pool)
        self._length[words, indices] = added.lengths
        self._pool = np.concatenate([self._pool, added.ids])


def _pre_tokenize(tokenizer: Tokenizer, text: str) -> list[str]:
    """Split a text into the words within which merges apply."""
    library = tokenizer.backend_tokenizer
    normalized = library.normalizer.normalize_str(text) if library.normalizer else text
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(normalized)]


@dataclass(frozen=True, eq=False)
class TaggedSources:
    """Source sentences that each begin with the tag of a target language.

    >>> corpus = TaggedSources(Sequences.from_lists([[5, 6], [7]]), np.array([10, 11]))
    >>> corpus.sample_encoding(np.random.default_rng(0)).ids.tolist()
    [10, 5, 6, 11, 7]
    """

    sources: Sequences | BpeDropout
    tags: Int[np.ndarray, "B"]

    def __len__(self) -> int:
        return len(self.tags)

    def sample_encoding(self, generator: np.random.Generator) -> Sequences:
        """The encoding for one epoch."""
        return self.sources.sample_encoding(generator).add_special_tokens(self.tags)


# Source or target sentences. The encoding of an epoch is sampled: always the same, or with dropout a new one each time.
CorpusSide = Sequences | BpeDropout | TaggedSources


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_len: int,
    dropout: float = 0.0,
    seed: int = 0,
    tags: Sequence[int] | None = None,
) -> tuple[CorpusSide, CorpusSide, int]:
    """Encode both sides of the pairs. Pairs with more than `max_len` tokens on either side (including `<eos>`) are left
    out; the third result is their count. Each source begins with its entry in `tags`, ids of language tags.

    BPE-dropout makes texts longer, differently in each epoch. The count then includes the pairs that are too long in
    one sample, as an estimate for every epoch; these pairs are kept because they may be shorter in another epoch.

    >>> tokenizer = Tokenizer.train(["a b c d"], "word")
    >>> sources, targets, too_long = encode_pairs([("a b", "c"), ("a b c", "d")], tokenizer, tokenizer, max_len=3)
    >>> len(sources), len(targets), too_long
    (1, 1, 1)
    """
    source_ids = source.encode_batch([text for text, _ in pairs])
    target_ids = target.encode_batch([text for _, text in pairs])
    added = 0 if tags is None else 1
    kept = [i for i in range(len(pairs)) if max(len(source_ids[i]) + added, len(target_ids[i])) < max_len]
    if not kept:
        raise RegardError(f"All {len(pairs)} pairs are longer than {max_len} tokens.", hint="Raise model.max_len.")
    too_long = len(pairs) - len(kept)

    def add_tags(sources: Sequences | BpeDropout) -> CorpusSide:
        return sources if tags is None else TaggedSources(sources, np.array([tags[i] for i in kept], np.int32))

    if dropout:
        samplers = [
            BpeDropout(tokenizer, [pairs[i][side] for i in kept], dropout, seed)
            for side, tokenizer in enumerate((source, target))
        ]
        sources, targets = add_tags(samplers[0]), samplers[1]
        fits = np.maximum(*_sample_lengths(sources, targets, seed)) < max_len
        if not fits.any():
            raise RegardError(
                f"With BPE-dropout {dropout}, all {len(pairs)} pairs are longer than {max_len} tokens.",
                hint="Lower tokenizer.dropout, or raise model.max_len.",
            )
        return sources, targets, too_long + int((~fits).sum())
    return (
        add_tags(Sequences.from_lists(source_ids[i] for i in kept)),
        Sequences.from_lists(target_ids[i] for i in kept),
        too_long,
    )


def _sample_lengths(
    source: CorpusSide, target: CorpusSide, seed: int
) -> tuple[Int[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Lengths of both sides in one sampled encoding, which is not that of any epoch."""
    generator = np.random.default_rng(seed)
    return source.sample_encoding(generator).lengths, target.sample_encoding(generator).lengths


class PairBatches:
    """Batches of sentence pairs with at most `budget` tokens per side. Epoch e depends on (seed, e) alone.

    See BatchSampler for how pairs are grouped. With `constant_shapes`, each side is padded to `budget` tokens and a
    constant number of sequences, and the max_len of both sides is one of 16, 32, 64, … or the maximum, so that compiled
    code is reused. Without, batches are not padded.

    A pair that BPE-dropout makes longer than `max_len` is left out of that epoch.

    >>> sides = Sequences.from_lists([[5], [6, 7], [8]]), Sequences.from_lists([[9], [9, 9], [9]])
    >>> [batch] = PairBatches(*sides, budget=16, max_len=16, seed=0).epoch(0)
    >>> batch.inputs[0].padded()
    (tensor([[8, 3, 0],
            [5, 3, 0],
            [6, 7, 3]]), tensor([2, 2, 3]))
    """

    def __init__(
        self,
        source: CorpusSide,
        target: CorpusSide,
        *,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
        special: tuple[SpecialTokens, SpecialTokens] = (SEQ2SEQ_TOKENS, SEQ2SEQ_TOKENS),
    ) -> None:
        if not 0 < len(source) == len(target):
            raise ValueError(f"expected as many sources as targets, at least 1, got {len(source)} and {len(target)}")
        self.source, self.target = source, target
        self.source_special, self.target_special = special
        self.seed = seed
        mean_length = float(1 + np.maximum(*_sample_lengths(source, target, seed)).mean())
        self._sampler = BatchSampler(mean_length, budget=budget, max_len=max_len, constant_shapes=constant_shapes)

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[Batch]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built."""
        generator = np.random.default_rng([self.seed, number])
        source, target = self.source.sample_encoding(generator), self.target.sample_encoding(generator)
        source_lengths, target_lengths = self._lengths(source, target)
        for rows in self._sampler.sample(generator, source_lengths, target_lengths)[start:]:
            sides = source_lengths[rows], target_lengths[rows]
            selected, count = part.select((sides[0] + sides[1]).tolist())
            rows = [rows[i] for i in selected]
            options = self._sampler.pack_options(*sides, part=part)
            yield self._make_batch(source.take(rows), target.take(rows), count, options)

    def _lengths(self, source: Sequences, target: Sequences) -> tuple[Int[np.ndarray, "B"], Int[np.ndarray, "B"]]:
        """Lengths of encoder and decoder inputs, with special tokens."""
        empty = Sequences.from_lists([[]])
        source_added, target_added = self._add_source_tokens(empty).lengths, self._add_target_tokens(empty).lengths
        # Decoder inputs lack <eos>, targets lack <sos>: both are one token shorter.
        source_lengths, target_lengths = source.lengths.astype(np.int32), target.lengths.astype(np.int32)
        source_lengths += int(source_added[0])
        target_lengths += int(target_added[0]) - 1
        return source_lengths, target_lengths

    def _add_source_tokens(self, source: Sequences) -> Sequences:
        special = self.source_special
        return source.add_special_tokens(special.begin, special.end).add_special_tokens(end=special.after_end)

    def _add_target_tokens(self, target: Sequences) -> Sequences:
        special = self.target_special
        return target.add_special_tokens(special.forced).add_special_tokens(special.sos, special.eos)

    def _make_batch(self, source: Sequences, target: Sequences, count: int, options: dict[str, int]) -> Batch:
        sources, targets = list(self._add_source_tokens(source)), list(self._add_target_tokens(target))
        return Batch(
            inputs=(pack(sources, **options), pack([ids[:-1] for ids in targets], **options)),
            targets=pack([ids[1:] for ids in targets], **options, fill=IGNORE_INDEX).ids,
            sentences=count,
            tokens=sum(map(len, targets[:count])) - count,
        )
