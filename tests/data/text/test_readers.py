import gzip
import io
import json
import sys
import tracemalloc

import pytest

from regard.data import read_documents, read_lines, read_pairs
from regard.data.text.readers import read_aligned_pairs, read_text
from regard.errors import RegardError
from tests.data.helpers import write

PAIRS = [("A cat.", "Un chat."), ("Two\u2028dogs.", "Deux chiens\u0085 là."), ("", "")]


def column(index):
    return "".join(f"{pair[index]}\n" for pair in PAIRS)


TSV = "A cat.\tUn chat.\nTwo\u2028dogs.\tDeux chiens\u0085 là.\tCC-BY\tmore\n\n"
CSV = 'A cat.,Un chat.\r\n"Two\u2028dogs.",Deux chiens\u0085 là.,CC-BY\r\n,\r\n'
JSONL = "".join(json.dumps({"source": a, "target": b, "id": 3}, ensure_ascii=False) + "\n" for a, b in PAIRS)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".bz2", ".zst"])
def test_every_format_gives_the_same_pairs(folder, suffix):
    source, target = write("a.en" + suffix, column(0)), write("a.fr" + suffix, column(1))
    assert read_pairs([source, target]) == PAIRS
    assert read_pairs([write("a.tsv" + suffix, TSV)]) == PAIRS
    assert read_pairs([write("a.jsonl" + suffix, JSONL)]) == PAIRS
    assert read_pairs([write("a.csv" + suffix, CSV)]) == PAIRS
    assert read_pairs([write("a.txt" + suffix, TSV)]) == PAIRS
    assert read_pairs([write("b.txt" + suffix, JSONL)]) == PAIRS
    assert read_lines(source) == [one for one, _ in PAIRS]
    assert read_pairs([folder / target, folder / source]) == [(b, a) for a, b in PAIRS]


def test_several_files_are_concatenated(folder):
    assert read_pairs([write("a.tsv", TSV), write("b.jsonl.gz", JSONL)]) == PAIRS + PAIRS


@pytest.mark.parametrize("content", [TSV, JSONL])
def test_reading_from_stdin(content, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert read_pairs(["-"]) == PAIRS
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    assert read_lines("-") == ["one", "two"]


def test_bom_and_carriage_returns_are_removed(folder):
    write("a.tsv", b"\xef\xbb\xbfA cat.\tUn chat.\r\nA dog.\tUn chien.")
    assert read_pairs(["a.tsv"]) == [("A cat.", "Un chat."), ("A dog.", "Un chien.")]


def test_selected_columns(folder):
    write("a.tsv", "7\tA cat.\tUn chat.\n")
    assert read_pairs(["a.tsv"], columns=("3", "2")) == [("Un chat.", "A cat.")]
    write("a.jsonl", '{"translation": {"en": "A cat.", "fr": "Un chat."}}\n{"fr": "Un chien.", "en": "A dog."}\n')
    assert read_pairs(["a.jsonl"], columns=("en", "fr")) == [("A cat.", "Un chat."), ("A dog.", "Un chien.")]


ALIGNED = [("A cat.", "Un chat."), ("", ""), ("No.", "Non merci.")], [[(0, 0), (1, 1)], [], []]


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.tsv", "A cat.\tUn chat.\t0-0 1-1\n\nNo.\tNon merci.\t\n", ()),
        ("a.csv", "A cat.,Un chat.,0-0 1-1,x\n\nNo.,Non merci.,,\n", ()),
        ("a.tsv", "Alignment\ten\tfr\n0-0 1-1\tA cat.\tUn chat.\n\n\tNo.\tNon merci.\n", ("en", "fr")),
        ("a.tsv", "A cat.\tUn chat.\tCC-BY\t0-0 1-1\n\nNo.\tNon merci.\t\t\n", ("1", "2", "4")),
        (
            "a.jsonl",
            '{"translation": {"source": "A cat.", "target": "Un chat."}, "alignment": "0-0 1-1"}\n\n'
            '{"translation": {"source": "No.", "target": "Non merci.", "alignment": ""}}\n',
            (),
        ),
        (
            "a.jsonl",
            '{"a": "A cat.", "b": "Un chat.", "c": "0-0 1-1"}\n\n{"a": "No.", "b": "Non merci.", "c": ""}',
            "abc",
        ),
    ],
)
def test_alignments_beside_the_pairs(folder, name, content, columns):
    assert read_aligned_pairs([write(name, content)], columns) == ALIGNED
    assert read_pairs([name], columns[:2]) == ALIGNED[0]


