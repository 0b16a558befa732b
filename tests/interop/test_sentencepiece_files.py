"""Reading and writing of sentencepiece files compared with the sentencepiece library."""

import json
import random

import pytest
import sentencepiece
import tokenizers
from tokenizers import normalizers

from regard.data import Tokenizer
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.errors import RegardError
from regard.interop.sentencepiece_files import (
    BPE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    PieceModel,
    read_sentencepiece,
    write_sentencepiece,
)
from regard.interop.sentencepiece_files import _to_bytes as to_bytes
from tests.interop.sentencepiece_models import (
    MODELS,
    SENTENCES,
    SPECIAL_NAMES,
    TEXTS,
    VALID_PIECES,
    ids_of,
    load_sentencepiece,
    train_sentencepiece,
    write_file,
)


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_decoded_texts_match_sentencepiece(name, tmp_path):
    content = train_sentencepiece(**MODELS[name])
    library, other = read_sentencepiece(write_file(tmp_path, content)), load_sentencepiece(content)
    tokenizer = Tokenizer(library, FOREIGN_KIND)
    assert tokenizer.vocab_size == other.vocab_size()
    known = 0
    for text in [*SENTENCES, *SPECIAL_NAMES]:
        ids = other.encode(text)
        assert tokenizer.encode(text) == ids, text
        if other.unk_id() not in ids:
            known += 1
            assert tokenizer.decode(ids) == other.decode(ids)
    assert known > 120
    assert [library.id_to_token(i) for i in range(other.vocab_size())] == [
        other.id_to_piece(i) for i in range(other.vocab_size())
    ]


def test_runs_of_spaces_with_the_same_score_match_sentencepiece(tmp_path):
    """As in the tokenizer of Llama, with other lengths."""
    runs = [Piece("▁" * length, -1e9) for length in (2, 3, 4, 8, 16)]
    pieces = [Piece("<unk>", 0, UNKNOWN), *runs, Piece("▁a", -1), Piece("ab", -2), *(Piece(c, -9) for c in "▁ab")]
    content = to_bytes(PieceModel(pieces, BPE, remove_extra_whitespaces=False))
    library, other = read_sentencepiece(write_file(tmp_path, content)), load_sentencepiece(content)
    for n in range(40):
        for text in (" " * n, f"a{' ' * n}b{' ' * (n // 2)}a"):
            assert ids_of(library, text) == other.encode(text), text


def test_unknown_characters_are_one_id_and_are_not_decoded(tmp_path):
    content = train_sentencepiece(**MODELS["unigram"])
    tokenizer = Tokenizer(read_sentencepiece(write_file(tmp_path, content)), FOREIGN_KIND)
    ids = tokenizer.encode("the ☃☃ cat")
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "the  cat"
    assert ("☃☃", (4, 6)) in tokenizer.encode_as_pieces("the ☃☃ cat")


def test_arbitrary_ids_are_decoded_as_by_sentencepiece(tmp_path):
    """Also ids that no text is encoded as: two leading spaces, an incomplete character."""
    for name in ("unigram", "bpe llama", "unigram without prefix"):
        content = train_sentencepiece(**MODELS[name])
        library, other = read_sentencepiece(write_file(tmp_path, content)), load_sentencepiece(content)
        space, word = other.piece_to_id("▁"), other.encode("the cat")
        byte = [other.piece_to_id("<0xE2>")] * (name == "bpe llama")
        for ids in ([space, space, *word], [1, space, *word, 2], [*word, space], [*byte, *word, *byte], []):
            assert library.decode(ids) == other.decode(ids)


def test_unused_pieces_are_never_encoded(tmp_path):
    pieces = [Piece("<unk>", 0, UNKNOWN), Piece("▁", -2), Piece("a", -3), Piece("b", -3), Piece("ab", -1, UNUSED)]
    content = to_bytes(PieceModel(pieces, UNIGRAM))
    library, other = read_sentencepiece(write_file(tmp_path, content)), load_sentencepiece(content)
    assert ids_of(library, "ab ab") == other.encode("ab ab") == [1, 2, 3, 1, 2, 3]
    assert library.decode([1, 4, 1, 4]) == other.decode([1, 4, 1, 4]) == "ab ab"


