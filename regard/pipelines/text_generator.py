"""A language model with its tokenizer, ready to use."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from regard.data.batching.pair_batches import IGNORED
from regard.data.batching.token_streams import whole_text
from regard.data.text.documents import encode_documents
from regard.data.text.special_tokens import WRITING, Special
from regard.data.text.tokenizer import Tokenizer
from regard.decode import BeamHistory, DecodeConfig, Hypothesis, decode_all
from regard.errors import RegardError
from regard.models import GPT
from regard.pipelines.pipeline import ModelWithTokenizers
from regard.pipelines.scoring import PairScore, logprobs

Hear = Callable[[int, str], None]


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt, what it thought of it, and, where asked for, the search that found it."""

    text: str
    score: float
    hypothesis: Hypothesis
    history: BeamHistory | None = None


@dataclass(frozen=True)
class TextLoss:
    """How a text surprises a model: nats in all, over its tokens, its words (a line's end is one) and its bytes."""

    nats: float
    tokens: int
    words: int
    bytes: int

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def word_perplexity(self) -> float:
        return math.exp(min(50.0, self.nats / self.words))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


@dataclass
class LanguageModel(ModelWithTokenizers):
    """A model that goes on with a text.

    >>> writer = load("model")  # doctest: +SKIP
    >>> writer("Once upon a time")  # doctest: +SKIP
    ', there was a little girl named Lily.'
    """

    model: GPT
    tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    special: Special = WRITING

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.tokenizer, self.tokenizer

    def __call__(self, prompt: str) -> str:
        return self.generate(prompt)[0].text

    def prompt_ids(self, prompt: str, *, name: str = "the prompt", truncate: bool = False) -> list[int]:
        """A text as the model reads it; with `truncate` the end of one that is longer than in training."""
        begun = self.special.framed([])
        ids = self.tokenizer.encode(prompt)
        ids = [*begun, *self.fit_length(ids, name, truncate, special=len(begun), keep_end=True)]
        if not ids:
            raise RegardError(f"{name} is empty, and this model cannot begin by itself.", "Give it some text.")
        return ids

    @overload
    def generate(self, prompts: str, config: DecodeConfig | None = None, **options: Any) -> list[Continuation]: ...
    @overload
    def generate(
        self, prompts: Sequence[str], config: DecodeConfig | None = None, **options: Any
    ) -> list[list[Continuation]]: ...
    @torch.no_grad()
    def generate(
        self,
        prompts: str | Sequence[str],
        config: DecodeConfig | None = None,
        *,
        truncate: bool = False,
        history: bool = False,
        hear: Hear | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """For each prompt its continuations, sampled unless the config says otherwise; for a single string, its own.

        `hear(number, text)` is told each piece of text of prompt `number` as it is written (not in beam search; of
        several samples, the first one drawn). `history` keeps what each step considered.
        Outputs end where the model ends them, at max_len tokens, or where prompt and output fill a table of positions.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], config, truncate=truncate, history=history, hear=hear, progress=progress)[0]
        config = config or DecodeConfig(method="sample")
        ids = [self.prompt_ids(p, name=f"prompt {i}", truncate=truncate) for i, p in enumerate(prompts, 1)]
        # The bounds that follow from a source's length are for translation.
        config = dataclasses.replace(config, max_ratio=0.0, max_extra=config.max_len)
        if self.tokenizer.kind == "word":  # the text of <unk> is empty
            config = dataclasses.replace(config, unknown=False)
        self.model.eval()
        listeners = [_Listener(self.tokenizer, one[len(self.special.framed([])) :]) for one in ids]

        def on_token(number: int, token: int) -> None:
            if hear is not None and (text := listeners[number].take(token)):
                hear(number, text)

        found = decode_all(
            self.model,
            ids,
            self.packed,
            config,
            special=self.special,
            history=history,
            room=self.length_limit,
            on_token=on_token if hear is not None else None,
            progress=progress,
        )
        if any(len(one) + len(h.ids) > self.trained_length for one, n_best in zip(ids, found) for h in n_best):
            self.warn_of_length()
        if hear is not None:
            for number, listener in enumerate(listeners):
                if rest := listener.rest():
                    hear(number, rest)
        return [
            [Continuation(listener.text_after(h.ids), h.score, h, n_best.history) for h in n_best]
            for listener, n_best in zip(listeners, found)
        ]

    @overload
    def score(self, texts: str, **options: Any) -> PairScore: ...
    @overload
    def score(self, texts: Iterable[str], **options: Any) -> list[PairScore]: ...
    @torch.no_grad()
    def score(self, texts: str | Iterable[str], *, truncate: bool = False, batch_tokens: int = 4096) -> Any:
        """The log-probability of each text and its end, from its first token that has one before it; for a single
        string, that of this text.
        """
        if isinstance(texts, str):
            return self.score([texts], truncate=truncate, batch_tokens=batch_tokens)[0]
        encoded = [
            [*self.prompt_ids(text, name=f"text {i}", truncate=truncate), self.special.eos]
            for i, text in enumerate(texts, 1)
        ]
        scores: list[PairScore] = []
        self.model.eval()
        while len(scores) < len(encoded):
            batch = [encoded[len(scores)]]
            while len(scores) + len(batch) < len(encoded) and sum(map(len, batch)) < batch_tokens:
                batch.append(encoded[len(scores) + len(batch)])
            wanted = torch.tensor([token for one in batch for token in one[1:]], device=self.device)
            rows = logprobs(self.model(self.packed([one[:-1] for one in batch])).float(), wanted)
            own_rows = rows.split([len(one) - 1 for one in batch])
            scores += [PairScore(float(own.double().sum()), len(own)) for own in own_rows]
        return scores

    @torch.no_grad()
    def evaluate(
        self,
        documents: str | Sequence[str],
        *,
        batch_tokens: int = 8192,
        progress: Callable[[int, int], None] | None = None,
    ) -> TextLoss:
        """The loss over whole documents of any length, or over one: each token is predicted once, from at least half
        of the trained length (but for the first ones). `progress` is called with the tokens done, and all of them.
        """
        documents = [documents] if isinstance(documents, str) else documents
        ids = encode_documents(documents, self.tokenizer, self.special)
        longest = self.trained_length
        nats, tokens = 0.0, 0
        self.model.eval()
        for batch in whole_text(ids, longest, budget=max(batch_tokens, longest), overlap=longest // 2):
            batch = batch.to(self.device)
            asked = batch.targets != IGNORED
            rows = logprobs(self.model(*batch.inputs)[asked].float(), batch.targets[asked])
            nats, tokens = nats - float(rows.double().sum()), tokens + len(rows)
            if progress is not None:
                progress(tokens, len(ids))
        words = sum(len(text.split()) + text.count("\n") for text in documents)
        return TextLoss(nats, tokens, max(1, words), sum(len(text.encode()) for text in documents))


class _Listener:
    """Tokens after a prompt as text: a token alone knows neither the space before it nor a whole letter."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        # A few tokens of the prompt are enough to know how the next one joins it.
        self.before = prompt[-8:]
        self.start = len(tokenizer.decode(self.before))
        self.tokens: list[int] = []
        self.told = ""

    def text_after(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(self.before + tokens)[self.start :]

    def take(self, token: int) -> str:
        """What is new in the text; nothing while a letter is incomplete."""
        self.tokens.append(token)
        text = self.text_after(self.tokens)
        if text.endswith("\ufffd") or not text.startswith(self.told):
            return ""
        new, self.told = text[len(self.told) :], text
        return new

    def rest(self) -> str:
        """What was held back to the end: a letter that was never completed."""
        return self.text_after(self.tokens)[len(self.told) :]
