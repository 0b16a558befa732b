import io
import json

import numpy as np
import pytest
import torch

from regard.data import read_labeled_texts, split_validation
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts
from regard.data.text.labeled_texts import LabeledText, LabeledTextBatches, label_ids, label_names
from regard.errors import RegardError
from tests.data.helpers import check_epochs, rows, write

SINGLES = [LabeledText(("A fine\u2028film.",), "good"), LabeledText(("Dull.",), "bad"), LabeledText(("",), "bad")]
PAIRS = [LabeledText(("A cat.", "An animal."), "yes"), LabeledText(("A dog.", "A cat."), "no")]


def tsv(examples, header=""):
    return header + "".join("\t".join([*one.texts, one.label]) + "\n" for one in examples)


def jsonl(examples, names=("text", "text2")):
    rows = [dict(zip(names, one.texts)) | {"label": one.label, "more": None} for one in examples]
    return "\n".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("examples", [SINGLES, PAIRS])
def test_every_format_gives_the_same_texts(folder, suffix, examples):
    plain = tsv(examples)
    assert read_labeled_texts([write("a.tsv" + suffix, plain)]) == examples
    assert read_labeled_texts([write("a.txt" + suffix, "\n" + plain + " \n")]) == examples
    assert read_labeled_texts([write("a.jsonl" + suffix, jsonl(examples))]) == examples
    assert read_labeled_texts([write("b.txt" + suffix, jsonl(examples, ("sentence1", "sentence2")))]) == examples
    assert read_labeled_texts([folder / ("a.tsv" + suffix), "b.txt" + suffix]) == examples * 2


@pytest.mark.parametrize("first", ["text", "sentence", "Text", "sentence1"])
def test_header_is_skipped(folder, first):
    assert read_labeled_texts([write("a.tsv", tsv(SINGLES, f"{first}\tlabel\r\n"))]) == SINGLES
    assert read_labeled_texts([write("b.tsv", tsv(PAIRS, f"{first}\ttext2\tlabel\n"))]) == PAIRS


def test_header_defines_the_column_order(folder):
    swapped = "".join(f"{one.label}\t{one.texts[0]}\n" for one in SINGLES)
    assert read_labeled_texts([write("a.tsv", "label\tsentence\n" + swapped)]) == SINGLES
    wide = "".join(f"{i}\t{one.texts[1]}\t{one.label}\t{one.texts[0]}\tx\n" for i, one in enumerate(PAIRS))
    assert read_labeled_texts([write("b.tsv", "index\tsentence2\tlabel\tsentence1\tmore\n" + wide)]) == PAIRS
    assert read_labeled_texts(["a.tsv", write("c.tsv", tsv(SINGLES))]) == SINGLES * 2  # each file has its own header


def test_labels_may_be_integers(folder):
    write("a.jsonl", '{"text": "a", "label": 1}\n{"sentence": "b", "label": "0 "}\n')
    assert read_labeled_texts(["a.jsonl"]) == [LabeledText(("a",), "1"), LabeledText(("b",), "0")]


def test_reading_from_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(tsv(SINGLES).encode())))
    assert read_labeled_texts(["-"]) == SINGLES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "no tab\n", r"^a\.tsv, line 1: no tab\. Write text<TAB>label, or"),
        ("a.tsv", "a\tb\tc\td\n", r"^a\.tsv, line 1: 4 columns without a header\."),
        ("a.tsv", "a\tb\n\na\tb\tc\n", r"^a\.tsv, line 3: expected 2 columns as in the first line, got 3\. Write"),
        ("a.tsv", "text\tlabel\na\n", r"^a\.tsv, line 2: expected 2 columns as in the first line, got 1"),
        ("a.tsv", "a\tb\na\t \n", r"^a\.tsv, line 2: the label is empty\."),
        ("a.tsv", "text\tlabel\n", r"^a\.tsv: there is no text\."),
        ("a.tsv", "", r"^a\.tsv is empty\.$"),
        ("a.tsv", b"a\tb\n\xff\tb\n", r"^a\.tsv, line 2: not UTF-8\."),
        ("a.jsonl", '{"text": "a", "label": "b"}\n{', r"^a\.jsonl, line 2: not JSON"),
        (
            "a.jsonl",
            '{"text": "a"}',
            r'^a\.jsonl, line 1: no text in "text" or no label in "label"; it has text',
        ),
        ("a.jsonl", '{"label": "a"}', r"^a\.jsonl, line 1: no text .*; it has label\."),
        (
            "a.jsonl",
            '{"text": "a", "text2": 2, "label": "a"}',
            r"^a\.jsonl, line 1: no text .*; it has text, text2",
        ),
        ("a.jsonl", '{"text": "a", "label": 0.5}', r"^a\.jsonl, line 1: no text .* or no label"),
        (
            "a.jsonl",
            '{"text": "a", "label": ["b", "c"]}',
            r'^a\.jsonl, line 1: the label in "label" is a list: multi-label classification is not supported\. ',
        ),
        ("a.jsonl", '["a", "b"]', r"^a\.jsonl, line 1: no text .*; it is not an object\."),
    ],
)
def test_invalid_files_are_errors(folder, name, content, message):
    with pytest.raises(RegardError, match=message):
        read_labeled_texts([write(name, content)])


def test_label_names_and_ids():
    names = label_names(SINGLES)
    assert names == ("bad", "good")
    assert label_ids(SINGLES, names).tolist() == [1, 0, 0]
    with pytest.raises(RegardError, match=r"'A cat\.' has the label 'yes', which .*not have\. .* bad, good\."):
        label_ids([*SINGLES, *PAIRS], names)
    with pytest.raises(RegardError, match="Every text has the label 'bad'"):
        label_names(SINGLES[1:])
    with pytest.raises(RegardError, match="There are no labeled texts"):
        label_names([])