def test_only_normal_pieces_determine_the_score_of_unknown_characters(tmp_path):
    """The unknown c is better than the piece bc, whose score is low."""
    pieces = [Piece("<unk>", 0, UNKNOWN), Piece("▁", -2), Piece("a", -20), Piece("ab", -1), Piece("bc", -20)]
    content = to_bytes(PieceModel([*pieces, Piece("zz", -100, UNUSED)], UNIGRAM))
    library = read_sentencepiece(write_file(tmp_path, content))
    assert ids_of(library, "abc") == load_sentencepiece(content).encode("abc") == [1, 3, 0]


@pytest.mark.parametrize("name", MODELS)
def test_written_file_is_equivalent_in_sentencepiece(name, tmp_path):
    content = train_sentencepiece(**MODELS[name])
    other = load_sentencepiece(content)
    write_sentencepiece(read_sentencepiece(write_file(tmp_path, content)), tmp_path / "again.model")
    again = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again.model"))
    for text in [*SENTENCES, *SPECIAL_NAMES]:
        ids = other.encode(text)
        assert again.encode(text) == ids, text
        assert again.decode(ids) == other.decode(ids)
    for attribute in ("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size"):
        assert getattr(again, attribute)() == getattr(other, attribute)()


def test_llama_tokenizer_is_written(tmp_path):
    """With merges in another order and without splitting at spaces, as in tokenizer.json of Llama."""
    content = train_sentencepiece(**MODELS["bpe llama"])
    table = json.loads(read_sentencepiece(write_file(tmp_path, content)).to_str())
    table["pre_tokenizer"] = None
    merges = table["model"]["merges"]
    by_piece: dict[str, list] = {}
    for merge in merges:
        by_piece.setdefault("".join(merge), []).insert(0, merge)
    table["model"]["merges"] = [merge for ways in by_piece.values() for merge in ways]
    assert table["model"]["merges"] != merges
    write_sentencepiece(tokenizers.Tokenizer.from_str(json.dumps(table)), tmp_path / "again.model")
    again = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again.model"))
    assert [again.encode(text) for text in SENTENCES] == [
        load_sentencepiece(content).encode(text) for text in SENTENCES
    ]
    # Moving the last merge to the front gives a different tokenizer, which is written with other scores.
    table["model"]["merges"] = [merges[-1], *merges[:-1]]
    write_sentencepiece(tokenizers.Tokenizer.from_str(json.dumps(table)), tmp_path / "other.model")
    other = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "other.model"))
    changed = tokenizers.Tokenizer.from_str(json.dumps(table))
    assert [other.encode(text) for text in SENTENCES] == [ids_of(changed, text) for text in SENTENCES]
    table["model"]["merges"] = merges[:-1]
    with pytest.raises(RegardError, match="sentencepiece has no equivalent of its model"):
        write_sentencepiece(tokenizers.Tokenizer.from_str(json.dumps(table)), tmp_path / "never.model")


@pytest.mark.parametrize("kind", ["word", "space", "char", "bpe", "bytes"])
def test_tokenizers_trained_with_regard_are_not_written_for_sentencepiece(kind, tmp_path):
    tokenizer = Tokenizer.train(TEXTS, kind, vocab_size=400)
    with pytest.raises(RegardError, match=r"never.model: .* cannot be written as a sentencepiece file.*tokenizer.json"):
        write_sentencepiece(tokenizer.backend_tokenizer, tmp_path / "never.model")
    assert not list(tmp_path.iterdir())


def test_tokenizer_with_another_normalizer_is_not_written(tmp_path):
    library = read_sentencepiece(write_file(tmp_path, train_sentencepiece(**MODELS["unigram"])))
    library.normalizer = normalizers.Sequence([normalizers.Lowercase(), library.normalizer])
    with pytest.raises(RegardError, match="sentencepiece has no equivalent of its normalizer"):
        write_sentencepiece(library, tmp_path / "never.model")


# -- damaged and unsupported files ------------------------------------------------------------------------------------


def make_file(*more: Piece, type: int = BPE, charsmap: bytes = b"") -> bytes:
    return to_bytes(PieceModel([*VALID_PIECES, *more], type, charsmap))


