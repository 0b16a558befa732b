"""Translations of lines, and their text format."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from regard.data.text.sentence_splitter import join_sentences
from regard.decode import DecodeConfig, Hypothesis, SearchHistory

Split = Literal["auto", "always", "never"]
"""which lines are split into sentences: those beyond the trained length, all, or none"""


@dataclass(frozen=True)
class Translation:
    """A translation of a line, with its score, its hypothesis and, if recorded, the search history."""

    text: str
    score: float
    hypothesis: Hypothesis = field(repr=False)
    history: SearchHistory | None = field(default=None, repr=False)


def format_translations(
    results: Sequence[Sequence[Translation]],
    config: DecodeConfig,
    first_index: int = 0,
    *,
    scores: bool = False,
    column: Sequence[str] | None = None,
) -> list[str]:
    """Translations as lines of text: text ||| score ||| column.

    With `n_best` above 1, a line begins with the index of the input line, and has a score.

    >>> best = Translation("Le chat dort.", -0.25, Hypothesis([], 0.0, 0.0, []))
    >>> format_translations([[best]], DecodeConfig(), scores=True)
    ['Le chat dort. ||| -0.2500']
    >>> format_translations([[best, best]], DecodeConfig(n_best=2), first_index=7)
    ['7 ||| Le chat dort. ||| -0.2500', '7 ||| Le chat dort. ||| -0.2500']
    """
    flat = [translation for n_best in results for translation in n_best]
    columns = [[translation.text.replace("\n", " ") for translation in flat]]
    if config.n_best > 1:
        columns.insert(0, [str(i) for i, n_best in enumerate(results, first_index) for _ in n_best])
    if scores or config.n_best > 1:
        columns.append([f"{translation.score:.4f}" for translation in flat])
    if column is not None:
        columns.append(list(column))
    return [" ||| ".join(fields) for fields in zip(*columns)]


def join_translations(sentences: list[list[Translation]], config: DecodeConfig) -> list[Translation]:
    """The translations of a line, joined from those of its sentences."""
    if len(sentences) == 1:
        return sentences[0]
    best = [n_best[0].hypothesis for n_best in sentences]
    logprobs = [logprob for hypothesis in best for logprob in hypothesis.token_logprobs]
    score = sum(logprobs) / max(1, len(logprobs)) ** config.length_penalty
    joined = Hypothesis([token for hypothesis in best for token in hypothesis.ids], score, sum(logprobs), logprobs)
    return [Translation(join_sentences([n_best[0].text for n_best in sentences]), score, joined)]
