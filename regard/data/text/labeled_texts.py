"""Labeled texts: from TSV, CSV and JSONL files to batches for classification."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from regard.data.batching.pair_batches import IGNORED, Batch
from regard.data.batching.text_batches import ByLength, Texts
from regard.data.text.readers import column_places, fields_of, in_line, names_columns, note_header, table_rows
from regard.errors import RegardError

# What headers of TSV files and fields of JSONL files call a text, a second one, and their label.
_FIRST, _SECOND, _LABEL = ("text", "sentence", "text1", "sentence1"), ("text2", "sentence2"), "label"


class Labelled(NamedTuple):
    """One text, or two, and what they are."""

    texts: tuple[str, ...]
    label: str


def read_labelled(files: Sequence[str | Path], columns: Sequence[str] | None = None) -> list[Labelled]:
    """Texts and their labels, one file after the other, plain or compressed; "-" is stdin. Empty lines are skipped.

    - `.tsv` and `.csv` files: text and label in two columns; or two texts and their label in three. A first line that
      names a column "label" and another "text" or "sentence" ("text1" and "text2", "sentence1" and "sentence2") is a
      header, and said to be: then columns may come in any order, and others are ignored.
    - `.jsonl` files: objects with "text", perhaps "text2", and "label" (or the other names above).
    - Other files, and stdin: JSONL if they begin with "{", otherwise TSV.

    `columns` are those of the text, perhaps of a second text, and of the label: by their names in the header, or the
    fields of JSONL; or, in tables, by their numbers from 1.
    """
    if columns and len(columns) not in (2, 3):
        raise RegardError(
            f"{len(columns)} columns for labeled texts.", hint="Name two or three: the text, or two, and the label."
        )
    examples = [example for file in files for example in _in_one(file, tuple(columns or ()))]
    if not examples:
        raise RegardError(f"{' '.join(map(str, files)) or 'No file'}: there is no text.", hint="Give text<TAB>label.")
    return examples


def _in_one(file: str | Path, columns: tuple[str, ...]) -> Iterator[Labelled]:
    table: _Table | None = None
    for row in table_rows(file):
        if row.fields == []:
            continue
        with in_line(file, row.number):
            if row.fields is None:
                example = _from_object(row.value, columns)
            else:
                if table is None:
                    table = _Table(row.fields, columns)
                    if table.has_header:
                        note_header(file, row.fields)
                        continue
                example = table.read(row.fields)
        yield example


class _Table:
    """Where in a row the texts and the label are, as the first row or `columns` say."""

    def __init__(self, first_row: Sequence[str], columns: Sequence[str]) -> None:
        names = [name.strip().lower() for name in first_row]
        self.width = len(names)
        first, second = _one_of(_FIRST, names), _one_of(_SECOND, names)
        self.has_header = first is not None and _LABEL in names
        if columns:
            self.has_header = self.has_header or names_columns(columns, first_row)
            *self.texts, self.label = column_places(columns, first_row)
            if max(*self.texts, self.label) >= self.width:
                raise RegardError(f"only {self.width} columns.", hint="Count columns from 1.")
        elif self.has_header:
            self.texts = [names.index(name) for name in (first, second) if name is not None]
            self.label = names.index(_LABEL)
        elif self.width in (2, 3):
            self.texts, self.label = list(range(self.width - 1)), self.width - 1
        else:
            found = "no tab" if self.width == 1 else f"{self.width} columns, and no header that says what they are"
            raise RegardError(f"{found}.", hint="Write text<TAB>label, or text<TAB>text<TAB>label, on every line.")

    def read(self, fields: Sequence[str]) -> Labelled:
        if len(fields) != self.width:
            raise RegardError(
                f"{len(fields)} columns, where the first line has {self.width}.",
                hint="Write text<TAB>label on every line; a text in TSV has no tab in it.",
            )
        return _example([fields[column] for column in self.texts], fields[self.label])


def _from_object(found: Any, columns: Sequence[str]) -> Labelled:
    fields = found if isinstance(found, dict) else {}
    first, second = _one_of(_FIRST, fields), _one_of(_SECOND, fields)
    *text_names, label_name = columns or (first or _FIRST[0], *([second] if second else []), _LABEL)
    texts, label = [fields.get(name) for name in text_names], fields.get(label_name)
    if not all(isinstance(text, str) for text in texts) or not isinstance(label, str | int):
        message = f'no text under "{text_names[0]}" or no label under "{label_name}"; {fields_of(found)}.'
        raise RegardError(message, hint='Write {"text": "…", "label": "…"} on every line, or name the columns.')
    return _example([text for text in texts if isinstance(text, str)], str(label))


def _one_of(known: Sequence[str], names: Sequence[str] | dict[str, Any]) -> str | None:
    return next((name for name in known if name in names), None)


def _example(texts: Sequence[str], label: str) -> Labelled:
    if not label.strip():
        raise RegardError("the label is empty.", hint="Write text<TAB>label on every line.")
    return Labelled(tuple(texts), label.strip())


def label_names(examples: Sequence[Labelled]) -> tuple[str, ...]:
    """The labels that occur, in alphabetical order: a model's numbers for them count from 0.

    >>> label_names([Labelled(("good",), "yes"), Labelled(("bad",), "no")])
    ('no', 'yes')
    """
    names = tuple(sorted({example.label for example in examples}))
    if len(names) < 2:
        raise RegardError(
            f"Every text has the label {names[0]!r}: there is nothing to tell apart."
            if names
            else "There is no text, and so no label.",
            hint="Give texts of at least two labels.",
        )
    return names


def label_ids(examples: Sequence[Labelled], names: Sequence[str]) -> Int[np.ndarray, "B"]:
    """The number of each text's label."""
    number = {name: index for index, name in enumerate(names)}
    for example in examples:
        if example.label not in number:
            known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            raise RegardError(
                f"The text {example.texts[0][:40]!r} has the label {example.label!r}, which the model does not know.",
                hint=f"Its labels are {known}.",
            )
    return np.array([number[example.label] for example in examples], np.int64)


class LabelledBatches:
    """Texts in batches of similar length; the targets are one a text, or a row a text, IGNORED for filling texts.

    Epoch e is a function of (seed, e) alone; `constant_shapes` is as in `Batches`.

    >>> from regard.data.batching.sequences import Sequences
    >>> texts = Texts(Sequences.of([[2, 5, 6, 3], [2, 7, 3]]))
    >>> [batch] = LabelledBatches(texts, np.array([0, 1]), budget=16, max_len=16, seed=0).epoch(0)
    >>> batch.inputs[0].padded()[0], batch.targets
    (tensor([[2, 7, 3, 0],
            [2, 5, 6, 3]]), tensor([1, 0]))
    """

    def __init__(
        self,
        texts: Texts,
        targets: Int[np.ndarray, "B *more"],
        *,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
    ) -> None:
        if len(texts) != len(targets):
            raise ValueError(f"{len(texts)} texts and {len(targets)} targets: there must be as many")
        self._targets = targets
        self._texts = ByLength(texts, budget=budget, max_len=max_len, seed=seed, constant_shapes=constant_shapes)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on: those before it cost nothing but the plan."""
        for rows, inputs in self._texts.epoch(number, start):
            packed = inputs[0]
            targets = torch.full((len(packed), *self._targets.shape[1:]), IGNORED)
            targets[: len(rows)] = torch.from_numpy(self._targets[rows])
            yield Batch(inputs, targets, sentences=len(rows), tokens=int(packed.offsets.starts[len(rows)]))
