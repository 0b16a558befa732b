"""The command line: a table of names to functions.

Nothing heavy is imported before a command runs, so that `regard --help` answers at once.
"""

import difflib
import importlib
import os
import sys
import warnings
from typing import NamedTuple

import regard
from regard.errors import RegardError


class Command(NamedTuple):
    """Where a command's function is, and what it does, in a line."""

    module: str
    function: str
    says: str


COMMANDS = {
    "demo": Command("regard.cli.demo", "run", "learn to translate English to French, here and now"),
    "train": Command("regard.cli.train", "run", "from files to a model folder"),
    "translate": Command("regard.cli.translate", "run", "translate lines"),
    "generate": Command("regard.cli.generate", "run", "go on with a text"),
    "classify": Command("regard.cli.classify", "run", "give texts, or pictures, their labels"),
    "segment": Command("regard.cli.segment", "run", "give each pixel of a picture its label"),
    "answer": Command("regard.cli.answer", "run", "find answers to questions in texts"),
    "embed": Command("regard.cli.embed", "run", "texts as vectors"),
    "evaluate": Command("regard.cli.evaluate", "run", "measure a model on data that it has not seen"),
    "score": Command("regard.cli.score", "run", "the log-probability of given translations"),
    "look": Command("regard.cli.look", "run", "a page, or a picture, of what the model regarded"),
    "info": Command("regard.cli.info", "run", "what a model folder holds"),
    "import": Command("regard.cli.importing", "run", "open a model of another program"),
    "export": Command("regard.cli.exporting", "run", "write a model for another program"),
    "bench": Command("regard.cli.bench", "run", "how fast it is here, beside every peer that is installed"),
}

HELP = "\n".join(
    [
        "usage: regard COMMAND …",
        "",
        "Trains, runs and shows attention models.",
        "",
        *(f"  {name:<10}  {command.says}" for name, command in COMMANDS.items()),
        "",
        "regard COMMAND --help tells more; regard --version tells the version.",
    ]
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command; gives its exit code: 0 for done, 2 for something that the user can put right.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    regard ...
    0
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text is UTF-8 here, whatever the locale says
            stream.reconfigure(encoding="utf-8")
    # Pillow's word on pictures that are too large: they are refused anyway, with a sentence that says what to do.
    warnings.filterwarnings("ignore", message="Image size .* could be decompression bomb")
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("regard: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has had enough (| head). Python must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"regard: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    if not argv:
        print(HELP, file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if name in ("-V", "--version"):
        print(f"regard {regard.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise RegardError(
            f"There is no command {name!r}.",
            f"Did you mean {near[0]}?" if near else f"There are {', '.join(COMMANDS)}.",
        )
    command = COMMANDS[name]
    try:
        return getattr(importlib.import_module(command.module), command.function)(rest)
    except SystemExit as stop:  # how tyro ends after --help, or an option that it does not know
        return stop.code if isinstance(stop.code, int) else 2
