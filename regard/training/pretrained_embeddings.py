"""Pre-trained word vectors as initial embeddings."""

from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from regard.data import Tokenizer
from regard.data.text.readers import numbered_lines
from regard.errors import RegardError
from regard.training.recipe import TrainConfig

# With a smaller share of the vocabulary, most embeddings start from random values.
MIN_RECOMMENDED_COVERAGE = 0.3


class VectorCoverage(NamedTuple):
    """The number of tokens in a vocabulary (without special tokens) that have a vector in a file.

    >>> str(VectorCoverage("glove.txt", 3412, 5000))
    'word vectors: 3,412 of 5,000 tokens found in glove.txt (68%)'
    """

    path: str
    covered: int
    tokens: int

    def __str__(self) -> str:
        share = f"{self.covered / self.tokens:.0%}"
        return f"word vectors: {self.covered:,} of {self.tokens:,} tokens found in {self.path} ({share})"

    def warnings(self) -> list[str]:
        """A warning if few tokens have a vector."""
        if self.covered >= MIN_RECOMMENDED_COVERAGE * self.tokens:
            return []
        return [
            f"{self}. The other embeddings start from random values: use tokenizer.kind word, and vectors in the "
            "language and letter case of the data."
        ]


@torch.no_grad()
def init_embeddings(model: Any, config: TrainConfig, source: Tokenizer, target: Tokenizer) -> list[VectorCoverage]:
    """Initialize the embeddings of known words from files of word vectors; return the coverage of each file.

    A model with a single embedding uses the source vectors.
    """
    coverage = []
    sides = [(config.source_vectors, source, getattr(model, "source_embedding", None) or model.embedding)]
    if hasattr(model, "target_embedding"):
        sides.append((config.target_vectors, target, model.target_embedding))
    for path, tokenizer, embedding in sides:
        if not path:
            continue
        vocabulary = tokenizer.vocabulary
        vectors = read_word_vectors(path, set(vocabulary))
        table = embedding.tokens.weight
        width = len(next(iter(vectors.values()))) if vectors else table.shape[1]
        if width != table.shape[1]:
            raise RegardError(
                f"{path}: the vectors have width {width}, the embeddings of the model {table.shape[1]}.",
                f"Set model.width to {width}.",
            )
        rows = [i for i, word in enumerate(vocabulary) if i >= 4 and word in vectors]
        if not rows:
            raise RegardError(
                f"{path}: none of its words is in the vocabulary.",
                "Use tokenizer.kind word, and vectors in the language of the data.",
            )
        known = torch.stack([torch.as_tensor(vectors[vocabulary[i]], dtype=torch.float32) for i in rows])
        # Scaled to the mean norm of the random embeddings that they replace, which the model is initialized for.
        known *= table[4:].norm(dim=1).mean() / known.norm(dim=1).mean()
        table[rows] = known.to(table)
        coverage.append(VectorCoverage(path, len(rows), len(vocabulary) - 4))
    return coverage


def read_word_vectors(path: str | Path, words: Container[str] | None = None) -> dict[str, Float[np.ndarray, "E"]]:
    """Read the vectors of the given words, or of all words. Each line holds a word and its vector; the header line of
    word2vec is optional; files may be compressed. If a word occurs twice, the first vector is used.

    To initialize the embeddings of a model, read the vectors of its vocabulary:

        vectors = read_word_vectors("glove.6B.300d.txt", words=set(tokenizer.vocabulary))
        for index, word in enumerate(tokenizer.vocabulary):
            if word in vectors:
                embedding[index] = torch.from_numpy(vectors[word])
    """
    vectors: dict[str, np.ndarray] = {}
    width = 0
    for number, line in numbered_lines(path):
        if not (line := line.rstrip()):
            continue
        if number == 1 and len(header := line.split()) == 2 and all(word.isdecimal() for word in header):
            width = int(header[1][:9])  # a longer number does not match the next line either
            continue
        width = width or len(line.split(" ")) - 1
        # Split from the right: some collections have "words" that contain spaces.
        word, *values = line.rsplit(" ", width) if width else [line]
        if not width or len(values) != width:
            count = len(line.split(" ")) - 1
            expected = str(width) if width else "at least 1"
            raise RegardError(f"{path}, line {number}: expected {expected} numbers after the word, got {count}.")
        if (words is None or word in words) and word not in vectors:
            try:
                vectors[word] = np.array(values, np.float32)
            except ValueError:
                raise RegardError(f"{path}, line {number}: {' '.join(values)[:40]!r} is not numeric.") from None
    return vectors
