"""The task `tag`: reading, alignment of words and tokens, training, `regard tag`."""

import json
import random

import pytest

import regard
from regard.cli import main
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tagged_texts import TaggedText, TaggingWindows, read_tagged_texts, tag_names
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.pipelines import load
from tests.training.toy_tasks import ANIMALS

SMALL = ["--steps", "80", "--model.width", "32", "--model.heads", "2", "--model.layers", "1", "--device", "cpu"]
SMALL += ["--model.feedforward", "32", "--model.max-len", "16", "--train.batch-tokens", "512", "--train.lr", "0.01"]
SMALL += ["--train.warmup", "10", "--train.validate-every", "80", "--model.dropout", "0", "--quiet"]


def make_text(words: int, rng: random.Random) -> TaggedText:
    """Animals, with "red sea" among them in most texts."""
    row, tags = [rng.choice(ANIMALS) for _ in range(words)], ["O"] * words
    position = rng.randrange(words - 1)
    if rng.random() < 0.7:
        row[position : position + 2], tags[position : position + 2] = ["red", "sea"], ["B-SEA", "I-SEA"]
    return TaggedText(tuple(row), tuple(tags))


def write_texts(path, texts):
    rows = [[*(f"{word}\tx\t{tag}" for word, tag in zip(*text)), ""] for text in texts]
    path.write_text("-DOCSTART- -X- O\n\n" + "\n".join(line for row in rows for line in row))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("tag"), random.Random(1)
    write_texts(folder / "train.conll", [make_text(rng.randint(2, 12), rng) for _ in range(200)])
    write_texts(folder / "test.conll", [make_text(n, rng) for n in (6, 8, 9, 10, 11, 40)])
    command = ["train", "--task", "tag", "--data", folder / "train.conll", "--out", folder / "model", *SMALL]
    assert main([str(word) for word in command]) == 0
    return folder


def test_entities_are_learned_and_evaluated(folder):
    """Texts of 40 words are longer than the model, and are processed in pieces."""
    encoder = load(folder / "model", "cpu")
    assert encoder.training["validation"]["f1"] > 95
    arguments = ["evaluate", folder / "model", "--data", folder / "test.conll", "--json", folder / "r.json", "--quiet"]
    assert main([str(word) for word in arguments]) == 0
    results = json.loads((folder / "r.json").read_text())
    assert results["f1"] > 90
    assert results["accuracy"] > 90
    assert results["per_class"]["SEA"]["support"] > 0
    assert [word.text for word in encoder.tag("cat, red sea!")] == ["cat", ",", "red", "sea", "!"]
    assert [word.tag for word in encoder.tag(["cat red sea", ("cat", "red", "sea")])[1]] == ["O", "B-SEA", "I-SEA"]
    assert encoder.tag([]) == []
    assert encoder.tag("") == []
    write_texts(folder / "other.conll", [TaggedText(("cat",), ("NOUN",))])
    with pytest.raises(RegardError, match="has the tag 'NOUN', which the model does not have"):
        regard.evaluate(folder / "model", folder / "other.conll")


def test_command_prints_words_or_entities(folder, capsys):
    model = str(folder / "model")
    assert main(["tag", model, "cat red sea", "cow red sea"]) == 0
    first, second, _ = capsys.readouterr().out.split("\n\n")
    assert [line.split("\t")[:2] for line in first.split("\n")] == [["cat", "O"], ["red", "B-SEA"], ["sea", "I-SEA"]]
    assert len(second.split("\n")) == 3
    output = folder / "entities.tsv"
    (folder / "in.txt").write_text("cat red sea\n")
    assert main(["tag", model, "--entities", "--input", str(folder / "in.txt"), "--output", str(output)]) == 0
    assert output.read_text() == "red sea\tSEA\n\n"


def test_tags_on_pages(folder):
    """The page shows the tags; the steps end with their probabilities."""
    seen = regard.look(load(folder / "model", "cpu"), "cat red sea")
    seen.save(folder / "page.html")
    assert "cat/O red/B-SEA sea/I-SEA" in (folder / "page.html").read_text()


