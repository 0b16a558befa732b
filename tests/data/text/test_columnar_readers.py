import json
import sys

import pytest

from regard.data import read_documents, read_labeled_texts, read_pairs
from regard.data.text import readers
from regard.data.text.readers import table_rows
from regard.errors import RegardError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PAIRS = [(f"cat {number}", f"chat {number}") for number in range(10)]


def write(path, **columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


@pytest.fixture
def pairs_file(tmp_path):
    sides = zip(*PAIRS)
    return write(tmp_path / "pairs.parquet", id=list(range(10)), en=list(next(sides)), fr=list(next(sides)))


def test_pairs(pairs_file, tmp_path):
    assert read_pairs([pairs_file], ("en", "fr")) == PAIRS
    # not parallel files, although they are two
    assert read_pairs([pairs_file, pairs_file], ("fr", "en")) == 2 * [(b, a) for a, b in PAIRS]
    nested = write(tmp_path / "wmt.parquet", translation=[{"en": a, "fr": b} for a, b in PAIRS])
    assert read_pairs([nested], ("en", "fr")) == PAIRS
    with pytest.raises(RegardError, match=r'pairs\.parquet, row 1: expected text in the fields "source" and "target"'):
        read_pairs([pairs_file])


def test_documents_and_labels(tmp_path):
    file = write(
        tmp_path / "texts.parquet", text=["good film", " ", "bad\nfilm"], label=[1, 0, 0], body=["a", "b", "c"]
    )
    assert read_documents([file]) == ["good film", "bad\nfilm"]
    assert read_documents([file], ("body",)) == ["a", "b", "c"]
    assert read_labeled_texts([file])[0] == (("good film",), "1")
    with pytest.raises(RegardError, match=r'texts\.parquet, row 1: expected text in the field "label"'):
        read_documents([file], ("label",))
    with pytest.raises(RegardError, match=r"Documents have one column \(got 2\)"):
        read_documents([file], ("text", "body"))


def test_only_the_named_columns_are_read_a_few_rows_at_a_time(pairs_file, monkeypatch):
    monkeypatch.setattr(readers, "_ROWS_PER_BATCH", 2)
    opened = []
    rows = table_rows(pairs_file, columns=("en",), on_open=opened.append)
    assert next(rows).value == {"en": "cat 0"}
    next(rows)
    next(rows)
    assert 0 < opened[0].position < pairs_file.stat().st_size / 2
    assert len(list(rows)) == 7
    assert opened[0].position == pairs_file.stat().st_size


def test_corrupt_and_missing_files(tmp_path):
    file = tmp_path / "pairs.parquet"
    with pytest.raises(RegardError, match=r"There is no file .*pairs\.parquet"):
        read_pairs([file])
    file.write_text("no parquet")
    with pytest.raises(RegardError, match=r"pairs\.parquet: not a readable Parquet file"):
        read_pairs([file])


def test_rows_that_refer_to_one_long_text_are_an_error(tmp_path):
    """A dictionary page holds the text once: some kilobytes expand to gigabytes."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4096, pyarrow.int32()), ["x" * (1 << 20)])
    file = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), file, store_schema=False, compression="zstd")
    assert file.stat().st_size < 10_000
    with pytest.raises(RegardError, match=r"bomb\.parquet: .* bytes expand to more than 64 MiB\. If that is expected"):
        read_documents([file])


@pytest.mark.parametrize(
    ("package", "file", "installed"), [("pyarrow.parquet", "a.parquet", "pyarrow"), ("datasets", "hf:a", "datasets")]
)
def test_missing_packages(package, file, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RegardError, match=rf'is not installed\. Install it with: \S+ -m pip install "{installed}>='):
        read_pairs([file])


@pytest.mark.parametrize("reference", ["hf:", "hf:a::b", "hf:a:b:c:d"])
def test_invalid_references(reference):
    with pytest.raises(RegardError, match="is not a reference to a dataset"):
        read_pairs([reference])


def test_local_datasets(tmp_path, monkeypatch):
    """Streamed by the package `datasets`, from a folder in a format of the hub; nothing is downloaded."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"translation": {"en": a, "fr": b}}) + "\n" for a, b in PAIRS]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text("".join(lines[:3]))
    load, calls = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **options: calls.append(options) or load(*a, **options))
    assert read_pairs([f"hf:{folder}"], ("en", "fr")) == PAIRS
    assert read_pairs([f"hf:{folder}:test"], ("en", "fr")) == PAIRS[:3]
    assert all(call["streaming"] for call in calls)
    with pytest.raises(RegardError, match=r"corpus:none: the dataset cannot be read \(.*none"):
        read_pairs([f"hf:{folder}:none"], ("en", "fr"))
    with pytest.raises(RegardError, match=r'corpus, row 1: expected text in the fields "source" and "target"'):
        read_pairs([f"hf:{folder}"])
