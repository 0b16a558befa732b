"""Tagged texts for token classification: reader of CoNLL files, alignment of words and tokens, batches."""

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from regard.data.batching.batch import IGNORE_INDEX, WHOLE, Batch, RankSlice
from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts, LengthGroupedBatches, max_text_tokens
from regard.data.text.readers import display_name, errors_at_line, numbered_lines
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.layers.packed import pack

logger = logging.getLogger("regard")

_HINT = "Write word<TAB>tag on every line, and an empty line after each sentence."
_DOCUMENT_START = "-DOCSTART-"
# CoNLL-U (universaldependencies.org/format): the first column, in lines that are no words of their own (a contraction
# before its parts, an omitted word), and comments that could also be a word and its tag.
_CONLLU_ID, _CONLLU_EXTRA = re.compile(r"\d+([-.]\d+)?\t"), re.compile(r"\d+[-.]\d+\t")
_COMMENT = re.compile(r"# ?(newdoc|newpar|global\.columns)\b")
_WORD = re.compile(r"\w+|[^\w\s]")


class TaggedText(NamedTuple):
    """The words of a text, each with its tag."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_tagged_texts(files: Sequence[str | Path], columns: Sequence[str] = ()) -> list[TaggedText]:
    """Read tagged texts from files in CoNLL format, plain or compressed; "-" is stdin.

    Each line has a word and, in the last column, its tag; columns are separated by tabs or, in lines without tabs, by
    spaces. `columns` selects the word and the tag by number from 1; in CoNLL-U they are FORM and UPOS, which is logged.
    Other columns are ignored, and so are comments and lines that start with -DOCSTART-. An empty line ends a text.
    """
    if columns and not (len(columns) == 2 and all(name.isdecimal() and int(name) for name in columns)):
        raise RegardError(
            f"The columns of tagged texts are two numbers from 1 (got {' '.join(columns)}).",
            "Pass the columns of the word and of the tag, such as --columns 2 5.",
        )
    numbers = [int(name) - 1 for name in columns]
    texts = [text for file in files for text in _read_file(file, numbers)]
    if not texts:
        raise RegardError(f"{' '.join(map(str, files)) or 'No file'}: there is no text.", _HINT)
    return texts


def _read_file(file: str | Path, columns: Sequence[int]) -> Iterator[TaggedText]:
    lines = [(number, line) for number, line in numbered_lines(file) if not line.startswith(_DOCUMENT_START)]
    first = next((line for _, line in lines if line.strip() and not line.startswith("#")), "")
    width = len(_fields(first))
    is_conllu = width == 10 and _CONLLU_ID.match(first) is not None
    if is_conllu and not columns:
        columns = [1, 3]
        logger.warning("%s: CoNLL-U; the words are column 2 (FORM), the tags column 4 (UPOS).", display_name(file))
    rows: list[tuple[str, str]] = []
    for number, line in lines:
        if _is_comment(line, first, width) or (is_conllu and _CONLLU_EXTRA.match(line)):
            continue
        if line.strip():
            with errors_at_line(file, number):
                rows.append(_parse_line(line, width, columns or [0, width - 1]))
        elif rows:
            yield TaggedText(*zip(*rows))
            rows = []
    if rows:
        yield TaggedText(*zip(*rows))


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split("\t")] if "\t" in line else line.split()


def _is_comment(line: str, first: str, width: int) -> bool:
    """Whether a line is a comment, and not the word "#" or "#tag": it has other columns than `first`, a line of words.

    >>> [_is_comment(line, "Ada\\tB-PER", 2) for line in ("# text = Ada", "#\\tO", "#rain\\tO")]
    [True, False, False]
    """
    has_other_columns = ("\t" in first and "\t" not in line) or len(_fields(line)) != width
    return line.startswith("#") and (has_other_columns or _COMMENT.match(line) is not None)


def _parse_line(line: str, width: int, columns: Sequence[int]) -> tuple[str, str]:
    fields = _fields(line)
    selected = [fields[column] for column in columns if column < len(fields)]
    if len(fields) < 2 or not all(selected):
        raise RegardError(f"expected a word and a tag, got {line.strip()[:40]!r}.", _HINT)
    if len(fields) != width:
        raise RegardError(f"expected {width} columns as in the first line, got {len(fields)}.", _HINT)
    if max(columns) >= width:
        raise RegardError(f"only {width} columns.", "Column numbers start at 1.")
    return selected[0], selected[1]


def tag_names(texts: Sequence[TaggedText]) -> tuple[str, ...]:
    """Names of the tags that occur, in alphabetical order; "O" comes first. The id of a tag is its index.

    >>> tag_names([TaggedText(("Ada", "slept"), ("B-PER", "O"))])
    ('O', 'B-PER')
    """
    names = {tag for text in texts for tag in text.tags}
    if len(names) < 2:
        raise RegardError(
            f"There are fewer than two tags: {', '.join(names)}.", "Provide words with at least two tags."
        )
    return tuple(sorted(names, key=lambda name: (name != "O", name)))


def split_words(text: str) -> list[tuple[int, int]]:
    """The (start, end) of each word of a text: runs of letters and digits, and single punctuation characters.

    >>> [("It's 5 pm."[start:end]) for start, end in split_words("It's 5 pm.")]
    ['It', "'", 's', '5', 'pm', '.']
    """
    return [match.span() for match in _WORD.finditer(text)]


def join_words(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The words as a text, separated by spaces, and the (start, end) of each.

    >>> join_words(["Ada", "slept"])
    ('Ada slept', [(0, 3), (4, 9)])
    """
    starts = itertools.accumulate((len(word) + 1 for word in words), initial=0)
    return " ".join(words), [(start, start + len(word)) for start, word in zip(starts, words)]


