import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import BpeDropout, Tokenizer
from regard.data.text.bpe_dropout import SEGMENTATIONS
from regard.errors import RegardError

TEXTS = [
    f"{a} little {b}ing {a}ness, un{b}able; <pad> déjà-vu's {a}{b}" for a in ("happy", "sad") for b in ("do", "go")
]
TOKENIZERS = {kind: Tokenizer.train(TEXTS * 3, kind, vocab_size=340) for kind in ("bpe", "bytes")}


def rows(drawn):
    return [drawn[i].tolist() for i in range(len(drawn))]


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@given(texts=st.lists(st.text(st.sampled_from("hapysdolitengu<>-' \tżé")), max_size=5))
def test_without_dropout_it_is_encode(kind, texts):
    tokenizer = TOKENIZERS[kind]
    texts = texts + TEXTS
    drawn = BpeDropout(tokenizer, texts, p=0.0, seed=3).draw(np.random.default_rng(0))
    assert rows(drawn) == tokenizer.encode_batch(texts)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_with_certain_dropout_it_is_characters(kind):
    tokenizer = TOKENIZERS[kind]
    [ids] = rows(BpeDropout(tokenizer, ["happy do"], p=1.0, seed=3).draw(np.random.default_rng(0)))
    if kind == "bpe":
        assert [tokenizer.library.id_to_token(one) for one in ids] == list("▁happy▁do")
    else:
        assert [tokenizer.library.id_to_token(one) for one in ids] == list("happyĠdo")


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_text_is_kept(kind, p):
    tokenizer = TOKENIZERS[kind]
    drawn = BpeDropout(tokenizer, TEXTS, p, seed=3).draw(np.random.default_rng(0))
    assert tokenizer.decode_batch(rows(drawn)) == TEXTS


def test_more_dropout_more_pieces():
    tokenizer = TOKENIZERS["bpe"]
    counts = [
        np.mean([len(BpeDropout(tokenizer, TEXTS, p, seed).draw(np.random.default_rng(0)).ids) for seed in range(20)])
        for p in (0.0, 0.1, 0.3, 0.6, 1.0)
    ]
    assert all(less < more for less, more in pairwise(counts))


def test_one_merge_is_left_out_as_often_as_it_should():
    """A word of two letters with one merge: left apart with probability p."""
    tokenizer = Tokenizer.train(["ab"] * 5, "bytes", vocab_size=261)
    assert len(tokenizer.encode("ab")) == 1
    apart = [
        len(BpeDropout(tokenizer, [], p=0.3, seed=seed).segment("ab", j)) == 2
        for seed in range(125)
        for j in range(SEGMENTATIONS)
    ]
    assert abs(np.mean(apart) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(apart))


def test_an_epoch_is_a_function_of_its_generator():
    tokenizer = TOKENIZERS["bpe"]
    fresh, used = (BpeDropout(tokenizer, TEXTS, 0.3, seed=5) for _ in range(2))
    for epoch in range(5):
        used.draw(np.random.default_rng(epoch))
    expected = rows(fresh.draw(np.random.default_rng(9)))
    assert rows(used.draw(np.random.default_rng(9))) == expected
    assert rows(used.draw(np.random.default_rng(9))) == expected
    assert rows(used.draw(np.random.default_rng(8))) != expected
    assert rows(BpeDropout(tokenizer, TEXTS, 0.3, seed=6).draw(np.random.default_rng(9))) != expected


def test_a_segmentation_is_a_function_of_seed_word_and_number():
    """Whatever other words there are."""
    tokenizer = TOKENIZERS["bpe"]
    alone, among = BpeDropout(tokenizer, ["happy"], 0.3, seed=5), BpeDropout(tokenizer, TEXTS, 0.3, seed=5)
    for j in range(SEGMENTATIONS):
        assert alone.segment("▁happy", j) == among.segment("▁happy", j)
    assert len({tuple(alone.segment("▁happy", j)) for j in range(SEGMENTATIONS)}) > 3


def test_a_warm_epoch_is_quick():
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(300)]
    texts = [" ".join(rng.choice(words, 13)) for _ in range(2000)]
    tokenizer = Tokenizer.train(texts, "bpe", vocab_size=400)
    corpus = BpeDropout(tokenizer, texts, 0.1, seed=0)
    for epoch in range(3):
        corpus.draw(np.random.default_rng(epoch))
    start = time.perf_counter()
    corpus.draw(np.random.default_rng(3))
    assert time.perf_counter() - start < 0.5  # about 0.01 s


def test_errors():
    with pytest.raises(RegardError, match="kind bpe or bytes, and this one is word"):
        BpeDropout(Tokenizer.train(TEXTS, "word"), TEXTS, 0.1, seed=0)
    with pytest.raises(RegardError, match=r"between 0 and 1; it cannot be 1\.5"):
        BpeDropout(TOKENIZERS["bpe"], TEXTS, 1.5, seed=0)


def test_no_text_at_all():
    drawn = BpeDropout(TOKENIZERS["bpe"], ["", " "], 0.1, seed=0).draw(np.random.default_rng(0))
    assert rows(drawn) == [[], []]
