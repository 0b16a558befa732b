"""Files translated, scored, embedded and classified by models: same results as in memory, resumed after SIGKILL."""

import copy
import gzip
import json
import os
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models import Bert, Seq2SeqConfig
from regard.models.bert import BertConfig
from regard.pipelines import TextEncoder, Translator, files, load
from regard.pipelines.scoring import format_score
from regard.pipelines.translation import format_translations
from tests.conftest import number_pairs, train_numbers
from tests.forkserver import CONTEXT

LINES = [source for source, _ in number_pairs(150, seed=7)]
LINES[40] = LINES[77] = ""
GREEDY = DecodeConfig(method="greedy")
SAMPLE = DecodeConfig(method="sample", n_best=2, seed=3)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ITEMS", 32)


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.en.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in LINES).encode()))
    return path


@pytest.fixture(scope="module")
def classifier() -> TextEncoder:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["one two three four five six seven eight nine ten"], "word", mask=True)
    sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=12)
    config = BertConfig(**sizes, head="classify", labels=("even", "odd"), pooler="tanh", positions="learned")
    return TextEncoder(Bert(config).eval(), tokenizer)


def stop_after(blocks: int):
    """A progress callback that ends the work after some blocks."""

    def progress(report) -> None:
        if report.items >= 32 * blocks:
            raise ZeroDivisionError

    return progress


# Translation


@pytest.mark.parametrize("config", [GREEDY, DecodeConfig(beam=3, n_best=2), SAMPLE], ids=["greedy", "n-best", "sample"])
def test_translations_are_those_of_translate(seq2seq, seq2seq_folder, corpus, tmp_path, config):
    expected = format_translations(seq2seq.translate(LINES, config), config, scores=True)
    undisturbed, resumed, parallel = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    seq2seq.translate_file(corpus, undisturbed, config, scores=True)
    rows = [line.rsplit(" ||| ", 1) for line in undisturbed.read_text("utf-8").splitlines()]
    assert [text for text, _ in rows] == [line.rsplit(" ||| ", 1)[0] for line in expected]
    scores = [float(line.rsplit(" ||| ", 1)[1]) for line in expected]
    np.testing.assert_allclose([float(score) for _, score in rows], scores, atol=2e-4)  # other batches
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            seq2seq.translate_file(corpus, resumed, config, scores=True, progress=stop_after(2))
    assert seq2seq.translate_file(corpus, resumed, config, scores=True).resumed_items >= 64
    assert resumed.read_bytes() == undisturbed.read_bytes()
    seq2seq.translate_file(corpus, parallel, config, scores=True, replicas=[load(seq2seq_folder, "cpu")])
    assert parallel.read_bytes() == undisturbed.read_bytes()


def test_empty_lines_stay_empty(seq2seq, corpus, tmp_path):
    seq2seq.translate_file(corpus, tmp_path / "out.txt", GREEDY)
    lines = (tmp_path / "out.txt").read_text("utf-8").splitlines()
    assert len(lines) == len(LINES)
    assert [i for i, line in enumerate(lines) if not line] == [40, 77]


def test_prefix(seq2seq, corpus, tmp_path):
    seq2seq.translate_file(corpus, tmp_path / "out.txt", GREEDY, prefixes="trois")
    lines = (tmp_path / "out.txt").read_text("utf-8").splitlines()
    assert all(line.startswith("trois") for line in lines if line)


def test_another_model_or_config_is_an_error(seq2seq, corpus, tmp_path):
    output = tmp_path / "out.txt"
    with pytest.raises(ZeroDivisionError):
        seq2seq.translate_file(corpus, output, GREEDY, progress=stop_after(1))
    other = train_numbers(Seq2SeqConfig(width=32), steps=1)
    with pytest.raises(
        RegardError, match=rf"other settings \(model was {seq2seq.fingerprint()}, now {other.fingerprint()}"
    ):
        other.translate_file(corpus, output, GREEDY)
    with pytest.raises(RegardError, match=r"\(beam was 5, now 7; method was greedy, now beam\)"):
        seq2seq.translate_file(corpus, output, DecodeConfig(beam=7))
    assert seq2seq.translate_file(corpus, output, GREEDY).resumed_items >= 32