@dataclass(frozen=True, eq=False)
class TaggingWindows:
    """Texts with their words aligned to tokens, in windows that fit into the model.

    >>> tokenizer = Tokenizer.train(["Ada slept here"], "word")
    >>> words = [("Ada", "slept", "here")]
    >>> windows = TaggingWindows.from_words(words, tokenizer, SpecialTokens(begin=2, end=3), max_len=4, segments=False)
    >>> [ids.tolist() for ids in windows.texts.ids], windows.positions
    ([[2, 4, 6, 3], [2, 5, 3]], [[(0, 0, 1), (0, 1, 2)], [(0, 2, 1)]])
    """

    texts: EncodedTexts
    positions: list[list[tuple[int, int, int]]]
    """for each window: (text, word, position of the first token of the word in the window)"""

    @staticmethod
    def from_words(
        texts: Sequence[Sequence[str]], tokenizer: Tokenizer, special: SpecialTokens, *, max_len: int, segments: bool
    ) -> "TaggingWindows":
        """Texts that are given as words, which are joined by spaces."""
        joined = [join_words(words) for words in texts]
        strings, spans = [text for text, _ in joined], [spans for _, spans in joined]
        return TaggingWindows.from_spans(strings, spans, tokenizer, special, max_len=max_len, segments=segments)

    @staticmethod
    def from_spans(
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        tokenizer: Tokenizer,
        special: SpecialTokens,
        *,
        max_len: int,
        segments: bool,
    ) -> "TaggingWindows":
        """Texts and the (start, end) of their words. Windows begin at the start of a word.

        A word belongs to the first token that overlaps it: several words may share a token. A word of which the
        tokenizer leaves nothing has no position.
        """
        limit = max_text_tokens(special, 1, max_len)
        before = 0 if special.begin is None else 1
        rows: list[tuple[list[int], None]] = []
        positions: list[list[tuple[int, int, int]]] = []
        ids_of_texts = tokenizer.encode_batch(list(texts))
        for index, (text, words, ids) in enumerate(zip(texts, spans, ids_of_texts)):
            first_tokens = _first_tokens([span for _, span in tokenizer.encode_as_pieces(text)], words)
            starts = sorted({token for token in first_tokens if token is not None} | {0})
            begin = 0
            while begin < len(ids):
                end = begin + limit
                if end < len(ids):  # the last start of a word after the first, so that no word is cut
                    end = max((start for start in starts if begin < start <= end), default=end)
                rows.append((ids[begin:end], None))
                positions.append(
                    [
                        (index, word, token - begin + before)
                        for word, token in enumerate(first_tokens)
                        if token is not None and begin <= token < end
                    ]
                )
                begin = end
        return TaggingWindows(EncodedTexts.from_ids(rows, special, segments=segments), positions)

    def __len__(self) -> int:
        return len(self.positions)


