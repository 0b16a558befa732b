"""Translation pipeline: a sequence-to-sequence model with its tokenizers."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from regard.data.text.languages import (
    LanguagePair,
    LanguageTokens,
    add_directions,
    format_language_pairs,
    parse_language_pairs,
)
from regard.data.text.sentence_splitter import split_sentences
from regard.data.text.special_tokens import SEQ2SEQ_TOKENS, SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.decode import DecodeConfig, Ensemble, Hypothesis, LexicalConstraints, NBest, Request, Shortlist, TokenTexts
from regard.errors import RegardError
from regard.layers.packed import Packed
from regard.models import TranslationModel
from regard.pipelines import translation_files
from regard.pipelines.decoding_request import DecodingRequest
from regard.pipelines.language_choice import select_languages, without_languages
from regard.pipelines.phrases import Phrases, make_constraints, phrases_per_line
from regard.pipelines.pipeline import DecodingPipeline, best_text
from regard.pipelines.scoring import SequenceScore, target_logprobs
from regard.pipelines.shortlist import SHORTLIST_FILE, learn_shortlist, read_shortlist, write_shortlist
from regard.pipelines.translation import Split, Translation, join_translations

if TYPE_CHECKING:
    from regard.pipelines.folder import ModelFolder

# Offset between the sampling indices of consecutive sentences of one line.
_SENTENCE_STRIDE = 1 << 32
# Lines of a stream that are translated together.
STREAM_BLOCK = 1024
BEAM_SEARCH = DecodeConfig()
# Sizes of shortlists.
TOKENS_PER_SOURCE_TOKEN = 50
FREQUENT_TOKENS = 100


@dataclass(repr=False)
class Translator(DecodingPipeline):
    """A translation model with its tokenizers.

    >>> translator = load("model")  # doctest: +SKIP
    >>> translator("The cat chased the mouse.")  # doctest: +SKIP
    'Le chat a chassé la souris.'
    """

    description = "a translator"
    commands = "regard translate, evaluate, score, look, info"
    tokenizer_count = 2
    sides = ("source", "target")
    stored_keys = frozenset({"languages", "language_tokens", *DecodingPipeline.stored_keys})
    model: TranslationModel
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    ensemble_members: list[TranslationModel] = field(default_factory=list)
    """other models of an ensemble with `model`"""
    special: SpecialTokens = SEQ2SEQ_TOKENS
    language_pairs: tuple[LanguagePair, ...] = ()
    """codes of source and target language of every pair that the model was trained on, if known"""
    target_language: str | None = None
    """target language of a multilingual model, see `with_target`"""
    source_language: str | None = None
    """source language of a multilingual model that needs it, see `with_target`"""
    language_tokens: LanguageTokens | None = None
    """tokens of the languages of an imported multilingual model; those of other models are tags in the tokenizer"""
    shortlist: Shortlist | None = None
    """target tokens that may translate each source token, for `DecodeConfig(shortlist=True)`"""
    decoding: DecodeConfig = BEAM_SEARCH

    @classmethod
    def from_parts(
        cls,
        model: Any,
        tokenizers: tuple[Tokenizer, ...],
        training: dict[str, Any],
        special: SpecialTokens | None = None,
    ) -> "Translator":
        translator: Translator = super().from_parts(model, tokenizers, training, special)
        translator.language_pairs = _recipe_language_pairs(training)  # at the start of training there is no config.json
        return translator

    def inherit_settings(self, origin: Any) -> None:
        super().inherit_settings(origin)
        # A model that is fine-tuned on some of its language pairs keeps the others.
        keeps = self.source_tokenizer.language_tags or not self.language_pairs
        pairs = (*origin.language_pairs, *self.language_pairs) if keeps else self.language_pairs
        self.language_pairs = add_directions(pairs, both=False)
        self.language_tokens = origin.language_tokens
        self.source_language, self.target_language = origin.source_language, origin.target_language

    def as_saved(self) -> "Translator":
        return without_languages(self)

    def write_files(self, folder: Path) -> None:
        if self.shortlist is None:
            (folder / SHORTLIST_FILE).unlink(missing_ok=True)
        else:
            write_shortlist(folder, self.shortlist)

    def write_settings(self, folder: Path) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self.language_pairs:
            settings["languages"] = format_language_pairs(self.language_pairs)
        if self.language_tokens is not None:
            settings["language_tokens"] = self.language_tokens.to_json()
        return settings | super().write_settings(folder)

    def read_settings(self, folder: "ModelFolder") -> None:
        super().read_settings(folder)
        file, config = folder.config_file, self.model.config
        codes = folder.table.get("languages", [])
        if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
            raise RegardError(f"{file}: languages must be a list of codes (got {codes!r}).", "Fix the file.")
        self.language_pairs = parse_language_pairs(codes, f"{file}: languages")
        if (tokens := folder.table.get("language_tokens")) is not None:
            vocab = min(config.source_vocab, config.target_vocab)
            self.language_tokens = LanguageTokens.from_json(tokens, f"{file}: language_tokens", vocab)
        self.shortlist = read_shortlist(folder.path, config.source_vocab, config.target_vocab)

    @property
    def fields(self) -> tuple[str, ...]:
        return ("source", "target")

    @property
    def abilities(self) -> tuple[str, ...]:
        return ("translate", "score")

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.source_tokenizer, self.target_tokenizer

    @overload
    def __call__(self, lines: str, to: str | None = None, source_language: str | None = None) -> str: ...
    @overload
    def __call__(
        self, lines: Sequence[str], to: str | None = None, source_language: str | None = None
    ) -> list[str]: ...
    def __call__(self, lines: str | Sequence[str], to: str | None = None, source_language: str | None = None) -> Any:
        """The best translation of a line, or of each; a line beyond the trained length is split into sentences.

        `to` and `source_language` are the codes of the languages, for a model of several.
        """
        return best_text(lines, self.translate(lines, split="auto", to=to, source_language=source_language))

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of all languages of the model, if known; for one pair, source and target.

        >>> translator.language_pairs, translator.languages  # doctest: +SKIP
        ((LanguagePair('en', 'de'), LanguagePair('en', 'fr')), ('en', 'de', 'fr'))
        """
        if self.language_tokens is not None:
            return tuple(self.language_tokens.ids)
        if len(self.language_pairs) == 1:
            return tuple(self.language_pairs[0])
        return tuple(dict.fromkeys(code for pair in self.language_pairs for code in pair))

    @property
    def target_languages(self) -> tuple[str, ...]:
        """Codes of the target languages, if known."""
        return self._languages_of("target")

    @property
    def source_languages(self) -> tuple[str, ...]:
        """Codes of the source languages, if known."""
        return self._languages_of("source")

    def _languages_of(self, side: Literal["source", "target"]) -> tuple[str, ...]:
        if self.language_tokens is not None:
            return tuple(self.language_tokens.ids)
        return tuple(dict.fromkeys(getattr(pair, side) for pair in self.language_pairs))

    def with_target(self, to: str | None = None, source_language: str | None = None) -> "Translator":
        """A translator of the same model into one target language and, if the model needs it, from one source language.

        None is the language set before, the default of the model, or its only one. Special tokens tell the model the
        languages: see `LanguageTokens`.

        >>> translator.with_target("fr")("The cat sleeps.")  # doctest: +SKIP
        'Le chat dort.'
        >>> nllb.with_target("fra_Latn", "eng_Latn")("The cat sleeps.")  # doctest: +SKIP
        'Le chat dort.'
        """
        return select_languages(self, to, source_language)

    @property
    def language_settings(self) -> dict[str, Any]:
        """The languages as settings of an output file."""
        chosen = {"to": self.target_language, "from": self.source_language}
        return {name: code for name, code in chosen.items() if code is not None}

    @property
    def models(self) -> Sequence[TranslationModel]:
        return [self.model, *self.ensemble_members]

    def encode_source(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """The ids of a source line with special tokens; `truncate` cuts it to the trained length."""
        ids = self.source_tokenizer.encode(line)
        return self.with_target().special.add_special_tokens(
            self.limit_length(ids, name, truncate, special_count=self._special_count)
        )

    def encode_target(self, line: str, *, name: str = "the line", truncate: bool = False) -> list[int]:
        """The ids of a target line without special tokens; `truncate` cuts it to the trained length."""
        ids = self.target_tokenizer.encode(line)
        return self.limit_length(ids, name, truncate, special_count=self._special_count)

    def encode_prefix(self, prefix: str, *, name: str = "the prefix", truncate: bool = False) -> list[int]:
        """The ids of a forced beginning of a translation; an error if it has words that the model cannot write."""
        ids = self.encode_target(prefix, name=name, truncate=truncate)
        if self.special.unk in ids:
            pieces = self.target_tokenizer.encode_as_pieces(prefix)
            unknown = dict.fromkeys(piece for (piece, _), token in zip(pieces, ids) if token == self.special.unk)
            raise RegardError(
                f"{name[0].upper()}{name[1:]}, {prefix!r}, cannot be generated: the vocabulary of the model lacks "
                f"{', '.join(map(repr, unknown))}.",
                "Use other words, or leave these out.",
            )
        return ids

    @property
    def _special_count(self) -> int:
        """Number of special tokens added to a text."""
        special = self.with_target().special
        return max(len(special.add_special_tokens([])), len(special.make_decoder_input([])))

    def record_search(
        self, text: str, config: DecodeConfig, prefix: str, **phrases: Any
    ) -> tuple[list[Any], list[int]]:
        prefixes = [prefix] if prefix else None
        outputs = self.translate([text], config, prefixes=prefixes, **phrases, history=True)[0]
        return outputs, self.encode_source(text)

    def forced_ids(self, prefix: str) -> list[int]:
        return [*self.special.make_decoder_input([])[1:], *self.encode_target(prefix)]

    def output_limit(self, config: DecodeConfig, source: Sequence[int]) -> int:
        limit, most = config.limit(len(source)), self.max_output_len
        return limit if most is None else min(limit, most)

    def forced_inputs(self, source: list[int], outputs: Sequence[list[int]]) -> tuple[Any, ...]:
        forced = len(self.forced_ids(""))
        return self.teacher_forced([(source, output[forced:]) for output in outputs])

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
        return [sentence for sentence, _ in self._encode_sentences([line], [split])[0]]

    def _encode_sentences(self, lines: Sequence[str], splits: Sequence[Split]) -> list[list[tuple[str, list[int]]]]:
        """The sentences of each line (see `split_line`) with their ids, without special tokens."""
        max_len = {"never": math.inf, "auto": self.trained_length - self._special_count, "always": -1}
        encoded = [[(line, ids)] for line, ids in zip(lines, self.source_tokenizer.encode_batch(lines))]
        for i, (line, split) in enumerate(zip(lines, splits)):
            if len(encoded[i][0][1]) > max_len[split] and (sentences := split_sentences(line)):
                encoded[i] = list(zip(sentences, self.source_tokenizer.encode_batch(sentences)))
        return encoded

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
        to: str | None = None,
        source_language: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """The `n_best` translations of each line, best first; one list for a single string.

        `to` and `source_language` are the codes of the languages, for a model of several. An empty line has an empty
        translation. Each translation begins with its entry in `prefixes`, and contains all phrases of its entry in
        `required` (as often as they are listed) and none of its entry in `forbidden`, as whole words; a list of strings
        applies to all lines. `split` selects the lines to split into sentences, whose translations are joined; this
        gives one translation per line. Lines with required phrases are not split. `first_index` is the index of the
        first line, on which samples depend in addition to the seed. `history` records the candidates of every step of
        the search.
        """
        phrases: dict[str, Any] = {"required": required, "forbidden": forbidden}
        options = {"prefixes": prefixes, **phrases, "truncate": truncate, "split": split, "history": history}
        options |= {"to": to, "source_language": source_language}
        if isinstance(lines, str):
            return self.translate([lines], config, **options)[0]
        return self.prepare(lines, config, first_index=first_index, **options).run(progress=progress)

    def prepare(
        self,
        lines: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        required: Phrases | None = None,
        forbidden: Phrases | None = None,
        truncate: bool = False,
        split: Split = "never",
        first_index: int = 0,
        history: bool = False,
        to: str | None = None,
        source_language: str | None = None,
    ) -> DecodingRequest[list[Translation]]:
        """The encoded lines and options of `translate`, to decode later: `translate` is `prepare(…).run()`."""
        translator, config = self.with_target(to, source_language), config or self.decoding
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
        split_lines = translator._encode_sentences(lines, ["never" if phrases else split for phrases in required])
        sentences = [sentence for line in split_lines for sentence in line]
        sentence_prefixes = None
        if prefixes is not None:  # for the first sentence of each line
            if len(prefixes) != len(lines):
                raise RegardError(
                    f"Expected one prefix per line: got {len(prefixes)} prefixes for {len(lines)} lines.",
                    'Pass "" for a line without one.',
                )
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
        request = translator._encode_request(
            sentences, config, sentence_prefixes, lexical, truncate, names, indices, history
        )

        def finish(results: list[NBest]) -> list[list[Translation]]:
            translations = iter(request.finish(results))
            return [join_translations([next(translations) for _ in line], config) for line in split_lines]

        return dataclasses.replace(request, finish=finish)

    def translate_stream(
        self,
        lines: Iterable[str],
        config: DecodeConfig | None = None,
        *,
        prefix: str = "",
        required: Sequence[str] = (),
        forbidden: Sequence[str] = (),
        truncate: bool = False,
        split: Split = "never",
        to: str | None = None,
        source_language: str | None = None,
        block_size: int = STREAM_BLOCK,
    ) -> Iterator[list[Translation]]:
        """The translations of each line, like `translate`, for any number of lines, even an endless stream.

        `block_size` lines are read and translated together; 1 yields each translation before the next line is read.
        Every translation begins with `prefix`; `required` and `forbidden` phrases apply to every line.

        >>> for n_best in translator.translate_stream(open("corpus.en")):  # doctest: +SKIP
        ...     print(n_best[0].text)
        """
        if isinstance(lines, str):
            raise RegardError("translate_stream expects an iterable of lines (got a string).", "Pass [line].")
        if block_size < 1:
            raise RegardError(f"block_size must be at least 1 (got {block_size}).", "Pass a positive number of lines.")
        options = {"required": required, "forbidden": forbidden, "truncate": truncate, "split": split}
        translator = self.with_target(to, source_language)
        return translator._translate_blocks(iter(lines), config, prefix, block_size, options)

    def _translate_blocks(
        self, lines: Iterator[str], config: DecodeConfig | None, prefix: str, size: int, options: dict[str, Any]
    ) -> Iterator[list[Translation]]:
        done = 0
        while block := [line.removesuffix("\n").removesuffix("\r") for line in islice(lines, size)]:
            prefixes = [prefix] * len(block) if prefix else None
            yield from self.translate(block, config, prefixes=prefixes, first_index=done, **options)
            done += len(block)

    def check_line(self, line: str, name: str, *, truncate: bool, split: Split) -> None:
        """Raise an error if a line, or one of its sentences, exceeds the length limit."""
        for sentence in self.split_line(line, split):
            self.encode_source(sentence, name=name, truncate=truncate)

    def _encode_request(
        self,
        lines: Sequence[tuple[str, list[int]]],
        config: DecodeConfig,
        prefixes: Sequence[str] | None,
        lexical: Sequence[LexicalConstraints] | None,
        truncate: bool,
        names: Sequence[str],
        sample_indices: Sequence[int],
        history: bool,
    ) -> DecodingRequest[list[Translation]]:
        """The request for sentences with their ids; empty sentences are not decoded."""
        if self.max_output_len is not None:
            config = dataclasses.replace(config, max_len=min(config.max_len, self.max_output_len))
        nonempty = [i for i, (line, _) in enumerate(lines) if line.strip()]
        count, trained_length = self._special_count, self.trained_length
        sources = []
        for i in nonempty:
            ids = lines[i][1]
            if len(ids) > trained_length - count:
                ids = self.limit_length(ids, names[i], truncate, special_count=count)
            sources.append(self.special.add_special_tokens(ids))
        forced = None
        if prefixes is not None or self.special.forced is not None:
            start = self.special.make_decoder_input([])[1:]
            texts = prefixes if prefixes is not None else [""] * len(lines)
            forced = [start + self.encode_prefix(texts[i], name=f"prefix {i + 1}", truncate=truncate) for i in nonempty]
        model = self.model if not self.ensemble_members else Ensemble(self.models)
        for member in self.models:
            if getattr(member, "training", True):  # exported graphs have no mode
                member.eval()

        def finish(results: list[NBest]) -> list[list[Translation]]:
            translations: list[list[Translation]] = [[] for _ in lines]
            if any(len(h.ids) >= trained_length for n_best in results for h in n_best):
                self.warn_beyond_trained_length()
            decoded = iter(self.target_tokenizer.decode_batch(h.ids for n_best in results for h in n_best))
            for i, n_best in zip(nonempty, results):
                translations[i] = [Translation(next(decoded), h.score, h, n_best.history) for h in n_best]
            empty = Translation("", 0.0, Hypothesis([], 0.0, 0.0, []))
            return [n_best or [empty] for n_best in translations]

        encoded = Request(
            sources,
            config,
            self.special,
            prefixes=forced,
            lexical=None if lexical is None else [lexical[i] for i in nonempty],
            sample_indices=[sample_indices[i] for i in nonempty],
            shortlist=self.shortlist,
            history=history,
        )
        return DecodingRequest(model, encoded, finish)

    def learn_shortlist(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        per_token: int = TOKENS_PER_SOURCE_TOKEN,
        frequent: int = FREQUENT_TOKENS,
        iterations: int = 5,
        progress: Callable[[int, int], None] | None = None,
    ) -> Shortlist:
        """Learn the shortlist from pairs of source and target, for `DecodeConfig(shortlist=True)`.

        It has the `per_token` most probable targets of each source token, according to IBM Model 1, and the `frequent`
        most frequent target tokens; with a shared tokenizer, also the source token itself. `save` stores it.
        """
        self.shortlist = learn_shortlist(self, pairs, per_token, frequent, iterations, progress)
        return self.shortlist

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
        to: str | None = None,
        source_language: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """The log-probability of each target given its source; one score for a single pair of strings.

        An ensemble scores with the mean probability of its models. `to` and `source_language` are the codes of the
        languages, for a model of several.
        """
        if isinstance(pairs, str):
            raise RegardError("score expects a pair of source and target (got a string).", 'Pass ("source", "target").')
        if isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(side, str) for side in pairs):
            options: dict[str, Any] = {"truncate": truncate, "batch_tokens": batch_tokens}
            return self.score([pairs], **options, to=to, source_language=source_language)[0]  # type: ignore[list-item]
        translator, encoded = self.with_target(to, source_language), []
        for i, (source_line, target_line) in enumerate(pairs, 1):  # type: ignore[misc]
            name = f"pair {i}"
            if not source_line.strip():
                raise RegardError(f"{name}: the source is empty.", "Remove the pair.")
            limits: dict[str, Any] = {"name": name, "truncate": truncate}
            source_ids = translator.encode_source(source_line, **limits)
            encoded.append((source_ids, translator.encode_target(target_line, **limits)))
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
        scores: list[SequenceScore | None] = [None] * len(encoded)
        models = [model.eval() for model in self.models]
        while order:
            batch: list[int] = []
            while order and (not batch or len(batch) * (len(encoded[order[-1]][1]) + 1) <= batch_tokens):
                batch.append(order.pop())
            source, target = translator.teacher_forced([encoded[i] for i in batch])
            labels = torch.tensor([t for i in batch for t in translator._labels(encoded[i][1])], device=self.device)
            per_model = [target_logprobs(model(source, target).float(), labels) for model in models]
            mean = torch.stack(per_model).logsumexp(0) - math.log(len(per_model))  # log of the mean probability
            for i, logprobs in zip(batch, mean.split([len(translator._labels(encoded[i][1])) for i in batch])):
                scores[i] = SequenceScore(float(logprobs.double().sum()), len(logprobs))
            if progress is not None:
                progress(len(encoded) - len(order), len(encoded))
        return [score for score in scores if score is not None]

    def teacher_forced(self, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Packed, Packed]:
        """The model inputs for teacher forcing, from pairs of ids (see `Translator.encode_source`)."""
        special = self.with_target().special
        return self.pack([s for s, _ in pairs]), self.pack([special.make_decoder_input(t) for _, t in pairs])

    def _labels(self, target: list[int]) -> list[int]:
        """The next token for each token of the decoder input."""
        return [*self.special.make_decoder_input(target)[1:], self.special.eos]

    translate_file = translation_files.translate_file
    score_file = translation_files.score_file


def _recipe_language_pairs(training: Any) -> tuple[LanguagePair, ...]:
    """The language pairs in the recipe of a training.json, which may hold anything."""
    for key in ("recipe", "data"):
        training = training.get(key) if isinstance(training, dict) else None
    if not isinstance(training, dict):
        return ()
    languages = training.get("languages")
    try:
        pairs = parse_language_pairs([code for code in languages or () if isinstance(code, str)])
    except (RegardError, TypeError):
        return ()
    return add_directions(pairs, training.get("both_directions") is True)
