import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import Question, SpecialTokens, Tokenizer, read_squad
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.text.labeled_texts import LabeledTextBatches
from regard.data.text.questions import QuestionWindows
from regard.errors import RegardError
from tests.data.helpers import check_epochs, rows, write

BERT, ROBERTA, BARE = SpecialTokens(begin=2, end=3), SpecialTokens(begin=2, end=3, between=3), SpecialTokens()
CONTEXT = "Léa  lives in\u00a0Paris, with two cats."


def squad(qas, context=CONTEXT, **more):
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}], **more})


def make_qa(id="q1", question="Where?", answers=(("Paris", 14),), **more):
    entries = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": id, "question": question, "answers": entries, **more}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_squad_files_are_read(folder, suffix):
    qas = [make_qa(), make_qa("q2", "Who?", (("Léa", 0), ("Léa  lives", 0))), make_qa(3, "Why?", ())]
    questions = read_squad(write("a.json" + suffix, "\ufeff" + squad(qas, version="1.1")))
    assert questions == [
        Question("q1", "Where?", CONTEXT, (("Paris", 14),)),
        Question("q2", "Who?", CONTEXT, (("Léa", 0), ("Léa  lives", 0))),
        Question("3", "Why?", CONTEXT),
    ]


def test_questions_without_answers(folder):
    """Version 2 has questions that cannot be answered; test files have no answers."""
    impossible = make_qa(plausible_answers=[{"text": "Paris", "answer_start": 14}], is_impossible=True)
    possible = make_qa("q2", is_impossible=False)
    without_answers = {"id": "q3", "question": "Who?"}
    questions = read_squad(write("a.json", squad([impossible, possible, without_answers], version="v2.0")))
    assert [one.answers for one in questions] == [(), (("Paris", 14),), ()]


@pytest.mark.parametrize(("stated", "actual"), [(0, 0), (2, 2), (4, 2), (6, 8), (8, 8), (99, 10), (-5, 0)])
def test_answer_is_located_at_its_nearest_occurrence(folder, caplog, stated, actual):
    """In real files a few answers are off by one character."""
    qas = [make_qa("q1", answers=[("cat", 5)]), make_qa("q2", answers=[("a.a", stated)])]
    questions = read_squad(write("a.json", squad(qas, "a.a.acata.a.a")))
    assert [one.answers for one in questions] == [(("cat", 5),), (("a.a", actual),)]
    warning = "a.json: 1 questions have an answer that does not start at its answer_start."
    assert caplog.messages == ([warning] if stated != actual else [])


def test_reading_from_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(squad([make_qa()]).encode())))
    assert [one.id for one in read_squad("-")] == ["q1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data":\n [}', r"^a\.json, line 2: not JSON \(.* at column 3\)\. Provide a file in SQuAD format\.$"),
        ('{"data": ' + "1" * 5000 + "}", r"^a\.json: not JSON \(a number has too many digits\)\."),
        (r'{"data": "\ud800"}', r"^a\.json: not JSON \(half a surrogate pair\)\."),
        ("[" * 100_000, r"^a\.json: not JSON \(nested too deeply\)\."),
        ("[]", r'^a\.json: no list in the field "data"; it is not an object\.'),
        ('{"date": []}', r'^a\.json: no list in the field "data"; it has date\.'),
        ('{"data": []}', r"^a\.json: the file contains no questions\."),
        (
            '{"data": [{"paragraphs": []}, {}]}',
            r'^a\.json, article 2: no list in the field "paragraphs"; it has no fields\.',
        ),
        (
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            r'article 1, paragraph 1: no text in the field "context"; it has qas\.',
        ),
        (
            '{"data": [{"paragraphs": [{"context": ""}]}]}',
            r'^a\.json, article 1, paragraph 1: no list in the field "qas"',
        ),
        (squad([{"question": "Who?"}]), r'^a\.json, article 1, paragraph 1: no text or number in the field "id"'),
        (squad([{"id": "q1"}]), r'^a\.json, question q1: no text in the field "question"; it has id\.'),
        (squad([make_qa() | {"answers": "Paris"}]), r'^a\.json, question q1: no list in the field "answers"'),
        (
            squad([make_qa() | {"answers": [{"text": "Paris"}]}]),
            r'^a\.json, question q1: no number in the field "answer_start"',
        ),
        (squad([make_qa(answers=[("Rome", 15)])]), r"^a\.json, question q1: the answer 'Rome' does not occur in its"),
        (squad([make_qa(), make_qa()]), r"^a\.json: two questions have the id 'q1'\."),
        ("", r"^a\.json is empty\.$"),
        (b'{\n"\xe9"}', r"^a\.json, line 2: not UTF-8"),
    ],
)
def test_invalid_files_are_errors(folder, content, message):
    with pytest.raises(RegardError, match=message):
        read_squad(write("a.json", content))


