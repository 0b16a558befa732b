"""A translation model with its tokenizers, ready to use."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch

from regard.data.text.sentence_splitter import join_sentences, split_sentences
from regard.data.text.special_tokens import TRANSLATING, Special
from regard.data.text.tokenizer import Tokenizer
from regard.decode import BeamHistory, DecodeConfig, Ensemble, Hypothesis, decode_all
from regard.errors import RegardError
from regard.layers.packed import Packed
from regard.models import TranslationModel
from regard.pipelines.pipeline import ModelWithTokenizers
from regard.pipelines.scoring import PairScore, logprobs

Split = Literal["auto", "always", "never"]
"""which lines are split into sentences: those longer than in training, all, or none"""
# Samples of the sentences of one line draw from streams this far apart.
_APART = 1 << 32


@dataclass(frozen=True)
class Translation:
    """One translation of one line, what the model thought of it, and, where asked for, the search that found it."""

    text: str
    score: float
    hypothesis: Hypothesis
    history: BeamHistory | None = None


@dataclass
class Translator(ModelWithTokenizers):
    """A model with its tokenisers, ready to use.

    >>> translator = load("model")  # doctest: +SKIP
    >>> translator("The cat chased the mouse.")  # doctest: +SKIP
    'Le chat a chassé la souris.'
    """

    model: TranslationModel
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    # further models that vote with the first one
    partners: list[TranslationModel] = field(default_factory=list)
    special: Special = TRANSLATING
    languages: tuple[str, ...] = ()
    """codes of the source and the target language, where they are known"""

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.source_tokenizer, self.target_tokenizer

    def __call__(self, line: str) -> str:
        """The best translation of a line; one that is longer than in training is split into sentences."""
        return self.translate(line, split="auto")[0].text

    @property
    def models(self) -> Sequence[TranslationModel]:
        return [self.model, *self.partners]

    def source_ids(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """A source line as the model takes it, its end marked; with `truncate` cut to the length of training."""
        ids = self.source_tokenizer.encode(line)
        return self.special.framed(self.fit_length(ids, name, truncate, special=self._special_count))

    def target_ids(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        return self.fit_length(self.target_tokenizer.encode(line), name, truncate, special=self._special_count)

    @property
    def _special_count(self) -> int:
        """The special ids that are added to a text."""
        return max(len(self.special.framed([])), len(self.special.begun([])))

    @property
    def longest_output(self) -> int | None:
        """The most tokens that a translation can have, whatever `DecodeConfig.max_len` allows; None: no limit."""
        return None if self.length_limit is None else self.length_limit - 1

    def sentences(self, line: str, split: Split) -> list[str]:
        """What is translated at a time: the line, or the sentences that it is split into."""
        room = self.trained_length - self._special_count
        if split == "never" or (split == "auto" and len(self.source_tokenizer.encode(line)) <= room):
            return [line]
        return split_sentences(line) or [line]

    @overload
    def translate(self, lines: str, config: DecodeConfig | None = None, **options: Any) -> list[Translation]: ...
    @overload
    def translate(
        self, lines: Sequence[str], config: DecodeConfig | None = None, **options: Any
    ) -> list[list[Translation]]: ...
    def translate(
        self,
        lines: str | Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        truncate: bool = False,
        split: Split = "never",
        first: int = 0,
        history: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """For each line its best translations, best first; for a single string those of that line.

        An empty line has an empty translation. `prefixes` are beginnings that the translations must have. With `split`
        lines that are longer than in training, or all, are split into sentences, and their translations joined; this
        gives one translation per line. `first` is the number of the first line, which sampling depends on beside the
        seed. `history` keeps what each step of the search considered, took and left.
        """
        if isinstance(lines, str):
            return self.translate([lines], config, prefixes=prefixes, truncate=truncate, split=split, history=history)[
                0
            ]
        config = config or DecodeConfig()
        if config.n_best > 1 or history:
            if split == "always":
                raise RegardError(
                    "Sentences of a line are joined for one translation per line.", "Leave out n_best, or do not split."
                )
            split = "never"
        pieces = [self.sentences(line, split) for line in lines]
        flat = [piece for row in pieces for piece in row]
        given = None
        if prefixes is not None:  # a line's first sentence begins with it
            given = [prefixes[i] if k == 0 else "" for i, row in enumerate(pieces) for k in range(len(row))]
        names = [f"line {i}" for i, row in enumerate(pieces, 1) for _ in row]
        numbers = [i + k * _APART for i, row in enumerate(pieces, first) for k in range(len(row))]
        found = iter(self._translate(flat, config, given, truncate, names, numbers, history, progress))
        return [_joined([next(found) for _ in row], config) for row in pieces]

    @torch.no_grad()
    def _translate(
        self,
        lines: Sequence[str],
        config: DecodeConfig,
        prefixes: Sequence[str] | None,
        truncate: bool,
        names: Sequence[str],
        numbers: Sequence[int],
        history: bool,
        progress: Callable[[int, int], None] | None,
    ) -> list[list[Translation]]:
        if self.longest_output is not None:
            config = dataclasses.replace(config, max_len=min(config.max_len, self.longest_output))
        filled = [i for i, line in enumerate(lines) if line.strip()]
        sources = [self.source_ids(lines[i], name=names[i], truncate=truncate) for i in filled]
        forced = None
        if prefixes is not None or self.special.forced is not None:
            begun = self.special.begun([])[1:]
            given = prefixes if prefixes is not None else [""] * len(lines)
            forced = [begun + self.target_ids(given[i], name=f"prefix {i + 1}", truncate=truncate) for i in filled]
        model = self.model if not self.partners else Ensemble(self.models)
        for member in self.models:
            member.eval()
        answers: list[list[Translation]] = [[] for _ in lines]
        found = decode_all(
            model,
            sources,
            self.packed,
            config,
            special=self.special,
            prefixes=forced,
            history=history,
            numbers=[numbers[i] for i in filled],
            progress=progress,
        )
        if any(len(one.ids) >= self.trained_length for n_best in found for one in n_best):
            self.warn_of_length()
        for i, n_best in zip(filled, found):
            answers[i] = [Translation(self.target_tokenizer.decode(h.ids), h.score, h, n_best.history) for h in n_best]
        nothing = Translation("", 0.0, Hypothesis([], 0.0, 0.0, []))
        return [answer or [nothing] for answer in answers]

    @overload
    def score(self, pairs: tuple[str, str], **options: Any) -> PairScore: ...
    @overload
    def score(self, pairs: Iterable[tuple[str, str]], **options: Any) -> list[PairScore]: ...
    @torch.no_grad()
    def score(
        self,
        pairs: tuple[str, str] | Iterable[tuple[str, str]],
        *,
        truncate: bool = False,
        batch_tokens: int = 4096,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """The log-probability that the model (or the mean of several) gives to each target, given its source; for a
        single pair of strings, that of this pair.
        """
        if isinstance(pairs, str):
            raise RegardError("A score is that of a pair: source and target.", 'Give ("source", "target").')
        if isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(side, str) for side in pairs):
            return self.score([pairs], truncate=truncate, batch_tokens=batch_tokens)[0]  # type: ignore[list-item]
        encoded = []
        for i, (line, given) in enumerate(pairs, 1):  # type: ignore[misc]
            name = f"pair {i}"
            if not line.strip():
                raise RegardError(f"{name}: the source is empty.", "Remove the pair: there is nothing to translate.")
            limits: dict[str, Any] = {"name": name, "truncate": truncate}
            encoded.append((self.source_ids(line, **limits), self.target_ids(given, **limits)))
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
        scores: list[PairScore | None] = [None] * len(encoded)
        models = [model.eval() for model in self.models]
        while order:
            batch: list[int] = []
            while order and (not batch or len(batch) * (len(encoded[order[-1]][1]) + 1) <= batch_tokens):
                batch.append(order.pop())
            source, target = self.teacher_forced([encoded[i] for i in batch])
            wanted = torch.tensor([t for i in batch for t in self._predicted(encoded[i][1])], device=self.device)
            votes = [logprobs(model(source, target).float(), wanted) for model in models]
            total = torch.stack(votes).logsumexp(0) - math.log(len(votes))  # of the mean probability
            for i, own in zip(batch, total.split([len(self._predicted(encoded[i][1])) for i in batch])):
                scores[i] = PairScore(float(own.double().sum()), len(own))
            if progress is not None:
                progress(len(encoded) - len(order), len(encoded))
        return [score for score in scores if score is not None]

    def teacher_forced(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Packed, Packed]:
        """Source ids (as from source_ids) and target ids as the model takes them when the target is given."""
        return self.packed([s for s, _ in pairs]), self.packed([self.special.begun(t) for _, t in pairs])

    def _predicted(self, target: list[int]) -> list[int]:
        """What should follow each token of the target as the model is given it."""
        return [*self.special.begun(target)[1:], self.special.eos]


def _joined(sentences: list[list[Translation]], config: DecodeConfig) -> list[Translation]:
    """The translations of a line, from those of its sentences."""
    if len(sentences) == 1:
        return sentences[0]
    best = [found[0].hypothesis for found in sentences]
    logprobs = [logprob for one in best for logprob in one.token_logprobs]
    score = sum(logprobs) / max(1, len(logprobs)) ** config.length_penalty
    whole = Hypothesis([token for one in best for token in one.ids], score, sum(logprobs), logprobs)
    return [Translation(join_sentences([found[0].text for found in sentences]), score, whole)]
