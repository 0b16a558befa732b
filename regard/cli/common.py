"""Arguments, input, data and progress shared by the commands."""

import dataclasses
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from itertools import islice
from pathlib import Path
from queue import Queue
from shlex import quote
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import torch

from regard.cli.options import Arg, parse_options
from regard.data import Tokenizer
from regard.data.text.compression import STDIN
from regard.data.text.readers import OnOpen, numbered_lines
from regard.decode import DecodeConfig
from regard.devices import Device
from regard.errors import RegardError
from regard.files import STDOUT, is_stdout
from regard.kernels.cpu.support import Compilation, compilation
from regard.pipelines import load
from regard.pipelines.files import BlockOutput, Cluster, FileProgress, FileSummary, ProcessItems
from regard.pipelines.folder import is_onnx_folder
from regard.pipelines.input_items import InputItems, find_shards, is_pattern
from regard.pipelines.resumable_file import check_output
from regard.progress import OnProgress, progress_bar, show_progress, show_status

if TYPE_CHECKING:
    from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator

# Texts per block; a block is sorted by length into batches. Blocks of a stream may be smaller.
BLOCK_SIZE = 1024
# Share of unknown characters in a text from which a warning is printed.
UNKNOWN_SHARE = 0.5

Model = Annotated[Path, Arg("MODEL", "model folder", is_positional=True)]
Ensemble = Annotated[tuple[Path, ...], Arg("MODEL", "further translators of an ensemble, with the same tokenizers")]
Data = Annotated[
    tuple[str, ...],
    Arg(
        "FILE",
        'two parallel files, or TSV, CSV, JSONL or Parquet; plain or compressed; "-": standard input; phrasebook: the '
        "built-in test split; images: a folder, .csv, .npz or idx",
    ),
]
Columns = Annotated[
    tuple[str, ...],
    Arg(
        "COLUMN",
        "columns of source and target, or of text and label: names of the header or of JSONL fields, or numbers from 1",
    ),
]
TargetLanguage = Annotated[str | None, Arg("LANGUAGE", "target language of a multilingual model, by its code")]
SourceLanguage = Annotated[
    str | None,
    Arg(
        "LANGUAGE",
        "source language of a multilingual model that needs it (NLLB, M2M100, mBART), by its code",
        names=("from",),
    ),
]
Truncate = Annotated[bool, Arg(help="truncate inputs to the training length (model.max_len)")]
Empty = Annotated[bool, Arg(help="allow empty answers, for models trained with unanswerable questions")]
DeviceOption = Annotated[Device, Arg(help="device to run on")]
Devices = Annotated[
    str,
    Arg(
        "DEVICE",
        "device to run on: auto, cpu, cuda, cuda:N or mps; with --output, several that work in parallel: cuda:0,cuda:1",
    ),
]
Output = Annotated[
    Path | None,
    Arg(
        "FILE",
        "output file, plain or compressed (.gz, .bz2, .xz); if interrupted, the same command resumes",
        "standard output",
    ),
]
Overwrite = Annotated[bool, Arg(help="replace an existing output file; start again if settings or input changed")]
ClusterOption = Annotated[
    Cluster | None,
    Arg(help="cluster that does the work, with --output: ray (of RAY_ADDRESS, or of this machine)"),
]
Quiet = Annotated[bool, Arg(help="print only results and errors")]
Decoding = Annotated[dict[str, Any], Arg(section=DecodeConfig())]

Options = TypeVar("Options")
M = TypeVar("M", "Translator", "TextGenerator", "TextEncoder", "ImageModel")
# Whether the running command has --quiet.
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def parse(options: type[Options], command: str, argv: list[str]) -> Options:
    """Parse the options of a command; --quiet turns off notes and progress."""
    parsed = parse_options(options, command, argv)
    quiet = getattr(parsed, "quiet", False)
    _quiet.set(quiet)
    if sys.stderr.isatty():
        compilation.on_start = lambda: print_note(f"{Compilation.MESSAGE.capitalize()} …")
    logging.getLogger("regard").setLevel(logging.ERROR if quiet else logging.NOTSET)
    return parsed


