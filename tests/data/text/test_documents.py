import functools
import io
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import SpecialTokens, Tokenizer, encode_documents, read_documents, split_documents
from regard.data.batching.sequences import Sequences
from regard.data.text import documents
from regard.data.text import tokenizer as tokenizer_module
from regard.data.text.tokenizer import TOKENIZER_KINDS
from regard.errors import RegardError
from regard.training import DataConfig
from regard.training.tasks import read_dataset
from tests.data.helpers import write

TEXT = "  A tab\tand\u2028a line.\n\n\n\rEnd \x85 "


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_file_is_one_document_without_changes(folder, suffix):
    files = [write(name + suffix, TEXT) for name in ("a.txt", "b.py", "c")]
    assert read_documents(files) == [TEXT] * 3
    assert read_documents([write("lines" + suffix, "a\nb\n")]) == ["a\nb\n"]


@settings(deadline=None)
@given(st.text(alphabet="ab \t\n\u2028é", max_size=30), st.booleans())
def test_only_bom_and_carriage_returns_are_changed(tmp_path_factory, text, windows):
    path = tmp_path_factory.getbasetemp() / "windows.txt"
    content = ("\ufeff" + text.replace("\n", "\r\n")) if windows else text
    path.write_bytes(content.encode())
    if not content:
        with pytest.raises(RegardError, match="is empty"):
            read_documents([path])
    elif not text.strip():
        with pytest.raises(RegardError, match="there is no text"):
            read_documents([path])
    else:
        assert read_documents([path]) == [text]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_jsonl_has_one_document_per_line(folder, suffix):
    texts = ["one\ntwo", " three\u2028", "", " \n"]
    lines = "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts)
    assert read_documents([write("a.jsonl" + suffix, "\n" + lines + "  \n"), write("b.txt", "four")]) == [
        "one\ntwo",
        " three\u2028",
        "four",
    ]


def test_stdin_is_one_document(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": 1}\r\ntwo')))
    assert read_documents(["-"]) == ['{"text": 1}\ntwo']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"^a\.txt is empty\.$"),
        ("a.txt", " \n", r"^a\.txt: there is no text\. Provide a file"),
        ("a.txt", b"one\ntwo\ncaf\xe9", r"^a\.txt, line 3: not UTF-8\. Convert it"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "a"',
            r"^a\.jsonl, line 2: not JSON \(.* at column 13\)\. Write one",
        ),
        (
            "a.jsonl",
            '\n{"texts": "a"}',
            r'^a\.jsonl, line 2: expected text in the field "text"; it has texts\. Write \{"text"',
        ),
        ("a.jsonl", '{"text": 3}', r'^a\.jsonl, line 1: expected text in the field "text"; it has text\.'),
        ("a.jsonl", '["text"]', r"^a\.jsonl, line 1: .*; it is not an object\."),
    ],
)
def test_invalid_files_are_errors(folder, name, content, message):
    with pytest.raises(RegardError, match=message):
        read_documents([write(name, content)])


def test_text_files_of_a_folder_are_documents(folder):
    os.makedirs("books/more")
    for name, text in (("b.txt", "two"), ("more/c.txt.gz", "three"), ("a.txt", "one"), ("notes.md", "no")):
        write(f"books/{name}", text)
    assert read_documents(["books", "books/b.txt"]) == ["one", "two", "three", "two"]
    for task in ("language", "mask"):
        assert len(read_dataset(task, DataConfig(files=("books",))).validation) == 1
    with pytest.raises(RegardError, match=r"^books is a folder .* folders of \.txt files are data for --task language"):
        read_dataset("translate", DataConfig(files=("books",)))
    os.makedirs("none")
    with pytest.raises(RegardError, match=r"^none: there is no \.txt file in this folder\."):
        read_documents(["none"])


def test_missing_files_are_errors():
    with pytest.raises(RegardError, match=r"^No file: there is no text"):
        read_documents([])
    with pytest.raises(RegardError, match=r"^There is no file nowhere\.txt\.$"):
        read_documents(["nowhere.txt"])


@settings(deadline=None)
@given(st.lists(st.text(max_size=9), max_size=8), st.floats(0.01, 0.99))
def test_split_takes_the_end_and_loses_nothing(documents, share):
    non_empty = [text for text in documents if text]
    total = sum(map(len, non_empty))
    if total < 2:
        with pytest.raises(RegardError, match=f"A text of {total} characters is too short for a validation split"):
            split_documents(documents, share)
        return
    training, validation = split_documents(documents, share)
    assert all(training)
    assert all(validation)
    if len(non_empty) == 1:
        [first], [last] = training, validation
        assert first + last == non_empty[0]
        assert len(first) == min(max(int(total * (1 - share)), 1), total - 1)
    else:
        assert training
        assert validation
        assert training + validation == non_empty
        target, size = total * share, sum(map(len, validation))
        # one document more or less would not be closer, apart from rounding
        for other in (size + len(training[-1]), size - len(validation[0])):
            if 0 < other < total:
                assert abs(size - target) <= abs(other - target) + 2


def test_default_split_is_the_last_tenth():
    text = "".join(map(str, np.arange(1000)))[:1115]
    assert split_documents([text]) == ([text[:1003]], [text[1003:]])
    assert split_documents(["aaaaaa", "bbb", "c"]) == (["aaaaaa", "bbb"], ["c"])


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_share_must_be_between_0_and_1(share):
    with pytest.raises(RegardError, match="must be between 0 and 1"):
        split_documents(["some text", "more"], share)


def test_documents_are_encoded_as_one_stream():
    tokenizer = Tokenizer.train([TEXT], "char", exact=True)
    documents = [TEXT, TEXT[:5]]
    stream = encode_documents(documents, tokenizer, SpecialTokens(begin=2))
    assert stream.dtype == np.int32
    borders = np.flatnonzero(stream == 3) + 1
    assert borders[-1] == len(stream)
    parts = np.split(stream, borders[:-1])
    assert [part[0] for part in parts] == [2, 2]
    assert [tokenizer.decode(part[1:-1]) for part in parts] == documents
    without = encode_documents(documents, tokenizer, SpecialTokens(begin=None, eos=9))
    expected = Sequences.from_lists([[*tokenizer.encode(text), 9] for text in documents])
    assert without.tolist() == expected.ids.tolist()


@pytest.mark.parametrize("kind", [*TOKENIZER_KINDS, "exact"])
@settings(deadline=None)
@given(text=st.text(alphabet="aabé   1'.\n-\u0301", max_size=60))
def test_encoding_in_parts_equals_encoding_at_once(kind, text, short_parts, tokenizers):
    tokenizer = tokenizers(kind)
    stream = encode_documents([text, "b"], tokenizer, SpecialTokens(begin=2))
    assert stream.tolist() == [2, *tokenizer.encode(text), 3, 2, *tokenizer.encode("b"), 3]


@pytest.fixture(scope="module")
def short_parts():
    """Encode in parts of a few characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PART_CHARS", 3)
        patch.setattr(documents, "PARTS_PER_BATCH", 2)
        yield


@pytest.fixture(scope="module")
def tokenizers():
    @functools.cache
    def make(kind):
        texts = ["ab aé b1 a'b. 1-a\nab ab aé\nb ."]
        if kind == "exact":
            return Tokenizer.train(texts, "char", exact=True)
        return Tokenizer.train(texts, kind, vocab_size=300 if kind == "bytes" else 40)

    return make
