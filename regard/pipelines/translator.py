"""Translation pipeline: a sequence-to-sequence model with its tokenizers."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

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
from regard.decode import DecodeConfig, Ensemble, Hypothesis, NBest, Request, Shortlist, TokenTexts
from regard.errors import RegardError
from regard.layers.packed import Packed
from regard.models import TranslationModel
from regard.pipelines import translation_files
from regard.pipelines.decoding_request import DecodingRequest, make_constraints
from regard.pipelines.pipeline import DecodingPipeline, best_text
from regard.pipelines.scoring import SequenceScore, target_logprobs
from regard.pipelines.shortlist import SHORTLIST_FILE, learn_shortlist, read_shortlist, write_shortlist
from regard.pipelines.translation import (
    Split,
    Translation,
    TranslationOptions,
    TranslationRequest,
    join_translations,
    select_languages,
    without_languages,
)

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
    sides = fields = ("source", "target")
    abilities = ("translate", "score")
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

    def _encode_sentences(self, lines: Sequence[str], splits: Sequence[Split]) -> list[list[tuple[str, list[int]]]]:
        """The sentences of each line, which are translated separately, with their ids, without special tokens."""
        max_len = {"never": math.inf, "auto": self.trained_length - self._special_count, "always": -1}
        encoded = [[(line, ids)] for line, ids in zip(lines, self.source_tokenizer.encode_batch(lines))]
        for i, (line, split) in enumerate(zip(lines, splits)):
            if len(encoded[i][0][1]) > max_len[split] and (sentences := split_sentences(line)):
                encoded[i] = list(zip(sentences, self.source_tokenizer.encode_batch(sentences)))
        return encoded

    @overload
    def translate(
        self, lines: str, config: DecodeConfig | None = None, **options: Unpack[TranslationOptions]
    ) -> list[Translation]: ...
    @overload
    def translate(
        self,
        lines: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[TranslationOptions],
    ) -> list[list[Translation]]: ...
    def translate(
        self,
        lines: str | Sequence[str],
        config: DecodeConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[TranslationOptions],
    ) -> Any:
        """The `n_best` translations of each line, best first; one list for a single string.

        `to` and `source_language` are the codes of the languages, for a model of several. An empty line has an empty
        translation. Each translation begins with its entry in `prefixes`, and contains all phrases of its entry in
        `required` (as often as they are listed) and none of its entry in `forbidden`, as whole words; one prefix, or a
        list of strings, applies to all lines. `split` selects the lines to split into sentences, whose translations
        are joined; this gives one translation per line. Lines with required phrases are not split. `truncate` cuts
        lines to the trained length. `first_index` is the index of the first line, on which samples depend in addition
        to the seed. `history` records the candidates of every step of the search. `names` are those of the lines in
        errors.
        """
        if isinstance(lines, str):
            return self.translate([lines], config, progress=progress, **options)[0]
        return self.prepare(lines, config, **options).run(progress=progress)

    def prepare(
        self, lines: Sequence[str], config: DecodeConfig | None = None, **options: Unpack[TranslationOptions]
    ) -> "PreparedTranslation":
        """The encoded lines and options of `translate`, to decode later: `translate` is `prepare(…).run()`."""
        return self.encode(TranslationRequest.of(lines, config or self.decoding, options, "translate"))

    def encode(self, request: TranslationRequest) -> "PreparedTranslation":
        """The lines of a request, encoded; empty sentences are not decoded."""
        translator = self.with_target(request.to, request.source_language)
        names, sentences, places = request.name_per_line, list[_Sentence](), list[list[int | None]]()
        special_count = translator._special_count
        for i, line in enumerate(translator._encode_sentences(request.lines, request.split_per_line)):
            places.append([])
            for k, (text, ids) in enumerate(line):
                places[i].append(len(sentences) if text.strip() else None)
                if text.strip():
                    if len(ids) > translator.trained_length - special_count:
                        ids = translator.limit_length(ids, names[i], request.truncate, special_count=special_count)
                    sentences.append(_Sentence(i, k, translator.special.add_special_tokens(ids)))
        config = request.config
        if self.max_output_len is not None:
            config = dataclasses.replace(config, max_len=min(config.max_len, self.max_output_len))
        lexical = make_constraints(
            lambda: self._token_texts, request.required_per_line, request.forbidden_per_line, names
        )
        for member in self.models:
            if getattr(member, "training", True):  # exported graphs have no mode
                member.eval()
        encoded = Request(
            [sentence.ids for sentence in sentences],
            config,
            translator.special,
            prefixes=translator._forced_tokens(request, sentences),
            lexical=None if lexical is None else [lexical[sentence.line] for sentence in sentences],
            sample_indices=[request.first_index + s.line + s.part * _SENTENCE_STRIDE for s in sentences],
            shortlist=self.shortlist,
            history=request.history,
        )
        model = Ensemble(self.models) if self.ensemble_members else self.model
        return PreparedTranslation(model, encoded, translator, places)

    def _forced_tokens(self, request: TranslationRequest, sentences: "list[_Sentence]") -> list[list[int]] | None:
        """The tokens that each output begins with: those of the languages, and of the prefix of its line."""
        start, prefixes = self.special.make_decoder_input([])[1:], request.prefix_per_line
        if request.prefixes is None and self.special.forced is None:
            return None
        encoded = {"": list[int]()}
        for i, prefix in enumerate(prefixes, 1):
            if prefix not in encoded:
                encoded[prefix] = self.encode_prefix(prefix, name=f"prefix {i}", truncate=request.truncate)
        return [start + encoded["" if sentence.part else prefixes[sentence.line]] for sentence in sentences]

    def translate_stream(
        self,
        lines: Iterable[str],
        config: DecodeConfig | None = None,
        *,
        block_size: int = STREAM_BLOCK,
        **options: Unpack[TranslationOptions],
    ) -> Iterator[list[Translation]]:
        """The translations of each line, like `translate`, for any number of lines, even an endless stream.

        `block_size` lines are read and translated together; 1 yields each translation before the next line is read.
        Prefix and phrases apply to every line.

        >>> for n_best in translator.translate_stream(open("corpus.en")):  # doctest: +SKIP
        ...     print(n_best[0].text)
        """
        if isinstance(lines, str):
            raise RegardError("translate_stream expects an iterable of lines (got a string).", "Pass [line].")
        if block_size < 1:
            raise RegardError(f"block_size must be at least 1 (got {block_size}).", "Pass a positive number of lines.")
        request = TranslationRequest.of((), config or self.decoding, options, "translate_stream")
        self.with_target(request.to, request.source_language)  # errors are raised here, not by the iterator
        return self._translate_blocks(iter(lines), request, block_size)

    def _translate_blocks(
        self, lines: Iterator[str], request: TranslationRequest, size: int
    ) -> Iterator[list[Translation]]:
        done = 0
        while block := [line.removesuffix("\n").removesuffix("\r") for line in islice(lines, size)]:
            yield from self.encode(request.block(block, done)).run()
            done += len(block)

    def learn_shortlist(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        per_token: int = TOKENS_PER_SOURCE_TOKEN,
        frequent: int = FREQUENT_TOKENS,
        progress: Callable[[int, int], None] | None = None,
    ) -> Shortlist:
        """Learn the shortlist from pairs of source and target, for `DecodeConfig(shortlist=True)`.

        It has the `per_token` most probable targets of each source token, according to IBM Model 1, and the `frequent`
        most frequent target tokens; with a shared tokenizer, also the source token itself. `save` stores it.
        """
        self.shortlist = learn_shortlist(self, pairs, per_token, frequent, progress)
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


class _Sentence(NamedTuple):
    """A sentence to decode."""

    line: int
    """index of its line"""
    part: int
    """index among the sentences of its line"""
    ids: list[int]


@dataclass(frozen=True)
class PreparedTranslation(DecodingRequest[list[Translation]]):
    """Encoded lines to translate."""

    translator: Translator
    places: list[list[int | None]]
    """for each line the indices of its sentences among the encoded sources; None: it is empty"""

    def finish(self, hypotheses: list[NBest]) -> list[list[Translation]]:
        flat = [hypothesis.ids for n_best in hypotheses for hypothesis in n_best]
        if any(len(ids) >= self.translator.trained_length for ids in flat):
            self.translator.warn_beyond_trained_length()
        texts = iter(self.translator.target_tokenizer.decode_batch(flat))
        empty = [Translation("", 0.0, Hypothesis([], 0.0, 0.0, []))]
        decoded = [
            [Translation(next(texts), best.score, best, n_best.history) for best in n_best] or empty
            for n_best in hypotheses
        ]
        config = self.encoded.config
        return [join_translations([empty if i is None else decoded[i] for i in line], config) for line in self.places]


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
