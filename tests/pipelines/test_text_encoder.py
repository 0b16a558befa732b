"""Text encoder pipeline: embeddings, labels, answers and masked tokens, compared with the model itself."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from regard.data import Question, Tokenizer
from regard.data.text.special_tokens import ENCODER_TOKENS, SpecialTokens
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.models import Bert
from regard.models.bert import bert_tiny
from regard.pipelines import TextEncoder, TextGenerator, load, save, text_encoder

WORDS = ["the", "cat", "sees", "a", "dog", "and", "hears", "two", "owls", "in", "that", "old", "tree"]
TEXTS = ["the cat sees a dog", "", "owls", "that old dog hears the cat in the tree", "two dog", "the cat sees a dog"]
SIZES = bert_tiny(width=16, heads=2, layers=2, feedforward=32, dropout=0.3, max_len=16)
LABELS = ("bad", "good", "so-so")


def make_encoder(
    head: str = "mask", kind: str = "word", special: SpecialTokens = ENCODER_TOKENS, **changes
) -> TextEncoder:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)], kind, vocab_size=300, mask=True)
    head_options = {"labels": LABELS, "pooler": "tanh"} if head == "classify" else {}
    sizes = {"vocab": tokenizer.vocab_size, "head": head, **head_options, **changes}
    model = Bert(dataclasses.replace(SIZES, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 20  # peaked distributions
    return TextEncoder(model, tokenizer, {"step": 3}, special)


def with_special_tokens(encoder: TextEncoder, text: str) -> list[int]:
    return [2, *encoder.tokenizer.encode(text), 3]


# Embeddings


@pytest.mark.parametrize("head", ["none", "mask", "classify", "answer"])
@torch.no_grad()
def test_embedding_is_the_mean_over_tokens(head):
    pipeline = make_encoder(head)
    vectors = pipeline.embed(TEXTS)
    assert vectors.shape == (6, 16)
    assert vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors):
        mean = pipeline.model.encode(pack([with_special_tokens(pipeline, text)])).mean(0)
        np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert np.abs(vectors[0] - vectors[3]).max() > 0.01


def test_embeddings_do_not_depend_on_other_texts_or_order(monkeypatch):
    pipeline = make_encoder()
    expected = pipeline.embed(TEXTS)
    np.testing.assert_allclose(expected, np.concatenate([pipeline.embed([text]) for text in TEXTS]), atol=1e-5)
    np.testing.assert_allclose(expected[::-1], pipeline.embed(TEXTS[::-1]), atol=1e-5)
    monkeypatch.setattr(text_encoder, "BATCH_TOKENS", 12)  # in several batches
    np.testing.assert_allclose(expected, pipeline.embed(TEXTS), atol=1e-5)
    np.testing.assert_array_equal(expected[0], expected[5])


def test_special_ids_of_imported_models():
    special = SpecialTokens(begin=9, end=10)
    [vector] = make_encoder(special=special).embed(["owls"])
    pipeline = make_encoder()
    with torch.no_grad():
        mean = pipeline.model.encode(pack([[9, *pipeline.tokenizer.encode("owls"), 10]])).mean(0)
    np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5)


def test_no_texts_give_no_results():
    assert make_encoder().embed([]).shape == (0, 16)
    assert make_encoder("classify").classify([]) == []
    assert make_encoder("answer").answer([]) == []


def test_text_beyond_the_length_limit_raises_with_its_number():
    pipeline = make_encoder(positions="learned")
    pipeline.embed(["cat " * 14])
    with pytest.raises(RegardError) as caught:
        pipeline.embed(["cat", "cat " * 15])
    assert str(caught.value) == (
        "text 2 has 15 tokens; the model supports at most 14. Split it, or use --truncate to drop its end."
    )
    cut, short = pipeline.embed(["cat " * 14 + "owls", "cat " * 14], truncate=True)
    np.testing.assert_array_equal(cut, short)


# Labels


@pytest.mark.parametrize("segments", [0, 2])
@torch.no_grad()
def test_probabilities_match_the_model(segments):
    pipeline = make_encoder("classify", segments=segments)
    texts = [*TEXTS, ("the cat", "a dog"), ("owls", ""), ("", "owls"), ("a dog", "the cat")]
    results = pipeline.classify(texts)
    for text, result in zip(texts, results):
        first, second = (text, None) if isinstance(text, str) else text
        ids = with_special_tokens(pipeline, first)
        segment_ids = [0] * len(ids)
        if second is not None:
            ids += with_special_tokens(pipeline, second)[1:]
            segment_ids += [1] * (len(ids) - len(segment_ids))
        logits = pipeline.model(pack([ids]), torch.tensor(segment_ids) if segments else None)[0]
        probabilities = dict(zip(LABELS, logits.softmax(0).tolist()))
        assert result.probabilities == pytest.approx(probabilities, abs=1e-5)
        assert sum(result.probabilities.values()) == pytest.approx(1, abs=1e-6)
        assert result.label == max(probabilities, key=lambda label: probabilities[label])
        assert result.probability == result.probabilities[result.label]
    assert len({result.label for result in results}) > 1


def test_labels_do_not_depend_on_other_texts_or_order(monkeypatch):
    pipeline = make_encoder("classify")
    expected = pipeline.classify(TEXTS)
    monkeypatch.setattr(text_encoder, "BATCH_TOKENS", 12)
    for results in (pipeline.classify(TEXTS), pipeline.classify(TEXTS[::-1])[::-1]):
        for one, other in zip(expected, results):
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_invalid_texts_to_classify_raise():
    pipeline = make_encoder("classify", positions="learned")
    long = "cat " * 15
    with pytest.raises(RegardError) as caught:
        pipeline.classify(["cat", long, ("cat", long)])
    assert str(caught.value) == (
        "2 of the texts have more tokens than the model supports (16). Split them, or use --truncate to cut them."
    )
    cut, short = pipeline.classify([long + " owls", "cat " * 14], truncate=True)
    assert cut == short
    with pytest.raises(RegardError, match="Item 2 has 3 texts; expected one or two"):
        pipeline.classify(["a", ("a", "cat", "sees")])


# Masked tokens


@torch.no_grad()
def test_fill_returns_the_most_probable_tokens():
    pipeline = make_encoder()
    predictions = pipeline.fill("the <mask> sees a <mask>", count=3)
    ids = [2, *pipeline.tokenizer.encode("the"), 4, *pipeline.tokenizer.encode("sees a"), 4, 3]
    probabilities = pipeline.model(pack([ids])).softmax(-1)
    assert len(predictions) == 2
    for position, predicted in zip((2, 5), predictions):
        best = sorted(range(pipeline.tokenizer.vocab_size), key=lambda i: -probabilities[position, i])[:3]
        assert [text for text, _ in predicted] == [pipeline.tokenizer.decode([i]) for i in best]
        expected = [probabilities[position, i].item() for i in best]
        assert [p for _, p in predicted] == pytest.approx(expected, abs=1e-6)
    assert predictions[0] != predictions[1]


@pytest.mark.parametrize("kind", ["word", "bpe", "bytes"])
def test_space_before_a_mask_belongs_to_the_masked_word(kind):
    """As in training, where words are masked together with their leading space."""
    pipeline = make_encoder(kind=kind, max_len=64)
    packed = []
    pipeline.pack = lambda rows: packed.append(list(rows[0])) or pack(rows)  # type: ignore[method-assign, func-returns-value]
    pipeline.fill("the <mask> sees <mask>")
    [ids] = packed
    full = with_special_tokens(pipeline, "the cat sees owls")
    first, second = (len(pipeline.tokenizer.encode(word)) for word in (" cat", " owls"))
    begin = 1 + len(pipeline.tokenizer.encode("the"))
    assert ids == [*full[:begin], 4, *full[begin + first : -1 - second], 4, 3]


def test_fill_can_return_every_token():
    pipeline = make_encoder()
    [predicted] = pipeline.fill("<mask>", count=1000)
    assert len(predicted) == pipeline.tokenizer.vocab_size
    assert sum(p for _, p in predicted) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("factory", "text", "message"),
    [
        (lambda: make_encoder(), "the cat", "The text contains no <mask>. Write <mask> in place of a token."),
        (
            lambda: make_encoder(positions="learned"),
            "<mask>" * 15,
            "The text has 15 tokens; the model supports at most",
        ),
        (lambda: make_encoder("none"), "<mask>", "This model has no masked language modeling head."),
        (lambda: make_encoder("classify"), "<mask>", "This model has no masked language modeling head."),
        (
            lambda: make_encoder(special=SpecialTokens(begin=2)),
            "<mask>",
            "This model has no masked language modeling head.",
        ),
    ],
)
def test_invalid_fill_raises(factory, text, message):
    with pytest.raises(RegardError) as caught:
        factory().fill(text)
    assert str(caught.value).startswith(message)


# Answers


@torch.no_grad()
def best_span(pipeline: TextEncoder, question: str, context: str) -> str:
    """The most probable span of a context that fits into one piece, found by exhaustive search."""
    ids = [*with_special_tokens(pipeline, question), *with_special_tokens(pipeline, context)[1:]]
    begin = len(with_special_tokens(pipeline, question))
    segment_ids = torch.tensor([0] * begin + [1] * (len(ids) - begin))
    scores = pipeline.model(pack([ids]), segment_ids).double().log_softmax(0)
    words = context.split()
    spans = itertools.combinations_with_replacement(range(len(words)), 2)
    first, last = max(spans, key=lambda span: float(scores[begin + span[0], 0] + scores[begin + span[1], 1]))
    return " ".join(words[first : last + 1])


def test_answer_is_the_most_probable_span(monkeypatch):
    pipeline = make_encoder("answer")
    contexts = ["the cat sees a dog", "two owls in that old tree", "owls", "that dog hears the cat and owls"]
    questions = [
        Question(str(i), question, context) for i, (context, question) in enumerate(itertools.product(contexts, WORDS))
    ]
    answers = pipeline.answer(questions)
    assert answers == [best_span(pipeline, one.question, one.context) for one in questions]
    assert len(set(answers)) > 5
    assert any(" " in answer for answer in answers)
    monkeypatch.setattr(text_encoder, "BATCH_TOKENS", 30)
    assert pipeline.answer(questions[::-1]) == answers[::-1]


def test_empty_context_gives_an_empty_answer():
    assert make_encoder("answer").answer([Question("1", "who", "")]) == [""]


@torch.no_grad()
def test_empty_answers_require_the_empty_option():
    pipeline = make_encoder("answer")
    pipeline.model.output.weight.zero_()
    pipeline.model.output.bias.zero_()
    # The first token, which is outside the context, has by far the highest score.
    direction = pipeline.model.encode(
        pack([[*with_special_tokens(pipeline, "a"), *with_special_tokens(pipeline, "cat sees")[1:]]])
    )[0]
    pipeline.model.output.weight += direction
    questions = [Question("1", "a", "cat sees")]
    assert pipeline.answer(questions)[0] in ("cat", "sees", "cat sees")
    assert pipeline.answer(questions, empty=True) == [""]


@pytest.mark.parametrize("head", ["none", "mask"])
def test_missing_head_raises(head):
    with pytest.raises(RegardError, match=r"no classification head\. Fine-tune it: regard train --task classify"):
        make_encoder(head).classify(["cat"])
    with pytest.raises(RegardError, match=r"no question answering head\. Fine-tune it: regard train --task answer"):
        make_encoder(head).answer([Question("1", "who", "the cat")])


# Saving and loading


@pytest.mark.parametrize("head", ["none", "mask", "classify", "answer"])
@pytest.mark.parametrize("special", [ENCODER_TOKENS, SpecialTokens(begin=9, end=10, mask=11)], ids=["default", "other"])
def test_loaded_pipeline_equals_the_saved_one(tmp_path, head, special):
    pipeline = make_encoder(head, special=special)
    pipeline.save(tmp_path)
    loaded = load(tmp_path, "cpu", expect=TextEncoder)
    assert (loaded.special, loaded.training, loaded.model.config) == (special, {"step": 3}, pipeline.model.config)
    assert loaded.tokenizer == pipeline.tokenizer
    np.testing.assert_array_equal(loaded.embed(TEXTS), pipeline.embed(TEXTS))
    questions = [Question("1", "who", "the cat sees a dog")]
    if head == "mask":
        assert loaded.fill("<mask> cat") == pipeline.fill("<mask> cat")
    if head == "classify":
        assert loaded.classify(TEXTS) == pipeline.classify(TEXTS)
    if head == "answer":
        assert loaded.answer(questions) == pipeline.answer(questions)


def test_dropout_is_off_after_training_mode():
    for head, call in (
        ("mask", lambda pipeline: pipeline.embed(TEXTS).tolist()),
        ("mask", lambda pipeline: pipeline.fill("the <mask>")),
        ("classify", lambda pipeline: pipeline.classify(TEXTS)),
    ):
        pipeline = make_encoder(head)
        before = call(pipeline)
        pipeline.model.train()
        assert call(pipeline) == before


def test_loading_as_another_pipeline_raises(tmp_path):
    save(tmp_path, make_encoder())
    with pytest.raises(RegardError, match="contains a text encoder, not a language model"):
        load(tmp_path, "cpu", expect=TextGenerator)
