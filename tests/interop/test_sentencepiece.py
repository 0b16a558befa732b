"""sentencepiece files, read and written, beside the library itself."""

import json
import random

import pytest
import sentencepiece
import tokenizers
from tokenizers import normalizers

from regard.data import Tokenizer
from regard.data.tokenizer import FOREIGN
from regard.errors import RegardError
from regard.interop.sentencepiece import (
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
from regard.interop.sentencepiece import _to_bytes as to_bytes
from tests.interop.sentencepiece_models import (
    MODELS,
    NAMES,
    SENTENCES,
    SOUND,
    TEXTS,
    ids_of,
    theirs,
    trained,
    written,
)


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_texts_are_those_of_sentencepiece(name, tmp_path):
    content = trained(**MODELS[name])
    library, other = read_sentencepiece(written(tmp_path, content)), theirs(content)
    tokenizer = Tokenizer(library, FOREIGN)
    assert tokenizer.vocab_size == other.vocab_size()
    known = 0
    for text in [*SENTENCES, *NAMES]:
        ids = other.encode(text)
        assert tokenizer.encode(text) == ids, text
        if other.unk_id() not in ids:
            known += 1
            assert tokenizer.decode(ids) == other.decode(ids)
    assert known > 120
    assert [library.id_to_token(i) for i in range(other.vocab_size())] == [
        other.id_to_piece(i) for i in range(other.vocab_size())
    ]


def test_unknown_characters_are_one_id_and_are_not_decoded(tmp_path):
    content = trained(**MODELS["unigram"])
    tokenizer = Tokenizer(read_sentencepiece(written(tmp_path, content)), FOREIGN)
    ids = tokenizer.encode("the ☃☃ cat")
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "the  cat"
    assert ("☃☃", (4, 6)) in tokenizer.pieces("the ☃☃ cat")


def test_what_a_model_writes_is_decoded_as_sentencepiece_does(tmp_path):
    """Also ids that no text has: two spaces at the beginning, half a character."""
    for name in ("unigram", "bpe of llama", "unigram bare"):
        content = trained(**MODELS[name])
        library, other = read_sentencepiece(written(tmp_path, content)), theirs(content)
        space, word = other.piece_to_id("▁"), other.encode("the cat")
        byte = [other.piece_to_id("<0xE2>")] * (name == "bpe of llama")
        for ids in ([space, space, *word], [1, space, *word, 2], [*word, space], [*byte, *word, *byte], []):
            assert library.decode(ids) == other.decode(ids)


def test_unused_pieces_are_never_chosen(tmp_path):
    pieces = [Piece("<unk>", 0, UNKNOWN), Piece("▁", -2), Piece("a", -3), Piece("b", -3), Piece("ab", -1, UNUSED)]
    content = to_bytes(PieceModel(pieces, UNIGRAM))
    library, other = read_sentencepiece(written(tmp_path, content)), theirs(content)
    assert ids_of(library, "ab ab") == other.encode("ab ab") == [1, 2, 3, 1, 2, 3]
    assert library.decode([1, 4, 1, 4]) == other.decode([1, 4, 1, 4]) == "ab ab"


def test_only_normal_pieces_say_what_an_unknown_character_costs(tmp_path):
    """Here it is worth it: c has no piece of its own, and bc is no good."""
    pieces = [Piece("<unk>", 0, UNKNOWN), Piece("▁", -2), Piece("a", -20), Piece("ab", -1), Piece("bc", -20)]
    content = to_bytes(PieceModel([*pieces, Piece("zz", -100, UNUSED)], UNIGRAM))
    library = read_sentencepiece(written(tmp_path, content))
    assert ids_of(library, "abc") == theirs(content).encode("abc") == [1, 3, 0]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_the_same_to_sentencepiece(name, tmp_path):
    content = trained(**MODELS[name])
    other = theirs(content)
    write_sentencepiece(read_sentencepiece(written(tmp_path, content)), tmp_path / "again.model")
    again = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again.model"))
    for text in [*SENTENCES, *NAMES]:
        ids = other.encode(text)
        assert again.encode(text) == ids, text
        assert again.decode(ids) == other.decode(ids)
    for what in ("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size"):
        assert getattr(again, what)() == getattr(other, what)()


def test_a_tokenizer_as_llama_has_it_can_be_written(tmp_path):
    """One that was never a file of sentencepiece for us: merges, in its own order, and no cut at spaces."""
    content = trained(**MODELS["bpe of llama"])
    table = json.loads(read_sentencepiece(written(tmp_path, content)).to_str())
    table["pre_tokenizer"] = None
    merges = table["model"]["merges"]
    by_piece: dict[str, list] = {}
    for merge in merges:
        by_piece.setdefault("".join(merge), []).insert(0, merge)
    table["model"]["merges"] = [merge for ways in by_piece.values() for merge in ways]
    assert table["model"]["merges"] != merges
    write_sentencepiece(tokenizers.Tokenizer.from_str(json.dumps(table)), tmp_path / "again.model")
    again = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again.model"))
    assert [again.encode(text) for text in SENTENCES] == [theirs(content).encode(text) for text in SENTENCES]
    # With the last of its merges first it is another tokenizer, whose pieces sentencepiece would join in another order.
    table["model"]["merges"] = [merges[-1], *merges[:-1]]
    write_sentencepiece(tokenizers.Tokenizer.from_str(json.dumps(table)), tmp_path / "other.model")
    other = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "other.model"))
    changed = tokenizers.Tokenizer.from_str(json.dumps(table))
    assert [other.encode(text) for text in SENTENCES] == [ids_of(changed, text) for text in SENTENCES]
    table["model"]["merges"] = merges[:-1]
    with pytest.raises(RegardError, match="its model joins texts in a way that sentencepiece does not"):
        write_sentencepiece(tokenizers.Tokenizer.from_str(json.dumps(table)), tmp_path / "never.model")


