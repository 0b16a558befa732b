"""Datasets of sentence pairs: splits, columns and descriptions."""

import dataclasses

import pytest

from regard.data import read_pairs
from regard.errors import RegardError
from regard.training import DataConfig, read_dataset
from tests.training.toy_tasks import toy


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "pairs.csv"
    rows = "".join(f"{index},sentence {index},phrase {index}\n" for index in range(200))
    path.write_text("id,en,fr\n" + rows + "200,sentence 1,phrase 1\n201,,\n")
    return str(path)


def test_description_counts_both_splits_and_dropped_pairs(table):
    dataset = read_dataset("translate", DataConfig(files=(table,), columns=("en", "fr")))
    assert (len(dataset.training), len(dataset.validation)) == (180, 20)
    assert dataset.describe() == "180 pairs for training, 20 for validation; dropped: 1 empty, 1 duplicate"


def test_columns_apply_to_training_and_validation(table):
    dataset = read_dataset("translate", DataConfig(files=(table,), validation=(table,), columns=("fr", "2")))
    assert dataset.training[0] == dataset.validation[0] == ("phrase 0", "sentence 0")


def test_columns_apply_to_every_task_that_reads_tables(table):
    both = read_dataset("text2text", DataConfig(files=(table,), columns=("en", "fr"), prefixes=("to French: ",)))
    assert ("to French: sentence 0", "phrase 0") in [*both.training, *both.validation]
    labeled = read_dataset("classify", DataConfig(files=(table,), columns=("en", "id"), validation=(table,)))
    assert (labeled.training[0].texts, labeled.training[0].label) == (("sentence 0",), "0")


def test_missing_column_is_an_error(table):
    with pytest.raises(RegardError, match=r"line 1: no column 'de' in the first row \(id, en, fr\)"):
        read_dataset("translate", DataConfig(files=(table,), columns=("en", "de")))


def test_one_language_code_is_an_error(table):
    with pytest.raises(RegardError, match=r"data\.languages = \['en'\]; expected two language codes"):
        read_dataset("translate", DataConfig(files=(table,), columns=("en", "fr"), languages=("en",)))


@pytest.mark.parametrize("task", ["translate", "language", "mask", "classify", "answer", "tag", "text2text"])
def test_limit_reads_the_first_examples(task, tmp_path):
    files = toy("text2text" if task == "translate" else task, tmp_path).data.files
    data = DataConfig(files[:1] if task == "translate" else files, validation=files)
    if task == "language":  # each file is a document
        data = dataclasses.replace(data, files=files * 5)
    whole, part = read_dataset(task, data), read_dataset(task, dataclasses.replace(data, limit=3))
    expected = whole.training[:3]
    if task == "text2text":
        assert (part.training[:3], len(part.training)) == (expected, 6)  # of each file
    else:
        assert part.training == expected
    assert part.validation == whole.validation


def test_built_in_pairs_bring_their_validation_part():
    dataset = read_dataset("translate", DataConfig(limit=50))
    assert dataset.training == read_pairs(["phrasebook"])[:50]
    assert dataset.validation == read_pairs(["phrasebook:validation"])
    dataset = read_dataset("translate", DataConfig(validation=("phrasebook:test",), limit=50))
    assert dataset.validation == read_pairs(["phrasebook:test"])
