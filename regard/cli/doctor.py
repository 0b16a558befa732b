"""`regard doctor`: description and checks of the machine."""

from dataclasses import dataclass

import tyro

from regard.diagnostics import doctor


@dataclass(frozen=True)
class Options:
    """Print what a bug report needs to know about this machine, and check it. Exit code 1 if there is a problem.

    The output contains no user name, no host name and no path of the home folder.
    """


def run(argv: list[str]) -> int:
    # Without the modules of other commands: they import torch, which may be what does not work.
    tyro.cli(Options, prog="regard doctor", args=argv)
    report = doctor()
    print(report)
    return 0 if report.ok else 1
