"""Questions whose answers stand in a text: SQuAD's files, pieces that a model can read, and batches of them."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from regard.data.batching.sequences import Sequences
from regard.data.batching.text_batches import Texts, room
from regard.data.text.labeled_texts import LabelledBatches
from regard.data.text.readers import fields_of, name_of, read_text
from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError

logger = logging.getLogger("regard")

# A piece of context shares so many tokens with the next, but no more than half of its own.
OVERLAP = 128
# No answer has more tokens. (Of PIAF's, 1 in 1000 would; at 30, which is usual for English, 18.)
LONGEST = 48


@dataclass(frozen=True)
class Question:
    """A question about a context, and the answers that count as right, each with the character where it begins.

    A question without answers is one that the context does not answer.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] = ()


def read_squad(file: str | Path) -> list[Question]:
    """The questions of a JSON file laid out as SQuAD's, plain or compressed; "-" is stdin.

    Both versions are read: a question of version 2 that `is_impossible` has no answers, plausible or not. An answer
    that does not begin where the file says is taken from the nearest place where it does; the log says how many.
    """
    name = name_of(file)
    try:
        found = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        message = f"{name}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})."
        raise RegardError(message, hint="Give a file in the layout of SQuAD.") from None
    except RecursionError:
        raise RegardError(f"{name}: JSON nested too deeply.", hint="Give a file in the layout of SQuAD.") from None
    questions: dict[str, Question] = {}
    moved = 0
    for stated in _in_articles(found, name):
        if stated.id in questions:
            raise RegardError(f"{name}: two questions have the id {stated.id!r}.", hint="Give each its own.")
        answers = tuple((text, _nearest(text, start, stated, name)) for text, start in stated.answers)
        moved += answers != stated.answers
        questions[stated.id] = replace(stated, answers=answers)
    if not questions:
        raise RegardError(f"{name}: there is no question in it.", hint="Give a file in the layout of SQuAD.")
    if moved:
        logger.warning("%s: %d questions have an answer that does not begin where the file says.", name, moved)
    return list(questions.values())


def _nearest(text: str, start: int, question: Question, name: str) -> int:
    """Where an answer begins: where the file says, or at the nearest place to that."""
    if start >= 0 and question.context.startswith(text, start):
        return start
    places = [place.start() for place in re.finditer(f"(?={re.escape(text)})", question.context)]
    if not places:
        message = f"{name}, question {question.id}: the answer {text!r} does not stand in its context."
        raise RegardError(message, hint="Give answers as they stand there, letter by letter.")
    return min(places, key=lambda place: abs(place - start))


def _in_articles(found: Any, name: str) -> Iterator[Question]:
    for i, article in enumerate(_get(found, "data", list, name), 1):
        for j, paragraph in enumerate(_get(article, "paragraphs", list, f"{name}, article {i}"), 1):
            where = f"{name}, article {i}, paragraph {j}"
            context = _get(paragraph, "context", str, where)
            for entry in _get(paragraph, "qas", list, where):
                own_id = str(_get(entry, "id", str | int, where))
                here = f"{name}, question {own_id}"
                known = "answers" in entry and not entry.get("is_impossible")
                answers = _get(entry, "answers", list, here) if known else []
                yield Question(
                    own_id,
                    _get(entry, "question", str, here),
                    context,
                    tuple((_get(one, "text", str, here), _get(one, "answer_start", int, here)) for one in answers),
                )


def _get(found: Any, name: str, kind: Any, where: str) -> Any:
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, kind):
        wanted = {list: "list", str: "text", int: "number"}.get(kind, "text or number")
        raise RegardError(
            f'{where}: no {wanted} under "{name}"; {fields_of(found)}.', hint="Give a file in the layout of SQuAD."
        )
    return value