def test_fingerprint_depends_on_weights_config_and_tokenizers(seq2seq_folder, seq2seq, transformer):
    again = load(seq2seq_folder, "cpu")
    assert again.fingerprint() == seq2seq.fingerprint() != transformer.fingerprint()
    with torch.no_grad():
        next(iter(again.model.parameters())).view(-1)[0] += 1e-3
    assert again.fingerprint() != seq2seq.fingerprint()
    tokenizer = Tokenizer.train(["another"], "char")
    assert Translator(seq2seq.model, tokenizer, tokenizer).fingerprint() != seq2seq.fingerprint()
    assert load([seq2seq_folder, seq2seq_folder], "cpu").fingerprint() != seq2seq.fingerprint()


def test_too_long_line_is_resumed_with_truncate(learned, tmp_path):
    """A model with learned positions has a limit of 16 tokens, of which two are special tokens."""
    corpus, output = tmp_path / "corpus.en", tmp_path / "out.txt"
    long = "one two three four five six seven eight nine ten one two three four five six"
    lines = [*LINES[:50], long, *LINES[50:]]
    corpus.write_text("".join(f"{line}\n" for line in lines))
    message = r"corpus.en, line 51 has 16 tokens; .* use --truncate .* The 50 lines before it are kept"
    with pytest.raises(RegardError, match=message):
        learned.translate_file(corpus, output, GREEDY)
    assert learned.translate_file(corpus, output, GREEDY, truncate=True).resumed_items == 50
    expected = learned.translate(lines, GREEDY, truncate=True)
    assert output.read_text("utf-8").splitlines() == [n_best[0].text for n_best in expected]
    # The other way round would mix truncated and untruncated lines.
    output.unlink()
    with pytest.raises(ZeroDivisionError):
        learned.translate_file(corpus, output, GREEDY, truncate=True, progress=stop_after(1))
    with pytest.raises(RegardError, match="truncate was True, now False"):
        learned.translate_file(corpus, output, GREEDY)


def test_truncate_changes_lines_of_models_without_a_limit(transformer, corpus, tmp_path):
    output = tmp_path / "out.txt"
    with pytest.raises(ZeroDivisionError):
        transformer.translate_file(corpus, output, GREEDY, progress=stop_after(1))
    with pytest.raises(RegardError, match="truncate was False, now True"):
        transformer.translate_file(corpus, output, GREEDY, truncate=True)


def _translate_in_process(folder: Path, source: Path, output: Path) -> None:
    files.BLOCK_ITEMS = 64
    torch.set_num_threads(1)
    load(folder, "cpu").translate_file(source, output, DecodeConfig(method="sample", seed=5))


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_killed_translation_is_identical(seq2seq_folder, tmp_path, suffix):
    source, output, undisturbed = (tmp_path / f"{name}{suffix}" for name in ("source", "output", "undisturbed"))
    with (gzip.open if suffix else open)(source, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line, _ in number_pairs(4000, seed=9))

    def start(path: Path) -> ForkServerProcess:
        process = CONTEXT.Process(target=_translate_in_process, args=(seq2seq_folder, source, path))
        process.start()
        return process

    def finished_lines() -> int:
        journal = output.with_name(f"{output.name}.partial.json")
        return json.loads(journal.read_text())["items"] if journal.exists() else 0

    draw = random.Random(len(suffix))
    for _ in range(5):
        process, goal = start(output), finished_lines() + draw.choice([0, 64, 128, 192])
        while finished_lines() <= goal:
            assert process.is_alive(), "finished before it was killed"
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.join()
        assert not output.exists()
    for path in (output, undisturbed):
        process = start(path)
        process.join()
        assert process.exitcode == 0
    assert output.read_bytes() == undisturbed.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (source, output, undisturbed)
    )


# Scores