# A leaf that points into the middle of a text.
INVALID_CHARSMAP = (1024).to_bytes(4, "little") + bytes(1020) + (2**31 + 1).to_bytes(4, "little") + b"ab\0"
INVALID_FILES = {
    "unsupported: type 3": lambda: train_sentencepiece(model_type="word"),
    "unsupported: type 4": lambda: train_sentencepiece(model_type="char", vocab_size=60),
    "spaces as suffixes of words": lambda: train_sentencepiece(model_type="unigram", treat_whitespace_as_suffix=True),
    "spaces that are not escaped as ▁": lambda: make_file()[:-1] + b"\0",
    "unsupported: a denormalizer": lambda: make_file() + b"\x2a\3\x12\1a",
    "0 unknown pieces, expected 1": lambda: make_file().replace(b"\x18\2", b"\x18\3"),
    "duplicate or empty pieces": lambda: make_file(Piece("a", -1)),
    "1 byte pieces, expected 0 or 256": lambda: make_file(Piece("<0x41>", 0, 6)),
    "a piece of an invalid type": lambda: make_file(Piece("c", 0, 7)),
    "same score": lambda: make_file(Piece("ab", -1), Piece("ba", -1)),
    "'aaa' and 'aa' have the same score": lambda: make_file(Piece("aa", -1), Piece("aaa", -1), Piece("aab", -2)),
    "the piece 'ac' contains 'c', which is not a piece": lambda: make_file(Piece("ac", -1)),
    "unsupported: BPE with unused pieces": lambda: make_file(Piece("ab", -1, UNUSED)),
    "no merges lead to the piece 'abab'": lambda: make_file(Piece("abab", -1), Piece("aa", 0, USER_DEFINED)),
    "is changed by normalization": lambda: train_sentencepiece(model_type="unigram", user_defined_symbols="①"),
    "score that is not a finite number": lambda: make_file(Piece("c", float("nan"))),
    "character map of the wrong size": lambda: make_file(charsmap=b"\x08\0\0\0\0\0\0\0a\0"),
    "character map with invalid offsets": lambda: make_file(charsmap=b"\4\0\0\0\0\4\1\0a\0"),
    "character map with invalid +offsets": lambda: make_file(charsmap=INVALID_CHARSMAP),
    "not a sentencepiece file": lambda: b"PK\3\4 a zip file",
}


@pytest.mark.parametrize("message", INVALID_FILES)
def test_damaged_and_unsupported_files_are_an_error(message, tmp_path):
    path = write_file(tmp_path, INVALID_FILES[message]())
    with pytest.raises(RegardError, match=message) as error:
        read_sentencepiece(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", ["bpe bytes", "unigram", "small"])
def test_damaged_file_is_an_error_or_a_usable_tokenizer(content, tmp_path):
    """Random damage raises only RegardError; a file that can be read can be used."""
    valid = make_file(type=UNIGRAM) if content == "small" else train_sentencepiece(**MODELS[content])
    rng = random.Random(3)
    errors = 0
    for _ in range(40):
        damaged = bytearray(valid)
        damaged[rng.randrange(len(valid))] = rng.randrange(256)
        path = write_file(tmp_path, bytes(damaged[: rng.choice([None, rng.randrange(len(valid))])]))
        try:
            library = read_sentencepiece(path)
        except RegardError:
            errors += 1
        else:
            ids_of(library, "The ① café ab 🙂\t<s>")
    assert errors > 10


@pytest.mark.parametrize("texts", [TEXTS, [*TEXTS, *["<pad> a<eos> </s> <unk>"] * 50]], ids=["plain", "special names"])
def test_tokenizers_of_the_kind_sentencepiece_are_written(texts, tmp_path):
    """Those that Regard trains."""
    tokenizer = Tokenizer.train(texts, "sentencepiece", 400)
    write_sentencepiece(tokenizer.backend_tokenizer, tmp_path / "spm.model")
    other = load_sentencepiece((tmp_path / "spm.model").read_bytes())
    for text in [*SENTENCES, *SPECIAL_NAMES, "<pad>", "a<eos>b <sos>"]:
        assert tokenizer.encode(text) == other.encode(text), text
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)
