"""Training on plain text, labels and questions, and the commands that use these models."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from regard.cli import main
from regard.data import read_pairs

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
    """Files of sentences, of sentences with labels, and of questions about their last word."""
    folder = tmp_path_factory.mktemp("data")
    sentences = [source for source, _ in read_pairs(["phrasebook"])[:300]]
    (folder / "text.txt").write_text("".join(f"{one}\n" for one in sentences))
    labels = ("question" if one.endswith("?") else "statement" for one in sentences)
    (folder / "kinds.tsv").write_text("".join(f"{one}\t{label}\n" for one, label in zip(sentences, labels)))
    paragraphs = []
    for i, one in enumerate(sentences[:60]):
        last = one.rstrip(".?").split()[-1]
        answers = [{"text": last, "answer_start": one.rindex(last)}]
        paragraphs.append({"context": one, "qas": [{"id": f"q{i}", "question": "The last word?", "answers": answers}]})
    (folder / "squad.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    return folder


def train_model(task: str, file: Path, out: Path, *more: str) -> Path:
    assert main(["train", "--task", task, "--data", str(file), "--out", str(out), *(more or SMALL)]) == 0
    return out


@pytest.fixture(scope="module")
def generator(data) -> Path:
    return train_model("language", data / "text.txt", data / "generator")


@pytest.fixture(scope="module")
def encoder(data) -> Path:
    return train_model("mask", data / "text.txt", data / "encoder")


@pytest.fixture(scope="module")
def classifier(data, encoder) -> Path:
    return train_model(
        *("classify", data / "kinds.tsv", data / "classifier", "--from", str(encoder)),
        *(*STEPS, "--lr", "0.01"),
    )


@pytest.fixture(scope="module")
def answerer(data) -> Path:
    return train_model("answer", data / "squad.json", data / "answerer")


# generate


def test_generate_prints_prompt_and_continuation(run, generator):
    text = run("generate", generator, "The cat ", "--max-len", 20, "--min-len", 5, "--seed", 3)
    assert text.startswith("The cat ")
    assert len(text.rstrip("\n")) > len("The cat ")
    assert text == run("generate", generator, "The cat ", "--max-len", 20, "--min-len", 5, "--seed", 3)
    assert run("generate", generator, "The cat ", "--method", "beam", "--max-len", 8).startswith("The cat ")


def test_generate_prints_json_for_several_prompts(run, monkeypatch, generator):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("The cat\nLe café €\n".encode())))
    rows = [json.loads(line) for line in run("generate", generator, "--n-best", 2, "--max-len", 6).splitlines()]
    assert [row["prompt"] for row in rows] == ["The cat"] * 2 + ["Le café €"] * 2
    assert all(0 < len(row["text"]) <= 6 and row["score"] < 0 for row in rows)


def test_generate_requires_a_language_model(run_error, seq2seq_folder, generator):
    assert "contains a translator, not a language model. Use it with: regard translate" in run_error(
        "generate", seq2seq_folder, "x"
    )
    assert "contains a language model, not a translator. Use it with: regard generate" in run_error(
        "translate", generator, "x"
    )


# embed


def test_embed_writes_json_lines_and_arrays(run, encoder, tmp_path):
    rows = [json.loads(line) for line in run("embed", encoder, "The cat sleeps.", "A dog.").splitlines()]
    assert [row["text"] for row in rows] == ["The cat sleeps.", "A dog."]
    run("embed", encoder, "The cat sleeps.", "A dog.", "--out", tmp_path / "v.npy")
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors, [row["vector"] for row in rows], atol=1e-6)
    run("embed", encoder, "A dog.", "--out", tmp_path / "v.jsonl")
    assert json.loads((tmp_path / "v.jsonl").read_text())["text"] == "A dog."


def test_embed_with_unknown_file_type(run_error, encoder, tmp_path):
    assert "expected the extension .npy or .jsonl" in run_error("embed", encoder, "x", "--out", tmp_path / "v.csv")


# classify


def test_classify_prints_labels_and_probabilities(run, classifier, data):
    lines = run("classify", classifier, "Is the cat big?", "The cat is big.").splitlines()
    assert [line.split("\t")[0] for line in lines] == ["question", "statement"]
    both = run("classify", classifier, "Is the cat big?", "--all").strip().split("\t")
    assert [name for name, _ in map(str.split, both)] == ["question", "statement"]
    assert sum(float(probability) for _, probability in map(str.split, both)) == pytest.approx(1, abs=2e-4)


def test_evaluate_on_labeled_texts(run, classifier, data, tmp_path):
    files = ["--json", tmp_path / "r.json", "--confusion", tmp_path / "c.svg"]
    assert "accuracy" in run("evaluate", classifier, "--data", data / "kinds.tsv", *files)
    metrics = json.loads((tmp_path / "r.json").read_text())
    assert metrics["texts"] == 300
    assert metrics["accuracy"] > 90
    assert metrics["labels"] == ["question", "statement"]
    assert np.trace(metrics["confusion"]) == pytest.approx(3 * metrics["accuracy"])
    assert np.sum(metrics["confusion"]) == 300
    assert "predicted labels of its texts" in " ".join((tmp_path / "c.svg").read_text().split())


def test_classify_requires_a_classifier(run_error, encoder, classifier, tmp_path):
    assert "no classification head" in run_error("classify", encoder, "x")
    (tmp_path / "other.tsv").write_text("what a day\tweather\nhow so\tquestion\n")
    assert "'weather', which the model does not have" in run_error(
        "evaluate", classifier, "--data", tmp_path / "other.tsv"
    )


# answer


def test_answer_is_a_span_of_the_context(run, answerer, data, tmp_path):
    context = "The cat chased the mouse."
    assert run("answer", answerer, "--question", "The last word?", "--context", context).strip() in context
    run("answer", answerer, "--data", data / "squad.json", "--out", tmp_path / "answers.json")
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == 60
    assert "F1" in run("evaluate", answerer, "--data", data / "squad.json")


def test_answers_may_be_empty_with_the_empty_option(run, caplog, data, tmp_path):
    """A model trained only on unanswerable questions: "" with --empty, else words of the context."""
    table = json.loads((data / "squad.json").read_text())
    for paragraph in table["data"][0]["paragraphs"]:
        paragraph["qas"][0] |= {"answers": [], "is_impossible": True}
    squad = tmp_path / "impossible.json"
    squad.write_text(json.dumps(table))
    answerer = train_model("answer", squad, tmp_path / "answerer")
    command = ["answer", answerer, "--question", "The last word?", "--context", "The cat sleeps."]
    assert run(*command).strip() in "The cat sleeps."
    assert run(*command).strip() != ""
    assert run(*command, "--empty") == "\n"
    assert set(json.loads(run("answer", answerer, "--data", squad, "--empty")).values()) == {""}
    evaluate = [
        *map(str, ("evaluate", answerer, "--data", squad, squad, "--json", tmp_path / "r.json", "--device", "cpu"))
    ]
    for more in [], ["--empty"]:
        caplog.clear()
        assert main([*evaluate, *more]) == 0
        assert ("Unanswerable questions: 120" in caplog.text) == (not more)
        caplog.clear()
        metrics = json.loads((tmp_path / "r.json").read_text())
        assert (metrics["questions"], metrics["without_answer"]) == (120, 120)
        assert metrics["exact_match"] == metrics["f1"]
        assert (
            metrics["f1"] == 100 if more else metrics["f1"] < 50
        )  # punctuation and articles are ignored, so some answers count as empty


def test_answer_requires_a_question_and_a_suitable_model(run_error, answerer, encoder):
    assert "Pass --question and --context, or --data" in run_error("answer", answerer, "--question", "Who?")
    assert "no question answering head" in run_error("answer", encoder, "--question", "Who?", "--context", "He.")


# evaluate, look, info, train


def test_evaluate_language_model(run, generator, data, tmp_path):
    output = run("evaluate", generator, "--data", data / "text.txt", "--json", tmp_path / "r.json")
    assert "bits per byte" in output
    metrics = json.loads((tmp_path / "r.json").read_text())
    size = (data / "text.txt").stat().st_size
    assert metrics["bytes"] == size
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] * metrics["tokens"] / np.log(2) / size)
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]))


def test_look_at_language_model_and_encoder(run, generator, encoder, tmp_path):
    for model in (generator, encoder):
        assert run("look", model, "The cat sleeps.", "--out", tmp_path / "map.png") == ""
        assert imread(tmp_path / "map.png").shape[2] == 4
        assert "blocks.0.attention" in run("info", model)


def test_train_with_invalid_task_or_data(run_error, tmp_path, data, encoder):
    assert "Pass --data FILE" in run_error("train", "--task", "language", "--out", tmp_path / "m")
    assert "(got 'sing')" in run_error("train", "--task", "sing")
    assert "--task: expected one argument" in run_error("train", "--task")
    wrong = ["--task", "language", "--data", data / "text.txt", "--from", encoder, "--out", tmp_path / "m"]
    assert "which does not support the task language" in run_error("train", *wrong)
    assert not (tmp_path / "m").exists()