@pytest.fixture(scope="module", params=["word", "char", "bytes"])
def tokenizer(request):
    return Tokenizer.train([CONTEXT, "who where"], request.param)


def question_about(context, answer):
    return Question("q", "who where", context, ((answer, context.index(answer)),))


@pytest.mark.parametrize("answer", ["Paris", "Léa", "Paris, with two", "cats."])
def test_answer_span_matches_its_text(tokenizer, answer):
    question = question_about(CONTEXT, answer)
    windows = QuestionWindows.from_questions([question], tokenizer, BERT, max_len=99, segments=True)
    first, last = windows.answers[0]
    assert CONTEXT[windows.char_starts[0][first] : windows.char_ends[0][last]] == answer
    expected = [2, *tokenizer.encode(question.question), 3, *tokenizer.encode(CONTEXT), 3]
    assert windows.texts.ids[0].tolist() == expected
    tail = len(tokenizer.encode(CONTEXT)) + 1
    assert windows.texts.segments[0].tolist() == [0] * (len(expected) - tail) + [1] * tail
    assert np.flatnonzero(windows.char_starts[0] >= 0).tolist() == list(range(len(expected) - tail, len(expected) - 1))


WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def words():
    return Tokenizer.train([" ".join(WORDS)], "space")


@settings(deadline=None)
@given(st.data(), st.integers(0, 40), st.integers(0, 12), st.integers(6, 30), st.integers(0, 20))
def test_windows_cover_the_context(words, data, length, asked, max_len, overlap):
    special = data.draw(st.sampled_from([BERT, ROBERTA, BARE]))
    begin_ids, middle, end_ids = {BERT: ([2], [3], [3]), ROBERTA: ([2], [3, 3], [3]), BARE: ([], [], [])}[special]
    frame = len(begin_ids + middle + end_ids)
    context = " ".join(WORDS[:length])
    answers = ()
    if length:
        first = data.draw(st.integers(0, length - 1))
        last = data.draw(st.integers(first, length - 1))
        start = len(" ".join(WORDS[:first])) + (first > 0)
        answers = ((" ".join(WORDS[first : last + 1]), start),)
    question = Question("q", " ".join(WORDS[:asked]), context, answers)
    windows = QuestionWindows.from_questions(
        [question], words, special, max_len=max_len, overlap=overlap, segments=False
    )
    assert windows.texts.segments is None
    assert windows.question_indices.tolist() == [0] * len(windows)
    all_ids, kept = words.encode(context), min(asked, (max_len - frame) // 2)
    size = max_len - frame - kept
    where = 0
    for i in range(len(windows)):
        ids, begins, ends = (one[i].tolist() for one in (windows.texts.ids, windows.char_starts, windows.char_ends))
        assert len(ids) == len(begins) == len(ends) <= max_len
        part = ids[kept + len(begin_ids + middle) : len(ids) - len(end_ids)]
        assert ids == [*begin_ids, *words.encode(question.question)[:kept], *middle, *part, *end_ids]
        assert part == all_ids[where : where + size]
        assert [context[a:b] for a, b in zip(begins, ends) if a >= 0] == WORDS[where : where + len(part)]
        begin, end = windows.answers[i]
        if answers and where <= first and last < where + size:
            assert context[begins[begin] : ends[end]] == answers[0][0]
        else:
            assert (begin, end) == (0, 0)
        if i < len(windows) - 1:
            assert where + size < length
            where += size - min(overlap, size // 2)
    assert where + size >= length


def test_context_is_tokenized_once_for_all_its_questions(words, monkeypatch):
    seen = []
    encode_as_pieces = Tokenizer.encode_as_pieces
    monkeypatch.setattr(
        Tokenizer, "encode_as_pieces", lambda self, text: seen.append(text) or encode_as_pieces(self, text)
    )
    questions = [Question(str(i), "w1", context) for i, context in enumerate(["w2 w3", "w4", "w2 w3"])]
    windows = QuestionWindows.from_questions(questions, words, BERT, max_len=20, segments=False)
    assert seen == ["w2 w3", "w4"]
    assert windows.question_indices.tolist() == [0, 1, 2]
    assert windows.texts.ids[0].tolist() == windows.texts.ids[2].tolist()


def scores_for(windows, spans):
    """Scores that favor the given spans: (window, first position, last position, score)."""
    scores = [np.zeros((len(windows.char_starts[i]), 2)) for i in range(len(windows))]
    for window, first, last, score in spans:
        scores[window][first, 0] += score
        scores[window][last, 1] += score
    return scores


def test_best_answer_of_all_windows(words):
    contexts = [" ".join(WORDS), " ".join(WORDS[5:8]), ""]
    questions = [Question(str(i), "w1", context) for i, context in enumerate(contexts)]
    windows = QuestionWindows.from_questions(questions, words, BERT, max_len=24, overlap=4, segments=False)
    assert windows.question_indices.tolist() == [0, 0, 0, 1, 2]
    # [begin] w1 [end] context: the contexts start at position 3, with w0, w16 and w32
    scores = scores_for(windows, [(0, 4, 5, 1.0), (1, 4, 6, 2.0), (2, 3, 3, 1.5), (3, 4, 4, 1.0)])
    assert windows.extract_answers(questions, scores) == ["w17 w18 w19", "w6", ""]


def test_answer_is_a_valid_span_of_the_context(words, monkeypatch):
    monkeypatch.setattr("regard.data.text.questions.MAX_ANSWER_TOKENS", 30)
    questions = [Question("q", "w1", " ".join(WORDS))]
    windows = QuestionWindows.from_questions(questions, words, BERT, max_len=50, segments=False)
    [best] = windows.extract_answers(questions, scores_for(windows, [(0, 1, 1, 9.0), (0, 2, 0, 9.0), (0, 5, 6, 1.0)]))
    assert best == "w2 w3"
    [best] = windows.extract_answers(questions, scores_for(windows, [(0, 9, 4, 9.0), (0, 9, 12, 2.0)]))
    assert best == "w6 w7 w8 w9"
    # at most 30 tokens from w0 on: the end at w35 is out of reach
    [best] = windows.extract_answers(questions, scores_for(windows, [(0, 3, 38, 3.0), (0, 3, 32, 1.0)]))
    assert best == " ".join(WORDS[:30])


def test_no_answer_if_every_window_prefers_none(words):
    questions = [Question("q", "w1", " ".join(WORDS))]
    windows = QuestionWindows.from_questions(questions, words, BERT, max_len=30, overlap=4, segments=False)
    assert len(windows) == 2
    spans = [(0, 0, 0, 3.0), (1, 0, 0, 2.0), (1, 4, 4, 1.0)]
    scores = scores_for(windows, spans)
    assert windows.extract_answers(questions, scores, empty=True) == [""]
    assert windows.extract_answers(questions, scores) == ["w23"]
    assert windows.extract_answers(questions, scores_for(windows, spans[:1] + spans[2:]), empty=True) == ["w23"]


@pytest.fixture(scope="module")
def many(words):
    rng = np.random.default_rng(0)
    questions = []
    for i in range(60):
        length = int(rng.integers(1, 40))
        first = int(rng.integers(length))
        start = len(" ".join(WORDS[:first])) + (first > 0)
        questions.append(Question(str(i), "w1 w2", " ".join(WORDS[:length]), ((WORDS[first], start),)))
    return questions, QuestionWindows.from_questions(questions, words, BERT, max_len=32, overlap=8, segments=True)


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_batches_have_two_targets_per_window(many, words, constant_shapes):
    questions, windows = many
    seen = []
    batches = LabeledTextBatches(
        windows.texts, windows.answers, budget=128, max_len=32, seed=0, constant_shapes=constant_shapes
    )
    for batch in batches.epoch(0):
        packed, segments = batch.inputs
        assert batch.targets.shape == (len(packed), 2)
        assert (batch.targets[batch.sentences :] == IGNORE_INDEX).all()
        assert len(segments) == len(packed.ids)
        for row, (first, last) in zip(rows(packed)[: batch.sentences], batch.targets.tolist()):
            seen.append((words.decode(row), words.decode(row[first : last + 1])))
    expected = [
        (words.decode(windows.texts.ids[i]), questions[number].answers[0][0] if windows.answers[i].any() else "")
        for i, number in enumerate(windows.question_indices)
    ]
    assert sorted(seen) == sorted(expected)
    assert 0 < sum(answer == "" for _, answer in seen) < len(seen)


def test_epoch_depends_on_seed_and_number_alone(many):
    check_epochs(lambda seed: LabeledTextBatches(many[1].texts, many[1].answers, budget=128, max_len=32, seed=seed))
