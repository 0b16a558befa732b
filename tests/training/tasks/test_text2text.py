"""The task `text2text`: several tasks in one model, with prefixes and sampling weights."""

from collections import Counter
from pathlib import Path

import pytest

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.training import DataConfig, run_recipe
from regard.training.tasks import TASKS
from regard.training.tasks.task import random_sample
from tests.training.toy_tasks import toy, write_text

TEXT2TEXT = TASKS["text2text"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
FRENCH = dict(zip(NUMBERS, ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"]))
DIGITS = dict(zip(NUMBERS, "12345678"))
GREEDY = DecodeConfig(method="greedy")


def numbers(words: dict[str, str]) -> list[str]:
    """All pairs of numbers and their translation: "one two", tab, "un deux"."""
    return [f"{a} {b}\t{words[a]} {words[b]}" for a in NUMBERS for b in NUMBERS]


def test_prefixes_select_the_task(tmp_path):
    files = [write_text(tmp_path / "fr.tsv", numbers(FRENCH)), write_text(tmp_path / "digits.tsv", numbers(DIGITS))]
    data = {"files": files, "validation": files, "prefixes": ["French: ", "digits: "], "weights": []}
    learn = {"steps": 120, "lr": 1e-2, "warmup": 10, "batch_tokens": 512, "validate_every": 120, "save_every": 120}
    sizes = {"dropout": 0.0, "width": 32, "positions": "rotary", "qk_norm": True}
    recipe = toy("text2text", tmp_path, data=data, tokenizer={"kind": "word"}, model=sizes, train=learn)
    model = run_recipe(recipe, tmp_path / "out", quiet=True)
    sources = [f"{task}: {a} {b}" for a in NUMBERS for b in NUMBERS for task in ("French", "digits")]
    outputs = [best[0].text for best in model.translate(sources, GREEDY)]
    expected = [f"{words[a]} {words[b]}" for a in NUMBERS for b in NUMBERS for words in (FRENCH, DIGITS)]
    assert sum(one == other for one, other in zip(outputs, expected)) > 0.9 * len(expected)
    assert model.training["validation"]["exact_match"] > 90


def read(folder: Path, counts: tuple[int, ...], **options):
    """Files with `counts` different pairs; those of the first file contain "a", of the second "b", and so on."""
    files = tuple(
        write_text(folder / f"{letter}.tsv", [f"{letter} {i}\t{i} {letter}" for i in range(count)])
        for letter, count in zip("abc", counts)
    )
    return TEXT2TEXT.read(DataConfig(files, **options))


@pytest.mark.parametrize(
    ("weights", "times"), [((), (1, 1)), ((1.0, 1.0), (1, 1)), ((1.0, 0.5), (2, 1)), ((0.2, 0.7), (1, 3.5))]
)
def test_weights_set_how_often_pairs_are_repeated(tmp_path, weights, times):
    dataset = read(tmp_path, (100, 50), weights=weights)
    repeats = Counter(dataset.training)
    for letter, count, weight in (("a", 90, times[0]), ("b", 45, times[1])):
        of_file = {pair: n for pair, n in repeats.items() if pair[0].startswith(letter)}
        assert abs(sum(of_file.values()) - count * weight) <= 0.5
        assert max(of_file.values()) - min(of_file.values()) <= 1
    assert dataset.training == read(tmp_path, (100, 50), weights=weights).training
    # validation pairs are not repeated
    assert Counter(source[0] for source, _ in dataset.validation) == {"a": 10, "b": 5}
    assert not {*dataset.training} & {*dataset.validation}


def test_prefixes_are_added_to_sources_only(tmp_path):
    dataset = read(tmp_path, (60, 60), prefixes=("to b: ", ""))
    for source, target in [*dataset.training, *dataset.validation]:
        letter = target[-1]
        assert source == ("to b: " if letter == "a" else "") + f"{letter} {target[:-2]}"
    assert dataset.fingerprints != read(tmp_path, (60, 60)).fingerprints


def test_validation_files_get_the_prefix_of_their_file(tmp_path):
    named = tuple(write_text(tmp_path / f"{name}.tsv", [f"{name}\t{name}", "\tempty"] * 3) for name in "xy")
    dataset = read(tmp_path, (5, 5), prefixes=("1: ", "2: "), validation=named)
    assert sorted(dataset.validation) == [("1: x", "x")] * 3 + [("2: y", "y")] * 3
    assert len(dataset.training) == 10


def test_validation_sample_is_of_all_tasks(tmp_path):
    """BLEU is computed on a sample of the examples."""
    named = tuple(write_text(tmp_path / f"{name}.tsv", [f"{name} {i}\t{i}" for i in range(60)]) for name in "xy")
    dataset = read(tmp_path, (5, 5), validation=named)
    assert 20 < sum(source.startswith("x") for source, _ in random_sample(dataset.validation, 60)) < 40


def test_dropped_pairs_are_counted_over_all_files(tmp_path):
    files = (
        write_text(tmp_path / "a.tsv", ["one\tun", "one\tun", "two\tdeux", "\t"]),
        write_text(tmp_path / "b.tsv", ["three\ttrois", "x\t" + "y" * 100, "four\tquatre"]),
    )
    dataset = TEXT2TEXT.read(DataConfig(files))
    assert dataset.dropped == "1 empty, 1 duplicate, 1 mismatched length"
    assert len(dataset.training) == len(dataset.validation) == 2


def test_parallel_files_are_an_error(tmp_path):
    """Each file holds the pairs of one task; parallel files are for the task translate."""
    for name in ("source", "target"):
        write_text(tmp_path / name, ["one", "two"])
    with pytest.raises(RegardError, match="source, line 1: no tab"):
        TEXT2TEXT.read(DataConfig((str(tmp_path / "source"), str(tmp_path / "target"))))


def test_suggested_model_is_t5_like(tmp_path):
    model = TEXT2TEXT.suggest_recipe(read(tmp_path, (50, 50)), False).model
    assert model.positions == "relative"
    assert model.norm_kind == "rms"