def print_note(text: str) -> None:
    """Print a note to stderr, unless --quiet is set."""
    if not _quiet.get():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def delayed_warnings() -> Iterator[None]:
    """Print warnings at the end, below a text that is printed piece by piece."""
    logger, records = logging.getLogger("regard"), list[logging.LogRecord]()

    def delay(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(delay)
    try:
        yield
    finally:
        logger.removeFilter(delay)
        for record in records:
            logger.handle(record)


def open_model(model: Path, device: str, expect: type[M], ensemble: Sequence[Path] = ()) -> M:
    """Load a model folder, a folder of ONNX graphs, or an ensemble of translators."""
    graphs = [folder for folder in (model, *ensemble) if is_onnx_folder(folder)]
    if not graphs:
        return load([model, *ensemble] if ensemble else model, device, expect=expect)
    if ensemble:
        raise RegardError(
            f"{graphs[0]} contains ONNX graphs, which cannot be part of an ensemble.",
            "Pass the model folder that it was exported from.",
        )
    if device not in ("auto", "cpu"):
        raise RegardError(f"{model} contains ONNX graphs, which run only on the CPU.", "Use --device auto or cpu.")
    from regard.interop import load_onnx

    return load_onnx(model, expect=expect)


def open_models(
    model: Path, devices: str, expect: type[M], ensemble: Sequence[Path] = (), *, parallel: bool = False
) -> list[M]:
    """Load a model once for each device in a list such as cuda:0,cuda:1. Only `parallel` work can use several."""
    names = [name.strip() for name in devices.split(",")]
    if len(names) > 1 and not parallel:
        raise RegardError(f"--device {devices}: several devices need --output.", "Pass --output FILE, or one device.")
    if (count := names.count("cpu")) > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    return [open_model(model, name, expect, ensemble) for name in names]


Texts = Annotated[tuple[str, ...], Arg("TEXT", default="lines of --input or standard input", is_positional=True)]
Input = Annotated[Path | None, Arg("FILE", "input file with one text per line, plain or compressed")]
InputShards = Annotated[
    Path | None,
    Arg(
        "FILE",
        "input file with one text per line, plain or compressed; a quoted pattern such as 'part-*.txt': several, with "
        "a folder as --output",
    ),
]


def read_texts(texts: tuple[str, ...], file: Path | None, prompt: str) -> Iterator[tuple[str, str]]:
    """The input texts of a command, each with its name: arguments, or the lines of a file or of standard input.

    `prompt` is printed when the input is typed in a terminal.
    """
    if texts and file is not None:
        raise RegardError("--input and texts as arguments cannot be combined.", "Use one of them.")
    file = None if file == Path(STDIN) else file
    for number, text in enumerate(texts, 1):
        yield f"text {number}", check_utf8(text, f"text {number}")
    if texts:
        return
    if file is None and sys.stdin.isatty():
        print_note(f"{prompt}; finish with Ctrl-D.")
    name = "stdin" if file is None else str(file)
    for number, line in numbered_lines(STDIN if file is None else file):
        yield f"{name}, line {number}", line


def suggest_input(texts: tuple[str, ...]) -> None:
    """Print a note if texts in the command line are names of files, whose lines may be meant."""
    for text in texts:
        with suppress(OSError, ValueError):  # too long for the name of a file
            if os.path.isfile(text):
                print_note(f"{text} is taken as text. For the lines of that file, use: --input {quote(text)}")


def input_texts(
    texts: tuple[str, ...], file: Path | None, prompt: str, unknown: "UnknownCharacters | None" = None
) -> InputItems[str]:
    """The input texts of a command that writes a file; the first ones are checked for unknown characters."""
    if file is None or file == Path(STDIN) or texts:
        name, unit, files = ("arguments", "text", ()) if texts else ("stdin", "line", (STDIN,))
        source: InputItems[str] = InputItems(
            name, lambda on_open: (text for _, text in read_texts(texts, file, prompt)), unit, files
        )
    else:
        source = InputItems.from_lines(file)
    if unknown is None:
        return source

    def read_checked(on_open: OnOpen) -> Iterator[str]:
        for index, text in enumerate(source.read(on_open)):
            if index < BLOCK_SIZE:
                unknown.check(text, source.item_name(index))
            yield text

    return dataclasses.replace(source, read=read_checked)


def input_shards(
    texts: tuple[str, ...], file: Path | None, prompt: str, unknown: "UnknownCharacters"
) -> InputItems[str] | Path:
    """The input texts of a command, see `input_texts`, or a pattern for several input files."""
    return file if file is not None and is_pattern(file) and not texts else input_texts(texts, file, prompt, unknown)


def is_stream(output: Path | None) -> bool:
    """Whether an output is standard output, a named pipe or a device, which is written directly."""
    if output is None or output == STDOUT:
        return True
    try:
        status = os.stat(output)
    except OSError:
        return False
    return is_stdout(status) or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


@contextmanager
def open_stream(output: Path | None) -> Iterator[TextIO]:
    """Open an output that is not a file (see `is_stream`) for text; by default standard output."""
    if output is None or output == STDOUT or is_stdout(os.stat(output)):
        yield sys.stdout
        return
    with open(output, "w", encoding="utf-8") as stream:
        yield stream


def check_shard_options(
    input: Path | None,
    output: Path | None,
    overwrite: bool,
    device: str,
    cluster: Cluster | None,
    extension: str | None = None,
) -> None:
    """Check the options of input and output, which may be several files, before a model is loaded."""
    if cluster is not None:
        if output is None or is_stream(output):
            raise RegardError(f"--cluster {cluster} needs --output.", "Pass --output FILE.")
        if device != "auto":
            raise RegardError(
                f"--device {device} and --cluster {cluster} cannot be combined.",
                "Leave out --device: the workers use the GPUs of the cluster, or its CPUs if it has none.",
            )
    if not is_pattern(input):
        check_file_options(output, overwrite, [input])
        return
    assert input is not None
    if output is None or is_stream(output):
        raise RegardError(f"--input {input} names several files: they need an output folder.", "Pass --output FOLDER.")
    for source, path in find_shards(input, output, extension):
        check_file_options(path, overwrite, source.files)


def check_file_options(output: Path | None, overwrite: bool, inputs: Sequence[str | Path | None]) -> None:
    """Check the options of the output before a model is loaded."""
    if output is not None and not is_stream(output):
        check_output(output, [file for file in inputs if file is not None], overwrite=overwrite)
    elif overwrite:
        raise RegardError("--overwrite needs --output FILE.", "Leave it out, or name a file.")


NamedText = tuple[str, str]
"""name of a text for error messages, and the text"""

Check = Callable[[str, str], object]
"""called with a text and its name; raises an error if the text is invalid"""


def read_blocks(
    texts: tuple[str, ...], file: Path | None, prompt: str, *, size: int | None = None
) -> Iterator[list[NamedText]]:
    """The input texts of a command (see `read_texts`) in blocks of `size`, by default BLOCK_SIZE.

    From a pipe or a terminal, a block contains the lines available so far. The texts before an unreadable one are
    yielded first.
    """
    size = size or BLOCK_SIZE
    lines = read_texts(texts, file, prompt)
    is_stream = not texts and file in (None, Path(STDIN)) and _stdin_is_stream()
    items = _until_error(lines)
    for block in _available_blocks(items, size) if is_stream else iter(lambda: list(islice(items, size)), []):
        failure = block.pop() if isinstance(block[-1], RegardError) else None
        if block:
            yield block  # type: ignore[misc]
        if failure is not None:
            raise failure  # type: ignore[misc]


def _until_error(lines: Iterator[NamedText]) -> Iterator[NamedText | RegardError]:
    """The texts before the first error, followed by the error."""
    try:
        yield from lines
    except RegardError as error:
        yield error


def _stdin_is_stream() -> bool:
    """Whether standard input is a pipe or a terminal, where lines may arrive one at a time."""
    try:
        return not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _available_blocks(items: Iterator[NamedText | RegardError], size: int) -> Iterator[list[NamedText | RegardError]]:
    """Blocks of the items that a thread has read since the last block, at most `size`."""
    queue: Queue[NamedText | RegardError | None] = Queue(2 * size)

    def read() -> None:
        for item in items:
            queue.put(item)
        queue.put(None)

    # In a copy of this context, so that --quiet applies to the thread.
    Thread(target=copy_context().run, args=(read,), daemon=True).start()
    ended = False
    while not ended:
        block = [queue.get()]
        while len(block) < size and block[-1] is not None and not queue.empty():
            block.append(queue.get())
        ended = block[-1] is None
        if items_read := [item for item in block if item is not None]:
            yield items_read


Lines = Callable[[list[str]], Iterable[str]]
"""computes the output of texts: one string each, which ends its last line"""


def print_or_write(
    options: Any,
    label: str,
    prompt: str,
    lines: Lines,
    write: Callable[..., FileSummary],
    *,
    check: Check | None = None,
    unknown: "UnknownCharacters | None" = None,
    source: Callable[..., Any] = input_texts,
    unit: str = "lines",
) -> None:
    """Texts in, lines out: print them as the texts arrive, or write them to the file of --output.

    `options` are those of a command with `text`, `input`, `output` and `overwrite`. `write` writes the file, or resumes
    it: it is called with input, output, `overwrite` and `progress`.
    """
    if not is_stream(options.output):
        with file_progress(label) as on_progress:
            texts = source(options.text, options.input, prompt, unknown)
            summary = write(texts, options.output, overwrite=options.overwrite, progress=on_progress)
        note_file(summary, options.output, unit)
        return

    done = 0
    with open_stream(options.output) as stream, streaming_progress(label) as on_done:
        for block in read_blocks(options.text, options.input, prompt):
            printed, error = _lines_until_error(lines, block, check)
            for name, text in block:
                if unknown is not None:
                    unknown.check(text, name)
            stream.writelines(printed)
            stream.flush()
            if error is not None:
                raise error
            done += len(block)
            on_done(done, None)


def _lines_until_error(
    lines: Lines, block: Sequence[NamedText], check: Check | None
) -> tuple[list[str], RegardError | None]:
    """The lines for a block; for the texts before the first one that `check` finds invalid, with its error.

    Texts are checked one by one only if the block has an error, so that each is tokenized once.
    """
    texts = [text for _, text in block]
    try:
        return list(lines(texts)), None
    except RegardError:
        for i, (name, text) in enumerate(block if check is not None else ()):
            try:
                check(text, name)
            except RegardError as error:
                return list(lines(texts[:i])) if i else [], error
        raise


def block_processor(lines: Lines) -> ProcessItems[str]:
    """The work on a block of a file, for `process_file`."""
    return lambda texts, first_index, on_batch: BlockOutput("".join(lines(texts)).encode())


class UnknownCharacters:
    """Warns once about a text with mostly unknown characters, such as one in another script."""

    def __init__(self, tokenizer: Tokenizer, unk: int) -> None:
        self.tokenizer, self.unk, self.has_warned = tokenizer, unk, False
        self.is_possible = True
        """whether the present texts may have unknown tokens, for commands that know their ids"""

    def check(self, text: str, name: str) -> None:
        if self.has_warned or not self.is_possible:
            return
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        spans = [span for token, span in zip(encoding.ids, encoding.offsets) if token == self.unk]
        covered = {i for begin, end in spans for i in range(begin, end)}
        letters = [i for i, letter in enumerate(text) if not letter.isspace()]
        share = sum(i in covered for i in letters) / max(1, len(letters))
        if share >= UNKNOWN_SHARE:
            self.has_warned = True
            print_note(f"{name}: {share:.0%} of the characters are unknown to the model's tokenizer.")


def plot_format(path: Path) -> str:
    """The format of a plot by its file name: png, svg or pdf.

    >>> plot_format(Path("confusion.SVG"))
    'svg'
    """
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg", "pdf"):
        raise RegardError(f"{path}: expected the extension .png, .svg or .pdf.", "Change the file extension.")
    return form


def check_utf8(argument: str, name: str) -> str:
    """Return a command line argument if it is valid UTF-8; the shell passes on any bytes."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise RegardError(f"{name}: not UTF-8.", "Set the terminal to UTF-8.") from None
    return argument


@contextmanager
def streaming_progress(label: str) -> Iterator[OnProgress]:
    """Progress of a command that prints results as it runs: a bar if stderr is a terminal and stdout is not.

    The callback is called with (done, total).
    """
    if _quiet.get() or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda done, total: None
        return
    with progress_bar(label) as on_progress:
        yield on_progress


@contextmanager
def file_progress(label: str) -> Iterator[Callable[[FileProgress], None]]:
    """Progress of a command that writes a file: rate and time left, in a bar or in log lines; none with --quiet."""
    with show_status(label, silent=_quiet.get()) as on_status:
        yield lambda progress: on_status(_progress_text(progress), progress.share)


def _progress_text(progress: FileProgress) -> str:
    """The progress of a file; before its first lines are finished, what they wait for."""
    is_waiting = not progress.items_per_second and compilation.running
    return f"{progress.items:,} lines, {Compilation.MESSAGE}" if is_waiting else str(progress)


def note_file(summary: FileSummary, output: Path, unit: str = "lines") -> None:
    """Print a note about a file that was written."""
    new = summary.items - summary.resumed_items
    rate = f"{new / max(summary.seconds, 1e-9):,.0f} {unit}/s"
    print_note(f"Wrote {summary.items:,} {unit} to {output} ({rate}).")


@contextmanager
def batch_progress(label: str) -> Iterator[OnProgress]:
    """Progress of a command that prints results at the end: a bar on a terminal, else log lines; none with --quiet."""
    with show_progress(label, silent=_quiet.get()) as on_progress:
        yield on_progress
