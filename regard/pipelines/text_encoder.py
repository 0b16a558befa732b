"""Text encoder pipeline: embeddings, classification, question answering, tagging, masked tokens."""

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts, EncoderInputs, LengthGroupedBatches, encode_texts
from regard.data.text.questions import Question, QuestionWindows
from regard.data.text.special_tokens import ENCODER_TOKENS, MASK_TOKEN, SpecialTokens
from regard.data.text.tagged_texts import TaggingWindows, join_words, split_words
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.models import Bert
from regard.models.bert import TEXT_HEADS, AnswerHead, MaskedTokenHead, TextHead, TextLabelHead, TokenLabelHead
from regard.pipelines.files import (
    BlockOutput,
    Cluster,
    FileProgress,
    FileSummary,
    ProcessItems,
    make_processors,
    process_file,
    process_shards,
)
from regard.pipelines.input_items import InputItems, find_shards
from regard.pipelines.pipeline import TextPipeline
from regard.pipelines.scoring import Classification, TaggedWord, format_classification
from regard.pipelines.sentence_embedding import (
    SentenceEmbedding,
    read_sentence_embedding,
    write_sentence_embedding,
)
from regard.ranges import MAX_INT

if TYPE_CHECKING:
    from regard.pipelines.folder import ModelFolder

logger = logging.getLogger("regard")

# Tokens per batch.
BATCH_TOKENS = 8192


