"""`regard completion`: the scripts, run by the installed shells."""

import shutil
import subprocess

import pytest

from regard.cli import COMMANDS, main
from regard.recipes import recipe_names

CASES = [
    (["tr"], {"train", "translate"}),
    ([""], set(COMMANDS)),
    (["train", "--ste"], {"--steps"}),
    (["train", "--train.ste"], {"--train.steps"}),
    (["train", "--model.cel"], {"--model.cell"}),
    (["train", "multi30k"], {"multi30k-rnn", "multi30k-transformer"}),
    (["translate", "model", "--bea"], {"--beam"}),
    (["look", "model", "--no-"], {"--no-browser", "--no-with-model"}),
    (["recipes", ""], set(recipe_names())),
]
BASH = 'source "$0"; COMP_WORDS=(regard "$@"); COMP_CWORD=$#; _regard; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, open(folder / shell, "w", encoding="utf-8") as file:
            patch.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return folder


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash_completes(scripts, words, expected):
    process = subprocess.run(["bash", "-c", BASH, scripts / "bash", *words], capture_output=True, text=True, check=True)
    assert (set(process.stdout.split()), process.stderr) == (expected, "")


def test_bash_completes_file_names_of_data(scripts):
    words = ["train", "--data", "multi30k"]
    process = subprocess.run(["bash", "-c", BASH, scripts / "bash", *words], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []  # then `-o default` completes file names
    assert "complete -o bashdefault -o default -F _regard regard" in (scripts / "bash").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "expected"), [case for case in CASES if case[0][-1]])
def test_fish_completes(scripts, words, expected):
    command = f'source {scripts / "fish"}; complete -C "regard {" ".join(words)}"'
    process = subprocess.run(["fish", "-c", command], capture_output=True, text=True, check=True)
    assert expected <= {line.split("\t")[0] for line in process.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_loads_its_script(scripts):
    command = f'source {scripts / "zsh"}; [ -n "$_comps[regard]" ]'
    subprocess.run(["zsh", "-f", "-c", command], check=True)