@dataclass(frozen=True, eq=False)
class QuestionPieces:
    """Questions with as much of their contexts as the model takes at a time, as two texts are framed.

    >>> tokenizer = Tokenizer.train(["who sat the cat sat there"], "word")
    >>> questions = [Question("1", "who sat", "the cat sat there", (("the cat", 0),))]
    >>> special = Special(begin=2, end=3)
    >>> pieces = QuestionPieces.of(questions, tokenizer, special, max_len=7, overlap=1, segments=True)
    >>> [tokenizer.decode(pieces.texts.ids[i]) for i in range(len(pieces))]
    ['who sat the cat', 'who sat cat sat', 'who sat sat there']
    >>> pieces.answers.tolist()
    [[4, 5], [0, 0], [0, 0]]
    """

    texts: Texts
    questions: Int[np.ndarray, "P"]
    """the number of each piece's question"""
    answers: Int[np.ndarray, "P 2"]
    """the first and the last token of the answer in the piece; twice the first token of all, where it is not in it"""
    begins: Sequences
    """where in the context each token begins; -1: nowhere"""
    ends: Sequences

    @staticmethod
    def of(
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        special: Special,
        *,
        max_len: int,
        segments: bool,
        overlap: int = OVERLAP,
    ) -> "QuestionPieces":
        """Pieces of at most `max_len` tokens; each shares `overlap` tokens of context with the next, or half of its own
        where that is less. A question may fill half of a piece; what is longer is cut off. The answer is the first.
        """
        left = room(special, 2, max_len)
        asked = tokenizer.encode_batch([one.question for one in questions])
        contexts = list(dict.fromkeys(one.context for one in questions))  # many questions are asked about one
        ids = dict(zip(contexts, tokenizer.encode_batch(contexts)))
        places = {context: [place for _, place in tokenizer.pieces(context)] for context in contexts}
        # where the context of a piece begins: after the frame's beginning, the question, its end, and what is between
        before = len(special.framed([])) + (special.between is not None)
        after = 0 if special.end is None else 1
        rows, numbers, answers, begins, ends = [], [], [], [], []
        for number, one in enumerate(questions):
            question = asked[number][: left // 2]
            context = ids[one.context]
            begin, end = ([place[i] for place in places[one.context]] for i in (0, 1))
            answer = _tokens_of(one, begin, end)
            size = left - len(question)
            step = size - min(overlap, size // 2)
            for first in range(0, max(1, len(context) - size + step), step):
                part = slice(first, first + size)
                head = before + len(question)
                rows.append((question, context[part]))
                numbers.append(number)
                inside = answer is not None and first <= answer[0] and answer[1] < first + size
                answers.append([head - first + place for place in answer] if answer and inside else [0, 0])
                begins.append([-1] * head + begin[part] + [-1] * after)
                ends.append([-1] * head + end[part] + [-1] * after)
        return QuestionPieces(
            Texts.of(rows, special, segments=segments),
            np.array(numbers, np.int64),
            np.array(answers, np.int64).reshape(-1, 2),
            Sequences.of(begins),
            Sequences.of(ends),
        )

    def __len__(self) -> int:
        return len(self.questions)

    def best(
        self, questions: Sequence[Question], scores: Sequence[Float[np.ndarray, "n 2"]], *, empty: bool = False
    ) -> list[str]:
        """The answer to each question, given for each token of each piece how likely an answer begins and ends there.

        It is the run of at most LONGEST tokens of context whose two scores have the greatest sum, of all pieces. With
        `empty` there may be none: where in every piece the first token of all, which is not of the context, has more.
        """
        found = [(-np.inf, "")] * len(questions)
        nothing = [np.inf] * len(questions)
        for piece, number in enumerate(self.questions.tolist()):
            begins, ends = self.begins[piece], self.ends[piece]
            own = np.asarray(scores[piece], np.float64)
            nothing[number] = min(nothing[number], own[0].sum())
            context = np.flatnonzero(begins >= 0)
            if not len(context):
                continue
            sums = own[context, 0][:, None] + own[context, 1]
            further = np.arange(len(context)) - np.arange(len(context))[:, None]  # the last token after the first
            sums[(further < 0) | (further >= LONGEST)] = -np.inf
            first, last = np.unravel_index(int(sums.argmax()), sums.shape)
            text = questions[number].context[begins[context[first]] : ends[context[last]]]
            found[number] = max(found[number], (float(sums[first, last]), text), key=lambda one: one[0])
        return ["" if empty and score < none else text for (score, text), none in zip(found, nothing)]


def _tokens_of(question: Question, begins: Sequence[int], ends: Sequence[int]) -> tuple[int, int] | None:
    """The first and the last token of the answer, in the whole context; None where there is none."""
    if not question.answers:
        return None
    text, start = question.answers[0]
    stop = start + len(text)
    inside = [i for i, (begin, end) in enumerate(zip(begins, ends)) if begin < stop and end > start]
    return (inside[0], inside[-1]) if inside else None


class AnswerBatches(LabelledBatches):
    """Pieces in batches of similar length; the targets are the answer's two places in each, IGNORED for filling pieces.

    >>> tokenizer = Tokenizer.train(["who the cat sat"], "word")
    >>> questions = [Question("1", "who", "the cat sat", (("cat", 4),))]
    >>> pieces = QuestionPieces.of(questions, tokenizer, Special(begin=2, end=3), max_len=16, segments=True)
    >>> [batch] = AnswerBatches(pieces, budget=16, max_len=16, seed=0).epoch(0)
    >>> batch.inputs[1], batch.targets
    (tensor([0, 0, 0, 1, 1, 1, 1]), tensor([[4, 4]]))
    """

    def __init__(
        self, pieces: QuestionPieces, *, budget: int, max_len: int, seed: int, constant_shapes: bool = False
    ) -> None:
        super().__init__(
            pieces.texts, pieces.answers, budget=budget, max_len=max_len, seed=seed, constant_shapes=constant_shapes
        )
