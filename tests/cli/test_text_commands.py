"""From plain text, labels and questions to models, and the commands that use them, as a user calls them."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from regard.cli import main
from regard.data import phrasebook_pairs

STEPS = [
    "--train.schedule",
    "cosine",
    "--train.steps",
    "40",
    "--train.warmup",
    "4",
    "--train.workers",
    "1",
    "--train.device",
    "cpu",
]
SMALL = [*STEPS, "--model.width", "32", "--model.heads", "2", "--model.layers", "1", "--model.feedforward", "64"]
SMALL += ["--model.max-len", "64", "--train.batch-tokens", "1024", "--train.lr", "0.01"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sentences; which of them are questions; and questions about their last word."""
    folder = tmp_path_factory.mktemp("data")
    sentences = [pair.source for pair in phrasebook_pairs("train", 300)]
    (folder / "text.txt").write_text("".join(f"{one}\n" for one in sentences))
    kinds = ("question" if one.endswith("?") else "statement" for one in sentences)
    (folder / "kinds.tsv").write_text("".join(f"{one}\t{kind}\n" for one, kind in zip(sentences, kinds)))
    asked = []
    for number, one in enumerate(sentences[:60]):
        last = one.rstrip(".?").split()[-1]
        answers = [{"text": last, "answer_start": one.rindex(last)}]
        asked.append({"context": one, "qas": [{"id": f"q{number}", "question": "The last word?", "answers": answers}]})
    (folder / "squad.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": asked}]}))
    return folder


def trained(task: str, file: Path, out: Path, *more: str) -> Path:
    assert main(["train", "--task", task, "--data", str(file), "--out", str(out), *(more or SMALL)]) == 0
    return out


@pytest.fixture(scope="module")
def writer(data) -> Path:
    return trained("language", data / "text.txt", data / "writer")


@pytest.fixture(scope="module")
def encoder(data) -> Path:
    return trained("mask", data / "text.txt", data / "encoder")


@pytest.fixture(scope="module")
def classifier(data, encoder) -> Path:
    return trained(
        *("classify", data / "kinds.tsv", data / "classifier", "--from", str(encoder)),
        *(*STEPS, "--lr", "0.01"),
    )


@pytest.fixture(scope="module")
def answerer(data) -> Path:
    return trained("answer", data / "squad.json", data / "answerer")


# generate


def test_one_prompt_is_answered_by_the_whole_text(run, writer):
    text = run("generate", writer, "The cat ", "--max-len", 20, "--min-len", 5, "--seed", 3)
    assert text.startswith("The cat ")
    assert len(text.rstrip("\n")) > len("The cat ")
    assert text == run("generate", writer, "The cat ", "--max-len", 20, "--min-len", 5, "--seed", 3)
    assert run("generate", writer, "The cat ", "--method", "beam", "--max-len", 8).startswith("The cat ")


def test_many_prompts_are_answered_by_lines_of_json(run, monkeypatch, writer):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("The cat\nLe café €\n".encode())))
    rows = [json.loads(line) for line in run("generate", writer, "--n-best", 2, "--max-len", 6).splitlines()]
    assert [row["prompt"] for row in rows] == ["The cat"] * 2 + ["Le café €"] * 2
    assert all(0 < len(row["text"]) <= 6 and row["score"] < 0 for row in rows)


def test_generating_wants_a_language_model(refused, seq2seq_folder, writer):
    assert "holds a translator, not a language model. Use it with: regard translate" in refused(
        "generate", seq2seq_folder, "x"
    )
    assert "holds a language model, not a translator. Use it with: regard generate" in refused("translate", writer, "x")


# embed


def test_vectors_as_json_and_as_an_array(run, encoder, tmp_path):
    rows = [json.loads(line) for line in run("embed", encoder, "The cat sleeps.", "A dog.").splitlines()]
    assert [row["text"] for row in rows] == ["The cat sleeps.", "A dog."]
    run("embed", encoder, "The cat sleeps.", "A dog.", "--out", tmp_path / "v.npy")
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors, [row["vector"] for row in rows], atol=1e-6)
    run("embed", encoder, "A dog.", "--out", tmp_path / "v.jsonl")
    assert json.loads((tmp_path / "v.jsonl").read_text())["text"] == "A dog."


def test_vectors_go_into_known_files_only(refused, encoder, tmp_path):
    assert "written as .npy or .jsonl" in refused("embed", encoder, "x", "--out", tmp_path / "v.csv")


# classify