def test_split_keeps_equal_texts_together():
    examples = [LabeledText((f"text {i % 50}",), str(i % 2)) for i in range(150)]
    training, validation = split_validation(examples, seed=0)
    assert sorted(training + validation) == sorted(examples)
    assert not {one.texts for one in training} & {one.texts for one in validation}


def numbered_texts(lengths, segments):
    ids = Sequences.from_lists([[10 + i] * length for i, length in enumerate(lengths)])
    return EncodedTexts(
        ids, Sequences.from_lists([[i % 2] * length for i, length in enumerate(lengths)]) if segments else None
    )


@pytest.mark.parametrize("constant_shapes", [False, True])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("more", [(), (2,)])
def test_each_text_has_its_target_in_the_batches(constant_shapes, segments, more):
    lengths = np.random.default_rng(0).integers(1, 20, 200).tolist()
    targets = np.random.default_rng(1).integers(0, 100, (200, *more))
    seen = {}
    texts = numbered_texts(lengths, segments)
    for batch in LabeledTextBatches(
        texts, targets, budget=100, max_len=20, seed=0, constant_shapes=constant_shapes
    ).epoch(0):
        packed = batch.inputs[0]
        assert len(batch.inputs) == 1 + segments
        assert batch.targets.shape == (len(packed), *more)
        assert batch.targets.dtype == torch.int64
        assert (batch.targets[batch.sentences :] == IGNORE_INDEX).all()
        texts_of_batch = rows(packed)[: batch.sentences]
        assert batch.tokens == sum(map(len, texts_of_batch))
        seen |= {row[0] - 10: target.tolist() for row, target in zip(texts_of_batch, batch.targets)}
    assert [seen[i] for i in range(200)] == targets.tolist()


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_epoch_depends_on_seed_and_number_alone(constant_shapes):
    texts = numbered_texts(np.random.default_rng(0).integers(1, 20, 80).tolist(), True)
    options = dict(budget=64, max_len=20, constant_shapes=constant_shapes)
    check_epochs(lambda seed: LabeledTextBatches(texts, np.arange(80), seed=seed, **options))


def test_number_of_targets_must_match():
    with pytest.raises(ValueError, match="got 2 texts and 3 targets"):
        LabeledTextBatches(numbered_texts([1, 2], False), np.arange(3), budget=16, max_len=16, seed=0)


def test_selected_columns_of_text_and_label(folder, caplog):
    rows = [("stars", "review", "title"), ("5", "What a film, wow!", "good"), ("1", "Meh.", "bad")]
    write("a.tsv", "".join("\t".join(row) + "\n" for row in rows))
    write("a.csv", "".join(",".join(f'"{field}"' for field in row) + "\r\n" for row in rows))
    write("a.jsonl", "".join(json.dumps(dict(zip(rows[0], row))) + "\n" for row in rows[1:]))
    expected = [LabeledText(("What a film, wow!",), "5"), LabeledText(("Meh.",), "1")]
    for name in ("a.tsv", "a.csv", "a.jsonl"):
        assert read_labeled_texts([name], columns=("review", "stars")) == expected
    assert read_labeled_texts(["a.csv"], columns=("title", "review", "1"))[0] == LabeledText(
        ("good", "What a film, wow!"), "5"
    )
    assert 'a.csv: first line "stars<TAB>review<TAB>title" is a header and is skipped.' in caplog.messages
    with pytest.raises(RegardError, match="only 3 columns"):
        read_labeled_texts(["a.tsv"], columns=("2", "4"))
    with pytest.raises(RegardError, match=r"need two or three columns \(got 1\)"):
        read_labeled_texts(["a.tsv"], columns=("2",))


def test_csv_with_and_without_header(folder, caplog):
    assert read_labeled_texts([write("a.csv", '"Good, really",yes\nBad,no\n')]) == [
        LabeledText(("Good, really",), "yes"),
        LabeledText(("Bad",), "no"),
    ]
    assert not caplog.messages
    assert read_labeled_texts([write("b.csv", "label,sentence\nyes,Good\n")]) == [LabeledText(("Good",), "yes")]
    assert caplog.messages == ['b.csv: first line "label<TAB>sentence" is a header and is skipped.']


@pytest.mark.parametrize("header", ["review,sentiment", "id,premise,hypothesis,label", "Content,Category"])
def test_headers_with_common_names_are_skipped(header, folder, caplog):
    examples = read_labeled_texts([write("a.csv", f"{header}\n" + "a," * header.count(",") + "b\n")])
    assert examples == [LabeledText(("a",) * (2 if "premise" in header else 1), "b")]
    assert f'first line "{header.replace(",", "<TAB>")}" is a header' in caplog.text


def test_a_first_line_that_looks_like_a_header_is_named(folder, caplog):
    lines = "".join(f"film {i}\t{'good' if i % 2 else 'bad'}\n" for i in range(12))
    assert len(read_labeled_texts([write("a.tsv", "opinion\tverdict\n" + lines)])) == 13
    assert 'looks like a header, but is read as the text "opinion" with the label "verdict"' in caplog.text
    assert caplog.messages[0].endswith("--columns opinion verdict")
    caplog.clear()
    read_labeled_texts([write("b.tsv", lines), write("c.tsv", "What a strange film\tugly\n" + lines)])
    assert not caplog.messages
