import gzip

import numpy as np
import pytest

from regard.data import read_word_vectors
from regard.errors import RegardError


def test_with_and_without_header(tmp_path):
    lines = "cat 0.5 -1 2\n. . . 1 2 3 \ncat 9 9 9\nété 1e-3 0 0\n"
    (tmp_path / "glove.txt").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "word2vec.txt.gz", "wt", encoding="utf-8") as stream:
        stream.write("4 3\n" + lines + "\n")
    for name in ("glove.txt", "word2vec.txt.gz"):
        vectors = read_word_vectors(tmp_path / name)
        assert list(vectors) == ["cat", ". . .", "été"]
        np.testing.assert_array_equal(vectors["cat"], np.array([0.5, -1, 2], np.float32))
        assert vectors["cat"].dtype == np.float32
        assert list(read_word_vectors(tmp_path / name, words={"été", "dog"})) == ["été"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cat 1 2 3\ndog 1 2\n", r"v\.txt, line 2: expected 3 numbers after the word, got 2\."),
        ("2 3\ncat 1 2\n", r"v\.txt, line 2: expected 3 numbers after the word, got 2\."),
        ("2 99999999999999999999\ncat 1 2\n", r"v\.txt, line 2: expected 999999999 numbers"),
        ("² ²\n", r"v\.txt, line 1: '²' is not numeric\."),
        ("cat\n", r"v\.txt, line 1: expected at least 1 numbers after the word, got 0\."),
        ("cat 1 2\ndog 1 x\n", r"v\.txt, line 2: '1 x' is not numeric\."),
        ("", r"v\.txt is empty\."),
    ],
)
def test_invalid_files_are_errors(tmp_path, content, message):
    (tmp_path / "v.txt").write_text(content)
    with pytest.raises(RegardError, match=message):
        read_word_vectors(tmp_path / "v.txt")


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(RegardError, match="There is no file"):
        read_word_vectors(tmp_path / "v.txt")
