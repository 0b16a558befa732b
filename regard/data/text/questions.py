"""Extractive question answering: SQuAD files, windows over long contexts."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from regard.config_reader import parse_json
from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts, max_text_tokens
from regard.data.text.readers import describe_fields, describe_json_error, display_name, read_text
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError

logger = logging.getLogger("regard")

# Consecutive windows of a context share this many tokens, but at most half a window.
OVERLAP = 128
# Maximum length of an answer. (Of PIAF's answers, 1 in 1000 is longer; with 30, usual for English, 18 would be.)
MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True)
class Question:
    """A question about a context, and its accepted answers, each with the index of its first character.

    A question without answers cannot be answered from its context.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] = ()


def read_squad(file: str | Path) -> list[Question]:
    """Read the questions of a JSON file in SQuAD format, plain or compressed; "-" is stdin.

    Both versions are supported: a question of version 2 with `is_impossible` has no answers, not even plausible ones.
    An answer that does not start at the stated character is located at its nearest occurrence; the log states how many
    questions are affected.
    """
    name = display_name(file)
    try:
        content = parse_json(read_text(file))
    except json.JSONDecodeError as error:
        message = f"{name}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})."
        raise RegardError(message, hint="Provide a file in SQuAD format.") from None
    except (ValueError, RecursionError) as error:
        message = f"{name}: not JSON ({describe_json_error(error)})."
        raise RegardError(message, hint="Provide a file in SQuAD format.") from None
    questions: dict[str, Question] = {}
    relocated = 0
    for question in _parse_articles(content, name):
        if question.id in questions:
            raise RegardError(f"{name}: two questions have the id {question.id!r}.", hint="Make the ids unique.")
        answers = tuple((text, _find_answer_start(text, start, question, name)) for text, start in question.answers)
        relocated += answers != question.answers
        questions[question.id] = replace(question, answers=answers)
    if not questions:
        raise RegardError(f"{name}: the file contains no questions.", hint="Provide a file in SQuAD format.")
    if relocated:
        logger.warning("%s: %d questions have an answer that does not start at its answer_start.", name, relocated)
    return list(questions.values())


def _find_answer_start(text: str, start: int, question: Question, name: str) -> int:
    """Start of an answer in its context: `start`, or the start of the nearest occurrence."""
    if start >= 0 and question.context.startswith(text, start):
        return start
    occurrences = [match.start() for match in re.finditer(f"(?={re.escape(text)})", question.context)]
    if not occurrences:
        message = f"{name}, question {question.id}: the answer {text!r} does not occur in its context."
        raise RegardError(message, hint="Copy answers from the context, character by character.")
    return min(occurrences, key=lambda position: abs(position - start))


def _parse_articles(content: Any, name: str) -> Iterator[Question]:
    for i, article in enumerate(_get_field(content, "data", list, name), 1):
        for j, paragraph in enumerate(_get_field(article, "paragraphs", list, f"{name}, article {i}"), 1):
            location = f"{name}, article {i}, paragraph {j}"
            context = _get_field(paragraph, "context", str, location)
            for entry in _get_field(paragraph, "qas", list, location):
                question_id = str(_get_field(entry, "id", str | int, location))
                question_location = f"{name}, question {question_id}"
                has_answers = "answers" in entry and not entry.get("is_impossible")
                answers = _get_field(entry, "answers", list, question_location) if has_answers else []
                yield Question(
                    question_id,
                    _get_field(entry, "question", str, question_location),
                    context,
                    tuple(
                        (
                            _get_field(answer, "text", str, question_location),
                            _get_field(answer, "answer_start", int, question_location),
                        )
                        for answer in answers
                    ),
                )


def _get_field(entry: Any, name: str, kind: Any, location: str) -> Any:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        expected = {list: "list", str: "text", int: "number"}.get(kind, "text or number")
        raise RegardError(
            f'{location}: no {expected} in the field "{name}"; {describe_fields(entry)}.',
            hint="Provide a file in SQuAD format.",
        )
    return value


