"""BPE-dropout (Provilkov et al., 2020): a word is cut differently each time it is met, so that its parts are learned.

The random numbers are our own: a word's segmentation number j is a function of (seed, word, j), made when first asked
for and kept; an epoch chooses j for every occurrence with the generator it is given. So an epoch is a function of that
generator, whatever came before it, and costs little more than looking words up.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from regard.data.batching.sequences import Sequences, gather
from regard.data.text.special_tokens import UNK
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError

SEGMENTATIONS = 32


class BpeDropout:
    """Texts whose encoding is drawn anew each epoch, every merge being passed over with probability p.

    >>> texts = ["the cat chased the mouse"]
    >>> tokenizer = Tokenizer.train(texts, "bpe", vocab_size=60)
    >>> drawn = BpeDropout(tokenizer, texts, p=0.5, seed=1).draw(np.random.default_rng(1))
    >>> tokenizer.decode(drawn[0])
    'the cat chased the mouse'
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], p: float, seed: int) -> None:
        if tokenizer.kind not in ("bpe", "bytes"):
            raise RegardError(
                f"BPE-dropout needs a tokeniser of kind bpe or bytes, and this one is {tokenizer.kind}.",
                hint="Set the dropout to 0 or choose another tokeniser.",
            )
        if not 0 <= p <= 1:
            raise RegardError(f"BPE-dropout is a probability, between 0 and 1; it cannot be {p}.")
        self.p, self.seed = p, seed
        model = json.loads(tokenizer.library.to_str())["model"]
        self._vocab: dict[str, int] = model["vocab"]
        # (left, right) -> (rank, merged): the merge of lowest rank comes first
        self._merges = {
            (self._vocab[left], self._vocab[right]): (rank, self._vocab[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }

        numbers: dict[str, int] = {}
        words: list[int] = []
        self._word_starts = np.zeros(len(texts) + 1, np.int64)
        for index, text in enumerate(texts):
            words.extend(numbers.setdefault(word, len(numbers)) for word in _cut(tokenizer, text))
            self._word_starts[index + 1] = len(words)
        self._words = np.array(words, np.int64)  # the texts, as numbers into _spelling
        self._spelling = list(numbers)
        # segmentation j of word w is _pool[_start[w, j] : _start[w, j] + _length[w, j]]; -1 while it is not made
        self._start = np.full((len(numbers), SEGMENTATIONS), -1, np.int32)
        self._length = np.zeros((len(numbers), SEGMENTATIONS), np.int32)
        self._pool = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._word_starts) - 1

    def segment(self, word: str, j: int) -> list[int]:
        """Segmentation number j of a word (as the tokeniser cuts texts into words)."""
        pieces = [self._vocab.get(sign, UNK) for sign in word]
        # One random number for each pair that is looked at: at most n(n - 1)/2 of them, 32 bits each.
        key = f"{self.seed} {j} {word}".encode()
        noise = hashlib.shake_128(key).digest(2 * len(pieces) * (len(pieces) - 1))
        random = iter(np.frombuffer(noise, "<u4").tolist())
        threshold = int(self.p * 2**32)
        while True:
            best: tuple[int, int, int] | None = None  # rank, place, merged
            for place, pair in enumerate(pairwise(pieces)):
                merge = self._merges.get(pair)
                if merge and next(random) >= threshold and (best is None or merge[0] < best[0]):
                    best = (merge[0], place, merge[1])
            if best is None:
                return pieces
            pieces[best[1] : best[1] + 2] = [best[2]]

    def draw(self, generator: np.random.Generator) -> Sequences:
        """The texts, encoded for one epoch."""
        chosen = generator.integers(SEGMENTATIONS, size=len(self._words))
        self._make_missing(chosen)
        lengths = self._length[self._words, chosen]
        ids = gather(self._pool, self._start[self._words, chosen], lengths)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Sequences(ids, ends[self._word_starts])

    def _make_missing(self, chosen: Int[np.ndarray, "N"]) -> None:
        keys = np.unique((self._words * SEGMENTATIONS + chosen)[self._start[self._words, chosen] < 0])
        words, numbers = np.divmod(keys, SEGMENTATIONS)
        made = Sequences.of(self.segment(self._spelling[w], j) for w, j in zip(words.tolist(), numbers.tolist()))
        self._start[words, numbers] = made.starts[:-1] + len(self._pool)
        self._length[words, numbers] = made.lengths
        self._pool = np.concatenate([self._pool, made.ids])


def _cut(tokenizer: Tokenizer, text: str) -> list[str]:
    """A text as the words inside which merging happens."""
    library = tokenizer.library
    normal = library.normalizer.normalize_str(text) if library.normalizer else text
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(normal)]
