"""Options from dataclasses: values, messages, help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from regard.cli.options import Arg, parse_options
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.ranges import Port


@dataclass(frozen=True)
class Options:
    """Do something.

    In a second paragraph.
    """

    model: Annotated[Path, Arg("MODEL", is_positional=True)]
    out: Path
    """output file"""
    text: Annotated[tuple[str, ...], Arg("TEXT", is_positional=True)] = ()
    phrases: Annotated[tuple[str, ...], Arg("PHRASE", is_repeated=True)] = ()
    files: tuple[str, ...] = ()
    port: Port = 8000
    rate: float | None = None
    form: Literal["png", "svg"] = "png"
    no_browser: bool = False
    tied: bool = True
    decode: Annotated[dict[str, Any], Arg(section=DecodeConfig(beam=7))] = field(default_factory=dict)


def parse(*words: str) -> Options:
    return parse_options(Options, "try", ["demo", *words, "--out", "o"])


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["one two", "--port", "5", "-3"], "text", ("one two", "-3")),
        (["--", "--help me", "-x"], "text", ("--help me", "-x")),
        (["--phrases", "a b", "c", "--phrases=d"], "phrases", ("a b", "d")),
        (["--files", "a", "b", "--no-tied", "--files", "c"], "files", ("a", "b", "c")),
        (["--rate", "-0.5"], "rate", -0.5),
        (["--no_browser"], "no_browser", True),
        (["--no-tied"], "tied", False),
        ([], "tied", True),
        ([], "decode", {}),
        (["--beam", "5", "--no-unknown"], "decode", {"beam": 5, "unknown": False}),
        (["--suppress-sequences", "7,15-16", "a"], "decode", {"suppress_sequences": ((7,), (15, 16))}),
        (["--begin-suppress-tokens", "7,15"], "decode", {"begin_suppress_tokens": (7, 15)}),
    ],
)
def test_values(words, name, value):
    words = ["--out", "o", *words] if "--" in words else [*words, "--out", "o"]
    options = parse_options(Options, "try", ["demo", *words])
    assert (options.model, options.out, getattr(options, name)) == (Path("demo"), Path("o"), value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prot", "5"], "Unknown option --prot. Did you mean --port?"),
        (["--outpt=5"], "Unknown option --outpt. Did you mean --out?"),
        (["-x"], "Unknown option -x. See: regard try --help"),
        (["--port"], "--port: expected one argument. See: regard try --help"),
        (["--port", "99999"], "--port must be between 0 and 65,535 (got 99999)."),
        (["--port", "many"], "--port must be an integer (got 'many')."),
        (["--rate", "much"], "--rate must be a number (got 'much')."),
        (["--form", "sgv"], "--form must be one of png, svg (got 'sgv'). Did you mean 'svg'?"),
        (["--beam", "0"], "beam must be between 1 and 1,000 (got 0). The default is 7."),
        (["--no-browser=5"], "--no-browser: ignored explicit argument '5'."),
        (["--begin-suppress-tokens", "7-8"], "--begin-suppress-tokens must be an integer (got '7-8')."),
        (["--suppress-sequences", "-5"], "--suppress-sequences must be an integer (got '')."),
    ],
)
def test_errors(words, message):
    with pytest.raises(RegardError) as error:
        parse(*words)
    assert str(error.value).startswith(message)


def test_required_arguments():
    for words, name in (([], "MODEL"), (["demo"], "--out")):
        with pytest.raises(RegardError, match=rf"^{name} is missing\. See: regard try --help$"):
            parse_options(Options, "try", words)


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for words in (["--help"], ["demo", "--prot", "-h"]):
        with pytest.raises(SystemExit) as stop:
            parse_options(Options, "try", words)
        assert stop.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:6] == [
            "usage: regard try MODEL [TEXT …] --out FILE [OPTION …]",
            "",
            "Do something.",
            "",
            "In a second paragraph.",
            "",
        ]
        assert "  --out FILE            output file" in lines
        assert "  --port N              (default: 8000)" in lines
        assert "  --no-tied" in lines
        assert "Options of greedy search, beam search and sampling." in lines
        assert any(line.startswith("  --beam N ") for line in lines[lines.index("  --no-tied") :])
        assert "(default: 7)" in " ".join(lines)
