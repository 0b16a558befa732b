"""`regard completion`: a completion script for a shell."""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from regard.cli import COMMANDS, main
from regard.cli.common import parse
from regard.cli.train_options import every_option
from regard.recipes import recipe_names

# Commands, then the options of the command; recipes where a word stands that no option takes; file names otherwise.
BASH = """\
_regard() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
    case $COMP_CWORD,${{COMP_WORDS[1]}},$current in
        1,*) words="{commands}" ;;
{options}
        *,train,*|*,recipes,*) case $previous in -*) ;; *) words="{recipes}" ;; esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _regard regard
"""
ZSH = "autoload -Uz compinit && compinit\nautoload -Uz bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class Options:
    """Print a completion script, for the file that a shell reads when it starts.

    bash: source <(regard completion bash). zsh: source <(regard completion zsh). fish: regard completion fish | source.
    To start shells faster, write the script to a file once and source that file.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


def run(argv: list[str]) -> int:
    scripts = {"bash": bash_script, "zsh": lambda: ZSH + bash_script(), "fish": fish_script}
    print(scripts[parse(Options, "completion", argv).shell](), end="")
    return 0


def bash_script() -> str:
    """The script for bash, which zsh understands too."""
    options = "\n".join(f'        *,{name},-*) words="{" ".join(option_names(name))}" ;;' for name in COMMANDS)
    return BASH.format(commands=" ".join(COMMANDS), options=options, recipes=" ".join(recipe_names()))


def fish_script() -> str:
    lines = []
    for name, command in COMMANDS.items():
        lines.append(f"complete -c regard -n __fish_use_subcommand -a {name} -d '{command.summary}'")
        here = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c regard {here} -l {option.removeprefix('--')}" for option in option_names(name)]
        if name in ("train", "recipes"):
            lines.append(f"complete -c regard {here} -a '{' '.join(recipe_names())}'")
    return "\n".join(lines) + "\n"


def option_names(command: str) -> list[str]:
    """The options of a command: for `train` those of all families, for others those that its help lists.

    >>> option_names("recipes")
    ['--help']
    """
    if command == "train":
        return [f"--{name}" for option in every_option().values() for name in option.names]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main([command, "--help"])
    return re.findall(r"^[│ ] (?:-h, )?(--[\w-]+)", shown.getvalue(), re.M)