def test_labels_and_how_likely_they_are(run, classifier, data):
    lines = run("classify", classifier, "Is the cat big?", "The cat is big.").splitlines()
    assert [line.split("\t")[0] for line in lines] == ["question", "statement"]
    both = run("classify", classifier, "Is the cat big?", "--all").strip().split("\t")
    assert [name for name, _ in map(str.split, both)] == ["question", "statement"]
    assert sum(float(share) for _, share in map(str.split, both)) == pytest.approx(1, abs=2e-4)


def test_accuracy_is_measured_on_labelled_texts(run, classifier, data, tmp_path):
    files = ["--json", tmp_path / "r.json", "--confusion", tmp_path / "c.svg"]
    assert "accuracy" in run("evaluate", classifier, "--data", data / "kinds.tsv", *files)
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["texts"] == 300
    assert found["accuracy"] > 90
    assert found["labels"] == ["question", "statement"]
    assert np.trace(found["confusion"]) == pytest.approx(3 * found["accuracy"])
    assert np.sum(found["confusion"]) == 300
    assert "what its texts were taken for" in " ".join((tmp_path / "c.svg").read_text().split())


def test_classifying_wants_a_model_that_was_trained_to(refused, encoder, classifier, tmp_path):
    assert "not trained to classify" in refused("classify", encoder, "x")
    (tmp_path / "other.tsv").write_text("what a day\tweather\nhow so\tquestion\n")
    assert "'weather', which the model does not know" in refused(
        "evaluate", classifier, "--data", tmp_path / "other.tsv"
    )


# answer


def test_an_answer_is_a_part_of_the_context(run, answerer, data, tmp_path):
    context = "The cat chased the mouse."
    assert run("answer", answerer, "--question", "The last word?", "--context", context).strip() in context
    run("answer", answerer, "--data", data / "squad.json", "--out", tmp_path / "answers.json")
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == 60
    assert "F1" in run("evaluate", answerer, "--data", data / "squad.json")


def test_an_answer_may_be_nothing(run, capsys, data, tmp_path):
    """Of a model that never saw an answer: nothing where that is allowed, and words of the context where it is not."""
    table = json.loads((data / "squad.json").read_text())
    for paragraph in table["data"][0]["paragraphs"]:
        paragraph["qas"][0] |= {"answers": [], "is_impossible": True}
    squad = tmp_path / "impossible.json"
    squad.write_text(json.dumps(table))
    reader = trained("answer", squad, tmp_path / "reader")
    asked = ["answer", reader, "--question", "The last word?", "--context", "The cat sleeps."]
    assert run(*asked).strip() in "The cat sleeps."
    assert run(*asked).strip() != ""
    assert run(*asked, "--empty") == "\n"
    assert set(json.loads(run("answer", reader, "--data", squad, "--empty")).values()) == {""}
    judge = [*map(str, ("evaluate", reader, "--data", squad, squad, "--json", tmp_path / "r.json", "--device", "cpu"))]
    for more in [], ["--empty"]:
        assert main([*judge, *more]) == 0
        assert ("Questions without an answer: 120" in capsys.readouterr().err) == (not more)
        found = json.loads((tmp_path / "r.json").read_text())
        assert (found["questions"], found["without_answer"]) == (120, 120)
        assert found["exact_match"] == found["f1"]
        assert found["f1"] == 100 if more else found["f1"] < 50  # a sign or an article alone is nothing too


def test_answering_wants_a_question(refused, answerer, encoder):
    assert "Give --question and --context, or --data" in refused("answer", answerer, "--question", "Who?")
    assert "not trained to answer" in refused("answer", encoder, "--question", "Who?", "--context", "He.")


# evaluate, look, info, train


def test_a_language_model_is_measured_on_text(run, writer, data, tmp_path):
    shown = run("evaluate", writer, "--data", data / "text.txt", "--json", tmp_path / "r.json")
    assert "bits a byte" in shown
    found = json.loads((tmp_path / "r.json").read_text())
    size = (data / "text.txt").stat().st_size
    assert found["bytes"] == size
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / np.log(2) / size)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))


def test_what_was_regarded_in_a_text(run, writer, encoder, tmp_path):
    for model in (writer, encoder):
        assert run("look", model, "The cat sleeps.", "--out", tmp_path / "map.png") == ""
        assert imread(tmp_path / "map.png").shape[2] == 4
        assert "blocks.0.attention" in run("info", model)


def test_training_for_a_task_needs_its_data(refused, tmp_path, data, encoder):
    assert "Pass --data FILE" in refused("train", "--task", "language", "--out", tmp_path / "m")
    assert "(got 'sing')" in refused("train", "--task", "sing")
    assert "--task: expected one argument" in refused("train", "--task")
    wrong = ["--task", "language", "--data", data / "text.txt", "--from", encoder, "--out", tmp_path / "m"]
    assert "which cannot be trained to language" in refused("train", *wrong)
    assert not (tmp_path / "m").exists()
