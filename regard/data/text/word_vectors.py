"""Pre-trained word vectors in the text format of word2vec and GloVe."""

from collections.abc import Container
from pathlib import Path

import numpy as np
from jaxtyping import Float

from regard.data.text.readers import numbered_lines
from regard.errors import RegardError


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