@pytest.mark.parametrize("third", ["", "\tCC-BY 2.0", "\t2020-01-31", "\tfine\t0-0"])
def test_other_columns_are_no_alignments(folder, third):
    text = f"A cat.\tUn chat.{third}\n"
    assert read_aligned_pairs([write("a.tsv", text)]) == ([("A cat.", "Un chat.")], None)
    assert read_aligned_pairs([write("b.tsv", f"en\tfr\tid\n{text}")]) == ([("A cat.", "Un chat.")], None)
    assert read_aligned_pairs([write("a.en", "A cat.\n"), write("a.fr", "Un chat.\n")]) == (
        [("A cat.", "Un chat.")],
        None,
    )


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("a b\tc\t0-0\na\tb\t0:0\n", (), r"^a\.tsv, line 2: invalid link '0:0'\. Write word indices from 0"),
        ("a b\tc\t0-0\na\tb\t0-0 -1-0\n", (), r"^a\.tsv, line 2: invalid link '-1-0'"),
        ("a b\tc\t0-0 1-1\n", (), r"^a\.tsv, line 1: the link 1-1 is out of range\. .* 2 words and the target 1,"),
        ("a b\tc\t2-0\n", (), r"^a\.tsv, line 1: the link 2-0 is out of range\."),
        ("a\tb\t0-0\na\tb\n", (), r"^a\.tsv, line 2: only 2 columns\. Write source<TAB>target<TAB>alignment on"),
        ("a\tb\n", "123", r"^a\.tsv, line 1: only 2 columns\."),
        ("a\tb\tc\td\n", "1234", r"^Sentence pairs need two columns, or three with an alignment \(got 4\)\."),
        ('{"source": "a", "target": "b", "alignment": [0]}', (), r'^a\.tsv, line 1: .* in the field "alignment"'),
        (
            '{"source": "a", "target": "b", "alignment": "0-0"}\n{"source": "a", "target": "b"}',
            (),
            r"pair 2 has no align",
        ),
        ('{"x": "a", "y": "b"}', "xyz", r'line 1: expected text in the field "z"; it has x, y\. Write links like'),
    ],
)
def test_malformed_alignments_are_errors(folder, content, columns, message):
    name = write("a.jsonl" if content.startswith("{") else "a.tsv", content)
    with pytest.raises(RegardError, match=message.replace(r"a\.tsv", name)):
        read_aligned_pairs([name], columns)


def test_built_in_pairs_have_parts(folder):
    sources = [{source for source, _ in read_pairs([f"phrasebook{part}"])} for part in ("", ":validation", ":test")]
    assert list(map(len, sources)) == [80_000, 500, 1000]
    assert len(set.union(*sources)) == 81_500  # they share no sentence
    with pytest.raises(RegardError, match=r"^There is no file phrasebook:dev\. The built-in .*:validation, "):
        read_pairs(["phrasebook:dev"])


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2", "zst"])
def test_corrupt_compressed_data_is_an_error(folder, kind):
    text = "".join(f"line {number}\n" for number in range(20_000))
    data = (folder / write(f"a.{kind}", text)).read_bytes()
    (folder / f"truncated.{kind}").write_bytes(data[: len(data) // 2])
    (folder / f"corrupt.{kind}").write_bytes(data[:40] + b"\xff" * 20 + data[60:])
    for name in ("truncated", "corrupt"):
        with pytest.raises(
            RegardError, match=rf"^{name}\.{kind}: corrupt compressed data after line \d+ \(.+\)\. Down"
        ):
            read_lines(f"{name}.{kind}")
        with pytest.raises(
            RegardError, match=rf"^{name}\.{kind}: corrupt compressed data after line \d+ \(.+\)\. Down"
        ):
            read_text(f"{name}.{kind}")


def test_compression_is_detected_by_content_with_a_warning(folder, caplog):
    (folder / "plain.gz").write_text("A cat.\tUn chat.\n")
    (folder / "packed.tsv").write_bytes(gzip.compress(b"A cat.\tUn chat.\n"))
    (folder / "packed.xz").write_bytes(gzip.compress(b"A cat.\tUn chat.\n"))
    for name in ("plain.gz", "packed.tsv", "packed.xz"):
        assert read_pairs([name]) == [("A cat.", "Un chat.")]
    assert [record.getMessage() for record in caplog.records] == [
        "plain.gz: not gzip data, despite its suffix; it is read as plain text.",
        "packed.tsv: gzip data, despite its suffix; it is decompressed.",
        "packed.xz: gzip data, despite its suffix; it is decompressed.",
    ]
    (folder / "neither.gz").write_bytes(b"\xff\xfe\n")
    with pytest.raises(
        RegardError, match=r"^neither\.gz, line 1: not UTF-8\. It is not gzip data either, despite \.gz\."
    ):
        read_lines("neither.gz")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="part of Python")
def test_error_names_the_missing_zstandard_package(folder, monkeypatch):
    (folder / "a.zst").write_bytes(b"(\xb5/\xfd and more")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RegardError, match=r'zstandard is not installed\. .* -m pip install "zstandard>='):
        read_lines("a.zst")


