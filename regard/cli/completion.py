"""`regard completion`: a completion script for a shell."""

from dataclasses import dataclass
from typing import Annotated, Literal

from regard.cli import COMMANDS, load_command
from regard.cli.common import parse
from regard.cli.options import Arg, read_options
from regard.cli.train_options import every_option
from regard.recipes import recipe_names

# Completes commands, then the options of the command; recipes where a positional argument is expected; else file names.
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
    """Print a shell completion script, to be sourced in the startup file of the shell.

    bash: source <(regard completion bash). zsh: source <(regard completion zsh). fish: regard completion fish | source.
    For faster startup, write the script to a file once and source that file.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], Arg(is_positional=True)]
    """shell to complete in"""


def run(argv: list[str]) -> int:
    scripts = {"bash": bash_script, "zsh": lambda: ZSH + bash_script(), "fish": fish_script}
    print(scripts[parse(Options, "completion", argv).shell](), end="")
    return 0


def bash_script() -> str:
    """The script for bash, which also works in zsh."""
    options = "\n".join(f'        *,{name},-*) words="{" ".join(option_names(name))}" ;;' for name in COMMANDS)
    return BASH.format(commands=" ".join(COMMANDS), options=options, recipes=" ".join(recipe_names()))


def fish_script() -> str:
    """The script for fish."""
    lines = []
    for name, command in COMMANDS.items():
        lines.append(f"complete -c regard -n __fish_use_subcommand -a {name} -d '{command.summary}'")
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c regard {condition} -l {option.removeprefix('--')}" for option in option_names(name)]
        if name in ("train", "recipes"):
            lines.append(f"complete -c regard {condition} -a '{' '.join(recipe_names())}'")
    return "\n".join(lines) + "\n"


def option_names(command: str) -> list[str]:
    """The options of a command, for `train` those of all families.

    >>> option_names("recipes")
    ['--help']
    """
    if command == "train":
        return [f"--{name}" for option in every_option().values() for name in option.names]
    options = read_options(load_command(command).Options)
    names = [f"--{name}" for option in options if not option.arg.is_positional for name in option.names]
    return [*names, "--help"]
