"""An encoder of texts with its tokeniser: vectors, labels, answers and hidden tokens, each against a plain twin."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from regard.data import Question, Tokenizer
from regard.data.text.special_tokens import READING, Special
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import Bert
from regard.models.bert import bert_tiny
from regard.pipelines import LanguageModel, TextEncoder, load, save, text_encoder

WORDS = ["the", "cat", "sees", "a", "dog", "and", "hears", "two", "owls", "in", "that", "old", "tree"]
TEXTS = ["the cat sees a dog", "", "owls", "that old dog hears the cat in the tree", "two dog", "the cat sees a dog"]
SIZES = bert_tiny(width=16, heads=2, layers=2, feedforward=32, dropout=0.3, max_len=16)
LABELS = ("bad", "good", "so-so")


def encoder_of(head: str = "mask", kind: str = "word", special: Special = READING, **changes) -> TextEncoder:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)], kind, vocab_size=300, mask=True)
    needed = {"labels": LABELS, "pooler": "tanh"} if head == "classify" else {}
    sizes = {"vocab": tokenizer.vocab_size, "head": head, **needed, **changes}
    model = Bert(dataclasses.replace(SIZES, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 20  # opinions
    return TextEncoder(model, tokenizer, {"step": 3}, special)


def framed(texts: TextEncoder, text: str) -> list[int]:
    return [2, *texts.tokenizer.encode(text), 3]


# Vectors


@pytest.mark.parametrize("head", ["none", "mask", "classify", "answer"])
@torch.no_grad()
def test_a_vector_is_the_mean_over_the_tokens(head):
    reader = encoder_of(head)
    vectors = reader.embed(TEXTS)
    assert vectors.shape == (6, 16)
    assert vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors):
        mean = reader.model.encode(pack([framed(reader, text)])).mean(0)
        np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert np.abs(vectors[0] - vectors[3]).max() > 0.01


def test_vectors_depend_on_no_neighbour_and_no_order(monkeypatch):
    reader = encoder_of()
    whole = reader.embed(TEXTS)
    np.testing.assert_allclose(whole, np.concatenate([reader.embed([text]) for text in TEXTS]), atol=1e-5)
    np.testing.assert_allclose(whole[::-1], reader.embed(TEXTS[::-1]), atol=1e-5)
    monkeypatch.setattr(text_encoder, "BATCH_TOKENS", 12)  # in several batches
    np.testing.assert_allclose(whole, reader.embed(TEXTS), atol=1e-5)
    np.testing.assert_array_equal(whole[0], whole[5])


def test_other_special_ids():
    """As imported models state them."""
    special = Special(begin=9, end=10)
    [vector] = encoder_of(special=special).embed(["owls"])
    reader = encoder_of()
    with torch.no_grad():
        mean = reader.model.encode(pack([[9, *reader.tokenizer.encode("owls"), 10]])).mean(0)
    np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5)


def test_no_texts():
    assert encoder_of().embed([]).shape == (0, 16)
    assert encoder_of("classify").classify([]) == []
    assert encoder_of("answer").answer([]) == []


def test_too_long_a_text_is_an_error_that_names_it():
    reader = encoder_of(positions="learned")
    reader.embed(["cat " * 14])
    with pytest.raises(RegardError) as caught:
        reader.embed(["cat", "cat " * 15])
    assert str(caught.value) == (
        "text 2 has 15 tokens, and the model takes at most 14. Split it, or use --truncate to cut it short."
    )
    cut, short = reader.embed(["cat " * 14 + "owls", "cat " * 14], truncate=True)
    np.testing.assert_array_equal(cut, short)


# Labels


@pytest.mark.parametrize("segments", [0, 2])
@torch.no_grad()
def test_probabilities_are_those_of_the_model(segments):
    reader = encoder_of("classify", segments=segments)
    texts = [*TEXTS, ("the cat", "a dog"), ("owls", ""), ("", "owls"), ("a dog", "the cat")]
    found = reader.classify(texts)
    for text, one in zip(texts, found):
        first, second = (text, None) if isinstance(text, str) else text
        ids = framed(reader, first)
        kinds = [0] * len(ids)
        if second is not None:
            ids += framed(reader, second)[1:]
            kinds += [1] * (len(ids) - len(kinds))
        logits = reader.model(pack([ids]), torch.tensor(kinds) if segments else None)[0]
        shares = dict(zip(LABELS, logits.softmax(0).tolist()))
        assert one.probabilities == pytest.approx(shares, abs=1e-5)
        assert sum(one.probabilities.values()) == pytest.approx(1, abs=1e-6)
        assert one.label == max(shares, key=lambda label: shares[label])
        assert one.probability == one.probabilities[one.label]
    assert len({one.label for one in found}) > 1


def test_labels_depend_on_no_neighbour_and_no_order(monkeypatch):
    reader = encoder_of("classify")
    whole = reader.classify(TEXTS)
    monkeypatch.setattr(text_encoder, "BATCH_TOKENS", 12)
    for again in (reader.classify(TEXTS), reader.classify(TEXTS[::-1])[::-1]):
        for one, other in zip(whole, again):
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_texts_that_cannot_be_classified():
    reader = encoder_of("classify", positions="learned")
    long = "cat " * 15
    with pytest.raises(RegardError) as caught:
        reader.classify(["cat", long, ("cat", long)])
    assert str(caught.value) == (
        "2 of the texts have more than the 16 tokens that the model takes. "
        "Split them, or use --truncate to cut them short."
    )
    cut, short = reader.classify([long + " owls", "cat " * 14], truncate=True)
    assert cut == short
    with pytest.raises(RegardError, match="text 2 is 3 texts"):
        reader.classify(["a", ("a", "cat", "sees")])


# Hidden tokens


@torch.no_grad()
def test_hidden_tokens_are_named_by_the_likeliest():
    reader = encoder_of()
    found = reader.fill("the <mask> sees a <mask>", count=3)
    ids = [2, *reader.tokenizer.encode("the"), 4, *reader.tokenizer.encode("sees a"), 4, 3]
    likely = reader.model(pack([ids])).softmax(-1)
    assert len(found) == 2
    for place, named in zip((2, 5), found):
        best = sorted(range(reader.tokenizer.vocab_size), key=lambda i: -likely[place, i])[:3]
        assert [text for text, _ in named] == [reader.tokenizer.decode([i]) for i in best]
        assert [share for _, share in named] == pytest.approx([likely[place, i].item() for i in best], abs=1e-6)
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", ["word", "bpe", "bytes"])
def test_the_space_before_a_hidden_token_is_its_own(kind):
    """As it is where tokens are hidden in training."""
    reader = encoder_of(kind=kind, max_len=64)
    seen = []
    reader.packed = lambda rows: seen.append(list(rows[0])) or pack(rows)  # type: ignore[method-assign, func-returns-value]
    reader.fill("the <mask> sees <mask>")
    [ids] = seen
    whole = framed(reader, "the cat sees owls")
    first, second = (len(reader.tokenizer.encode(word)) for word in (" cat", " owls"))
    begin = 1 + len(reader.tokenizer.encode("the"))
    assert ids == [*whole[:begin], 4, *whole[begin + first : -1 - second], 4, 3]


def test_every_token_can_be_named():
    reader = encoder_of()
    [named] = reader.fill("<mask>", count=1000)
    assert len(named) == reader.tokenizer.vocab_size
    assert sum(share for _, share in named) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("reader", "text", "says"),
    [
        (lambda: encoder_of(), "the cat", "There is no <mask> in the text. Write <mask> where a token is hidden."),
        (lambda: encoder_of(positions="learned"), "<mask>" * 15, "The text has 15 tokens, and the model takes at most"),
        (lambda: encoder_of("none"), "<mask>", "This model does not name hidden tokens."),
        (lambda: encoder_of("classify"), "<mask>", "This model does not name hidden tokens."),
        (lambda: encoder_of(special=Special(begin=2)), "<mask>", "This model does not name hidden tokens."),
    ],
)
def test_what_cannot_be_filled(reader, text, says):
    with pytest.raises(RegardError) as caught:
        reader().fill(text)
    assert str(caught.value).startswith(says)


# Answers


@torch.no_grad()
def best_by_hand(reader: TextEncoder, question: str, context: str) -> str:
    """Every run of words of a context that fits into one piece."""
    ids = [*framed(reader, question), *framed(reader, context)[1:]]
    begin = len(framed(reader, question))
    kinds = torch.tensor([0] * begin + [1] * (len(ids) - begin))
    scores = reader.model(pack([ids]), kinds).double().log_softmax(0)
    words = context.split()
    runs = itertools.combinations_with_replacement(range(len(words)), 2)
    first, last = max(runs, key=lambda run: float(scores[begin + run[0], 0] + scores[begin + run[1], 1]))
    return " ".join(words[first : last + 1])


def test_the_answer_is_the_likeliest_run_of_words(monkeypatch):
    reader = encoder_of("answer")
    contexts = ["the cat sees a dog", "two owls in that old tree", "owls", "that dog hears the cat and owls"]
    questions = [
        Question(str(i), question, context) for i, (context, question) in enumerate(itertools.product(contexts, WORDS))
    ]
    found = reader.answer(questions)
    assert found == [best_by_hand(reader, one.question, one.context) for one in questions]
    assert len(set(found)) > 5
    assert any(" " in answer for answer in found)
    monkeypatch.setattr(text_encoder, "BATCH_TOKENS", 30)
    assert reader.answer(questions[::-1]) == found[::-1]


def test_a_context_without_words_has_no_answer():
    assert encoder_of("answer").answer([Question("1", "who", "")]) == [""]


@torch.no_grad()
def test_nothing_is_an_answer_only_where_it_may_be():
    reader = encoder_of("answer")
    reader.model.output.weight.zero_()
    reader.model.output.bias.zero_()
    # The first token of all, which is of no context, is far ahead of the others.
    towards = reader.model.encode(pack([[*framed(reader, "a"), *framed(reader, "cat sees")[1:]]]))[0]
    reader.model.output.weight += towards
    questions = [Question("1", "a", "cat sees")]
    assert reader.answer(questions)[0] in ("cat", "sees", "cat sees")
    assert reader.answer(questions, empty=True) == [""]


@pytest.mark.parametrize("head", ["none", "mask"])
def test_a_model_that_was_trained_for_something_else(head):
    with pytest.raises(RegardError, match=r"not trained to classify\. Train it on: regard train --task classify"):
        encoder_of(head).classify(["cat"])
    with pytest.raises(RegardError, match=r"not trained to answer\. Train it on: regard train --task answer"):
        encoder_of(head).answer([Question("1", "who", "the cat")])


# The folder


@pytest.mark.parametrize("head", ["none", "mask", "classify", "answer"])
@pytest.mark.parametrize("special", [READING, Special(begin=9, end=10, mask=11)], ids=["own", "other"])
def test_what_is_loaded_is_what_was_saved(tmp_path, head, special):
    reader = encoder_of(head, special=special)
    reader.save(tmp_path)
    again = load(tmp_path, "cpu", expect=TextEncoder)
    assert (again.special, again.training, again.model.config) == (special, {"step": 3}, reader.model.config)
    assert again.tokenizer == reader.tokenizer
    np.testing.assert_array_equal(again.embed(TEXTS), reader.embed(TEXTS))
    asked = [Question("1", "who", "the cat sees a dog")]
    if head == "mask":
        assert again.fill("<mask> cat") == reader.fill("<mask> cat")
    if head == "classify":
        assert again.classify(TEXTS) == reader.classify(TEXTS)
    if head == "answer":
        assert again.answer(asked) == reader.answer(asked)


def test_dropout_is_off_whatever_was_on_before():
    for head, call in (
        ("mask", lambda reader: reader.embed(TEXTS).tolist()),
        ("mask", lambda reader: reader.fill("the <mask>")),
        ("classify", lambda reader: reader.classify(TEXTS)),
    ):
        reader = encoder_of(head)
        before = call(reader)
        reader.model.train()
        assert call(reader) == before


def test_an_encoder_is_not_a_language_model(tmp_path):
    save(tmp_path, encoder_of())
    with pytest.raises(RegardError, match="holds an encoder of texts, not a language model"):
        load(tmp_path, "cpu", expect=LanguageModel)
