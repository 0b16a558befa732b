import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import IGNORED, AnswerBatches, Question, QuestionPieces, Special, Tokenizer, read_squad
from regard.errors import RegardError
from tests.data.helpers import check_epochs, rows, write

BERT, ROBERTA, BARE = Special(begin=2, end=3), Special(begin=2, end=3, between=3), Special()
CONTEXT = "Léa  lives in\u00a0Paris, with two cats."


def squad(qas, context=CONTEXT, **more):
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}], **more})


def asked(id="q1", question="Where?", answers=(("Paris", 14),), **more):
    entries = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": id, "question": question, "answers": entries, **more}


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_squad_files_are_read(folder, packing):
    qas = [asked(), asked("q2", "Who?", (("Léa", 0), ("Léa  lives", 0))), asked(3, "Why?", ())]
    questions = read_squad(write("a.json" + packing, "\ufeff" + squad(qas, version="1.1")))
    assert questions == [
        Question("q1", "Where?", CONTEXT, (("Paris", 14),)),
        Question("q2", "Who?", CONTEXT, (("Léa", 0), ("Léa  lives", 0))),
        Question("3", "Why?", CONTEXT),
    ]


def test_questions_without_answers(folder):
    """Version 2 has questions that cannot be answered; test files have no answers at all."""
    impossible = asked(plausible_answers=[{"text": "Paris", "answer_start": 14}], is_impossible=True)
    possible = asked("q2", is_impossible=False)
    silent = {"id": "q3", "question": "Who?"}
    questions = read_squad(write("a.json", squad([impossible, possible, silent], version="v2.0")))
    assert [one.answers for one in questions] == [(), (("Paris", 14),), ()]


@pytest.mark.parametrize(("stated", "taken"), [(0, 0), (2, 2), (4, 2), (6, 8), (8, 8), (99, 10), (-5, 0)])
def test_an_answer_beside_its_place_is_taken_from_the_nearest(folder, caplog, stated, taken):
    """A few answers of real files are a character off."""
    qas = [asked("q1", answers=[("cat", 5)]), asked("q2", answers=[("a.a", stated)])]
    questions = read_squad(write("a.json", squad(qas, "a.a.acata.a.a")))
    assert [one.answers for one in questions] == [(("cat", 5),), (("a.a", taken),)]
    said = "a.json: 1 questions have an answer that does not begin where the file says."
    assert caplog.messages == ([said] if stated != taken else [])


def test_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(squad([asked()]).encode())))
    assert [one.id for one in read_squad("-")] == ["q1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"data":\n [}', r"^a\.json, line 2: not JSON \(.* at column 3\)\. Give a file in the layout of SQuAD\.$"),
        ("[]", r'^a\.json: no list under "data"; it is not an object\.'),
        ('{"date": []}', r'^a\.json: no list under "data"; it has date\.'),
        ('{"data": []}', r"^a\.json: there is no question in it\."),
        ('{"data": [{"paragraphs": []}, {}]}', r'^a\.json, article 2: no list under "paragraphs"; it has no fields\.'),
        (
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            r'article 1, paragraph 1: no text under "context"; it has qas\.',
        ),
        ('{"data": [{"paragraphs": [{"context": ""}]}]}', r'^a\.json, article 1, paragraph 1: no list under "qas"'),
        (squad([{"question": "Who?"}]), r'^a\.json, article 1, paragraph 1: no text or number under "id"'),
        (squad([{"id": "q1"}]), r'^a\.json, question q1: no text under "question"; it has id\.'),
        (squad([asked() | {"answers": "Paris"}]), r'^a\.json, question q1: no list under "answers"'),
        (squad([asked() | {"answers": [{"text": "Paris"}]}]), r'^a\.json, question q1: no number under "answer_start"'),
        (squad([asked(answers=[("Rome", 15)])]), r"^a\.json, question q1: the answer 'Rome' does not stand in its"),
        (squad([asked(), asked()]), r"^a\.json: two questions have the id 'q1'\."),
        ("", r"^a\.json is empty\.$"),
        (b'{\n"\xe9"}', r"^a\.json, line 2: not UTF-8"),
    ],
)
def test_bad_input(folder, content, said):
    with pytest.raises(RegardError, match=said):
        read_squad(write("a.json", content))


