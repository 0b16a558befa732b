import gzip
import io
import json

import pytest

from regard.data import read_lines, read_pairs
from regard.errors import RegardError
from tests.data.helpers import write

PAIRS = [("A cat.", "Un chat."), ("Two\u2028dogs.", "Deux chiens\u0085 là."), ("", "")]


def column(index):
    return "".join(f"{pair[index]}\n" for pair in PAIRS)


TSV = "A cat.\tUn chat.\nTwo\u2028dogs.\tDeux chiens\u0085 là.\tCC-BY\tmore\n\n"
JSONL = "".join(json.dumps({"source": a, "target": b, "id": 3}, ensure_ascii=False) + "\n" for a, b in PAIRS)


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_every_format_gives_the_same_pairs(folder, packing):
    source, target = write("a.en" + packing, column(0)), write("a.fr" + packing, column(1))
    assert read_pairs([source, target]) == PAIRS
    assert read_pairs([write("a.tsv" + packing, TSV)]) == PAIRS
    assert read_pairs([write("a.jsonl" + packing, JSONL)]) == PAIRS
    assert read_pairs([write("a.txt" + packing, TSV)]) == PAIRS
    assert read_pairs([write("b.txt" + packing, JSONL)]) == PAIRS
    assert read_lines(source) == [one for one, _ in PAIRS]
    assert read_pairs([folder / target, folder / source]) == [(b, a) for a, b in PAIRS]


def test_several_files_of_pairs_follow_each_other(folder):
    assert read_pairs([write("a.tsv", TSV), write("b.jsonl.gz", JSONL)]) == PAIRS + PAIRS


@pytest.mark.parametrize("content", [TSV, JSONL])
def test_stdin(content, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert read_pairs(["-"]) == PAIRS
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    assert read_lines("-") == ["one", "two"]


def test_marks_of_windows_are_removed(folder):
    write("a.tsv", b"\xef\xbb\xbfA cat.\tUn chat.\r\nA dog.\tUn chien.")
    assert read_pairs(["a.tsv"]) == [("A cat.", "Un chat."), ("A dog.", "Un chien.")]


def test_columns(folder):
    write("a.tsv", "7\tA cat.\tUn chat.\n")
    assert read_pairs(["a.tsv"], columns=("3", "2")) == [("Un chat.", "A cat.")]
    write("a.jsonl", '{"translation": {"en": "A cat.", "fr": "Un chat."}}\n{"fr": "Un chien.", "en": "A dog."}\n')
    assert read_pairs(["a.jsonl"], columns=("en", "fr")) == [("A cat.", "Un chat."), ("A dog.", "Un chien.")]


def broken_gz(folder):
    data = gzip.compress(bytes(range(97, 123)) * 4000 + b"\n")
    (folder / "cut.gz").write_bytes(data[: len(data) // 2])
    (folder / "spoilt.gz").write_bytes(data[:20] + b"\xff" * 20 + data[40:])
    (folder / "plain.gz").write_text("no gzip\n")
    (folder / "plain.xz").write_text("no xz\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut.gz", r"^cut\.gz: broken gz data after line 0 \(.*\)\. Download or compress"),
        ("spoilt.gz", r"^spoilt\.gz: broken gz data"),
        ("plain.gz", r"^plain\.gz: broken gz data after line 0 \(Not a gzipped file"),
        ("plain.xz", r"^plain\.xz: broken xz data"),
    ],
)
def test_broken_archives(folder, name, said):
    broken_gz(folder)
    with pytest.raises(RegardError, match=said):
        read_lines(name)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.en": "1\n2\n3\n", "a.fr": "1\n2\n"}, r"^a\.en has 3 lines, but a\.fr has 2\. .*line 3 has no partner"),
        ({"a.en": "1\n", "a.fr": b"caf\xe9\n"}, r"^a\.fr, line 1: not UTF-8\. Convert it: iconv"),
        ({"a.tsv": b"a\tb\n\xff\xfe\n"}, r"^a\.tsv, line 2: not UTF-8"),
        ({"a.tsv.gz": b"a\tb\nc\td\n\xe9\tf\n"}, r"^a\.tsv\.gz, line 3: not UTF-8"),
        ({"a.en": "", "a.fr": "1\n"}, r"^a\.en is empty\.$"),
        ({"a.jsonl": ""}, r"^a\.jsonl is empty\.$"),
        ({"a.tsv": "a\tb\nno\n"}, r"^a\.tsv, line 2: no tab\. Write source<TAB>target"),
        ({"a.txt": "a b\n"}, r"^a\.txt, line 1: no tab"),
        ({"a.jsonl": '{"source": "a"'}, r"^a\.jsonl, line 1: not JSON \(.* at column \d+\)\. Write one object a line"),
        (
            {"a.jsonl": '{"en": "a", "fr": "b"}'},
            r'^a\.jsonl, line 1: no text under "source" and "target"; it has en, fr',
        ),
        ({"a.jsonl": '{"source": "a", "target": 3}'}, r'line 1: no text under "source" and "target"'),
        ({"a.jsonl": '["a", "b"]'}, "line 1: no text .* it is no object"),
        ({"a.en": "1\n", "a.fr": "2\n", "a.de": "3\n"}, r"two parallel files .*, not from 3 files like a\.en\."),
        ({}, "not from 0 files"),
    ],
)
def test_bad_input(folder, files, said):
    for name, content in files.items():
        write(name, content)
    with pytest.raises(RegardError, match=said):
        read_pairs(list(files))


def test_a_missing_file_and_what_may_have_been_meant(folder):
    write("train.en.gz", "x\n")
    with pytest.raises(RegardError, match=r"^There is no file trian\.en\.gz\. Did you mean train\.en\.gz\?$"):
        read_lines("trian.en.gz")
    with pytest.raises(RegardError, match=r"^There is no file nowhere/a\.tsv\. There is no folder nowhere either\.$"):
        read_pairs(["nowhere/a.tsv"])
    with pytest.raises(RegardError, match=r"^There is no file zzz\.$"):
        read_lines("zzz")
    (folder / "sub").mkdir()
    with pytest.raises(RegardError, match=r"^sub cannot be read: Is a directory\.$"):
        read_lines("sub")


def test_columns_that_are_not_there(folder):
    write("a.tsv", "a\tb\n")
    with pytest.raises(RegardError, match=r"a\.tsv, line 1: only 2 columns"):
        read_pairs(["a.tsv"], columns=("1", "3"))
    with pytest.raises(RegardError, match=r"the columns of a TSV file are numbers\. Count from 1"):
        read_pairs(["a.tsv"], columns=("en", "fr"))
    with pytest.raises(RegardError, match="the columns of a TSV file are numbers"):
        read_pairs(["a.tsv"], columns=("0", "1"))
    with pytest.raises(RegardError, match="two parallel files have none"):
        read_pairs(["a.en", "a.fr"], columns=("1", "2"))