def _first_tokens(tokens: Sequence[tuple[int, int]], words: Sequence[tuple[int, int]]) -> list[int | None]:
    """The index of the first token that overlaps each word; both are (start, end) in order."""
    found: list[int | None] = []
    token = 0
    for start, end in words:
        while token < len(tokens) and tokens[token][1] <= start:
            token += 1
        is_inside = token < len(tokens) and tokens[token][0] < end
        found.append(token if is_inside else None)
    return found


class TaggedTextBatches:
    """Windows of tagged texts in batches of similar length. The first token of a word has the tag's id as its target.

    Other tokens, and words that share a token with the word before, have IGNORE_INDEX. Epoch e depends on (seed, e)
    alone; `constant_shapes` is as in `PairBatches`.

    >>> tokenizer = Tokenizer.train(["Ada slept here"], "word")
    >>> texts = [TaggedText(("Ada", "slept"), ("B-PER", "O"))]
    >>> options = dict(max_len=8, segments=False)
    >>> windows = TaggingWindows.from_words([texts[0].words], tokenizer, SpecialTokens(begin=2, end=3), **options)
    >>> [batch] = TaggedTextBatches(windows, texts, ("O", "B-PER"), budget=8, max_len=8, seed=0).epoch(0)
    >>> batch.targets
    tensor([-1,  1,  0, -1])
    """

    def __init__(
        self,
        windows: TaggingWindows,
        texts: Sequence[TaggedText],
        names: Sequence[str],
        *,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
    ) -> None:
        ids = {name: index for index, name in enumerate(names)}
        targets = []
        for row, positions in zip(windows.texts.ids, windows.positions):
            target = [IGNORE_INDEX] * len(row)
            for text, word, position in reversed(positions):  # of several words on a token, the first counts
                target[position] = _tag_id(texts[text], word, ids)
            targets.append(target)
        self._targets = Sequences.from_lists(targets)
        self._texts = LengthGroupedBatches(
            windows.texts, budget=budget, max_len=max_len, seed=seed, constant_shapes=constant_shapes
        )

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[Batch]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built."""
        for rows, inputs in self._texts.epoch(number, start, part):
            packed = inputs[0]
            tokens = int(packed.offsets.starts[len(rows)])
            targets = torch.full_like(packed.ids, IGNORE_INDEX)
            if rows:
                targets[:tokens] = pack([self._targets[row] for row in rows]).ids
            yield Batch(inputs, targets, sentences=len(rows), tokens=tokens)


def _tag_id(text: TaggedText, word: int, ids: dict[str, int]) -> int:
    tag = text.tags[word]
    if tag not in ids:
        known = ", ".join(list(ids)[:10]) + (", …" if len(ids) > 10 else "")
        raise RegardError(
            f"The word {text.words[word]!r} has the tag {tag!r}, which the model does not have.",
            f"Its tags are {known}.",
        )
    return ids[tag]


def check_tags(texts: Sequence[TaggedText], names: Sequence[str]) -> Int[np.ndarray, "N"]:
    """The tag ids of all words; an error for a tag that is not among the names."""
    ids = {name: index for index, name in enumerate(names)}
    return np.array([_tag_id(text, word, ids) for text in texts for word in range(len(text.words))], np.int64)
