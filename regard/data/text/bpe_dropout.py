"""BPE-dropout (Provilkov et al. 2020): merges are skipped at random, so that words are segmented differently each time.

Segmentation j of a word depends on (seed, word, j) alone; it is computed when first needed and cached. An epoch samples
j for every occurrence of a word with the generator passed to it. So an epoch depends on its generator alone, not on
earlier epochs, and costs little more than a table lookup per word.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from regard.data.batching.sequences import Sequences, gather_slices
from regard.data.text.special_tokens import UNK
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError

SEGMENTATIONS_PER_WORD = 32


class BpeDropout:
    """Texts whose encoding is sampled in each epoch; every merge is skipped with probability p.

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
