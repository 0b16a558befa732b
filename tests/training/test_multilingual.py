"""One model for several language pairs: data, sampling, tags, scores per pair, and use of the trained model."""

import itertools
import json

import numpy as np
import pytest

import regard
from regard.cli import main
from regard.data.text.languages import LanguagePair, files_per_pair, parse_language_pairs
from regard.errors import RegardError
from regard.evaluation import align
from regard.interop import export_ctranslate2, export_onnx
from regard.interop.onnx_runner import load_onnx
from regard.training import DataConfig, read_dataset
from regard.viewer import look

WORDS = {
    "en": ["red", "blue", "green", "dog", "cat", "bird", "runs", "sits"],
    "de": ["rot", "blau", "grün", "Hund", "Katze", "Vogel", "rennt", "sitzt"],
    "fr": ["rouge", "bleu", "vert", "chien", "chat", "oiseau", "court", "assis"],
}


def sentence(indices, language):
    """The words; in French the noun comes before the adjective."""
    color, animal, verb = (WORDS[language][i] for i in indices)
    return f"{animal} {color} {verb}" if language == "fr" else f"{color} {animal} {verb}"


SENTENCES = list(itertools.product((0, 1, 2), (3, 4, 5), (6, 7)))


def write_pairs(path, source, target, repeats=1):
    lines = [f"{sentence(words, source)}\t{sentence(words, target)}\n" for words in SENTENCES]
    # Cleaning drops duplicates, so further pairs get a number.
    more = [f"{i} {line.replace(chr(9), f'{chr(9)}{i} ')}" for i in range(1, repeats) for line in lines]
    path.write_text("".join(lines + more))
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_pairs(folder / "en-de.tsv", "en", "de"), write_pairs(folder / "en-fr.tsv", "en", "fr")]


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """A model of en-de and en-fr that has learned both."""
    out = tmp_path_factory.mktemp("multilingual") / "model"
    regard.train(
        data,
        out,
        languages=["en-de", "en-fr"],
        validation=data,
        tokenizer={"kind": "word", "vocab_size": 100},
        model={"width": 32, "heads": 2, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
        train={"steps": 120, "batch_tokens": 256, "lr": 1e-2, "warmup": 10, "ema": 0.0, "workers": 1, "device": "cpu"},
        validate_every=60,
        validate_by="bleu",
        quiet=True,
    )
    return out


@pytest.fixture(scope="module")
def translator(folder):
    return regard.load(folder, "cpu")


def test_one_model_translates_into_each_language(translator):
    for language in ("de", "fr"):
        outputs = translator.translate([sentence(words, "en") for words in SENTENCES], to=language)
        assert [n_best[0].text for n_best in outputs] == [sentence(words, language) for words in SENTENCES]


def test_scores_are_reported_per_pair(folder, translator):
    scores = translator.training["validation"]
    assert scores["exact_match_en-de"] == scores["exact_match_en-fr"] == scores["exact_match"] == 100
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"bleu_en-de", "bleu_en-fr"} <= lines[-1].keys()


def test_the_folder_states_its_languages(folder, translator):
    assert json.loads((folder / "config.json").read_text())["languages"] == ["en-de", "en-fr"]
    assert translator.language_pairs == (LanguagePair("en", "de"), LanguagePair("en", "fr"))
    assert translator.languages == ("en", "de", "fr")
    assert translator.target_languages == ("de", "fr")


def test_missing_and_unknown_targets_name_the_known_ones(translator):
    for call in (translator, translator.encode_source, lambda text: look(translator, text)):
        with pytest.raises(RegardError, match=r"No target language is given, and the model has 2.*into: de, fr"):
            call("red dog runs")
    with pytest.raises(RegardError, match=r"Unknown target language 'en'\. The model translates into: de, fr"):
        translator("red dog runs", to="en")


def test_text_never_produces_a_tag(translator):
    tag = translator.source_tokenizer.language_tags["fr"]
    assert tag not in translator.source_tokenizer.encode("<2fr> red <2fr>dog <2fr>")
    assert translator.with_target("fr").encode_source("<2de> red")[0] == tag


def test_scores_prefer_the_language_of_the_target(translator):
    pair = sentence(SENTENCES[0], "en"), sentence(SENTENCES[0], "fr")
    assert translator.score(pair, to="fr").logprob > translator.score(pair, to="de").logprob + 5


def test_saving_a_translator_with_a_target_keeps_all_languages(translator, tmp_path):
    translator.with_target("fr").save(tmp_path)
    assert regard.load(tmp_path, "cpu")("red dog runs", to="de") == "rot Hund rennt"


def test_look_and_alignment_treat_the_tag_as_a_special_token(translator):
    seen = look(translator, "red dog runs", to="fr")
    assert seen.translation == "chien rouge court"
    cross = seen.maps["decoder.0.cross"]
    assert cross.columns[0] == "<2fr>"
    ((first, *_),) = align(translator.with_target("fr"), [("red dog runs", "chien rouge court")], "decoder.0.cross")
    assert first[0] in (0, 1, 2)


def test_engine_and_plain_search_agree(translator):
    lines = [sentence(words, "en") for words in SENTENCES]
    for to in ("de", "fr"):
        plain, engine = (
            translator.translate(lines, regard.DecodeConfig(engine=name, beam=2), to=to) for name in ("plain", "auto")
        )
        assert [n_best[0].text for n_best in plain] == [n_best[0].text for n_best in engine]


def test_onnx_folder_keeps_the_languages(translator, tmp_path):
    pytest.importorskip("onnxruntime")
    export_onnx(translator, tmp_path / "graphs")
    assert load_onnx(tmp_path / "graphs")("red dog runs", to="fr") == "chien rouge court"


