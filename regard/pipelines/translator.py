"""Translation pipeline: a sequence-to-sequence model with its tokenizers."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, overload

import torch

from regard.data.text.sentence_splitter import join_sentences, split_sentences
from regard.data.text.special_tokens import SEQ2SEQ_TOKENS, SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.decode import DecodeConfig, Ensemble, Hypothesis, LexicalConstraints, SearchHistory, TokenTexts, decode_all
from regard.errors import RegardError
from regard.layers.packed import Packed
from regard.models import TranslationModel
from regard.pipelines.phrases import Phrases, make_constraints, phrases_per_line
from regard.pipelines.pipeline import TextPipeline
from regard.pipelines.scoring import SequenceScore, target_logprobs

Split = Literal["auto", "always", "never"]
"""which lines are split into sentences: those beyond the trained length, all, or none"""
# Offset between the sampling indices of consecutive sentences of one line.
_SENTENCE_STRIDE = 1 << 32


@dataclass(frozen=True)
class Translation:
    """A translation of a line, with its score, its hypothesis and, if recorded, the search history."""

    text: str
    score: float
    hypothesis: Hypothesis
    history: SearchHistory | None = None


@dataclass
class Translator(TextPipeline):
    """A translation model with its tokenizers.

    >>> translator = load("model")  # doctest: +SKIP
    >>> translator("The cat chased the mouse.")  # doctest: +SKIP
    'Le chat a chassé la souris.'
    """

    model: TranslationModel
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    ensemble_members: list[TranslationModel] = field(default_factory=list)
    """other models of an ensemble with `model`"""
    special: SpecialTokens = SEQ2SEQ_TOKENS
    languages: tuple[str, ...] = ()
    """codes of the source and the target language, if known"""

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.source_tokenizer, self.target_tokenizer

    def __call__(self, line: str) -> str:
        """The best translation of a line; a line beyond the trained length is split into sentences."""
        return self.translate(line, split="auto")[0].text

    @property
    def models(self) -> Sequence[TranslationModel]:
        return [self.model, *self.ensemble_members]

    def encode_source(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """The ids of a source line with special tokens; `truncate` cuts it to the trained length."""
        ids = self.source_tokenizer.encode(line)
        return self.special.add_special_tokens(
            self.limit_length(ids, name, truncate, special_count=self._special_count)
        )

    def encode_target(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """The ids of a target line without special tokens; `truncate` cuts it to the trained length."""
        ids = self.target_tokenizer.encode(line)
        return self.limit_length(ids, name, truncate, special_count=self._special_count)

    @property
    def _special_count(self) -> int:
        """Number of special tokens added to a text."""
        return max(len(self.special.add_special_tokens([])), len(self.special.make_decoder_input([])))

    @property
    def max_output_len(self) -> int | None:
        """Maximum length of a translation in tokens, independent of `DecodeConfig.max_len`; None: no limit."""
        return None if self.length_limit is None else self.length_limit - 1

    @cached_property
    def _token_texts(self) -> TokenTexts:
        """The texts of the target tokens, in which phrases are searched."""
        return TokenTexts.from_tokenizer(self.target_tokenizer, self.model.config.target_vocab)

    def split_line(self, line: str, split: Split) -> list[str]:
        """The sentences of a line, which are translated separately, or the line itself if it is not split."""
        max_len = self.trained_length - self._special_count
        if split == "never" or (split == "auto" and len(self.source_tokenizer.encode(line)) <= max_len):
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
        required: Phrases | None = None,
        forbidden: Phrases | None = None,
        truncate: bool = False,
        split: Split = "never",
        first_index: int = 0,
        history: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """The `n_best` translations of each line, best first; one list for a single string.

        An empty line has an empty translation. Each translation begins with its entry in `prefixes`, and contains all
        phrases of its entry in `required` (as often as they are listed) and none of its entry in `forbidden`, as whole
        words; a list of strings applies to all lines. `split` selects the lines to split into sentences, whose
        translations are joined; this gives one translation per line. Lines with required phrases are not split.
        `first_index` is the index of the first line, on which samples depend in addition to the seed. `history` records
        the candidates of every step of the search.
        """
        if isinstance(lines, str):
            phrases: dict[str, Any] = {"required": required, "forbidden": forbidden}
            return self.translate(
                [lines], config, prefixes=prefixes, **phrases, truncate=truncate, split=split, history=history
            )[0]
        config = config or DecodeConfig()
        if config.n_best > 1 or history:
            if split == "always":
                raise RegardError(
                    "split='always' gives one translation per line, without search history.",
                    "Use n_best=1 and history=False, or another split.",
                )
            split = "never"
        required = phrases_per_line(required, len(lines), "required")
        forbidden = phrases_per_line(forbidden, len(lines), "forbidden")
        if split == "always" and any(required):
            raise RegardError(
                "split='always' translates sentences separately: a required phrase has no sentence to be in.",
                "Use another split.",
            )
        split_lines = [self.split_line(line, "never" if r else split) for line, r in zip(lines, required)]
        sentences = [sentence for line in split_lines for sentence in line]
        sentence_prefixes = None
        if prefixes is not None:  # for the first sentence of each line
            sentence_prefixes = [
                prefixes[i] if k == 0 else "" for i, line in enumerate(split_lines) for k in range(len(line))
            ]
        names = [f"line {i}" for i, line in enumerate(split_lines, 1) for _ in line]
        indices = [
            i + k * _SENTENCE_STRIDE for i, line in enumerate(split_lines, first_index) for k in range(len(line))
        ]
        required, forbidden = (
            [phrases[i] for i, line in enumerate(split_lines) for _ in line] for phrases in (required, forbidden)
        )
        lexical = make_constraints(lambda: self._token_texts, required, forbidden, names)
        results = iter(
            self._translate(sentences, config, sentence_prefixes, lexical, truncate, names, indices, history, progress)
        )
        return [_join_translations([next(results) for _ in line], config) for line in split_lines]

    @torch.no_grad()
    def _translate(
        self,
        lines: Sequence[str],
        config: DecodeConfig,
        prefixes: Sequence[str] | None,
        lexical: Sequence[LexicalConstraints] | None,
        truncate: bool,
        names: Sequence[str],
        sample_indices: Sequence[int],
        history: bool,
        progress: Callable[[int, int], None] | None,
    ) -> list[list[Translation]]:
        if self.max_output_len is not None:
            config = dataclasses.replace(config, max_len=min(config.max_len, self.max_output_len))
        nonempty = [i for i, line in enumerate(lines) if line.strip()]
        sources = [self.encode_source(lines[i], name=names[i], truncate=truncate) for i in nonempty]
        forced = None
        if prefixes is not None or self.special.forced is not None:
            start = self.special.make_decoder_input([])[1:]
            texts = prefixes if prefixes is not None else [""] * len(lines)
            forced = [start + self.encode_target(texts[i], name=f"prefix {i + 1}", truncate=truncate) for i in nonempty]
        model = self.model if not self.ensemble_members else Ensemble(self.models)
        for member in self.models:
            member.eval()
        translations: list[list[Translation]] = [[] for _ in lines]
        results = decode_all(
            model,
            sources,
            self.pack,
            config,
            special=self.special,
            prefixes=forced,
            history=history,
            lexical=None if lexical is None else [lexical[i] for i in nonempty],
            sample_indices=[sample_indices[i] for i in nonempty],
            progress=progress,
        )
        if any(len(h.ids) >= self.trained_length for n_best in results for h in n_best):
            self.warn_beyond_trained_length()
        for i, n_best in zip(nonempty, results):
            translations[i] = [
                Translation(self.target_tokenizer.decode(h.ids), h.score, h, n_best.history) for h in n_best
            ]
        empty = Translation("", 0.0, Hypothesis([], 0.0, 0.0, []))
        return [n_best or [empty] for n_best in translations]

    @overload
    def score(self, pairs: tuple[str, str], **options: Any) -> SequenceScore: ...
    @overload
    def score(self, pairs: Iterable[tuple[str, str]], **options: Any) -> list[SequenceScore]: ...
    @torch.no_grad()
    def score(
        self,
        pairs: tuple[str, str] | Iterable[tuple[str, str]],
        *,
        truncate: bool = False,
        batch_tokens: int = 4096,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """The log-probability of each target given its source; one score for a single pair of strings.

        An ensemble scores with the mean probability of its models.
        """
        if isinstance(pairs, str):
            raise RegardError("score expects a pair of source and target (got a string).", 'Pass ("source", "target").')
        if isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(side, str) for side in pairs):
            return self.score([pairs], truncate=truncate, batch_tokens=batch_tokens)[0]  # type: ignore[list-item]
        encoded = []
        for i, (source_line, target_line) in enumerate(pairs, 1):  # type: ignore[misc]
            name = f"pair {i}"
            if not source_line.strip():
                raise RegardError(f"{name}: the source is empty.", "Remove the pair.")
            limits: dict[str, Any] = {"name": name, "truncate": truncate}
            encoded.append((self.encode_source(source_line, **limits), self.encode_target(target_line, **limits)))
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
        scores: list[SequenceScore | None] = [None] * len(encoded)
        models = [model.eval() for model in self.models]
        while order:
            batch: list[int] = []
            while order and (not batch or len(batch) * (len(encoded[order[-1]][1]) + 1) <= batch_tokens):
                batch.append(order.pop())
            source, target = self.teacher_forced([encoded[i] for i in batch])
            labels = torch.tensor([t for i in batch for t in self._labels(encoded[i][1])], device=self.device)
            per_model = [target_logprobs(model(source, target).float(), labels) for model in models]
            mean = torch.stack(per_model).logsumexp(0) - math.log(len(per_model))  # log of the mean probability
            for i, logprobs in zip(batch, mean.split([len(self._labels(encoded[i][1])) for i in batch])):
                scores[i] = SequenceScore(float(logprobs.double().sum()), len(logprobs))
            if progress is not None:
                progress(len(encoded) - len(order), len(encoded))
        return [score for score in scores if score is not None]

    def teacher_forced(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Packed, Packed]:
        """The model inputs for teacher forcing, from pairs of ids (see `Translator.encode_source`)."""
        return self.pack([s for s, _ in pairs]), self.pack([self.special.make_decoder_input(t) for _, t in pairs])

    def _labels(self, target: list[int]) -> list[int]:
        """The next token for each token of the decoder input."""
        return [*self.special.make_decoder_input(target)[1:], self.special.eos]


def _join_translations(sentences: list[list[Translation]], config: DecodeConfig) -> list[Translation]:
    """The translations of a line, joined from those of its sentences."""
    if len(sentences) == 1:
        return sentences[0]
    best = [n_best[0].hypothesis for n_best in sentences]
    logprobs = [logprob for hypothesis in best for logprob in hypothesis.token_logprobs]
    score = sum(logprobs) / max(1, len(logprobs)) ** config.length_penalty
    joined = Hypothesis([token for hypothesis in best for token in hypothesis.ids], score, sum(logprobs), logprobs)
    return [Translation(join_sentences([n_best[0].text for n_best in sentences]), score, joined)]
