"""Datasets of sentence pairs: splits, columns and descriptions."""

import pytest

from regard.errors import RegardError
from regard.training import DataConfig, read_dataset


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