@dataclass(frozen=True, eq=False)
class QuestionWindows:
    """Questions, each paired with overlapping windows of its context that fit into the model.

    >>> tokenizer = Tokenizer.train(["who sat the cat sat there"], "word")
    >>> questions = [Question("1", "who sat", "the cat sat there", (("the cat", 0),))]
    >>> special = SpecialTokens(begin=2, end=3)
    >>> windows = QuestionWindows.from_questions(questions, tokenizer, special, max_len=7, overlap=1, segments=True)
    >>> [tokenizer.decode(windows.texts.ids[i]) for i in range(len(windows))]
    ['who sat the cat', 'who sat cat sat', 'who sat sat there']
    >>> windows.answers.tolist()
    [[4, 5], [0, 0], [0, 0]]
    """

    texts: EncodedTexts
    question_indices: Int[np.ndarray, "P"]
    """index of the question of each window"""
    answers: Int[np.ndarray, "P 2"]
    """positions of the first and last token of the answer in each window; (0, 0) if the window does not contain it"""
    char_starts: Sequences
    """start of each token in the context, in characters; -1 for tokens that are not part of the context"""
    char_ends: Sequences

    @staticmethod
    def from_questions(
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        special: SpecialTokens,
        *,
        max_len: int,
        segments: bool,
        overlap: int = OVERLAP,
    ) -> "QuestionWindows":
        """Split contexts into windows of at most `max_len` tokens, question and special tokens included.

        Consecutive windows share `overlap` tokens of context, or half a window if that is less. A question is truncated
        to half a window. Only the first answer of a question is used.
        """
        limit = max_text_tokens(special, 2, max_len)
        question_ids = tokenizer.encode_batch([question.question for question in questions])
        contexts = list(dict.fromkeys(question.context for question in questions))  # questions may share a context
        context_ids = dict(zip(contexts, tokenizer.encode_batch(contexts)))
        context_spans = {context: [span for _, span in tokenizer.encode_as_pieces(context)] for context in contexts}
        # special tokens before the context: `begin`, the `end` of the question, and `between`
        before = len(special.add_special_tokens([])) + (special.between is not None)
        after = 0 if special.end is None else 1
        rows, indices, answers, char_starts, char_ends = [], [], [], [], []
        for index, question in enumerate(questions):
            question_part = question_ids[index][: limit // 2]
            context = context_ids[question.context]
            starts, ends = ([span[i] for span in context_spans[question.context]] for i in (0, 1))
            answer = _answer_token_span(question, starts, ends)
            size = limit - len(question_part)
            step = size - min(overlap, size // 2)
            for first in range(0, max(1, len(context) - size + step), step):
                window = slice(first, first + size)
                head = before + len(question_part)
                rows.append((question_part, context[window]))
                indices.append(index)
                is_inside = answer is not None and first <= answer[0] and answer[1] < first + size
                answers.append([head - first + position for position in answer] if answer and is_inside else [0, 0])
                char_starts.append([-1] * head + starts[window] + [-1] * after)
                char_ends.append([-1] * head + ends[window] + [-1] * after)
        return QuestionWindows(
            EncodedTexts.from_ids(rows, special, segments=segments),
            np.array(indices, np.int64),
            np.array(answers, np.int64).reshape(-1, 2),
            Sequences.from_lists(char_starts),
            Sequences.from_lists(char_ends),
        )

    def __len__(self) -> int:
        return len(self.question_indices)

    def extract_answers(
        self, questions: Sequence[Question], scores: Sequence[Float[np.ndarray, "n 2"]], *, empty: bool = False
    ) -> list[str]:
        """The best answer to each question. `scores` are the start and end scores of every token of each window.

        The answer is the span of at most MAX_ANSWER_TOKENS context tokens with the highest sum of start and end score
        over all windows of the question. With `empty`, the answer is "" if in every window the first token of the
        sequence (the no-answer position) scores higher.
        """
        best = [(-np.inf, "")] * len(questions)
        no_answer = [np.inf] * len(questions)
        for window, index in enumerate(self.question_indices.tolist()):
            starts, ends = self.char_starts[window], self.char_ends[window]
            window_scores = np.asarray(scores[window], np.float64)
            no_answer[index] = min(no_answer[index], window_scores[0].sum())
            context = np.flatnonzero(starts >= 0)
            if not len(context):
                continue
            sums = window_scores[context, 0][:, None] + window_scores[context, 1]
            distance = np.arange(len(context)) - np.arange(len(context))[:, None]  # from the first token to the last
            sums[(distance < 0) | (distance >= MAX_ANSWER_TOKENS)] = -np.inf
            first, last = np.unravel_index(int(sums.argmax()), sums.shape)
            text = questions[index].context[starts[context[first]] : ends[context[last]]]
            best[index] = max(best[index], (float(sums[first, last]), text), key=lambda scored: scored[0])
        return ["" if empty and score < limit else text for (score, text), limit in zip(best, no_answer)]


def _answer_token_span(question: Question, starts: Sequence[int], ends: Sequence[int]) -> tuple[int, int] | None:
    """First and last token of the first answer in the context, given the character span of each token; None if there is
    no answer."""
    if not question.answers:
        return None
    text, answer_start = question.answers[0]
    answer_end = answer_start + len(text)
    inside = [i for i, (start, end) in enumerate(zip(starts, ends)) if start < answer_end and end > answer_start]
    return (inside[0], inside[-1]) if inside else None