@dataclass(repr=False)
class TextEncoder(TextPipeline):
    """A text encoder (BERT) with its tokenizer.

    >>> encoder = load("minilm")  # doctest: +SKIP
    >>> encoder.embed(["A cat.", "A dog."]).shape  # doctest: +SKIP
    (2, 384)
    """

    description = "a text encoder"
    commands = "regard embed, classify, tag, answer, look, info"
    tokenizer_count = 1
    stored_keys = frozenset({"sentence"})
    model: Bert
    tokenizer: Tokenizer
    training: dict[str, Any] = field(default_factory=dict)
    special: SpecialTokens = ENCODER_TOKENS
    sentence: SentenceEmbedding = field(default_factory=SentenceEmbedding)
    """pooling of embeddings and the layers after it"""
    _has_warned_of_cut = False

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        return self.tokenizer, self.tokenizer

    @property
    def head(self) -> TextHead:
        """What the outputs of the model are."""
        return TEXT_HEADS[self.model.config.head]

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.head.fields

    @property
    def abilities(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("embed", self.head.method) if self.head.method else ("embed",)

    def _require_head(self, head: type[TextHead], name: str, hint: str) -> None:
        if not isinstance(self.head, head):
            raise RegardError(f"This model has no {name} head.", hint)

    def inherit_settings(self, origin: Any) -> None:
        self.sentence = origin.sentence

    def write_settings(self, folder: Path) -> dict[str, Any]:
        return write_sentence_embedding(folder, self.sentence)

    def read_settings(self, folder: "ModelFolder") -> None:
        self.sentence = read_sentence_embedding(folder.path, folder.table, self.model.config.width)

    def encode_text(self, text: str, *, name: str = "the text", truncate: bool = False) -> list[int]:
        """The ids of a text with special tokens; `truncate` cuts it to the trained length.

        For a masked language model, `<mask>` in the text is the mask token.
        """
        count = len(self.special.add_special_tokens([]))
        ids = self.limit_length(self._encode_masks(text), name, truncate, special_count=count)
        return self.special.add_special_tokens(ids)

    def _encode_masks(self, text: str) -> list[int]:
        mask = self.special.mask if self.head.shares_embedding else None
        if mask is None:
            return self.tokenizer.encode(text)
        *before, last = text.split(MASK_TOKEN)
        # The space before a mask belongs to the masked word; it is not a separate token.
        parts = [self.tokenizer.encode(part) for part in (*(part.rstrip(" ") for part in before), last)]
        return reduce(lambda left, right: [*left, mask, *right], parts)

    def encode_for_embedding(self, text: str, *, name: str = "the text", truncate: bool = False) -> list[int]:
        """The ids of a text to embed: `encode_text` with the prompt of the model, cut to the length that it embeds."""
        limit = self.sentence.config.max_len
        text = self.sentence.config.prompt + text
        if not limit or limit > self.trained_length:
            ids = self.encode_text(text, name=name, truncate=truncate)
        else:
            content = self.tokenizer.encode(text)
            kept = content[: max(0, limit - len(self.special.add_special_tokens([])))]
            if len(kept) < len(content) and not (truncate or self._has_warned_of_cut):
                self._has_warned_of_cut = True
                logger.warning("Warning: %s has more tokens than the model embeds (%d); its end is cut.", name, limit)
            ids = self.special.add_special_tokens(kept)
        if not ids:
            raise RegardError(f"{name} is empty, and this model adds no special tokens.", "Pass at least one token.")
        return ids

    def encode_rows(
        self, rows: Sequence[tuple[str, ...]], *, name: str | None = None, truncate: bool = False
    ) -> EncodedTexts:
        """Encode texts, or pairs of texts, with special tokens; `truncate` cuts them to the trained length.

        `name` identifies a single row in errors.
        """
        options: dict[str, Any] = {"segments": self.model.config.segments > 1}
        encoded, truncated = encode_texts(rows, self.tokenizer, self.special, max_len=self.trained_length, **options)
        if not truncated or truncate:
            return encoded
        limit = self.length_limit
        encoded, truncated = encode_texts(rows, self.tokenizer, self.special, max_len=limit or MAX_INT, **options)
        if truncated:
            subject = f"{name} has" if name is not None else f"{truncated} of the texts have"
            pronoun = "it" if name is not None else "them"
            raise RegardError(
                f"{subject} more tokens than the model supports ({limit}).",
                f"Split {pronoun}, or use --truncate to cut {pronoun}.",
            )
        self.warn_beyond_trained_length()
        return encoded

    @torch.no_grad()
    def embed(
        self, texts: str | Sequence[str], *, truncate: bool = False
    ) -> Float[np.ndarray, "B E"] | Float[np.ndarray, "E"]:
        """Embeddings, one per text; one vector for a single string.

        An embedding is the mean of the token vectors, or the attention pooling of a model with `pooling = "query"`,
        normalized to length 1. Models of sentence-transformers have their own pooling and layers after it; see
        `sentence.config`.
        """
        if isinstance(texts, str):
            return self.embed([texts], truncate=truncate)[0]
        rows = [self.encode_for_embedding(text, name=f"text {i}", truncate=truncate) for i, text in enumerate(texts, 1)]
        vectors = np.zeros((len(rows), self.embedding_width), np.float32)
        self.model.eval()
        self.sentence.to(self.device)
        for indices, (packed,) in _batches(EncodedTexts(Sequences.from_lists(rows))):
            encoded = self.model.encode(packed.to(self.device)).float()
            if self.model.config.pooling == "query":
                pooled = self.model.query_pool(encoded, packed.to(self.device).offsets).float()
                embeddings = self.sentence.project(pooled)
            else:
                embeddings = self.sentence(encoded, packed.offsets.lengths.tolist())
            vectors[indices] = embeddings.cpu().numpy()
        return vectors

    @property
    def embedding_width(self) -> int:
        """The number of dimensions of an embedding."""
        return self.sentence.output_width(self.model.config.width)

    def fingerprint(self) -> str:
        """A hash of the weights, config and tokenizer, and of the sentence embedding if it is not the default one."""
        fingerprint = super().fingerprint()
        if self.sentence.is_default:
            return fingerprint
        settings = fingerprint + repr(self.sentence.config)
        return hashlib.sha256(settings.encode() + self.sentence.to_bytes()).hexdigest()[:16]

    @overload
    def classify(self, texts: str, *, truncate: bool = False) -> Classification: ...
    @overload
    def classify(self, texts: Sequence[str | tuple[str, ...]], *, truncate: bool = False) -> list[Classification]: ...
    @torch.no_grad()
    def classify(self, texts: str | Sequence[str | tuple[str, ...]], *, truncate: bool = False) -> Any:
        """The label of each text, or pair of texts, with the probability of every label; one result for a string.

        Probabilities sum to 1, except for models with `problem_type = "multi_label"` (several labels may apply to a
        text, or there is only one) and `"regression"` (values instead of probabilities).
        """
        if isinstance(texts, str):
            return self.classify([texts], truncate=truncate)[0]
        self._require_head(TextLabelHead, "classification", "Fine-tune it: regard train --task classify --from …")
        rows = [(text,) if isinstance(text, str) else text for text in texts]
        for i, row in enumerate(rows, 1):
            if len(row) not in (1, 2):
                raise RegardError(f"Item {i} has {len(row)} texts; expected one or two.", "Pass a text or a pair.")
        encoded = self.encode_rows(rows, truncate=truncate)
        results: list[Classification | None] = [None] * len(rows)
        for indices, logits in self._outputs(encoded):
            for i, probabilities in zip(indices, self.label_scores(logits).tolist()):
                results[i] = Classification.from_probabilities(self.model.config.labels, probabilities)
        return [result for result in results if result is not None]

    def label_scores(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """The probabilities of the labels, or the values of a regression model."""
        problem = self.model.config.problem_type
        return (
            logits if problem == "regression" else logits.sigmoid() if problem == "multi_label" else logits.softmax(-1)
        )

    def embed_file(
        self,
        source: str | Path | InputItems[str],
        output: str | Path,
        *,
        truncate: bool = False,
        replicas: Sequence["TextEncoder"] = (),
        cluster: Cluster | None = None,
        overwrite: bool = False,
        progress: Callable[[FileProgress], None] | None = None,
    ) -> FileSummary:
        """Embed the lines of a file of any size, plain or compressed; the same call resumes it if killed.

        The output is an array with one row per line (.npy), which `np.load(output, mmap_mode="r")` opens without
        reading it, or JSON lines with text and vector (any other extension; .jsonl.gz is compressed). `replicas` are
        copies of this encoder, on other devices, that work in parallel; with `cluster="ray"`, a Ray cluster does the
        work (see `ray_processors`). If `source` is a pattern such as "part-*.txt", `output` is a folder, which gets one
        .npy file per input file. An existing output is an error unless `overwrite` is set.

        >>> encoder.embed_file("corpus.txt.gz", "vectors.npy")  # doctest: +SKIP
        FileSummary(items=100000, resumed_items=0, seconds=20.1, totals={})
        """
        width = self.embedding_width
        shards = find_shards(source, output, ".npy")
        is_array = shards[0][1].suffix == ".npy"

        def make_processor(encoder: TextEncoder) -> ProcessItems[str]:
            def process(lines: list[str], first_index: int, on_batch: Callable[[int, int], None]) -> BlockOutput:
                vectors = encoder.embed(lines, truncate=truncate)
                if is_array:
                    return BlockOutput(np.ascontiguousarray(vectors, "<f4").tobytes())
                return BlockOutput("".join(map(format_embedding, lines, vectors)).encode())

            return process

        return process_shards(
            shards,
            make_processors(make_processor, self, replicas, cluster),
            settings={"task": "embed", "model": self.fingerprint(), "truncate": truncate},
            check=lambda line, name: self.encode_for_embedding(line, name=name, truncate=truncate),
            header=(lambda rows: _npy_header(rows, width)) if is_array else None,
            allowed_changes=self.truncation_changes,
            overwrite=overwrite,
            progress=progress,
        )

    def classify_file(
        self,
        source: str | Path | InputItems[str],
        output: str | Path,
        *,
        all_labels: bool = False,
        truncate: bool = False,
        replicas: Sequence["TextEncoder"] = (),
        overwrite: bool = False,
        progress: Callable[[FileProgress], None] | None = None,
    ) -> FileSummary:
        """Classify the lines of a file of any size, like `embed_file`. A tab in a line separates two texts.

        Each line of the output has a label and its probability, or all labels with `all_labels`
        (see `format_classification`).

        >>> classifier.classify_file("reviews.txt", "labels.tsv")  # doctest: +SKIP
        FileSummary(items=100000, resumed_items=0, seconds=20.1, totals={})
        """

        def make_processor(encoder: TextEncoder) -> ProcessItems[str]:
            def process(lines: list[str], first_index: int, on_batch: Callable[[int, int], None]) -> BlockOutput:
                results = encoder.classify([split_pair(line) for line in lines], truncate=truncate)
                rows = [format_classification(result, all_labels) for result in results]
                return BlockOutput("".join(f"{row}\n" for row in rows).encode())

            return process

        return process_file(
            source if isinstance(source, InputItems) else InputItems.from_lines(source),
            output,
            [make_processor(encoder) for encoder in (self, *replicas)],
            settings={
                "task": "classify",
                "model": self.fingerprint(),
                "all_labels": all_labels,
                "truncate": truncate,
            },
            check=lambda line, name: self.encode_rows([split_pair(line)], name=name, truncate=truncate),
            allowed_changes=self.truncation_changes,
            overwrite=overwrite,
            progress=progress,
        )

    @overload
    def answer(self, questions: Question, *, empty: bool = False) -> str: ...
    @overload
    def answer(self, questions: Sequence[Question], *, empty: bool = False) -> list[str]: ...
    @torch.no_grad()
    def answer(self, questions: Question | Sequence[Question], *, empty: bool = False) -> Any:
        """The answer to each question, a span of its context; one answer for a single `Question`.

        A long context is processed in overlapping pieces. With `empty`, an answer may be "" if the context contains
        none; this requires a model that was trained on unanswerable questions.
        """
        if isinstance(questions, Question):
            return self.answer([questions], empty=empty)[0]
        if isinstance(questions, str):
            raise RegardError(
                "A question needs its context (got a string).", 'Pass Question(id="", question="…", context="…").'
            )
        config = self.model.config
        self._require_head(AnswerHead, "question answering", "Fine-tune it: regard train --task answer --from …")
        pieces = QuestionWindows.from_questions(
            questions, self.tokenizer, self.special, max_len=config.max_len, segments=config.segments > 1
        )
        scores: list[Any] = [None] * len(pieces)
        for indices, logits in self._outputs(pieces.texts):
            lengths = [len(pieces.texts.ids[i]) for i in indices]
            for i, rows in zip(indices, logits.split(lengths)):
                scores[i] = rows.log_softmax(0).cpu().numpy()
        return pieces.extract_answers(questions, scores, empty=empty)

    @overload
    def tag(self, texts: str) -> list[TaggedWord]: ...
    @overload
    def tag(self, texts: Sequence[str | Sequence[str]]) -> list[list[TaggedWord]]: ...
    @torch.no_grad()
    def tag(self, texts: str | Sequence[str | Sequence[str]]) -> Any:
        """The words of each text with their tags; one list for a string.

        A text is a string, which is split into words and punctuation characters, or a list of words. The tag of a word
        is that of its first token. Long texts are processed in pieces.
        """
        if isinstance(texts, str):
            return self.tag([texts])[0]
        config = self.model.config
        self._require_head(TokenLabelHead, "token classification", "Fine-tune it: regard train --task tag --from …")
        if not texts:
            return []
        strings, spans = zip(*((t, split_words(t)) if isinstance(t, str) else join_words(t) for t in texts))
        windows = TaggingWindows.from_spans(
            strings, spans, self.tokenizer, self.special, max_len=config.max_len, segments=config.segments > 1
        )
        # A word of which the tokenizer leaves nothing has the first tag, with probability 0.
        results = [
            [TaggedWord(text[start:end], config.labels[0], 0.0, start, end) for start, end in words]
            for text, words in zip(strings, spans)
        ]
        for indices, logits in self._outputs(windows.texts):
            lengths = [len(windows.texts.ids[i]) for i in indices]
            for i, rows in zip(indices, logits.split(lengths)):
                probabilities, tags = (x.tolist() for x in rows.softmax(-1).max(-1))
                for text, word, position in windows.positions[i]:
                    tag, probability = config.labels[tags[position]], probabilities[position]
                    results[text][word] = results[text][word]._replace(tag=tag, probability=probability)
        return results

    @overload
    def fill(self, texts: str, count: int = 5) -> list[list[tuple[str, float]]]: ...
    @overload
    def fill(self, texts: Sequence[str], count: int = 5) -> list[list[list[tuple[str, float]]]]: ...
    @torch.no_grad()
    def fill(self, texts: str | Sequence[str], count: int = 5) -> Any:
        """The `count` most probable tokens for each `<mask>` in a text, or in each, with their probabilities."""
        if not isinstance(texts, str):
            return [self.fill(text, count) for text in texts]
        if not isinstance(self.head, MaskedTokenHead) or self.special.mask is None:
            raise RegardError("This model has no masked language modeling head.", "Train one: regard train --task mask")
        if MASK_TOKEN not in texts:
            raise RegardError(f"The text contains no {MASK_TOKEN}.", f"Write {MASK_TOKEN} in place of a token.")
        ids = self.encode_text(texts, name="The text")
        self.model.eval()
        probabilities = self.model(self.pack([ids])).float().softmax(-1)
        predictions = []
        for position in [i for i, token in enumerate(ids) if token == self.special.mask]:
            best, tokens = probabilities[position].topk(min(count, probabilities.shape[1]))
            predictions.append([(self.tokenizer.decode([i]), p) for i, p in zip(tokens.tolist(), best.tolist())])
        return predictions

    def _outputs(self, texts: EncodedTexts) -> Iterator[tuple[list[int], Tensor]]:
        """The model's outputs for batches of texts, each with the indices of its texts."""
        self.model.eval()
        for indices, inputs in _batches(texts):
            yield indices, self.model(*(x.to(self.device) for x in inputs)).float()


def split_pair(line: str) -> tuple[str, ...]:
    """The text of a line, or the two texts that a tab separates.

    >>> split_pair("A cat."), split_pair("A cat.\\tAn animal.")
    (('A cat.',), ('A cat.', 'An animal.'))
    """
    return tuple(line.split("\t")[:2])


def format_embedding(text: str, vector: Float[np.ndarray, "E"]) -> str:
    """A text and its embedding as a JSON line."""
    return json.dumps({"text": text, "vector": [round(float(x), 7) for x in vector]}, ensure_ascii=False) + "\n"


def _npy_header(rows: int, width: int) -> bytes:
    """The header of a .npy file; NumPy reserves space for the number of rows, so that its length is constant."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return header.getvalue()


def _batches(texts: EncodedTexts) -> Iterator[tuple[list[int], EncoderInputs]]:
    """Batches of texts of similar length, each with the indices of its texts."""
    if not len(texts):
        return iter(())
    max_len = int(texts.ids.lengths.max())
    return LengthGroupedBatches(texts, budget=max(BATCH_TOKENS, max_len), max_len=max_len, seed=0).epoch(0)
