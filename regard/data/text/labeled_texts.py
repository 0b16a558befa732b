"""Labeled texts for classification: readers of TSV, CSV, JSONL and Parquet files, label ids, batches."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from regard.data.batching.batch import IGNORE_INDEX, WHOLE, Batch, RankSlice
from regard.data.batching.texts import EncodedTexts, LengthGroupedBatches
from regard.data.text.readers import (
    column_indices,
    describe_fields,
    display_name,
    errors_at_line,
    has_named_column,
    table_rows,
    warn_header_skipped,
)
from regard.errors import RegardError

logger = logging.getLogger("regard")

# Names of the columns (or JSONL fields) of a text, of the second text of a pair, and of the label.
_FIRST = ("text", "sentence", "text1", "sentence1", "premise", "review", "comment", "tweet", "message", "content")
_SECOND = ("text2", "sentence2", "hypothesis")
_LABELS = ("label", "sentiment", "category", "class", "target", "rating", "stars")
# A first line with at most this many words, whose label no other of at least this many lines has, may be a header.
_HEADER_WORDS, _HEADER_LINES = 2, 10


class LabeledText(NamedTuple):
    """A text, or a pair of texts, with its label."""

    texts: tuple[str, ...]
    label: str


def read_labeled_texts(files: Sequence[str | Path], columns: Sequence[str] | None = None) -> list[LabeledText]:
    """Read labeled texts from files, plain or compressed; "-" is stdin. Empty lines are skipped.

    - `.tsv` and `.csv` files: text and label in two columns, or two texts and a label in three. A first line with a
      column "label" and a column "text" or "sentence" ("text1" and "text2", "sentence1" and "sentence2"), or other
      common names, is a header; it is logged. With a header, columns may be in any order, and other columns are
      ignored. So is, in the log only, a first line that looks like a header.
    - `.jsonl` and `.parquet` files: objects with "text", optionally "text2", and "label" (or the other names above).
    - Other files, and stdin: JSONL if they start with "{", otherwise TSV.

    `columns` selects the text, optionally the second text, and the label: by column name, JSONL field, or column number
    from 1.
    """
    if columns and len(columns) not in (2, 3):
        raise RegardError(
            f"Labeled texts need two or three columns (got {len(columns)}).",
            hint="Name the column of the text, or of both texts, and of the label.",
        )
    examples = [example for file in files for example in _read_file(file, tuple(columns or ()))]
    if not examples:
        raise RegardError(
            f"{' '.join(map(str, files)) or 'No file'}: there is no text.", hint="Write text<TAB>label on every line."
        )
    return examples


def _read_file(file: str | Path, columns: tuple[str, ...]) -> Iterator[LabeledText]:
    layout: _ColumnLayout | None = None
    first, labels = LabeledText((), ""), Counter[str]()
    for row in table_rows(file, columns=columns):
        if row.fields == []:
            continue
        with errors_at_line(file, row.number):
            if row.fields is None:
                example = _from_object(row.value, columns)
            else:
                if layout is None:
                    layout = _ColumnLayout(row.fields, columns)
                    if layout.has_header:
                        warn_header_skipped(file, row.fields)
                        continue
                example = layout.parse(row.fields)
                first = first if labels else example
                labels[example.label] += 1
        yield example
    text, lines = " ".join(first.texts), labels.total()
    is_alone = lines >= _HEADER_LINES and labels[first.label] == 1 and len(labels) <= 1 + lines // 2
    if layout is not None and not layout.has_header and is_alone and len(text.split()) <= _HEADER_WORDS:
        logger.warning(
            'The first line of %s looks like a header, but is read as the text "%s" with the label "%s". '
            "If it is a header, name the columns: --columns %s",
            *(display_name(file), text, first.label, join([*first.texts, first.label])),
        )


class _ColumnLayout:
    """Indices of the text and label columns, from the first row or from `columns`."""

    def __init__(self, first_row: Sequence[str], columns: Sequence[str]) -> None:
        names = [name.strip().lower() for name in first_row]
        self.width = len(names)
        first, second, label = (_first_match(known, names) for known in (_FIRST, _SECOND, _LABELS))
        self.has_header = first is not None and label is not None
        if columns:
            self.has_header = self.has_header or has_named_column(columns, first_row)
            *self.texts, self.label = column_indices(columns, first_row)
            if max(*self.texts, self.label) >= self.width:
                raise RegardError(f"only {self.width} columns.", hint="Column numbers start at 1.")
        elif first is not None and label is not None:
            self.texts = [names.index(name) for name in (first, second) if name is not None]
            self.label = names.index(label)
        elif self.width in (2, 3):
            self.texts, self.label = list(range(self.width - 1)), self.width - 1
        else:
            problem = "no tab" if self.width == 1 else f"{self.width} columns without a header"
            raise RegardError(f"{problem}.", hint="Write text<TAB>label, or text<TAB>text<TAB>label, on every line.")

    def parse(self, fields: Sequence[str]) -> LabeledText:
        if len(fields) != self.width:
            raise RegardError(
                f"expected {self.width} columns as in the first line, got {len(fields)}.",
                hint="Write text<TAB>label on every line; a text in TSV cannot contain a tab.",
            )
        return _make_example([fields[column] for column in self.texts], fields[self.label])


def _from_object(entry: Any, columns: Sequence[str]) -> LabeledText:
    fields = entry if isinstance(entry, dict) else {}
    first, second = _first_match(_FIRST, fields), _first_match(_SECOND, fields)
    label_name = _first_match(_LABELS, fields) or _LABELS[0]
    *text_names, label_name = columns or (first or _FIRST[0], *([second] if second else []), label_name)
    texts, label = [fields.get(name) for name in text_names], fields.get(label_name)
    if isinstance(label, list):
        raise RegardError(
            f'the label in "{label_name}" is a list: multi-label classification is not supported.',
            "Write one label per text, such as the most important one, or train one model per label.",
        )
    if not all(isinstance(text, str) for text in texts) or not isinstance(label, str | int):
        message = f'no text in "{text_names[0]}" or no label in "{label_name}"; {describe_fields(entry)}.'
        raise RegardError(message, hint='Write {"text": "…", "label": "…"} on every line, or name the columns.')
    return _make_example([text for text in texts if isinstance(text, str)], str(label))


def _first_match(known: Sequence[str], names: Sequence[str] | dict[str, Any]) -> str | None:
    return next((name for name in known if name in names), None)


def _make_example(texts: Sequence[str], label: str) -> LabeledText:
    if not label.strip():
        raise RegardError("the label is empty.", hint="Write text<TAB>label on every line.")
    return LabeledText(tuple(texts), label.strip())


def label_names(examples: Sequence[LabeledText]) -> tuple[str, ...]:
    """Names of the labels that occur, in alphabetical order. The id of a label is its index.

    >>> label_names([LabeledText(("good",), "yes"), LabeledText(("bad",), "no")])
    ('no', 'yes')
    """
    names = tuple(sorted({example.label for example in examples}))
    if len(names) < 2:
        raise RegardError(
            f"Every text has the label {names[0]!r}; classification needs at least two labels."
            if names
            else "There are no labeled texts.",
            hint="Provide texts with at least two labels.",
        )
    return names


def label_ids(examples: Sequence[LabeledText], names: Sequence[str]) -> Int[np.ndarray, "B"]:
    """The label id of each text."""
    label_id = {name: index for index, name in enumerate(names)}
    for example in examples:
        if example.label not in label_id:
            known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            raise RegardError(
                f"The text {example.texts[0][:40]!r} has the label {example.label!r}, which the model does not have.",
                hint=f"Its labels are {known}.",
            )
    return np.array([label_id[example.label] for example in examples], np.int64)


class LabeledTextBatches:
    """Texts in batches of similar length. Each text has one target, or one row of targets; padding has IGNORE_INDEX.

    Epoch e depends on (seed, e) alone; `constant_shapes` is as in `PairBatches`.

    >>> from regard.data.batching.sequences import Sequences
    >>> texts = EncodedTexts(Sequences.from_lists([[2, 5, 6, 3], [2, 7, 3]]))
    >>> [batch] = LabeledTextBatches(texts, np.array([0, 1]), budget=16, max_len=16, seed=0).epoch(0)
    >>> batch.inputs[0].padded()[0], batch.targets
    (tensor([[2, 7, 3, 0],
            [2, 5, 6, 3]]), tensor([1, 0]))
    """

    def __init__(
        self,
        texts: EncodedTexts,
        targets: Int[np.ndarray, "B *more"],
        *,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
    ) -> None:
        if len(texts) != len(targets):
            raise ValueError(f"expected one target per text, got {len(texts)} texts and {len(targets)} targets")
        self._targets = targets
        self._texts = LengthGroupedBatches(
            texts, budget=budget, max_len=max_len, seed=seed, constant_shapes=constant_shapes
        )

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[Batch]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built."""
        for rows, inputs in self._texts.epoch(number, start, part):
            packed = inputs[0]
            targets = torch.full((len(packed), *self._targets.shape[1:]), IGNORE_INDEX)
            targets[: len(rows)] = torch.from_numpy(self._targets[rows])
            yield Batch(inputs, targets, sentences=len(rows), tokens=int(packed.offsets.starts[len(rows)]))
