"""Shortlists of translators: learned from pairs, stored in the model folder, used in decoding."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from regard.decode import DecodeConfig, Shortlist
from regard.errors import RegardError
from regard.pipelines import TextGenerator, Translator, load
from tests.conftest import ENGLISH, FRENCH, number_pairs
from tests.pipelines.test_folder import make_translator
from tests.pipelines.test_int8_weights import make_generator

PAIRS = number_pairs(200, seed=3)
TEST_PAIRS = number_pairs(30, seed=4)
SHORT = DecodeConfig(beam=2, shortlist=True)


def copy_of(translator: Translator, **changes) -> Translator:
    return dataclasses.replace(translator, shortlist=None, **changes)


def test_translations_of_each_token_are_learned(transformer):
    translator = copy_of(transformer)
    shortlist = translator.learn_shortlist(PAIRS, per_token=1, frequent=0)
    assert shortlist is translator.shortlist
    ids = {word: translator.source_tokenizer.encode(word)[0] for word in (*ENGLISH, *FRENCH)}
    for source, target in zip(ENGLISH, FRENCH):
        assert shortlist.targets[ids[source]].tolist() == [ids[target], ids[source]]  # its own id: shared tokenizer
    for source, target in TEST_PAIRS:
        allowed = shortlist.allowed_tokens(translator.encode_source(source), translator.special)
        assert set(translator.encode_target(target)) <= set(allowed.tolist())
        assert len(allowed) < translator.target_tokenizer.vocab_size


def test_true_translations_of_the_test_set_are_in_the_lists(transformer):
    """Translations stay the same; a list of other tokens changes them."""
    translator = copy_of(transformer)
    translator.learn_shortlist(PAIRS, per_token=2, frequent=2)
    lines = [source for source, _ in TEST_PAIRS]
    full, short = (
        [n_best[0].text for n_best in translator.translate(lines, config)] for config in (DecodeConfig(beam=2), SHORT)
    )
    assert sum(a == b for a, b in zip(full, short)) >= len(lines) // 3
    translator.learn_shortlist([(source, "un") for source, _ in PAIRS], per_token=1, frequent=0)
    assert {word for n in translator.translate(["six seven"], SHORT) for word in n[0].text.split()} <= {
        "un",
        "six",
        "seven",
    }


def test_learning_is_deterministic(transformer):
    first, second = (copy_of(transformer).learn_shortlist(PAIRS) for _ in range(2))
    assert np.array_equal(first.targets, second.targets)
    assert np.array_equal(first.frequent, second.frequent)


def test_frequent_tokens(transformer):
    pairs = [("one two", "un un un deux"), ("", "dix dix dix dix dix"), ("two", "deux trois")]
    shortlist = copy_of(transformer).learn_shortlist(pairs, frequent=2)
    ids = [transformer.target_tokenizer.encode(word)[0] for word in ("un", "deux")]
    assert shortlist.frequent.tolist() == sorted(ids)
    every = copy_of(transformer).learn_shortlist(pairs, frequent=1000)
    assert len(every.frequent) == 3  # tokens that do not occur are left out


def test_separate_vocabularies():
    translator = make_translator("transformer", shared=False)
    shortlist = translator.learn_shortlist([("six", "ONE"), ("ten six", "TWO ONE")], per_token=1, frequent=0)
    target = translator.target_tokenizer.encode("ONE")
    assert shortlist.targets[translator.source_tokenizer.encode("six")].tolist() == [target]


def test_folder_keeps_the_shortlist(tmp_path, transformer):
    translator = copy_of(transformer)
    translator.learn_shortlist(PAIRS, per_token=3)
    expected = translator.translate("one two three", SHORT)
    for precision in ("float32", "int8"):
        translator.save(tmp_path, precision=precision)
        loaded = load(tmp_path, "cpu")
        assert np.array_equal(loaded.shortlist.targets, translator.shortlist.targets)
        assert np.array_equal(loaded.shortlist.frequent, translator.shortlist.frequent)
        assert len(loaded.translate("one two three", SHORT)) == 1
    translator.save(tmp_path)
    assert load(tmp_path, "cpu").translate("one two three", SHORT) == expected
    ensemble = load([tmp_path, tmp_path], "cpu")
    assert [t.text for t in ensemble.translate("one two three", SHORT)] == [t.text for t in expected]
    translator.shortlist = None
    translator.save(tmp_path)
    assert load(tmp_path, "cpu").shortlist is None


def test_files_record_the_shortlist(tmp_path, transformer):
    translator = copy_of(transformer)
    (tmp_path / "in.txt").write_text("one two\nthree\n")
    with pytest.raises(RegardError, match="the model has no shortlist"):
        translator.translate_file(tmp_path / "in.txt", tmp_path / "out.txt", SHORT)
    translator.learn_shortlist(PAIRS)
    assert translator.translate_file(tmp_path / "in.txt", tmp_path / "out.txt", SHORT).items == 2


def test_models_without_shortlist_are_an_error(transformer):
    with pytest.raises(RegardError, match=r"the model has no shortlist\. Learn one .* regard shortlist"):
        copy_of(transformer).translate(["one"], SHORT)
    generator: TextGenerator = make_generator()
    with pytest.raises(RegardError, match="the model has no shortlist"):
        generator.generate("one", SHORT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_token": 0}, "per_token must be at least 1 (got 0)."),
        ({"frequent": -1}, "frequent must be at least 0 (got -1)."),
    ],
)
def test_invalid_sizes(transformer, options, message):
    with pytest.raises(RegardError) as caught:
        copy_of(transformer).learn_shortlist(PAIRS, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("pairs", [[], [("", "un"), ("one", " ")]])
def test_no_pairs(transformer, pairs):
    with pytest.raises(RegardError, match="no pairs with text"):
        copy_of(transformer).learn_shortlist(pairs)


def set_array(name, value):
    return lambda arrays: arrays.update({name: value(arrays[name])})


BROKEN = {
    "missing": (lambda arrays: arrays.pop("frequent"), "frequent is missing"),
    "int64": (set_array("targets", lambda a: a.astype(np.int64)), "targets must be int32 with 2 axes (got int64"),
    "flat": (set_array("targets", lambda a: a.ravel()), "targets must be int32 with 2 axes (got int32 of shape"),
    "rows": (set_array("targets", lambda a: a[1:].copy()), "rows, but the source vocabulary has"),
    "large": (set_array("frequent", lambda a: a + 1000), "but the target vocabulary has"),
    "negative": (set_array("targets", lambda a: a - 1), "targets contains the token -2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path, transformer, name):
    translator = copy_of(transformer)
    translator.learn_shortlist(PAIRS)
    translator.save(tmp_path)
    path = tmp_path / "shortlist.safetensors"
    arrays = dict(load_file(path))
    change, message = BROKEN[name]
    change(arrays)
    save_file(arrays, path)
    with pytest.raises(RegardError) as caught:
        load(tmp_path, "cpu")
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_damaged_file(tmp_path, transformer):
    copy_of(transformer).save(tmp_path)
    (tmp_path / "shortlist.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(RegardError, match="the file is damaged"):
        load(tmp_path, "cpu")


def test_long_pairs_are_truncated(transformer):
    shortlist = copy_of(transformer).learn_shortlist([("one " * 3000, "un " * 3000)])
    assert isinstance(shortlist, Shortlist)