@pytest.mark.parametrize("kind", ["word", "space", "char", "bpe", "bytes"])
def test_our_own_kinds_are_not_written_for_sentencepiece(kind, tmp_path):
    tokenizer = Tokenizer.train(TEXTS, kind, vocab_size=400)
    with pytest.raises(RegardError, match=r"never.model: .* cannot be written for sentencepiece.*tokenizer.json"):
        write_sentencepiece(tokenizer.library, tmp_path / "never.model")
    assert not list(tmp_path.iterdir())


def test_a_changed_normalizer_is_not_written(tmp_path):
    library = read_sentencepiece(written(tmp_path, trained(**MODELS["unigram"])))
    library.normalizer = normalizers.Sequence([normalizers.Lowercase(), library.normalizer])
    with pytest.raises(RegardError, match="its normalizer changes texts in a way that sentencepiece does not"):
        write_sentencepiece(library, tmp_path / "never.model")


# -- damaged files, and what cannot be expressed ----------------------------------------------------------------------


def of_pieces(*more: Piece, type: int = BPE, charsmap: bytes = b"") -> bytes:
    return to_bytes(PieceModel([*SOUND, *more], type, charsmap))


# A leaf that points into the middle of a text.
MISLED = (1024).to_bytes(4, "little") + bytes(1020) + (2**31 + 1).to_bytes(4, "little") + b"ab\0"
REFUSED = {
    "type 3": lambda: trained(model_type="word"),
    "type 4": lambda: trained(model_type="char", vocab_size=60),
    "spaces at the ends of words": lambda: trained(model_type="unigram", treat_whitespace_as_suffix=True),
    "not written as ▁": lambda: of_pieces()[:-1] + b"\0",
    "a map of characters for decoding": lambda: of_pieces() + b"\x2a\3\x12\1a",
    "0 pieces for what is unknown": lambda: of_pieces().replace(b"\x18\2", b"\x18\3"),
    "a piece twice": lambda: of_pieces(Piece("a", -1)),
    "1 pieces for bytes": lambda: of_pieces(Piece("<0x41>", 0, 6)),
    "unknown kind": lambda: of_pieces(Piece("c", 0, 7)),
    "same score": lambda: of_pieces(Piece("ab", -1), Piece("ba", -1)),
    "not 'c' by itself": lambda: of_pieces(Piece("ac", -1)),
    "unused pieces": lambda: of_pieces(Piece("ab", -1, UNUSED)),
    "nothing leads to the piece 'abab'": lambda: of_pieces(Piece("abab", -1), Piece("aa", 0, USER_DEFINED)),
    "changed by its own normalizer": lambda: trained(model_type="unigram", user_defined_symbols="①"),
    "score that is no number": lambda: of_pieces(Piece("c", float("nan"))),
    "map of characters of the wrong size": lambda: of_pieces(charsmap=b"\x08\0\0\0\0\0\0\0a\0"),
    "map of characters that leads nowhere": lambda: of_pieces(charsmap=b"\4\0\0\0\0\4\1\0a\0"),
    "map of characters that leads +nowhere": lambda: of_pieces(charsmap=MISLED),
    "not a file of sentencepiece": lambda: b"PK\3\4 a zip file",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_be_the_same_is_refused(what, tmp_path):
    path = written(tmp_path, REFUSED[what]())
    with pytest.raises(RegardError, match=what) as error:
        read_sentencepiece(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", ["bpe bytes", "unigram", "a few"])
def test_a_damaged_file_is_an_error_or_a_tokenizer(content, tmp_path):
    """Whatever byte is another one: nothing but a RegardError, and what can be opened can be used."""
    sound = of_pieces(type=UNIGRAM) if content == "a few" else trained(**MODELS[content])
    draw = random.Random(3)
    refused = 0
    for _ in range(40):
        damaged = bytearray(sound)
        damaged[draw.randrange(len(sound))] = draw.randrange(256)
        path = written(tmp_path, bytes(damaged[: draw.choice([None, draw.randrange(len(sound))])]))
        try:
            library = read_sentencepiece(path)
        except RegardError:
            refused += 1
        else:
            ids_of(library, "The ① café ab 🙂\t<s>")
    assert refused > 10
