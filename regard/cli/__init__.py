"""Command line interface: the table of commands and their dispatch.

Heavy modules are imported only when a command runs, so that `regard --help` is fast.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import regard
from regard.errors import Interrupted, RegardError, did_you_mean

INTERRUPTED = "regard: interrupted."


class Command(NamedTuple):
    """A command: its module in this package, which has `Options` and `run`, and a summary in the imperative."""

    module: str
    summary: str


GROUPS = {
    "train": {
        "demo": Command("demo", "Train a small English-French translator in a minute"),
        "train": Command("train", "Train a model from files"),
        "prepare": Command("prepare", "Encode a corpus larger than memory for training"),
        "recipes": Command("recipes", "List the packaged recipes, or print one"),
        "scores": Command("scores", "Compare models with each of the six scores on the same data"),
    },
    "use": {
        "translate": Command("inference.translate", "Translate text"),
        "generate": Command("inference.generate", "Generate text from a prompt"),
        "classify": Command("inference.classify", "Classify texts or images"),
        "tag": Command("inference.tag", "Tag the words of texts, such as named entities"),
        "answer": Command("inference.answer", "Answer questions about a text"),
        "embed": Command("inference.embed", "Embed texts as vectors"),
        "segment": Command("inference.segment", "Label every pixel of an image"),
    },
    "look": {
        "look": Command("inference.look", "Show attention as an interactive page or an image"),
        "evaluate": Command("inference.evaluate", "Evaluate a model on test data"),
        "score": Command("inference.score", "Score translations by their log-probability"),
        "info": Command("info", "Describe a model folder"),
    },
    "serve": {
        "serve": Command("serve", "Serve models over HTTP"),
    },
    "exchange": {
        "import": Command("import_model", "Import a model from Hugging Face, timm or llama2.c"),
        "export": Command("export_model", "Export a model to Hugging Face, CTranslate2 or ONNX"),
    },
    "maintain": {
        "shortlist": Command("shortlist", "Learn a vocabulary shortlist for faster translation"),
        "config": Command("config", "Show the recipe and configuration of a model"),
        "doctor": Command("doctor", "Check this machine, and describe it for a bug report"),
        "completion": Command("completion", "Print a completion script for bash, zsh or fish"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def format_commands() -> str:
    """The commands by group."""
    lines = ["usage: regard COMMAND …", "", "Train, run and explain attention models."]
    for title, group in GROUPS.items():
        lines += ["", title, *(f"  {name:<10}  {command.summary}" for name, command in group.items())]
    return "\n".join(
        [*lines, "", "regard help COMMAND shows the options of a command; regard --version shows the version."]
    )


def load_command(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"regard.cli.{COMMANDS[name].module}")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for an error, 130 for an interrupt.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    regard ...
    0
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # UTF-8 regardless of the locale
            stream.reconfigure(encoding="utf-8")
    # Images that are too large raise a RegardError, so Pillow's warning about them is not needed.
    warnings.filterwarnings("ignore", message="Image size .* could be decompression bomb")
    # Notes of libraries that say nothing to users: fonts of matplotlib, connections of PyTorch's workers.
    warnings.filterwarnings("ignore", module="matplotlib")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except (RegardError, Interrupted) as error:
        print(f"regard: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        # The reader closed the pipe (| head). Python must not flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"regard: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    if not argv:
        print(format_commands(), file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help", "help"):
        if not rest:
            print(format_commands())
            return 0
        name, rest = rest[0], ["--help"]
    if name in ("-V", "--version"):
        print(f"regard {regard.__version__}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, f"Commands: {', '.join(COMMANDS)}.")
        raise RegardError(f"Unknown command {name!r}.", hint)
    with _exit_on_interrupt():
        module = load_command(name)
    try:
        return module.run(rest)
    except SystemExit as stop:  # after --help
        return stop.code if isinstance(stop.code, int) else 2


@contextmanager
def _exit_on_interrupt() -> Iterator[None]:
    """Context in which Ctrl-C ends the process immediately.

    A KeyboardInterrupt while torch is imported may surface as another error, or as a traceback that Python prints and
    ignores. Nothing needs to be saved at this point.
    """

    def exit_now(*_: object) -> None:
        os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(Interrupted.exit_code)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, exit_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
