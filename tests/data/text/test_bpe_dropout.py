import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import Tokenizer
from regard.data.batching.pairs import SEGMENTATIONS_PER_WORD, BpeDropout
from regard.errors import RegardError

TEXTS = [
    f"{a} little {b}ing {a}ness, un{b}able; <pad> déjà-vu's {a}{b}" for a in ("happy", "sad") for b in ("do", "go")
]
TOKENIZERS = {kind: Tokenizer.train(TEXTS * 3, kind, vocab_size=340) for kind in ("bpe", "bytes")}


def rows(encoded):
    return [encoded[i].tolist() for i in range(len(encoded))]


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@given(texts=st.lists(st.text(st.sampled_from("hapysdolitengu<>-' \tżé")), max_size=5))
def test_without_dropout_equals_encode(kind, texts):
    tokenizer = TOKENIZERS[kind]
    texts = texts + TEXTS
    encoded = BpeDropout(tokenizer, texts, p=0.0, seed=3).sample_encoding(np.random.default_rng(0))
    assert rows(encoded) == tokenizer.encode_batch(texts)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_dropout_1_gives_characters(kind):
    tokenizer = TOKENIZERS[kind]
    [ids] = rows(BpeDropout(tokenizer, ["happy do"], p=1.0, seed=3).sample_encoding(np.random.default_rng(0)))
    if kind == "bpe":
        assert [tokenizer.backend_tokenizer.id_to_token(one) for one in ids] == list("▁happy▁do")
    else:
        assert [tokenizer.backend_tokenizer.id_to_token(one) for one in ids] == list("happyĠdo")


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_decoding_restores_the_text(kind, p):
    tokenizer = TOKENIZERS[kind]
    encoded = BpeDropout(tokenizer, TEXTS, p, seed=3).sample_encoding(np.random.default_rng(0))
    assert tokenizer.decode_batch(rows(encoded)) == TEXTS


def test_more_dropout_gives_more_pieces():
    tokenizer = TOKENIZERS["bpe"]
    counts = [
        np.mean(
            [
                len(BpeDropout(tokenizer, TEXTS, p, seed).sample_encoding(np.random.default_rng(0)).ids)
                for seed in range(20)
            ]
        )
        for p in (0.0, 0.1, 0.3, 0.6, 1.0)
    ]
    assert all(less < more for less, more in pairwise(counts))


def test_merge_is_skipped_with_probability_p():
    """A word of two letters with one merge is not merged with probability p."""
    tokenizer = Tokenizer.train(["ab"] * 5, "bytes", vocab_size=261)
    assert len(tokenizer.encode("ab")) == 1
    unmerged = [
        len(BpeDropout(tokenizer, [], p=0.3, seed=seed).segment("ab", j)) == 2
        for seed in range(125)
        for j in range(SEGMENTATIONS_PER_WORD)
    ]
    assert abs(np.mean(unmerged) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(unmerged))


def test_epoch_depends_on_its_generator_alone():
    tokenizer = TOKENIZERS["bpe"]
    fresh, used = (BpeDropout(tokenizer, TEXTS, 0.3, seed=5) for _ in range(2))
    for epoch in range(5):
        used.sample_encoding(np.random.default_rng(epoch))
    expected = rows(fresh.sample_encoding(np.random.default_rng(9)))
    assert rows(used.sample_encoding(np.random.default_rng(9))) == expected
    assert rows(used.sample_encoding(np.random.default_rng(9))) == expected
    assert rows(used.sample_encoding(np.random.default_rng(8))) != expected
    assert rows(BpeDropout(tokenizer, TEXTS, 0.3, seed=6).sample_encoding(np.random.default_rng(9))) != expected


def test_segmentation_depends_on_seed_word_and_index_alone():
    """It does not depend on the other words."""
    tokenizer = TOKENIZERS["bpe"]
    alone, among = BpeDropout(tokenizer, ["happy"], 0.3, seed=5), BpeDropout(tokenizer, TEXTS, 0.3, seed=5)
    for j in range(SEGMENTATIONS_PER_WORD):
        assert alone.segment("▁happy", j) == among.segment("▁happy", j)
    assert len({tuple(alone.segment("▁happy", j)) for j in range(SEGMENTATIONS_PER_WORD)}) > 3


def test_epoch_with_cached_segmentations_is_fast():
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(300)]
    texts = [" ".join(rng.choice(words, 13)) for _ in range(2000)]
    tokenizer = Tokenizer.train(texts, "bpe", vocab_size=400)
    corpus = BpeDropout(tokenizer, texts, 0.1, seed=0)
    for epoch in range(3):
        corpus.sample_encoding(np.random.default_rng(epoch))
    start = time.process_time()
    corpus.sample_encoding(np.random.default_rng(3))
    assert time.process_time() - start < 0.5  # about 0.01 s


def test_invalid_arguments_are_errors():
    with pytest.raises(RegardError, match=r"kind bpe or bytes \(got word\)"):
        BpeDropout(Tokenizer.train(TEXTS, "word"), TEXTS, 0.1, seed=0)
    with pytest.raises(RegardError, match=r"must be between 0 and 1 \(got 1\.5\)"):
        BpeDropout(TOKENIZERS["bpe"], TEXTS, 1.5, seed=0)


def test_empty_texts():
    encoded = BpeDropout(TOKENIZERS["bpe"], ["", " "], 0.1, seed=0).sample_encoding(np.random.default_rng(0))
    assert rows(encoded) == [[], []]
