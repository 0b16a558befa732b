import json
import re
import subprocess
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from regard.data import Tokenizer
from regard.data.text import tokenizer as tokenizer_module
from regard.data.text.special_tokens import EOS, PAD, SOS, SPECIAL_TOKEN_NAMES, UNK
from regard.data.text.tokenizer import FOREIGN_KIND, TOKENIZER_KINDS, split_text
from regard.errors import RegardError

TEXTS = [
    "The cat chased the mouse.",
    "Le chat a chassé la souris.",
    "L'homme n'aime pas les t-shirts, dit-elle !",
    "un homme d&apos; âge mûr , &quot; là &quot; . . .",
    "She said: “it's 3.5% <more> than <unk> & co.”",
] * 3


def trained(kind, **options):
    return Tokenizer.train(TEXTS, kind, **options)


TOKENIZERS = {kind: trained(kind) for kind in TOKENIZER_KINDS}


def normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).replace("▁", " ").split())


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_decoding_restores_training_texts(kind):
    tokenizer = TOKENIZERS[kind]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert min(ids) >= len(SPECIAL_TOKEN_NAMES)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.decode_batch(tokenizer.encode_batch(TEXTS)) == TEXTS


@given(st.text())
def test_bytes_are_exact_for_any_text(text):
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(range(len(SPECIAL_TOKEN_NAMES)))


SEEN = sorted({sign for text in TEXTS for sign in text} - {" "})


