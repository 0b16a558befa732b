"""Several tasks in one model: prefixes that tell them apart, weights that mix them."""

from collections import Counter
from pathlib import Path

import pytest

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.training import DataConfig, train
from regard.training.tasks import TASKS
from tests.training.toy_tasks import toy, write_text

TEXT2TEXT = TASKS["text2text"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
FRENCH = dict(zip(NUMBERS, ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"]))
DIGITS = dict(zip(NUMBERS, "12345678"))
GREEDY = DecodeConfig(method="greedy")


def numbers(words: dict[str, str]) -> list[str]:
    """ "one two" and its translation by the words, for every two numbers."""
    return [f"{a} {b}\t{words[a]} {words[b]}" for a in NUMBERS for b in NUMBERS]


def test_two_tasks_are_told_apart_by_their_prefix(tmp_path):
    files = [write_text(tmp_path / "fr.tsv", numbers(FRENCH)), write_text(tmp_path / "digits.tsv", numbers(DIGITS))]
    data = {"files": files, "validation": files, "prefixes": ["French: ", "digits: "], "weights": []}
    learn = {"steps": 120, "lr": 1e-2, "warmup": 10, "batch_tokens": 512, "validate_every": 120, "save_every": 120}
    sizes = {"dropout": 0.0, "width": 32, "positions": "rotary", "qk_norm": True}
    recipe = toy("text2text", tmp_path, data=data, tokenizer={"kind": "word"}, model=sizes, train=learn)
    model = train(recipe, tmp_path / "out", quiet=True)
    asked = [f"{task}: {a} {b}" for a in NUMBERS for b in NUMBERS for task in ("French", "digits")]
    found = [one[0].text for one in model.translate(asked, GREEDY)]
    wanted = [f"{words[a]} {words[b]}" for a in NUMBERS for b in NUMBERS for words in (FRENCH, DIGITS)]
    assert sum(one == other for one, other in zip(found, wanted)) > 0.9 * len(wanted)
    assert model.training["validation"]["exact_match"] > 90


def read(folder: Path, counts: tuple[int, ...], **options):
    """Files of so many different pairs, the first's with "a", the next with "b", and so on."""
    files = tuple(
        write_text(folder / f"{letter}.tsv", [f"{letter} {i}\t{i} {letter}" for i in range(count)])
        for letter, count in zip("abc", counts)
    )
    return TEXT2TEXT.read(DataConfig(files, **options))


@pytest.mark.parametrize(
    ("weights", "times"), [((), (1, 1)), ((1.0, 1.0), (1, 1)), ((1.0, 0.5), (2, 1)), ((0.2, 0.7), (1, 3.5))]
)
def test_weights_say_how_often_the_pairs_of_a_file_are_seen(tmp_path, weights, times):
    dataset = read(tmp_path, (100, 50), weights=weights)
    seen = Counter(dataset.training)
    for letter, count, often in (("a", 90, times[0]), ("b", 45, times[1])):
        own = {pair: n for pair, n in seen.items() if pair[0].startswith(letter)}
        assert abs(sum(own.values()) - count * often) <= 0.5
        assert max(own.values()) - min(own.values()) <= 1
    assert dataset.training == read(tmp_path, (100, 50), weights=weights).training
    # what is set aside is seen once, whatever the weight
    assert Counter(source[0] for source, _ in dataset.validation) == {"a": 10, "b": 5}
    assert not {*dataset.training} & {*dataset.validation}


def test_prefixes_begin_the_sources_and_nothing_else(tmp_path):
    dataset = read(tmp_path, (60, 60), prefixes=("to b: ", ""))
    for source, target in [*dataset.training, *dataset.validation]:
        letter = target[-1]
        assert source == ("to b: " if letter == "a" else "") + f"{letter} {target[:-2]}"
    assert dataset.fingerprints != read(tmp_path, (60, 60)).fingerprints


def test_validation_files_belong_to_the_files(tmp_path):
    named = tuple(write_text(tmp_path / f"{name}.tsv", [f"{name}\t{name}", "\tempty"] * 3) for name in "xy")
    dataset = read(tmp_path, (5, 5), prefixes=("1: ", "2: "), validation=named)
    assert sorted(dataset.validation) == [("1: x", "x")] * 3 + [("2: y", "y")] * 3
    assert len(dataset.training) == 10


def test_every_task_is_among_the_first_that_are_judged(tmp_path):
    """BLEU is measured on the first of them."""
    named = tuple(write_text(tmp_path / f"{name}.tsv", [f"{name} {i}\t{i}" for i in range(60)]) for name in "xy")
    dataset = read(tmp_path, (5, 5), validation=named)
    assert 20 < sum(source.startswith("x") for source, _ in dataset.validation[:60]) < 40


def test_what_was_left_out_is_counted_over_all_files(tmp_path):
    files = (
        write_text(tmp_path / "a.tsv", ["one\tun", "one\tun", "two\tdeux", "\t"]),
        write_text(tmp_path / "b.tsv", ["three\ttrois", "x\t" + "y" * 100, "four\tquatre"]),
    )
    dataset = TEXT2TEXT.read(DataConfig(files))
    assert dataset.left_out == "1 empty, 1 duplicate, 1 mismatched length"
    assert len(dataset.training) == len(dataset.validation) == 2


def test_two_parallel_files_are_two_tasks_and_not_one(tmp_path):
    """Each file of a text2text run holds pairs; sides in two files are for translation."""
    for name in ("source", "target"):
        write_text(tmp_path / name, ["one", "two"])
    with pytest.raises(RegardError, match="source, line 1: no tab"):
        TEXT2TEXT.read(DataConfig((str(tmp_path / "source"), str(tmp_path / "target"))))


def test_the_suggested_model_has_t5s_form(tmp_path):
    model = TEXT2TEXT.suggest_recipe(read(tmp_path, (50, 50)), False).model
    assert model.positions == "relative"
    assert model.norm_kind == "rms"
