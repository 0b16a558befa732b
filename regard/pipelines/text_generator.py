"""Text generation pipeline: a language model with its tokenizer."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.batching.streams import sliding_window_batches
from regard.data.text.documents import encode_documents
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.decode import DecodeConfig, Hypothesis, NBest, Request, SearchHistory, TokenTexts
from regard.errors import RegardError
from regard.models import GPT
from regard.pipelines.callback_iterator import iterate_callback
from regard.pipelines.chat_template import Messages, render_chat
from regard.pipelines.decoding_request import (
    DecodingRequest,
    Phrases,
    check_options,
    make_constraints,
    phrases_per_line,
)
from regard.pipelines.pipeline import DecodingPipeline, best_text
from regard.pipelines.scoring import SequenceScore, target_logprobs

OnText = Callable[[int, str], None]
"""called with the index of a prompt and a piece of its generated text"""

SAMPLING = DecodeConfig(method="sample")


@dataclass(frozen=True)
class Continuation:
    """Text generated after a prompt, with its score, its hypothesis and, if recorded, the search history."""

    text: str
    score: float
    hypothesis: Hypothesis = field(repr=False)
    history: SearchHistory | None = field(default=None, repr=False)


@dataclass(frozen=True)
class TextLoss:
    """Total loss of a text in nats, and its numbers of tokens, words (line ends included) and bytes."""

    nats: float
    tokens: int
    words: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.nats / self.tokens

    @property
    def word_perplexity(self) -> float:
        return math.exp(min(50.0, self.nats / self.words))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


class GenerationOptions(TypedDict, total=False):
    """Options of generated texts, beside those of decoding: see `TextGenerator.generate`."""

    required: Phrases | None
    forbidden: Phrases | None
    truncate: bool
    special_tokens: bool
    history: bool


class TokenScores(NamedTuple):
    """Log-probabilities of the tokens of a sequence, and the likeliest token in the place of each with its own."""

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(repr=False)
class TextGenerator(DecodingPipeline):
    """A language model (GPT) with its tokenizer.

    >>> generator = load("model")  # doctest: +SKIP
    >>> generator("Once upon a time")  # doctest: +SKIP
    ', there was a little girl named Lily.'
    """

    description = "a language model"
    commands = "regard generate, evaluate, look, info"
    tokenizer_count = 1
    continues_source = True
    model: GPT
    tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    special: SpecialTokens = CAUSAL_LM_TOKENS
    decoding: DecodeConfig = SAMPLING

    @property
    def abilities(self) -> tuple[str, ...]:  # type: ignore[override]
        imported = self.training.get("imported")
        has_template = isinstance(imported, dict) and imported.get("chat_template")
        return ("generate", *(["chat"] if has_template else []), "score")

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.tokenizer, self.tokenizer

    @overload
    def __call__(self, prompts: str) -> str: ...
    @overload
    def __call__(self, prompts: Sequence[str]) -> list[str]: ...
    def __call__(self, prompts: str | Sequence[str]) -> Any:
        """The first continuation of a prompt, or of each."""
        return best_text(prompts, self.generate(prompts))

    def record_search(
        self, text: str, config: DecodeConfig, prefix: str, **phrases: Any
    ) -> tuple[list[Any], list[int]]:
        if prefix:
            raise RegardError("Only translators support a prefix.", "Append it to the prompt instead.")
        return self.generate([text], config, **phrases, history=True)[0], self.encode_prompt(text)

    def forced_ids(self, prefix: str) -> list[int]:
        return []

    def output_limit(self, config: DecodeConfig, source: Sequence[int]) -> int:
        limit = self.length_limit
        return config.max_len if limit is None else min(config.max_len, limit - len(source))

    def forced_inputs(self, source: list[int], outputs: Sequence[list[int]]) -> tuple[Any, ...]:
        return (self.pack([[*source, *output] for output in outputs]),)

    def encode_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        name: str = "the prompt",
        truncate: bool = False,
        special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a prompt with special tokens; `truncate` keeps the end of one beyond the trained length.

        With `special_tokens`, names of special tokens in the prompt, such as `<|im_end|>`, become these tokens. By
        default they are plain text, so that a text from elsewhere cannot end a turn or pose as another speaker. If the
        prompt begins with the start token, no other is added. A prompt may also be a list of ids; none is added.
        """
        prefix = self.special.add_special_tokens([])
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, special_tokens=special_tokens)
            if special_tokens and prefix and ids[: len(prefix)] == prefix:
                prefix = []
        else:
            ids, prefix, vocab = list(prompt), [], self.model.config.vocab
            unknown = next((token for token in ids if not 0 <= token < vocab), None)
            if unknown is not None:
                raise RegardError(
                    f"{name} has the token {unknown}, but the vocabulary of the model has {vocab} tokens.",
                    "Encode it with the tokenizer of this model.",
                )
        ids = [*prefix, *self.limit_length(ids, name, truncate, special_count=len(prefix), keep_end=True)]
        if not ids:
            reason = ", and this model has no start token" if isinstance(prompt, str) else ""
            raise RegardError(f"{name} is empty{reason}.", "Write at least one token of text.")
        return ids

    @cached_property
    def _token_texts(self) -> TokenTexts:
        """The texts of the tokens, in which phrases are searched."""
        return TokenTexts.from_tokenizer(self.tokenizer, self.model.config.vocab)

    @overload
    def generate(
        self,
        prompts: str,
        config: DecodeConfig | None = None,
        *,
        on_text: OnText | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Continuation]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        on_text: OnText | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[list[Continuation]]: ...
    def generate(
        self,
        prompts: str | Sequence[str],
        config: DecodeConfig | None = None,
        *,
        on_text: OnText | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Any:
        """The continuations of each prompt, decoded with `decoding` by default; one list for a single string.

        `on_text(index, text)` is called for every piece of text generated for prompt `index` (not in beam search; with
        several samples, for the first only). An output ends at `<eos>`, after `max_len` tokens, or when prompt and
        output reach the length limit of the model. `options` are those of `GenerationOptions`.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], config, **options, on_text=on_text, progress=progress)[0]
        request = self.prepare(prompts, config, **options)
        return request.run(progress=progress) if on_text is None else request.run_streaming(on_text, progress)

    def prepare(
        self,
        prompts: Sequence[str | Sequence[int]],
        config: DecodeConfig | None = None,
        **options: Unpack[GenerationOptions],
    ) -> "PreparedGeneration":
        """The encoded prompts and options of `generate`, to decode later: `generate` is `prepare(…).run()`."""
        check_options(options, GenerationOptions.__annotations__, "generate")
        config = config or self.decoding
        truncate, special_tokens = options.get("truncate", False), options.get("special_tokens", False)
        ids = [
            self.encode_prompt(prompt, name=f"prompt {i}", truncate=truncate, special_tokens=special_tokens)
            for i, prompt in enumerate(prompts, 1)
        ]
        # Limits relative to the source length are for translation.
        config = dataclasses.replace(config, max_ratio=0.0, max_extra=config.max_len)
        if self.tokenizer.kind == "word":  # <unk> decodes to nothing
            config = dataclasses.replace(config, unknown=False)
        lexical = make_constraints(
            lambda: self._token_texts,
            phrases_per_line(options.get("required"), len(prompts), "required"),
            phrases_per_line(options.get("forbidden"), len(prompts), "forbidden"),
            [f"prompt {i}" for i in range(1, len(prompts) + 1)],
        )
        if lexical is not None:
            lexical = [phrases.after(prompt) for phrases, prompt in zip(lexical, ids)]
        self.model.eval()
        total = min((limit for limit in (self.length_limit, config.max_total_len) if limit), default=None)
        history = options.get("history", False)
        encoded = Request(ids, config, self.special, lexical=lexical, max_total_len=total, history=history)
        return PreparedGeneration(self.model, encoded, self)

    def stream_decoders(self, request: DecodingRequest[Any]) -> list["StreamDecoder"]:
        """The decoders of the texts after the prompts of a request."""
        return [self.stream_decoder(prompt) for prompt in request.encoded.sources]

    def stream_decoder(self, prompt: list[int]) -> "StreamDecoder":
        """The decoder of the text after a prompt, given by its ids with special tokens."""
        return StreamDecoder(self.tokenizer, prompt)

    def chat_prompt(self, messages: Messages) -> str:
        """The prompt of a conversation, made by the chat template of the model; it contains special tokens.

        A message must not contain the name of a special token: it could end a turn or pose as another speaker.
        """
        for i, message in enumerate(messages, 1):
            content = str(message.get("content", "")) if isinstance(message, Mapping) else ""
            found = next((name for name in self.tokenizer.special_token_names if name in content), None)
            if found is not None:
                raise RegardError(f"Message {i} contains the special token {found}.", "Remove it from the text.")
        imported = self.training.get("imported")
        imported = imported if isinstance(imported, dict) else {}
        return render_chat(imported.get("chat_template"), messages, imported.get("special_tokens", {}))

    def chat(self, messages: Messages, config: DecodeConfig | None = None, *, on_text: OnText | None = None) -> str:
        """The answer of a chat model to a list of messages; `on_text` is called with every piece of it.

        >>> generator.chat([{"role": "user", "content": "What is attention?"}])  # doctest: +SKIP
        'Attention is a weighted mean of values.'
        """
        prompt = self.chat_prompt(messages)
        return self.generate(prompt, config, special_tokens=True, on_text=on_text)[0].text

    def generate_stream(
        self, prompt: str, config: DecodeConfig | None = None, *, truncate: bool = False
    ) -> Iterator[str]:
        """The continuation of a prompt, piece by piece as it is generated; joined, the text of `generate`.

        Generation runs at most two pieces ahead, and ends when the iterator is closed or no longer used. Beam search
        yields the whole text at its end.

        >>> for text in generator.generate_stream("Once upon a time"):  # doctest: +SKIP
        ...     print(text, end="", flush=True)
        """
        config = config or self.decoding
        if config.n_best > 1:
            raise RegardError(
                f"generate_stream generates one text (got n_best={config.n_best}).", "Use n_best=1, or generate."
            )
        request = self.prepare([prompt], config, truncate=truncate)  # errors are raised here, not by the iterator
        if config.method == "beam":
            return (request.run()[0][0].text for _ in range(1))
        return iterate_callback(lambda emit: request.run_streaming(lambda _, text: emit(text)))

    @overload
    def score(self, texts: str, **options: Any) -> SequenceScore: ...
    @overload
    def score(self, texts: Iterable[str], **options: Any) -> list[SequenceScore]: ...
    @torch.no_grad()
    def score(self, texts: str | Iterable[str], *, truncate: bool = False, batch_tokens: int = 4096) -> Any:
        """The log-probability of each text including `<eos>`; one score for a single string.

        Without a start token, the first token of a text is not scored.
        """
        if isinstance(texts, str):
            return self.score([texts], truncate=truncate, batch_tokens=batch_tokens)[0]
        encoded = [
            [*self.encode_prompt(text, name=f"text {i}", truncate=truncate), self.special.eos]
            for i, text in enumerate(texts, 1)
        ]
        scores = self.score_tokens(encoded, batch_tokens=batch_tokens)
        return [SequenceScore(float(score.logprobs.double().sum()), len(score.logprobs)) for score in scores]

    @torch.no_grad()
    def score_tokens(self, encoded: Sequence[Sequence[int]], *, batch_tokens: int = 4096) -> list[TokenScores]:
        """The log-probabilities of the tokens of each sequence after its first, and the likeliest tokens there."""
        scores: list[TokenScores] = []
        self.model.eval()
        while len(scores) < len(encoded):
            batch = [encoded[len(scores)]]
            while len(scores) + len(batch) < len(encoded) and sum(map(len, batch)) < batch_tokens:
                batch.append(encoded[len(scores) + len(batch)])
            targets = torch.tensor([token for ids in batch for token in ids[1:]], device=self.device)
            logits = self.model(self.pack([list(ids[:-1]) for ids in batch])).float()
            top = logits.argmax(-1)
            columns = (target_logprobs(logits, targets), top, target_logprobs(logits, top))
            lengths = [len(ids) - 1 for ids in batch]
            scores += map(TokenScores, *(column.cpu().split(lengths) for column in columns))
        return scores

    @torch.no_grad()
    def evaluate(
        self,
        documents: str | Sequence[str],
        *,
        batch_tokens: int = 8192,
        progress: Callable[[int, int], None] | None = None,
    ) -> TextLoss:
        """The loss over one or more documents of any length.

        Each token is predicted once, with a context of at least half the trained length (except at the beginning).
        `progress(done, total)` is called with numbers of tokens.
        """
        documents = [documents] if isinstance(documents, str) else documents
        ids = encode_documents(documents, self.tokenizer, self.special)
        length = self.trained_length
        nats, tokens = 0.0, 0
        self.model.eval()
        for batch in sliding_window_batches(ids, length, budget=max(batch_tokens, length), overlap=length // 2):
            batch = batch.to(self.device)
            has_target = batch.targets != IGNORE_INDEX
            logprobs = target_logprobs(self.model(*batch.inputs)[has_target].float(), batch.targets[has_target])
            nats, tokens = nats - float(logprobs.double().sum()), tokens + len(logprobs)
            if progress is not None:
                progress(tokens, len(ids))
        words = sum(len(text.split()) + text.count("\n") for text in documents)
        return TextLoss(nats, tokens, max(1, words), sum(len(text.encode()) for text in documents))


@dataclass(frozen=True)
class PreparedGeneration(DecodingRequest[list[Continuation]]):
    """Encoded prompts to continue."""

    generator: TextGenerator

    def finish(self, hypotheses: list[NBest]) -> list[list[Continuation]]:
        prompts, generator = self.encoded.sources, self.generator
        lengths = (len(prompt) + len(best.ids) for prompt, n_best in zip(prompts, hypotheses) for best in n_best)
        if any(length > generator.trained_length for length in lengths):
            generator.warn_beyond_trained_length()
        return [
            [Continuation(decoder.decode(best.ids), best.score, best, n_best.history) for best in n_best]
            for decoder, n_best in zip(generator.stream_decoders(self), hypotheses)
        ]

    def run_streaming(
        self, on_text: OnText, progress: Callable[[int, int], None] | None = None
    ) -> list[list[Continuation]]:
        """`run`, with a call of `on_text` for every piece of text."""
        decoders = self.generator.stream_decoders(self)

        def on_token(index: int, token: int) -> None:
            if text := decoders[index].add(token):
                on_text(index, text)

        results = self.run(on_token=on_token, progress=progress)
        for index, decoder in enumerate(decoders):
            if text := decoder.flush():
                on_text(index, text)
        return results


class StreamDecoder:
    """Decodes generated tokens piece by piece. A token may depend on the previous one for its leading space, or hold
    only part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        # The last tokens of the prompt determine how the next token is decoded.
        self.context = prompt[-8:]
        self.start = len(tokenizer.decode(self.context))
        self.tokens: list[int] = []
        self.emitted = ""

    def decode(self, tokens: list[int]) -> str:
        """The text of these tokens after the prompt."""
        return self.tokenizer.decode(self.context + tokens)[self.start :]

    def add(self, token: int) -> str:
        """The new text after this token; empty while a character is incomplete."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        if text.endswith("\ufffd") or not text.startswith(self.emitted):
            return ""
        new, self.emitted = text[len(self.emitted) :], text
        return new

    def flush(self) -> str:
        """The remaining text: a character that was never completed."""
        return self.decode(self.tokens)[len(self.emitted) :]