def test_score_file(seq2seq, tmp_path):
    pairs = number_pairs(100, seed=2)
    pairs[33] = ("", "")
    (tmp_path / "en").write_text("".join(f"{source}\n" for source, _ in pairs))
    (tmp_path / "fr").write_text("".join(f"{target}\n" for _, target in pairs))
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    scores = seq2seq.score([pair for pair in pairs if pair[0]])
    expected = [format_score(score) for score in scores]
    expected.insert(33, "")
    for source in ([tmp_path / "en", tmp_path / "fr"], tmp_path / "pairs.tsv"):
        output = tmp_path / "scores.tsv"
        with pytest.raises(ZeroDivisionError):
            seq2seq.score_file(source, output, progress=stop_after(2), overwrite=True)
        summary = seq2seq.score_file(source, output, overwrite=True)
        rows = [line.split("\t") for line in output.read_text().splitlines()]
        np.testing.assert_allclose(
            [float(row[0]) for row in rows if row != [""]], [score.logprob for score in scores], atol=2e-6
        )
        assert [row[-1] for row in rows] == [row.split("\t")[-1] for row in expected]
        assert (summary.items, summary.resumed_items) == (100, 64)
        assert summary.totals == {
            "pairs": 99,
            "tokens": sum(score.tokens for score in scores),
            "logprob": pytest.approx(sum(score.logprob for score in scores)),
        }


def test_score_file_with_bad_pairs(seq2seq, tmp_path):
    (tmp_path / "pairs.tsv").write_text("one\tun\n\tdeux\n")
    with pytest.raises(RegardError, match=r"pairs.tsv, pair 2: the source is empty. Remove the pair. The 1 pairs"):
        seq2seq.score_file(tmp_path / "pairs.tsv", tmp_path / "scores.tsv")
    (tmp_path / "en").write_text("one\n" * 50)
    (tmp_path / "fr").write_text("un\n" * 47)
    with pytest.raises(RegardError, match=r"en has 50 lines, but .*fr has 47.* line 48 has no counterpart"):
        seq2seq.score_file([tmp_path / "en", tmp_path / "fr"], tmp_path / "other.tsv")


# Embeddings and labels


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.jsonl.gz"])
def test_embed_file(classifier, corpus, tmp_path, name):
    output, undisturbed = tmp_path / name, tmp_path / f"undisturbed-{name}"
    classifier.embed_file(corpus, undisturbed)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            classifier.embed_file(corpus, output, progress=stop_after(2))
    assert classifier.embed_file(corpus, output).resumed_items >= 64
    assert output.read_bytes() == undisturbed.read_bytes()
    if name == "v.npy":
        vectors = np.load(output, mmap_mode="r")
        assert vectors.shape == (150, 16)
    else:
        rows = [json.loads(line) for line in files.InputItems.from_lines(output)]
        assert [row["text"] for row in rows] == LINES
        vectors = np.array([row["vector"] for row in rows])
    np.testing.assert_allclose(vectors, classifier.embed(LINES), atol=1e-6)


def test_classify_file(classifier, corpus, tmp_path):
    classifier.classify_file(corpus, tmp_path / "labels.tsv")
    rows = [line.split("\t") for line in (tmp_path / "labels.tsv").read_text().splitlines()]
    expected = classifier.classify(LINES)
    assert [label for label, _ in rows] == [result.label for result in expected]
    classifier.classify_file(corpus, tmp_path / "all.tsv.gz", all_labels=True, replicas=[copy.deepcopy(classifier)])
    with gzip.open(tmp_path / "all.tsv.gz", "rt") as file:
        assert all(line.startswith("even ") and "\todd " in line for line in file)


def test_too_long_text_of_an_encoder(classifier, tmp_path):
    (tmp_path / "texts").write_text("one\ntwo\n" + "three " * 20 + "\nfour\n")
    with pytest.raises(RegardError, match=r"texts, line 3 has more tokens .* The 2 lines before it are kept"):
        classifier.classify_file(tmp_path / "texts", tmp_path / "labels")
    assert classifier.classify_file(tmp_path / "texts", tmp_path / "labels", truncate=True).resumed_items == 2
    with pytest.raises(RegardError, match="texts, line 3 has 20 tokens"):
        classifier.embed_file(tmp_path / "texts", tmp_path / "v.npy")
    assert classifier.embed_file(tmp_path / "texts", tmp_path / "v.npy", truncate=True).resumed_items == 2
    assert np.load(tmp_path / "v.npy").shape == (4, 16)