def peak_memory(function):
    tracemalloc.start()
    try:
        with pytest.raises(RegardError) as caught:
            function()
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["gz", "zst", "txt"])
def test_endless_line_is_refused_without_much_memory(folder, kind):
    name = write(f"zeros.{kind}", bytes(64 << 20))
    message, peak = peak_memory(lambda: read_pairs([name]))
    assert message.startswith(f"{name}, line 1: longer than 1,048,576 bytes. Is it a text file")
    assert peak < 80 << 20 if kind == "zst" else peak < 8 << 20


def test_line_limit_is_exact(folder, monkeypatch):
    monkeypatch.setattr("regard.data.text.readers.numbered_lines.__defaults__", (8,))
    assert read_lines(write("a.txt", "1234567\n12345678")) == ["1234567", "12345678"]
    with pytest.raises(RegardError, match=r"^a\.txt, line 2: longer than 8 bytes"):
        read_lines(write("a.txt", "1234567\n123456789\n"))


@pytest.mark.parametrize("read", [read_text, read_lines], ids=lambda one: one.__name__)
@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_decompression_bomb_is_refused(folder, monkeypatch, read, suffix):
    monkeypatch.setattr("regard.data.text.compression.MAX_EXPANSION_BYTES", 1 << 18)
    name = write("bomb.txt" + suffix, b"bomb bomb\n" * (1 << 17))
    message, peak = peak_memory(lambda: read(name))
    assert "If that is expected, decompress the file first." in message
    assert "data expand to more than" in message
    assert peak < 40 << 20
    # More than the limit, but not many times its compressed size.
    text = "".join(f"{number * 7919 % 100_003} and {number}\n" for number in range(25_000))
    assert read_text(write("fine.txt" + suffix, text)) == text


def test_document_may_be_one_long_line(folder):
    text = "word " * (1 << 19)
    assert read_text(write("a.txt", text)) == text
    assert read_text(write("a.txt.xz", text)) == text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.en": "1\n2\n3\n", "a.fr": "1\n2\n"}, r"^a\.en has 3 lines, but a\.fr has 2\. .*line 3 has no counterpart"),
        ({"a.en": "1\n", "a.fr": b"caf\xe9\n"}, r"^a\.fr, line 1: not UTF-8\. Convert it: iconv"),
        ({"a.tsv": b"a\tb\n\xff\xfe\n"}, r"^a\.tsv, line 2: not UTF-8"),
        ({"a.tsv.gz": b"a\tb\nc\td\n\xe9\tf\n"}, r"^a\.tsv\.gz, line 3: not UTF-8"),
        ({"a.en": "", "a.fr": "1\n"}, r"^a\.en is empty\.$"),
        ({"a.jsonl": ""}, r"^a\.jsonl is empty\.$"),
        ({"a.tsv": "a\tb\nno\n"}, r"^a\.tsv, line 2: no tab\. Write source<TAB>target"),
        ({"a.txt": "a b\n"}, r"^a\.txt, line 1: no tab"),
        (
            {"a.jsonl": '{"source": "a"'},
            r"^a\.jsonl, line 1: not JSON \(.* at column \d+\)\. Write one object per line",
        ),
        (
            {"a.jsonl": '{"en": "a", "fr": "b"}'},
            r'^a\.jsonl, line 1: expected text in the fields "source" and "target"; it has en, fr',
        ),
        ({"a.jsonl": '{"source": "a", "target": 3}'}, r'line 1: expected text in the fields "source" and "target"'),
        ({"a.jsonl": '["a", "b"]'}, "line 1: expected text .* it is not an object"),
        ({"a.en": "1\n", "a.fr": "2\n", "a.de": "3\n"}, r"Expected two parallel files, .*, got 3 files like a\.en\."),
        ({}, "got 0 files"),
    ],
)
def test_invalid_files_are_errors(folder, files, message):
    for name, content in files.items():
        write(name, content)
    with pytest.raises(RegardError, match=message):
        read_pairs(list(files))


