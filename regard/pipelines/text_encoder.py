"""An encoder of texts with its tokeniser, ready to use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.batching.sequences import Sequences
from regard.data.batching.text_batches import ByLength, Inputs, Texts, encode_texts
from regard.data.text.questions import Question, QuestionPieces
from regard.data.text.special_tokens import MASK_NAME, READING, Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.models import Bert
from regard.pipelines.pipeline import ModelWithTokenizers
from regard.pipelines.scoring import Classified, classified
from regard.ranges import MAX_INT

# Tokens that are encoded at once.
BATCH_TOKENS = 8192


@dataclass
class TextEncoder(ModelWithTokenizers):
    """A model that reads whole texts.

    >>> encoder = load("minilm")  # doctest: +SKIP
    >>> encoder.embed(["A cat.", "A dog."]).shape  # doctest: +SKIP
    (2, 384)
    """

    model: Bert
    tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    special: Special = READING

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.tokenizer, self.tokenizer

    def text_ids(self, text: str, *, name: str = "the text", truncate: bool = False) -> list[int]:
        """A text as the model reads it; with `truncate` cut to the length of training."""
        count = len(self.special.framed([]))
        return self.special.framed(self.fit_length(self.tokenizer.encode(text), name, truncate, special=count))

    def encode_rows(self, rows: Sequence[tuple[str, ...]], *, name: str | None = None, truncate: bool = False) -> Texts:
        """Texts, or pairs of texts, as the model reads them; with `truncate` cut to the length of training.

        `name` is that of a single row in messages.
        """
        how: dict[str, Any] = {"segments": self.model.config.segments > 1}
        encoded, cut = encode_texts(rows, self.tokenizer, self.special, max_len=self.trained_length, **how)
        if not cut or truncate:
            return encoded
        limit = self.length_limit
        encoded, cut = encode_texts(rows, self.tokenizer, self.special, max_len=limit or MAX_INT, **how)
        if cut:
            where = f"{name} has" if name is not None else f"{cut} of the texts have"
            what = "it" if name is not None else "them"
            raise RegardError(
                f"{where} more than the {limit} tokens that the model takes.",
                f"Split {what}, or use --truncate to cut {what} short.",
            )
        self.warn_of_length()
        return encoded

    @torch.no_grad()
    def embed(
        self, texts: str | Sequence[str], *, truncate: bool = False
    ) -> Float[np.ndarray, "B E"] | Float[np.ndarray, "E"]:
        """A vector per text, or the vector of a single string, of length 1: the mean over its tokens, or what the
        model's query finds in them (`pooling = "query"`).
        """
        if isinstance(texts, str):
            return self.embed([texts], truncate=truncate)[0]
        rows = [self.text_ids(text, name=f"text {i}", truncate=truncate) for i, text in enumerate(texts, 1)]
        vectors = np.zeros((len(rows), self.model.config.width), np.float32)
        self.model.eval()
        for numbers, (packed,) in _batches(Texts(Sequences.of(rows))):
            encoded = self.model.encode(packed.to(self.device)).float()
            if self.model.config.pooling == "query":
                found = self.model.query_pool(encoded, packed.to(self.device).offsets).float()
            else:
                found = torch.stack([one.mean(0) for one in encoded.split(packed.offsets.lengths.tolist())])
            vectors[numbers] = torch.nn.functional.normalize(found, dim=-1).cpu().numpy()
        return vectors

    @overload
    def classify(self, texts: str, *, truncate: bool = False) -> Classified: ...
    @overload
    def classify(self, texts: Sequence[str | tuple[str, ...]], *, truncate: bool = False) -> list[Classified]: ...
    @torch.no_grad()
    def classify(self, texts: str | Sequence[str | tuple[str, ...]], *, truncate: bool = False) -> Any:
        """The label of each text, or of each two texts, and the probability of each label; for a single string, its
        own.
        """
        if isinstance(texts, str):
            return self.classify([texts], truncate=truncate)[0]
        if self.model.config.head != "classify":
            raise RegardError(
                "This model was not trained to classify.", "Train it on: regard train --task classify --from …"
            )
        rows = [(text,) if isinstance(text, str) else text for text in texts]
        for number, row in enumerate(rows, 1):
            if len(row) not in (1, 2):
                raise RegardError(f"text {number} is {len(row)} texts.", "Give one text, or two.")
        encoded = self.encode_rows(rows, truncate=truncate)
        found: list[Classified | None] = [None] * len(rows)
        for numbers, logits in self._outputs(encoded):
            for number, row in zip(numbers, logits.softmax(-1).tolist()):
                found[number] = classified(self.model.config.labels, row)
        return [one for one in found if one is not None]

    @overload
    def answer(self, questions: Question, *, empty: bool = False) -> str: ...
    @overload
    def answer(self, questions: Sequence[Question], *, empty: bool = False) -> list[str]: ...
    @torch.no_grad()
    def answer(self, questions: Question | Sequence[Question], *, empty: bool = False) -> Any:
        """The answer to each question, or to a single one: words of its context, found in as many overlapping pieces
        as that needs.

        With `empty`, for models that were trained on such questions too, it is nothing where the context has none.
        """
        if isinstance(questions, Question):
            return self.answer([questions], empty=empty)[0]
        if isinstance(questions, str):
            raise RegardError(
                "A question comes with its context.", 'Give Question(id="", question="…", context="…"), or several.'
            )
        config = self.model.config
        if config.head != "answer":
            raise RegardError(
                "This model was not trained to answer.", "Train it on: regard train --task answer --from …"
            )
        pieces = QuestionPieces.of(
            questions, self.tokenizer, self.special, max_len=config.max_len, segments=config.segments > 1
        )
        scores: list[Any] = [None] * len(pieces)
        for numbers, logits in self._outputs(pieces.texts):
            lengths = [len(pieces.texts.ids[number]) for number in numbers]
            for number, rows in zip(numbers, logits.split(lengths)):
                scores[number] = rows.log_softmax(0).cpu().numpy()
        return pieces.best(questions, scores, empty=empty)

    @torch.no_grad()
    def fill(self, text: str, count: int = 5) -> list[list[tuple[str, float]]]:
        """For each `<mask>` in a text the likeliest tokens there, and how likely they are."""
        if self.model.config.head != "mask" or self.special.mask is None:
            raise RegardError("This model does not name hidden tokens.", "Train one with: regard train --task mask")
        *before, last = text.split(MASK_NAME)
        if not before:
            raise RegardError(f"There is no {MASK_NAME} in the text.", f"Write {MASK_NAME} where a token is hidden.")
        # The space before a word is the word's, not a token of its own.
        parts = [self.tokenizer.encode(part) for part in (*(part.rstrip(" ") for part in before), last)]
        ids: list[int] = reduce(lambda left, right: [*left, self.special.mask, *right], parts)  # type: ignore[list-item]
        ids = self.special.framed(self.fit_length(ids, "The text", False, special=len(self.special.framed([]))))
        self.model.eval()
        likely = self.model(self.packed([ids])).float().softmax(-1)
        found = []
        for place in [i for i, one in enumerate(ids) if one == self.special.mask]:
            best, which = likely[place].topk(min(count, likely.shape[1]))
            found.append([(self.tokenizer.decode([i]), p) for i, p in zip(which.tolist(), best.tolist())])
        return found

    def _outputs(self, texts: Texts) -> Iterator[tuple[list[int], Tensor]]:
        """The model's outputs for batches of the texts, with the numbers of those in each."""
        self.model.eval()
        for numbers, inputs in _batches(texts):
            yield numbers, self.model(*(one.to(self.device) for one in inputs)).float()


def _batches(texts: Texts) -> Iterator[tuple[list[int], Inputs]]:
    """Texts of similar length together, with their numbers."""
    if not len(texts):
        return iter(())
    longest = int(texts.ids.lengths.max())
    return ByLength(texts, budget=max(BATCH_TOKENS, longest), max_len=longest, seed=0).epoch(0)