def run(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_commands_take_the_target_language(folder, data, capsys, tmp_path):
    assert run(capsys, "translate", folder, "red dog runs", "--to", "fr")[1] == ["chien rouge court"]
    code, _, error = run(capsys, "translate", folder, "red dog runs")
    assert code == 2
    assert "Pass one of them (--to" in error
    (tmp_path / "in.txt").write_text("red dog runs\n")
    files = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt"]
    assert run(capsys, "translate", folder, "--to", "de", *files)[0] == 0
    assert (tmp_path / "out.txt").read_text() == "rot Hund rennt\n"
    code, _, error = run(capsys, "translate", folder, "--to", "fr", *files)  # the file was written for another language
    assert code == 2
    assert run(capsys, "score", folder, "--data", data[1], "--to", "fr")[0] == 0
    assert run(capsys, "look", folder, "red dog runs", "--to", "fr", "--out", tmp_path / "p.html", "--no-with-model")[
        1
    ] == ["chien rouge court"]
    assert "  pairs  en-de en-fr" in run(capsys, "info", folder)[1]


def test_evaluate_has_rows_per_pair(folder, data, capsys, tmp_path):
    languages = ["--languages", "en-de", "en-fr"]
    code, lines, _ = run(capsys, "evaluate", folder, "--data", *data, *languages, "--json", tmp_path / "r.json")
    assert code == 0
    assert any("en-fr" in line for line in lines)
    results = json.loads((tmp_path / "r.json").read_text())
    assert list(results["per_pair"]) == ["en-de", "en-fr"]
    assert results["exact_match"] == results["per_pair"]["en-fr"]["exact_match"] == 100
    assert results["sentences"] == 2 * len(SENTENCES)
    code, _, error = run(capsys, "evaluate", folder, "--data", data[0])
    assert code == 2
    assert "--languages en-de en-fr" in error


TINY = {"steps": 2, "warmup": 1, "workers": 1, "device": "cpu", "batch_tokens": 256}


def test_fine_tuning_one_pair_keeps_the_others(folder, data, tmp_path):
    with pytest.raises(RegardError, match=r"several languages \(de, fr\); those of the data are unknown"):
        regard.train(data[0], tmp_path / "a", start_from=folder, train=TINY, quiet=True)
    with pytest.raises(RegardError, match="no tag for the target language it; its languages: de, fr"):
        regard.train(data[0], tmp_path / "b", start_from=folder, train=TINY, languages=["en-it"], quiet=True)
    tuned = regard.train(
        data[0], tmp_path / "c", start_from=folder, train=TINY, languages=["en-de"], lr=1e-6, quiet=True
    )
    assert tuned.languages == ("en", "de", "fr")
    assert tuned("red dog runs", to="fr") == "chien rouge court"
    assert "bleu_en-de" not in tuned.training["validation"]


def test_both_directions(data):
    config = DataConfig(files=(data[0],), languages=("en-de",), both_directions=True)
    dataset = read_dataset("translate", config)
    assert [str(pair) for pair in dataset.language_pairs] == ["en-de", "de-en"]
    forward, backward = dataset.validation_of(0), dataset.validation_of(1)
    assert forward == [(target, source) for source, target in backward]
    assert not set(forward) & set(dataset.training)


@pytest.mark.parametrize(("temperature", "small"), [(1.0, 16), (2.0, 48), (100.0, 143)])
def test_temperature_of_sampling(tmp_path, data, temperature, small):
    """A pair of n sentence pairs is sampled in proportion to n^(1/T)."""
    large = write_pairs(tmp_path / "large.tsv", "en", "fr", repeats=9)  # 162 pairs, of which 146 are for training
    config = DataConfig(files=(data[0], large), languages=("en-de", "en-fr"), sampling_temperature=temperature)
    counts = np.bincount(read_dataset("translate", config).training_languages)
    assert counts[1] == 146
    assert counts[0] == pytest.approx(small, abs=1)


def test_single_pair_has_languages_and_no_tag(data, tmp_path):
    tiny = {"width": 16, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 1}
    translator = regard.train(
        data[0], tmp_path / "m", languages=["en-de"], model=tiny, tokenizer={"kind": "word"}, train=TINY, quiet=True
    )
    assert (translator.languages, translator.source_tokenizer.language_tags) == (("en", "de"), {})
    assert translator("red dog runs", to="de") == translator("red dog runs")
    with pytest.raises(RegardError, match=r"Unknown target language 'fr'\. The model translates into: de"):
        translator("red dog runs", to="fr")


def test_wrong_number_of_files_is_an_error():
    pairs = parse_language_pairs(["en-de", "en-fr"])
    with pytest.raises(RegardError, match=r"data.files: got 3 files for 2 language pairs \(en-de en-fr\)"):
        files_per_pair(["a.tsv", "b.tsv", "c.tsv"], pairs, "data.files")


@pytest.mark.parametrize("languages", [["en"], ["en-de", "fr"], ["en", "de", "fr"], ["EN-DE"]])
def test_invalid_languages_are_errors(languages):
    with pytest.raises(RegardError, match="expected two language codes, or pairs of codes"):
        parse_language_pairs(languages)


def test_ctranslate2_takes_the_tag_as_the_first_piece(translator, tmp_path):
    library = pytest.importorskip("ctranslate2")
    export_ctranslate2(translator, tmp_path)
    runner = library.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    tokenizer = translator.source_tokenizer.backend_tokenizer
    pieces = tokenizer.encode("red dog runs", add_special_tokens=False).tokens
    for to in ("de", "fr"):
        (result,) = runner.translate_batch([[f"<2{to}>", *pieces]], beam_size=1)
        ids = [tokenizer.token_to_id(piece) for piece in result.hypotheses[0]]
        assert tokenizer.decode(ids) == translator("red dog runs", to=to)