def test_missing_file_error_suggests_a_similar_name(folder):
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


def test_missing_columns_are_errors(folder):
    write("a.tsv", "a\tb\n")
    with pytest.raises(RegardError, match=r"a\.tsv, line 1: only 2 columns"):
        read_pairs(["a.tsv"], columns=("1", "3"))
    with pytest.raises(RegardError, match=r"line 1: no column 'en' in the first row \(a, b\)\. Use column names"):
        read_pairs(["a.tsv"], columns=("en", "fr"))
    with pytest.raises(RegardError, match="no column '0' in the first row"):
        read_pairs(["a.tsv"], columns=("0", "1"))
    with pytest.raises(RegardError, match=r"need two columns \(got 3\)"):
        read_pairs(["a.tsv"], columns=("1", "2", "3"))
    with pytest.raises(RegardError, match="Two parallel files have no columns"):
        read_pairs(["a.en", "a.fr"], columns=("1", "2"))


HEADERS = ["source\ttarget", "Source\tTarget", "en\tfr", "eng\tfra", "en_US\tpt-BR", "word\tplural", "English\tFrench"]


@pytest.mark.parametrize("header", HEADERS)
def test_header_is_skipped_and_logged(folder, caplog, header):
    assert read_pairs([write("a.tsv", f"{header}\nA cat.\tUn chat.\n")]) == [("A cat.", "Un chat.")]
    displayed = header.replace("\t", "<TAB>")
    assert [record.getMessage() for record in caplog.records] == [
        f'a.tsv: first line "{displayed}" is a header and is skipped.'
    ]


@pytest.mark.parametrize(
    "first", ["no\tne", "word\twords", "source\tsource", "the cat\tle chat", "is\test", "en\tfr\nde\tit"]
)
def test_first_pair_is_not_mistaken_for_a_header(folder, caplog, first):
    pairs = read_pairs([write("a.tsv", f"{first}\nyes\tda\n")])
    assert pairs[0] == tuple(first.split("\n")[0].split("\t"))
    assert not caplog.records


def test_columns_are_selected_by_header_name(folder, caplog):
    content = "id{0}Fr{0}en\n7{0}Un chat.{0}A cat.\n"
    for name, separator in (("a.tsv", "\t"), ("a.csv", ","), ("a.txt", "\t")):
        write(name, content.format(separator))
        assert read_pairs([name], columns=("en", "fr")) == [("A cat.", "Un chat.")]
        assert read_pairs([name], columns=("3", "fr")) == [("A cat.", "Un chat.")]
    assert len(caplog.records) == 6
    # Known names of source and target columns are detected.
    assert read_pairs([write("b.tsv", "id\ttgt\tsrc\n7\tUn chat.\tA cat.\n")]) == [("A cat.", "Un chat.")]


def test_csv_quoting_follows_rfc_4180(folder):
    write("a.csv", 'source,target\r\n"A ""big"" cat, here","Un gros\nchat"\r\n\r\nA dog.,Un chien.\r\n')
    assert read_pairs(["a.csv"]) == [('A "big" cat, here', "Un gros\nchat"), ("", ""), ("A dog.", "Un chien.")]
    with pytest.raises(RegardError, match=r"^b\.csv, line 2: not CSV \(.+\)\. Quote fields"):
        read_pairs([write("b.csv", 'a,b\n"c"d,e\n')])
    with pytest.raises(RegardError, match=r"^c\.csv, line 2: only 1 column"):
        read_pairs([write("c.csv", "a,b\nc\n")])


@pytest.mark.parametrize("read", [lambda file: read_pairs([file]), lambda file: read_documents([file])])
def test_number_of_thousands_of_digits_is_an_error(folder, read):
    with pytest.raises(RegardError, match=r"^a\.jsonl, line 1: not JSON \(a number has too many digits\)\."):
        read(write("a.jsonl", '{"source": ' + "1" * 5000 + "}"))


def test_half_a_surrogate_pair_is_an_error(folder):
    """It is a string in Python, but tokenizers and files cannot hold it."""
    line = r'{"source": "\ud83d\ude00", "target": "a"}'
    assert read_pairs([write("a.jsonl", line)]) == [("😀", "a")]
    with pytest.raises(RegardError, match=r"^b\.jsonl, line 1: not JSON \(half a surrogate pair\)\."):
        read_pairs([write("b.jsonl", line.replace(r"\ude00", ""))])
