"""A translation model with its tokenisers, ready to use."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.data.special import TRANSLATING, Special
from regard.data.tokenizer import Tokenizer
from regard.decode import BeamHistory, DecodeConfig, Ensemble, Hypothesis, decode_all
from regard.errors import RegardError
from regard.folder.bundle import ModelWithTokenizers, within
from regard.folder.scoring import PairScore, logprobs
from regard.layers.packed import Packed
from regard.models import TranslationModel


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

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.source_tokenizer, self.target_tokenizer

    def __call__(self, line: str) -> str:
        return self.translate([line])[0][0].text

    def source_ids(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """A source line as the model takes it, its end marked; too long a line is an error, or is cut short."""
        return self.special.framed(self._within_limit(self.source_tokenizer.encode(line), name, truncate))

    def target_ids(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        return self._within_limit(self.target_tokenizer.encode(line), name, truncate)

    def _within_limit(self, ids: list[int], name: str, truncate: bool) -> list[int]:
        frame = max(len(self.special.framed([])), len(self.special.begun([])))
        room = min(model.config.max_len for model in [self.model, *self.partners]) - frame
        return within(ids, room, name, truncate)

    @torch.no_grad()
    def translate(
        self,
        lines: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        truncate: bool = False,
        history: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Translation]]:
        """For each line its best translations, best first. An empty line is answered by an empty one.

        `prefixes` are beginnings that the translations must have; `history` keeps what each step of the search
        considered, took and left.
        """
        config = config or DecodeConfig()
        limit = min(model.config.max_len for model in [self.model, *self.partners]) - 1
        config = dataclasses.replace(config, max_len=min(config.max_len, limit))
        filled = [i for i, line in enumerate(lines) if line.strip()]
        sources = [self.source_ids(lines[i], name=f"line {i + 1}", truncate=truncate) for i in filled]
        forced = None
        if prefixes is not None or self.special.forced is not None:
            begun = self.special.begun([])[1:]
            given = prefixes if prefixes is not None else [""] * len(lines)
            forced = [begun + self.target_ids(given[i], name=f"prefix {i + 1}", truncate=truncate) for i in filled]
        model = self.model if not self.partners else Ensemble([self.model, *self.partners])
        for member in [self.model, *self.partners]:
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
            progress=progress,
        )
        for i, n_best in zip(filled, found):
            answers[i] = [Translation(self.target_tokenizer.decode(h.ids), h.score, h, n_best.history) for h in n_best]
        nothing = Translation("", 0.0, Hypothesis([], 0.0, 0.0, []))
        return [answer or [nothing] for answer in answers]

    @torch.no_grad()
    def score(
        self, pairs: Iterable[tuple[str, str]], *, truncate: bool = False, batch_tokens: int = 4096
    ) -> list[PairScore]:
        """The log-probability that the model (or the mean of several) gives to each target, its source being given."""
        encoded = []
        for i, (line, given) in enumerate(pairs, 1):
            name = f"pair {i}"
            if not line.strip():
                raise RegardError(f"{name}: the source is empty.", "Remove the pair: there is nothing to translate.")
            limits: dict[str, Any] = {"name": name, "truncate": truncate}
            encoded.append((self.source_ids(line, **limits), self.target_ids(given, **limits)))
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
        scores: list[PairScore | None] = [None] * len(encoded)
        models = [self.model.eval(), *(partner.eval() for partner in self.partners)]
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
        return [score for score in scores if score is not None]

    def teacher_forced(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Packed, Packed]:
        """Source ids (as from source_ids) and target ids as the model takes them when the target is given."""
        return self.packed([s for s, _ in pairs]), self.packed([self.special.begun(t) for _, t in pairs])

    def _predicted(self, target: list[int]) -> list[int]:
        """What should follow each token of the target as the model is given it."""
        return [*self.special.begun(target)[1:], self.special.eos]