@pytest.mark.parametrize("kind", ["char", "bpe"])
@given(text=st.text(st.sampled_from([*SEEN, " ", "\t", "\n", "\u00a0", "\u2028", "▁"])))
def test_decoding_restores_texts_of_known_characters(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == normal(text)
    assert min(ids, default=4) >= len(SPECIAL_TOKEN_NAMES)


@given(st.lists(st.sampled_from(sorted({word for text in TEXTS for word in text.split()}))))
def test_space_restores_lines_of_known_words(words):
    tokenizer = TOKENIZERS["space"]
    ids = tokenizer.encode("  ".join(words))
    assert len(ids) == len(words)
    assert tokenizer.decode(ids) == " ".join(words)


def test_space_does_not_change_phonemes():
    phonemes = "t͡ɕ͈ a̠ ç c̹ ə"  # the combining cedilla is not composed with its letter
    tokenizer = Tokenizer.train([phonemes], "space")
    assert len(tokenizer.encode(phonemes)) == 5
    assert tokenizer.decode(tokenizer.encode(phonemes)) == phonemes


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_names_of_special_tokens_are_encoded_as_text(kind):
    texts = ["x<pad> <unk> <sos><eos> <pad> <eos>x"] * 20
    tokenizer = Tokenizer.train(texts, kind, vocab_size=400)
    ids = tokenizer.encode(texts[0])
    assert min(ids) >= len(SPECIAL_TOKEN_NAMES)
    assert tokenizer.decode(ids) == texts[0]
    assert tokenizer.decode([SOS, *ids, EOS, PAD, PAD]) == texts[0]
    assert (
        [tokenizer.backend_tokenizer.token_to_id(name) for name in SPECIAL_TOKEN_NAMES]
        == [PAD, UNK, SOS, EOS]
        == [0, 1, 2, 3]
    )


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_white_space_only_has_no_tokens(kind):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    if kind != "bytes":
        assert tokenizer.encode("   " if kind == "sentencepiece" else " \t ") == []


def test_words_and_punctuation():
    def split(kind, text):
        return [piece for piece, _ in TOKENIZERS[kind].encode_as_pieces(text)]

    assert split("word", "L'homme aime t-shirts, dit-elle !") == [
        *("L'", "homme", "aime", "t", "-", "shirts", ",", "dit", "-", "elle", "!")
    ]
    assert split("space", "L'homme dit-elle !") == ["L'homme", "dit-elle", "!"]
    big = Tokenizer.train(["d&apos; un t-shirt."] * 9, "bpe", vocab_size=200)
    assert [piece for piece, _ in big.encode_as_pieces("d&apos; un t-shirt.")] == ["d&apos;", "un", "t-shirt", "."]


def test_unknown_words_become_unk_and_are_not_decoded():
    tokenizer = TOKENIZERS["word"]
    ids = tokenizer.encode("The zebra chased the cat.")
    assert ids[1] == UNK
    assert ids.count(UNK) == 1
    assert tokenizer.decode(ids) == "The chased the cat."


def test_lowercase():
    tokenizer = trained("word", lowercase=True)
    assert tokenizer.decode(tokenizer.encode("THE CAT")) == "the cat"


def test_characters_are_composed():
    tokenizer = TOKENIZERS["char"]
    assert tokenizer.encode(unicodedata.normalize("NFD", "chassé")) == tokenizer.encode("chassé")


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_pieces_have_their_positions(kind):
    tokenizer = TOKENIZERS[kind]
    text = "  The cat  chased the souris."
    pieces = tokenizer.encode_as_pieces(text)
    assert len(pieces) == len(tokenizer.encode(text))
    for piece, (start, end) in pieces:
        assert text[start:end] == piece
        assert piece.isspace() or piece == piece.lstrip()
    assert "".join("".join(piece for piece, _ in pieces).split()) == "Thecatchasedthesouris."


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_pieces_of_decoded_ids(kind):
    tokenizer = TOKENIZERS[kind]
    text = TEXTS[0]
    ids = tokenizer.encode(text)
    assert tokenizer.decode_as_pieces(ids) == tokenizer.encode_as_pieces(text)
    assert tokenizer.decode_as_pieces([SOS, *ids, EOS]) == [
        ("", (0, 0)),
        *tokenizer.encode_as_pieces(text),
        ("", (len(text), len(text))),
    ]


@pytest.mark.parametrize("kind", ["word", "bpe", "bytes"])
def test_vocabulary_is_plain_text(kind):
    tokenizer = TOKENIZERS[kind]
    words = tokenizer.vocabulary
    assert len(words) == tokenizer.vocab_size
    assert words[:4] == list(SPECIAL_TOKEN_NAMES)
    assert not any("▁" in word or "Ġ" in word for word in words)
    if kind == "word":
        assert [words[index] for index in tokenizer.encode("L'homme , homme")] == ["L'", "homme", ",", "homme"]


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_loaded_file_has_its_kind_and_gives_the_same_ids(kind, tmp_path):
    tokenizer = trained(kind, lowercase=True, vocab_size=300)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.kind == kind
    text = "The <unk> cat L'homme chassé"
    assert again.encode(text) == tokenizer.encode(text)
    # other tools that read the file get the same ids and special tokens
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert other.encode("the cat").ids == tokenizer.encode("the cat")
    assert other.decode([SOS, *tokenizer.encode("the cat"), EOS]) == "the cat"


PROGRAM = """
from pathlib import Path
from regard.data import Tokenizer
from regard.data.text import tokenizer as tokenizer_module
from regard.data.text.tokenizer import FOREIGN_KIND, TOKENIZER_KINDS, split_text

def train_all(folder):
    texts = [f"the {a}{b} {b}{a}ing {a}{a}." for a in "abcdefgh" for b in "éxyzwvut"]
    for kind in TOKENIZER_KINDS:
        Tokenizer.train(texts, kind, vocab_size=150).save(Path(folder) / f"{kind}.json")
"""


def test_training_is_deterministic(tmp_path):
    """Also in another process, with another hash seed."""
    names: dict = {}
    exec(PROGRAM, names)
    for run in ("first", "second", "other-process"):
        (tmp_path / run).mkdir()
    names["train_all"](tmp_path / "first")
    names["train_all"](tmp_path / "second")
    program = f"{PROGRAM}\ntrain_all({str(tmp_path / 'other-process')!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    for kind in TOKENIZER_KINDS:
        runs = [(tmp_path / run / f"{kind}.json").read_bytes() for run in ("first", "second", "other-process")]
        assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("char", {"exact": True}), ("word", {"keep_newlines": True}), ("bytes", {}), ("bpe", {}), ("sentencepiece", {})],
)
def test_long_text_is_trained_on_in_parts(kind, options, monkeypatch):
    """In parts, since the library needs 85 bytes per character of a text; the tokenizer is the same."""
    seen, split = [], tokenizer_module._training_parts

    def record(text):
        seen.extend(split(text))
        return iter(seen)

    text = "\n".join(TEXTS) * 4
    whole = Tokenizer.train([text], kind, vocab_size=300, **options)
    monkeypatch.setattr(tokenizer_module, "_training_parts", record)
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 50)
    parts = Tokenizer.train([text], kind, vocab_size=300, **options)
    assert parts.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    assert "".join(seen) == text
    assert max(map(len, seen)) < 100


@pytest.mark.parametrize("text", ["ab" * 50_000, "你好" * 50_000, " " * 100_000, "a " + "b" * 5000 + " c"])
def test_pieces_without_white_space_are_bounded_in_training(text):
    """Merging the pairs of a piece takes quadratic time: 30 seconds for 400,000 letters."""
    parts = list(tokenizer_module._training_parts(text))
    assert "".join(parts) == text
    assert max(len(piece) for part in parts for piece in re.findall(r"\S+|\s+", part)) == 1024
    assert max(map(len, split_text(text))) <= 2**16


