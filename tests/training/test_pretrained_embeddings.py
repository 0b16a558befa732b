"""Pre-trained word vectors as initial embeddings."""

import dataclasses
import gzip

import numpy as np
import pytest
import torch

from regard.data import Tokenizer
from regard.errors import RegardError
from regard.models import Seq2SeqConfig, TransformerConfig, make_model
from regard.training import recipe_from_dict, run_recipe
from regard.training.pretrained_embeddings import VectorCoverage, init_embeddings, read_word_vectors
from regard.training.recipe import TrainConfig
from tests.training.helpers import small_dataset, small_recipe

CONFIGS = {
    "transformer": TransformerConfig(width=4, heads=2, feedforward=8, encoder_layers=1, decoder_layers=1),
    "seq2seq": Seq2SeqConfig(width=4),
}


def example(name: str, shared: bool):
    torch.manual_seed(0)
    source = Tokenizer.train(["the cat sleeps"], "word")
    target = source if shared else Tokenizer.train(["le chat dort"], "word")
    sizes = dict(source_vocab=source.vocab_size, target_vocab=target.vocab_size, shared_vocab=shared)
    return make_model(dataclasses.replace(CONFIGS[name], **sizes)), source, target


def row(tokenizer: Tokenizer, word: str) -> int:
    return tokenizer.vocabulary.index(word)


@pytest.mark.parametrize("name", CONFIGS)
def test_known_words_get_their_vectors_and_others_keep_random_values(tmp_path, name):
    path = tmp_path / "vectors.txt"
    path.write_text("2 4\ncat 1 2 3 4\nthe 4 3 2 1\n", encoding="utf-8")
    model, source, target = example(name, shared=False)
    table = model.source_embedding.tokens.weight
    before, target_before = table.detach().clone(), model.target_embedding.tokens.weight.detach().clone()
    init_embeddings(model, TrainConfig(source_vectors=str(path)), source, target)
    cat = table[row(source, "cat")].detach()
    torch.testing.assert_close(cat / cat.norm(), torch.tensor([1.0, 2, 3, 4]) / 30**0.5)
    # scaled to the norm of the random embeddings
    assert cat.norm().item() == pytest.approx(before[4:].norm(dim=1).mean().item(), rel=1e-5)
    for other in (0, 1, 2, 3, row(source, "sleeps")):
        assert torch.equal(table[other], before[other])
    assert torch.equal(model.target_embedding.tokens.weight, target_before)


def test_source_and_target_vectors(tmp_path):
    (tmp_path / "en").write_text("cat 1 0 0 0\n", encoding="utf-8")
    (tmp_path / "fr").write_text("chat 0 1 0 0\n", encoding="utf-8")
    model, source, target = example("transformer", shared=False)
    config = TrainConfig(source_vectors=str(tmp_path / "en"), target_vectors=str(tmp_path / "fr"))
    coverage = init_embeddings(model, config, source, target)
    assert coverage == [VectorCoverage(str(tmp_path / "en"), 1, 3), VectorCoverage(str(tmp_path / "fr"), 1, 3)]
    assert model.source_embedding.tokens.weight[row(source, "cat")].count_nonzero() == 1
    assert model.target_embedding.tokens.weight[row(target, "chat")].count_nonzero() == 1
    # and the output layer, which is tied to the target embedding
    assert model.output.weight[row(target, "chat")].count_nonzero() == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cat 1 2 3\n", "the vectors have width 3, the embeddings of the model 4. Set model.width to 3."),
        ("dog 1 2 3 4\n", "none of its words is in the vocabulary"),
    ],
)
def test_mismatched_vectors_are_an_error(tmp_path, content, message):
    path = tmp_path / "vectors.txt"
    path.write_text(content, encoding="utf-8")
    model, source, target = example("transformer", shared=True)
    with pytest.raises(RegardError) as caught:
        init_embeddings(model, TrainConfig(source_vectors=str(path)), source, target)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_without_vector_files_there_is_no_coverage():
    model, source, target = example("seq2seq", shared=True)
    assert init_embeddings(model, TrainConfig(), source, target) == []


def test_low_coverage_gives_a_warning():
    enough, few = VectorCoverage("v.txt", 30, 100), VectorCoverage("v.txt", 29, 100)
    assert enough.warnings() == []
    assert few.warnings()[0].startswith("word vectors: 29 of 100 tokens found in v.txt (29%). The other embeddings")


def test_plan_shows_the_coverage(tmp_path, capsys):
    (tmp_path / "en.txt").write_text("".join(f"{word} {'1 ' * 16}\n" for word in ("the", "cat")), encoding="utf-8")
    recipe = recipe_from_dict(
        {"tokenizer": {"kind": "word"}, "train": {"source_vectors": str(tmp_path / "en.txt")}}, small_recipe()
    )
    run_recipe(recipe, tmp_path / "out", dataset=small_dataset(), dry_run=True)
    plan = capsys.readouterr().err
    assert f"tokens found in {tmp_path / 'en.txt'} (" in plan
    assert "Warning: word vectors: " in plan


def test_with_and_without_header(tmp_path):
    lines = "cat 0.5 -1 2\n. . . 1 2 3 \ncat 9 9 9\nété 1e-3 0 0\n"
    (tmp_path / "glove.txt").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "word2vec.txt.gz", "wt", encoding="utf-8") as stream:
        stream.write("4 3\n" + lines + "\n")
    for name in ("glove.txt", "word2vec.txt.gz"):
        vectors = read_word_vectors(tmp_path / name)
        assert list(vectors) == ["cat", ". . .", "été"]
        np.testing.assert_array_equal(vectors["cat"], np.array([0.5, -1, 2], np.float32))
        assert vectors["cat"].dtype == np.float32
        assert list(read_word_vectors(tmp_path / name, words={"été", "dog"})) == ["été"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cat 1 2 3\ndog 1 2\n", r"v\.txt, line 2: expected 3 numbers after the word, got 2\."),
        ("2 3\ncat 1 2\n", r"v\.txt, line 2: expected 3 numbers after the word, got 2\."),
        ("2 99999999999999999999\ncat 1 2\n", r"v\.txt, line 2: expected 999999999 numbers"),
        ("² ²\n", r"v\.txt, line 1: '²' is not numeric\."),
        ("cat\n", r"v\.txt, line 1: expected at least 1 numbers after the word, got 0\."),
        ("cat 1 2\ndog 1 x\n", r"v\.txt, line 2: '1 x' is not numeric\."),
        ("", r"v\.txt is empty\."),
    ],
)
def test_invalid_files_are_errors(tmp_path, content, message):
    (tmp_path / "v.txt").write_text(content)
    with pytest.raises(RegardError, match=message):
        read_word_vectors(tmp_path / "v.txt")


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(RegardError, match="There is no file"):
        read_word_vectors(tmp_path / "v.txt")