def test_words_are_aligned_to_tokens():
    tokenizer = Tokenizer.train(["abcabc abc xyz"] * 9, "bpe", 12)
    special = SpecialTokens(begin=2, end=3)
    words = [("abc", "xyz"), ("abcabc", "abc", "xyz", "abc", "xyzxyz")]
    whole = TaggingWindows.from_words(words, tokenizer, special, max_len=99, segments=False)
    assert [[word for _, word, _ in window] for window in whole.positions] == [[0, 1], [0, 1, 2, 3, 4]]
    for row, window in zip(whole.texts.ids, whole.positions):
        for text, word, position in window:
            assert words[text][word].startswith(tokenizer.decode([row[position]]).strip())
    parts = TaggingWindows.from_words(words, tokenizer, special, max_len=9, segments=False)
    found = [(text, word) for window in parts.positions for text, word, _ in window]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert max(len(row) for row in parts.texts.ids) <= 9
    assert sum(len(row) - 2 for row in parts.texts.ids) == sum(len(row) - 2 for row in whole.texts.ids)


def test_files_are_read_with_tabs_or_spaces(tmp_path):
    (tmp_path / "a.txt").write_text("Ada NNP B-PER\nslept VBD O\n\n\nNew York\tx\tB-LOC\n")
    texts = read_tagged_texts([tmp_path / "a.txt"])
    assert texts == [TaggedText(("Ada", "slept"), ("B-PER", "O")), TaggedText(("New York",), ("B-LOC",))]
    assert tag_names(texts) == ("O", "B-LOC", "B-PER")
    (tmp_path / "c.txt").write_text("Ada B-PER\nslept VBD O\n")
    with pytest.raises(RegardError, match=r"c\.txt, line 2: expected 2 columns as in the first line, got 3"):
        read_tagged_texts([tmp_path / "c.txt"])
    (tmp_path / "b.txt").write_text("Ada B-PER\nslept\n")
    with pytest.raises(RegardError, match=r"b\.txt, line 2: expected a word and a tag, got 'slept'"):
        read_tagged_texts([tmp_path / "b.txt"])


@pytest.mark.parametrize("separator", ["\t", " "])
def test_comments_are_not_words(separator, tmp_path):
    rows = ["# newdoc", "# text = #1 Ada", "#", "#rain O", "# O", "", "# a comment", "Ada B-PER", "#x = 1 2"]
    lines = [row.replace(" ", separator) if row.endswith((" O", "-PER")) else row for row in rows]
    (tmp_path / "a.conll").write_text("\n".join(lines))
    texts = read_tagged_texts([tmp_path / "a.conll"])
    assert texts == [TaggedText(("#rain", "#"), ("O", "O")), TaggedText(("Ada",), ("B-PER",))]


CONLLU = """# sent_id = 1
1-2\tDu\t_\t_\t_\t_\t_\t_\t_\t_
1\tde\tde\tADP\tP\t_\t3\tcase\t_\t_
2\tle\tle\tDET\tD\t_\t3\tdet\t_\tSpaceAfter=No
2.1\tvu\t_\tVERB\tV\t_\t_\t_\t_\t_
3\tpain\tpain\tNOUN\tN\t_\t0\troot\t_\t_
"""


def test_conllu_has_the_words_and_parts_of_speech(tmp_path, caplog):
    """Not the last column, MISC; nor contractions before their parts and omitted words."""
    path = tmp_path / "fr.conllu"
    path.write_text(CONLLU)
    assert read_tagged_texts([path]) == [TaggedText(("de", "le", "pain"), ("ADP", "DET", "NOUN"))]
    assert "the words are column 2 (FORM), the tags column 4 (UPOS)" in caplog.text
    assert read_tagged_texts([path], ["3", "5"]) == [TaggedText(("de", "le", "pain"), ("P", "D", "N"))]
    for columns, message in (
        (["2"], "are two numbers"),
        (["form", "upos"], "are two numbers"),
        (["2", "11"], "only 10"),
    ):
        with pytest.raises(RegardError, match=message):
            read_tagged_texts([path], columns)


def test_validation_texts_with_new_tags_only_are_too_few(tmp_path):
    (tmp_path / "a.conll").write_text("\n".join(f"word{i}\tT{i}\n" for i in range(30)))
    with pytest.raises(RegardError, match="Too few tagged texts for a validation split"):
        regard.train(tmp_path / "a.conll", tmp_path / "model", task="tag", quiet=True)
