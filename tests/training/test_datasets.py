"""What is read for training, and what is said of it."""

import pytest

from regard.errors import RegardError
from regard.training import DataConfig, read_corpus
from regard.training.tasks import read_data


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "pairs.csv"
    rows = "".join(f"{number},sentence {number},phrase {number}\n" for number in range(200))
    path.write_text("id,en,fr\n" + rows + "200,sentence 1,phrase 1\n201,,\n")
    return str(path)


def test_the_description_counts_what_is_trained_on(table):
    corpus = read_corpus(DataConfig(files=(table,), columns=("en", "fr")))
    assert (len(corpus.training), len(corpus.validation)) == (180, 20)
    assert corpus.describe() == "180 pairs for training, 20 for validation; left out: 1 empty, 1 duplicate"


def test_columns_hold_for_training_and_validation(table):
    corpus = read_corpus(DataConfig(files=(table,), validation=(table,), columns=("fr", "2")))
    assert corpus.training[0] == corpus.validation[0] == ("phrase 0", "sentence 0")


def test_columns_of_every_task_that_reads_tables(table):
    both = read_data("text2text", DataConfig(files=(table,), columns=("en", "fr"), prefixes=("to French: ",)))
    assert ("to French: sentence 0", "phrase 0") in [*both.training, *both.validation]
    labeled = read_data("classify", DataConfig(files=(table,), columns=("en", "id"), validation=(table,)))
    assert (labeled.training[0].texts, labeled.training[0].label) == (("sentence 0",), "0")


def test_a_column_that_is_missing(table):
    with pytest.raises(RegardError, match=r"line 1: no column 'de' in the first row \(id, en, fr\)"):
        read_corpus(DataConfig(files=(table,), columns=("en", "de")))


def test_languages_are_two(table):
    with pytest.raises(RegardError, match=r"data\.languages = \['en'\]; expected two codes"):
        read_corpus(DataConfig(files=(table,), columns=("en", "fr"), languages=("en",)))
