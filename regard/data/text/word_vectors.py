"""Pre-trained word vectors in the text format of word2vec and GloVe."""

from collections.abc import Container
from pathlib import Path

import numpy as np
from jaxtyping import Float

from regard.data.text.readers import numbered_lines
from regard.errors import RegardError


def read_vectors(path: str | Path, wanted: Container[str] | None = None) -> dict[str, Float[np.ndarray, "E"]]:
    """The vectors of the wanted words (without `wanted`, of all): a word and its numbers on each line, with or without
    word2vec's first line of counts; plain, .gz or .xz. Where a word comes twice, the first counts.

    To begin a model's embeddings with them, ask for the words of its tokeniser:

        vectors = read_vectors("glove.6B.300d.txt", wanted=set(tokenizer.vocabulary))
        for index, word in enumerate(tokenizer.vocabulary):
            if word in vectors:
                embedding[index] = torch.from_numpy(vectors[word])
    """
    vectors: dict[str, np.ndarray] = {}
    width = 0
    for number, line in numbered_lines(path):
        if not (line := line.rstrip()):
            continue
        if number == 1 and len(header := line.split()) == 2 and all(one.isdigit() for one in header):
            width = int(header[1])
            continue
        width = width or len(line.split(" ")) - 1
        # From the right: some collections have "words" with spaces in them.
        word, *numbers = line.rsplit(" ", width) if width else [line]
        if not width or len(numbers) != width:
            found = len(line.split(" ")) - 1
            raise RegardError(f"{path}, line {number}: {found} numbers after the word instead of {width or 'some'}.")
        if (wanted is None or word in wanted) and word not in vectors:
            try:
                vectors[word] = np.array(numbers, np.float32)
            except ValueError:
                raise RegardError(f"{path}, line {number}: {' '.join(numbers)[:40]!r} are not numbers.") from None
    return vectors
