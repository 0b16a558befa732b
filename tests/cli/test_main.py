"""Command line: commands, help, exit codes."""

import os
import re
import subprocess
import sys

import pytest

from regard import cli
from regard.cli import COMMANDS, main
from regard.errors import Interrupted, RegardError


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    listed = {
        title: re.findall(r"^  (\w+)", text, re.M) for title, text in re.findall(r"^(\w+)\n((?:  .+\n)+)", output, re.M)
    }
    assert list(listed) == ["train", "use", "look", "serve", "exchange", "maintain"]
    assert sorted(name for names in listed.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_of_a_command(capsys, word):
    assert main(["info", "--help"]) == 0
    expected = capsys.readouterr().out
    assert main([word, "info"]) == 0
    assert capsys.readouterr().out == expected
    assert main([word, "trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_no_command_prints_usage(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("regard 0.")


@pytest.mark.parametrize(("name", "hint"), [("tranlsate", "Did you mean translate?"), ("xyz", "Commands: demo,")])
def test_unknown_command_suggests_the_nearest(capsys, name, hint):
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(f"regard: Unknown command '{name}'. {hint}")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"usage: regard {name}" in output
    assert not re.search(r"\b(STR|INT|FLOAT)\b", output)


def test_help_imports_no_heavy_modules():
    code = (
        "import sys; from regard.cli import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib', 'tokenizers', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_python_m_regard_runs_commands():
    process = subprocess.run([sys.executable, "-m", "regard", "tranlsate"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr.split(".")[0]) == (2, "regard: Unknown command 'tranlsate'")


@pytest.mark.parametrize(
    ("raised", "exit_code", "message"),
    [
        (RegardError("It broke.", "Fix it."), 2, "regard: It broke. Fix it.\n"),
        (KeyboardInterrupt(), 130, "regard: interrupted.\n"),
        (Interrupted("Interrupted at step 7.", "Run it again."), 130, "regard: Interrupted at step 7. Run it again.\n"),
        (PermissionError(13, "Permission denied", "secret"), 2, "regard: secret: Permission denied.\n"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, raised, exit_code, message):
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["info"]) == exit_code
    assert capsys.readouterr().err == message


def test_interrupt_during_import_is_one_line(tmp_path):
    """At any moment of the import of torch."""
    for delay in (0.2, 0.6, 1.0):
        program = (
            "import os, signal, sys, threading\n"
            f"threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
            "from regard.cli import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", program, "info", str(tmp_path)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 2:  # the command ended before the signal, because the folder contains no model
            assert (process.returncode, process.stderr) == (130, "regard: interrupted.\n")


def test_summaries_are_imperative():
    for command in COMMANDS.values():
        first = command.summary.split()[0]
        assert first[0].isupper()
        assert not first.endswith("s")


WITHOUT_QUIET = {"info", "recipes", "config", "completion", "doctor"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WITHOUT_QUIET))
def test_commands_that_print_notes_have_quiet(capsys, name):
    assert main([name, "--help"]) == 0
    assert "--quiet" in capsys.readouterr().out


def test_quiet_prints_results_and_errors(transformer_folder, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("one two\tun deux\n")
    for quiet in ([], ["--quiet"], []):  # applies to one command only
        assert main(["score", str(transformer_folder), "--data", str(pairs), "--device", "cpu", *quiet]) == 0
        output = capsys.readouterr()
        assert output.out.count("\t") == 2
        assert ("perplexity" in output.err) is not bool(quiet)
    assert main(["score", str(transformer_folder), "--data", "missing.tsv", "--quiet"]) == 2
    assert "missing.tsv" in capsys.readouterr().err


def test_closed_pipe_prints_no_error(transformer_folder, tmp_path):
    """The reading end of the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "import sys; from regard.cli import main; sys.exit(main())"]
    process = subprocess.run(
        [*command, "translate", str(transformer_folder), "one two", "--device", "cpu"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")