@pytest.fixture(scope="module", params=["word", "char", "bytes"])
def tokenizer(request):
    return Tokenizer.train([CONTEXT, "who where"], request.param)


def question_about(context, answer):
    return Question("q", "who where", context, ((answer, context.index(answer)),))


@pytest.mark.parametrize("answer", ["Paris", "Léa", "Paris, with two", "cats."])
def test_the_places_of_an_answer_are_its_text(tokenizer, answer):
    question = question_about(CONTEXT, answer)
    pieces = QuestionPieces.of([question], tokenizer, BERT, max_len=99, segments=True)
    first, last = pieces.answers[0]
    assert CONTEXT[pieces.begins[0][first] : pieces.ends[0][last]] == answer
    framed = [2, *tokenizer.encode(question.question), 3, *tokenizer.encode(CONTEXT), 3]
    assert pieces.texts.ids[0].tolist() == framed
    tail = len(tokenizer.encode(CONTEXT)) + 1
    assert pieces.texts.segments[0].tolist() == [0] * (len(framed) - tail) + [1] * tail
    assert np.flatnonzero(pieces.begins[0] >= 0).tolist() == list(range(len(framed) - tail, len(framed) - 1))


WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def words():
    return Tokenizer.train([" ".join(WORDS)], "space")


@settings(deadline=None)
@given(st.data(), st.integers(0, 40), st.integers(0, 12), st.integers(6, 30), st.integers(0, 20))
def test_pieces_cover_the_context(words, data, length, asked, max_len, overlap):
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
    pieces = QuestionPieces.of([question], words, special, max_len=max_len, overlap=overlap, segments=False)
    assert pieces.texts.segments is None
    assert pieces.questions.tolist() == [0] * len(pieces)
    all_ids, kept = words.encode(context), min(asked, (max_len - frame) // 2)
    size = max_len - frame - kept
    where = 0
    for i in range(len(pieces)):
        ids, begins, ends = (one[i].tolist() for one in (pieces.texts.ids, pieces.begins, pieces.ends))
        assert len(ids) == len(begins) == len(ends) <= max_len
        part = ids[kept + len(begin_ids + middle) : len(ids) - len(end_ids)]
        assert ids == [*begin_ids, *words.encode(question.question)[:kept], *middle, *part, *end_ids]
        assert part == all_ids[where : where + size]
        assert [context[a:b] for a, b in zip(begins, ends) if a >= 0] == WORDS[where : where + len(part)]
        begin, end = pieces.answers[i]
        if answers and where <= first and last < where + size:
            assert context[begins[begin] : ends[end]] == answers[0][0]
        else:
            assert (begin, end) == (0, 0)
        if i < len(pieces) - 1:
            assert where + size < length
            where += size - min(overlap, size // 2)
    assert where + size >= length


def test_a_context_is_read_once_for_all_its_questions(words, monkeypatch):
    seen = []
    pieces_of = Tokenizer.pieces
    monkeypatch.setattr(Tokenizer, "pieces", lambda self, text: seen.append(text) or pieces_of(self, text))
    questions = [Question(str(i), "w1", context) for i, context in enumerate(["w2 w3", "w4", "w2 w3"])]
    pieces = QuestionPieces.of(questions, words, BERT, max_len=20, segments=False)
    assert seen == ["w2 w3", "w4"]
    assert pieces.questions.tolist() == [0, 1, 2]
    assert pieces.texts.ids[0].tolist() == pieces.texts.ids[2].tolist()


def scores_for(pieces, places):
    """Scores that point to one place of each piece: (piece, begin, end, how sure)."""
    scores = [np.zeros((len(pieces.begins[i]), 2)) for i in range(len(pieces))]
    for piece, begin, end, sure in places:
        scores[piece][begin, 0] += sure
        scores[piece][end, 1] += sure
    return scores


def test_the_best_answer_of_all_pieces(words):
    contexts = [" ".join(WORDS), " ".join(WORDS[5:8]), ""]
    questions = [Question(str(i), "w1", context) for i, context in enumerate(contexts)]
    pieces = QuestionPieces.of(questions, words, BERT, max_len=24, overlap=4, segments=False)
    assert pieces.questions.tolist() == [0, 0, 0, 1, 2]
    # [begin] w1 [end] context: the context begins at place 3, that of the second piece with w16, of the third with w32
    scores = scores_for(pieces, [(0, 4, 5, 1.0), (1, 4, 6, 2.0), (2, 3, 3, 1.5), (3, 4, 4, 1.0)])
    assert pieces.best(questions, scores) == ["w17 w18 w19", "w6", ""]


def test_an_answer_lies_in_the_context_the_right_way_round_and_is_not_too_long(words, monkeypatch):
    monkeypatch.setattr("regard.data.text.questions.LONGEST", 30)
    questions = [Question("q", "w1", " ".join(WORDS))]
    pieces = QuestionPieces.of(questions, words, BERT, max_len=50, segments=False)
    [best] = pieces.best(questions, scores_for(pieces, [(0, 1, 1, 9.0), (0, 2, 0, 9.0), (0, 5, 6, 1.0)]))
    assert best == "w2 w3"
    [best] = pieces.best(questions, scores_for(pieces, [(0, 9, 4, 9.0), (0, 9, 12, 2.0)]))
    assert best == "w6 w7 w8 w9"
    # 30 tokens from w0 on, and no more: the end at w35 is out of reach
    [best] = pieces.best(questions, scores_for(pieces, [(0, 3, 38, 3.0), (0, 3, 32, 1.0)]))
    assert best == " ".join(WORDS[:30])


def test_no_answer_where_every_piece_says_so(words):
    questions = [Question("q", "w1", " ".join(WORDS))]
    pieces = QuestionPieces.of(questions, words, BERT, max_len=30, overlap=4, segments=False)
    assert len(pieces) == 2
    sure = [(0, 0, 0, 3.0), (1, 0, 0, 2.0), (1, 4, 4, 1.0)]
    scores = scores_for(pieces, sure)
    assert pieces.best(questions, scores, empty=True) == [""]
    assert pieces.best(questions, scores) == ["w23"]
    assert pieces.best(questions, scores_for(pieces, sure[:1] + sure[2:]), empty=True) == ["w23"]


@pytest.fixture(scope="module")
def many(words):
    rng = np.random.default_rng(0)
    questions = []
    for i in range(60):
        length = int(rng.integers(1, 40))
        first = int(rng.integers(length))
        start = len(" ".join(WORDS[:first])) + (first > 0)
        questions.append(Question(str(i), "w1 w2", " ".join(WORDS[:length]), ((WORDS[first], start),)))
    return questions, QuestionPieces.of(questions, words, BERT, max_len=32, overlap=8, segments=True)


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_batches_have_two_places_a_piece(many, words, constant_shapes):
    questions, pieces = many
    seen = []
    batches = AnswerBatches(pieces, budget=128, max_len=32, seed=0, constant_shapes=constant_shapes)
    for batch in batches.epoch(0):
        packed, segments = batch.inputs
        assert batch.targets.shape == (len(packed), 2)
        assert (batch.targets[batch.sentences :] == IGNORED).all()
        assert len(segments) == len(packed.ids)
        for row, (first, last) in zip(rows(packed)[: batch.sentences], batch.targets.tolist()):
            seen.append((words.decode(row), words.decode(row[first : last + 1])))
    expected = [
        (words.decode(pieces.texts.ids[i]), questions[number].answers[0][0] if pieces.answers[i].any() else "")
        for i, number in enumerate(pieces.questions)
    ]
    assert sorted(seen) == sorted(expected)
    assert 0 < sum(answer == "" for _, answer in seen) < len(seen)


def test_an_epoch_is_a_function_of_seed_and_number(many):
    check_epochs(lambda seed: AnswerBatches(many[1], budget=128, max_len=32, seed=seed))
