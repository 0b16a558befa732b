"""Arguments, data and progress that several commands share."""

import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from itertools import islice
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

from regard.data import Tokenizer, read_pairs
from regard.data.phrasebook import phrasebook_pairs, words
from regard.data.text.compression import STDIN
from regard.data.text.readers import numbered_lines
from regard.errors import RegardError
from regard.evaluation.alignment import Words
from regard.interop.onnx.onnx_runner import holds_graphs, open_onnx
from regard.pipelines import Device, ImageModel, LanguageModel, TextEncoder, Translator, load
from regard.training.recipe import PHRASEBOOK
from regard.training.run_log import OnProgress, progress_bar, show_progress
from regard.viewer import Link

TEST_SIZE = 1000
# Texts that are processed together: they are sorted by length into batches. Fewer where fewer have arrived.
BLOCK = 1024
# A text with at least this share of unknown characters is warned of.
UNKNOWN_SHARE = 0.5

Model = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help="the model folder")]
Ensemble = Annotated[
    tuple[Path, ...], tyro.conf.arg(metavar="MODEL", help="further models, of the same tokenisers, that vote with it")
]
Data = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="FILE",
        help='two parallel files, or TSV, CSV or JSONL; plain or compressed; "-": stdin; phrasebook: the built-in test '
        "split; pictures: a folder, a table (.csv), .npz, idx",
    ),
]
Columns = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="COLUMN",
        help="columns of source and target, or of text and label: names of a header or of JSONL fields, or numbers "
        "from 1",
    ),
]
Truncate = Annotated[bool, tyro.conf.arg(help="cut lines to the length that the model was trained on")]
Empty = Annotated[
    bool,
    tyro.conf.arg(help="an answer may be nothing; for models that were trained on questions without an answer too"),
]

Quiet = Annotated[bool, tyro.conf.arg(help="print results and errors only")]

Options = TypeVar("Options")
M = TypeVar("M", Translator, LanguageModel, TextEncoder, ImageModel)
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
_CONFIG = (tyro.conf.FlagCreatePairsOff,)
_registry = tyro.constructors.ConstructorRegistry()
# Whether --quiet was given to the command that is running.
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@_registry.primitive_rule
def _named_values(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Numbers and texts, called N, X and TEXT in the help."""
    kind: Any = info.type
    if kind not in _METAVARS:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=_METAVARS[kind],
        instance_from_str=lambda words: kind(words[0]),
        is_instance=lambda value: isinstance(value, int | float if kind is float else kind),
        str_from_instance=lambda value: [str(value)],
    )


def parse(options: type[Options], command: str, argv: list[str]) -> Options:
    """The options of a command, from the command line; `quiet` among them silences remarks and progress."""
    found = tyro.cli(options, prog=f"regard {command}", args=argv, config=_CONFIG, registry=_registry)
    quiet = getattr(found, "quiet", False)
    _quiet.set(quiet)
    logging.getLogger("regard").setLevel(logging.ERROR if quiet else logging.NOTSET)
    return found


def note(text: str) -> None:
    """Prints a remark to stderr, unless --quiet was given."""
    if not _quiet.get():
        print(text, file=sys.stderr, flush=True)


def open_model(model: Path, device: Device, expect: type[M], ensemble: Sequence[Path] = ()) -> M:
    """Open a model folder, a folder of ONNX graphs, or several translators as an ensemble."""
    graphs = [folder for folder in (model, *ensemble) if holds_graphs(folder)]
    if not graphs:
        return load([model, *ensemble] if ensemble else model, device, expect=expect)
    if ensemble:
        raise RegardError(
            f"{graphs[0]} holds ONNX graphs, which cannot be part of an ensemble.",
            "Name the model folder that it was exported from.",
        )
    if device not in ("auto", "cpu"):
        raise RegardError(f"{model} holds ONNX graphs, which run on CPUs.", "Use device auto or cpu.")
    return open_onnx(model, expect=expect)


class Examples(NamedTuple):
    """Pairs to be judged by; gold alignments where there are some, and the words that they number."""

    pairs: list[tuple[str, str]]
    gold: list[list[Link]] | None = None
    words: Words = str.split


def read_examples(files: Sequence[str], columns: Sequence[str] = ()) -> Examples:
    """The pairs of files, or those of the phrasebook's test split with their gold alignments."""
    if tuple(files) == (PHRASEBOOK,):
        return phrasebook_examples("test", TEST_SIZE)
    return Examples(read_pairs(files, columns))


def phrasebook_examples(split: Literal["val", "test"], size: int) -> Examples:
    drawn = phrasebook_pairs(split, size)
    return Examples([(one.source, one.target) for one in drawn], [list(one.alignment) for one in drawn], words)


Texts = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
Input = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help="a file of lines, plain or compressed")]