def test_parts_are_split_between_words(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 3)
    assert split_text("one two 3 four. five\nsix seven") == ["one", " two 3 four. five\nsix", " seven"]
    assert split_text("") == [""]


def test_vocab_size_includes_special_tokens():
    assert Tokenizer.train(["a b c d e f g"], "word", vocab_size=7).vocab_size == 7
    assert Tokenizer.train(TEXTS, "bpe", vocab_size=100).vocab_size == 100
    assert Tokenizer.train(TEXTS, "bytes", vocab_size=300).vocab_size == 300


def test_invalid_files_and_kinds_are_errors(tmp_path):
    with pytest.raises(
        RegardError, match=r"Unknown tokenizer kind 'morse'\. Choose one of word, space, char, bpe, bytes"
    ):
        Tokenizer.train(TEXTS, "morse")
    with pytest.raises(RegardError, match=r"nowhere\.json: the file is missing"):
        Tokenizer.load(tmp_path / "nowhere.json")
    with pytest.raises(RegardError, match="cannot be read: Is a directory"):
        Tokenizer.load(tmp_path)
    for content in (b'{"version": "1.0"', b"\xff\xfe", b""):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(RegardError, match=r"broken\.json is not a tokenizer file"):
            Tokenizer.load(tmp_path / "broken.json")
    TOKENIZERS["bytes"].save(tmp_path / "other.json")
    foreign = json.loads((tmp_path / "other.json").read_text())
    foreign["added_tokens"] = []
    foreign["model"]["vocab"] = {token: 999 - index for token, index in foreign["model"]["vocab"].items()}
    (tmp_path / "other.json").write_text(json.dumps(foreign))
    with pytest.raises(RegardError, match=r"other\.json: unsupported tokenizer"):
        Tokenizer.load(tmp_path / "other.json")


def test_words_with_newlines():
    text = "The cat.\n\nThe dog eats.\nDon't!\n"
    tokenizer = Tokenizer.train([text], "word", keep_newlines=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    first, again = (tokenizer.encode(text)[i] for i in (0, 5))
    assert first == again  # the first word of a line is the same token as elsewhere
    assert tokenizer.decode(tokenizer.encode("  The \t cat. \n dog ")) == "The cat.\ndog"
    for part in ("The cat.\n", "The cat"):
        assert tokenizer.encode(text)[: len(tokenizer.encode(part))] == tokenizer.encode(part)


def test_words_with_newlines_are_loaded_again(tmp_path):
    tokenizer = Tokenizer.train(["a b\nc"], "word", keep_newlines=True)
    tokenizer.save(tmp_path / "tokenizer.json")
    opened = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (opened, opened.kind, opened.decode(opened.encode("a\nb"))) == (tokenizer, "word", "a\nb")


def edit_file(path, edit):
    table = json.loads(path.read_text())
    edit(table)
    path.write_text(json.dumps(table))


def remove_template_token(table):
    """The template of special tokens names one that is not defined: the library panics when it encodes."""
    template = {"type": "TemplateProcessing", "special_tokens": {}, "pair": []}
    table["post_processor"] = template | {"single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]}


def use_unknown_token_without_entry(table):
    table["model"] |= {"unk_token": "missing", "vocab": {"b": 0}}
    table["added_tokens"] = []


@pytest.mark.parametrize("edit", [remove_template_token, use_unknown_token_without_entry])
def test_file_that_fails_when_a_text_is_encoded_is_an_error(tmp_path, edit):
    path = tmp_path / "tokenizer.json"
    Tokenizer.train(["a b"], "word").save(path)
    edit_file(path, edit)
    with pytest.raises(RegardError, match=r"tokenizer\.json is not a tokenizer file: .*\. Restore the tokenizer"):
        Tokenizer.load(path, foreign=True)


def test_ids_with_gaps(tmp_path):
    """Ids that exceed the number of entries would be outside of the model's embedding."""
    path = tmp_path / "tokenizer.json"
    Tokenizer.train(["a b"], "word").save(path)
    edit_file(path, lambda table: table["model"]["vocab"].update({"▁a": 9}))
    with pytest.raises(RegardError, match=r"tokenizer\.json: the 6 entries have ids up to 9\. Restore the tokenizer"):
        Tokenizer.load(path)
    foreign = Tokenizer.load(path, foreign=True)
    assert (foreign.vocab_size, foreign.largest_id) == (6, 9)


def test_text_that_a_tokenizer_cannot_encode_is_an_error():
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="missing"))
    tokenizer = Tokenizer(library, FOREIGN_KIND)
    for encode in (tokenizer.encode, tokenizer.encode_as_pieces, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(RegardError, match=r"The tokenizer cannot encode a text: .+\. Restore the tokenizer"):
            encode("b")