def numbered_texts(texts: tuple[str, ...], file: Path | None, invitation: str) -> Iterator[tuple[str, str]]:
    """The texts of a command, each with its name: its arguments, or the lines of a file or of standard input."""
    if texts and file is not None:
        raise RegardError("Both --input and lines as arguments are given.", "Give one of them.")
    file = None if file == Path(STDIN) else file
    for number, text in enumerate(texts, 1):
        yield f"text {number}", as_text(text, f"text {number}")
    if texts:
        return
    if file is None and sys.stdin.isatty():
        note(f"{invitation}; Ctrl-D ends.")
    name = "stdin" if file is None else str(file)
    for number, line in numbered_lines(STDIN if file is None else file):
        yield f"{name}, line {number}", line


Named = tuple[str, str]
"""a text with the name that errors call it by"""


Check = Callable[[str, str], object]


def named_blocks(
    texts: tuple[str, ...], file: Path | None, invitation: str, *, check: Check | None = None, size: int | None = None
) -> Iterator[list[Named]]:
    """Named texts in blocks of `size` (default BLOCK); from a pipe or a terminal, of those that have arrived.

    `check(text, name)` raises an error for a text that cannot be processed. Where that happens, or reading fails, the
    texts before it come first.
    """
    size = size or BLOCK
    lines = numbered_texts(texts, file, invitation)
    arriving = not texts and file in (None, Path(STDIN)) and _delivers_lines()
    items = _until_error(lines, check)
    for block in _arrived(items, size) if arriving else iter(lambda: list(islice(items, size)), []):
        failure = block.pop() if isinstance(block[-1], RegardError) else None
        if block:
            yield block  # type: ignore[misc]
        if failure is not None:
            raise failure  # type: ignore[misc]


def _until_error(lines: Iterator[Named], check: Check | None) -> Iterator[Named | RegardError]:
    """The texts before the first error, and that error."""
    try:
        for name, text in lines:
            if check is not None:
                check(text, name)
            yield name, text
    except RegardError as error:
        yield error


def _delivers_lines() -> bool:
    """Whether standard input is a pipe or a terminal, which may deliver a line at a time."""
    try:
        return not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _arrived(items: Iterator[Named | RegardError], size: int) -> Iterator[list[Named | RegardError]]:
    """Blocks of what a thread has read since the last one, at most `size`."""
    waiting: Queue[Named | RegardError | None] = Queue(2 * size)

    def read() -> None:
        for item in items:
            waiting.put(item)
        waiting.put(None)

    # In a copy of this context, so that --quiet holds in the thread too.
    Thread(target=copy_context().run, args=(read,), daemon=True).start()
    ended = False
    while not ended:
        block = [waiting.get()]
        while len(block) < size and block[-1] is not None and not waiting.empty():
            block.append(waiting.get())
        ended = block[-1] is None
        if found := [item for item in block if item is not None]:
            yield found


class UnknownCharacters:
    """Warns once of a text that the tokenizer mostly does not know, such as one in another script."""

    def __init__(self, tokenizer: Tokenizer, unk: int) -> None:
        self.tokenizer, self.unk, self.warned = tokenizer, unk, False

    def check(self, text: str, name: str) -> None:
        if self.warned:
            return
        encoding = self.tokenizer.library.encode(text, add_special_tokens=False)
        spans = [span for token, span in zip(encoding.ids, encoding.offsets) if token == self.unk]
        covered = {i for begin, end in spans for i in range(begin, end)}
        letters = [i for i, letter in enumerate(text) if not letter.isspace()]
        share = sum(i in covered for i in letters) / max(1, len(letters))
        if share >= UNKNOWN_SHARE:
            self.warned = True
            note(f"{name}: {share:.0%} of the characters are unknown to the model's tokenizer.")


def plot_format(path: Path) -> str:
    """The format of a figure by its file name: png or svg.

    >>> plot_format(Path("confusion.SVG"))
    'svg'
    """
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise RegardError(f"{path}: expected a file name ending in .png or .svg.", "Change the ending.")
    return form


def as_text(argument: str, name: str) -> str:
    """An argument of the command line, if it is text: the shell passes any bytes on."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise RegardError(f"{name}: not UTF-8.", "Set the terminal to UTF-8.") from None
    return argument


@contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """A progress bar on stderr, if that is a terminal and stdout is not: call it with (done, total)."""
    if _quiet.get() or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda done, total: None
        return
    with progress_bar(what) as on_progress:
        yield on_progress


@contextmanager
def steps_of(what: str) -> Iterator[OnProgress]:
    """Progress of a command whose results come at the end: a bar on a terminal, lines in a log, nothing if --quiet."""
    with show_progress(what, silent=_quiet.get()) as on_progress:
        yield on_progress
