"""`regard doctor`: description and checks of the machine."""

import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from regard.cli.options import parse_options
from regard.version import __version__

_BFLOAT16 = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
_TRITON = """import torch
from regard.kernels.triton.linear_relu import relu_backward
x = torch.ones(64, 64, device="cuda")
assert relu_backward(x, x)[1].cpu().eq(64).all()"""
_HAS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"


@dataclass(frozen=True)
class Options:
    """Print what a bug report needs to know about this machine, and check it. Exit code 1 if there is a problem.

    The output contains no user name, no host name and no path of the home folder.
    """


class Result(NamedTuple):
    """The end of a Python process: exit code (negative: signal), and the output, or the last line of the error."""

    code: int
    text: str


def run(argv: list[str]) -> int:
    # torch runs in processes of their own: it may be what does not work.
    parse_options(Options, "doctor", argv)
    machine = run_python("-m", "torch.utils.collect_env")
    print(f"Regard {__version__}, Python {platform.python_version()}, {platform.platform()}\n")
    print(redact("\n".join(describe_packages())))
    problems = [f"torch does not work: {machine.text}. Install it again."] if machine.code else list(find_problems())
    print("" if machine.code else f"\n{redact(machine.text)}")
    for problem in problems:
        print(redact(f"problem: {problem}"))
    print(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


def describe_packages() -> Iterator[str]:
    """The version of each package that Regard uses, with the extra that installs it."""
    try:
        requirements = importlib.metadata.requires("regard") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in sorted(requirements, key=str.lower):
        name, extra = re.split(r"[^\w.-]", requirement)[0], re.search(r'extra == "(\w+)"', requirement)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield f"{name} {version}{f' (extra {extra[1]})' if extra else ''}"


def find_problems() -> Iterator[str]:
    """Check that a bfloat16 product works on the CPU and, if there is a GPU, that Triton compiles a kernel."""
    product = run_python("-c", _BFLOAT16)
    if product.code == -signal.SIGILL:
        from regard.devices import LIMITED_ISA

        name, value = LIMITED_ISA
        works = name not in os.environ and run_python("-c", _BFLOAT16, **{name: value}).code == 0
        advice = f"Set {name}={value}." if works else "Train with --train.precision float32."
        yield f"bfloat16 is an illegal instruction: the CPU advertises instructions that it does not have. {advice}"
    elif product.code:
        yield f"bfloat16 products fail: {product.text}. Train with --train.precision float32."
    if run_python("-c", _HAS_GPU).code == 0 and (kernel := run_python("-c", _TRITON)).code:
        advice = "Install a C compiler (apt install gcc), and the version of Triton that torch requires."
        yield f"Triton does not compile kernels, without which the GPU is slower: {kernel.text}. {advice}"


def run_python(*arguments: str, **variables: str) -> Result:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    try:
        process = subprocess.run(
            [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return Result(1, "no answer within 120 s")
    if process.returncode < 0:
        return Result(process.returncode, f"the process died of {signal.Signals(-process.returncode).name}")
    if process.returncode:
        return Result(process.returncode, (process.stderr.strip().splitlines() or ["no message"])[-1][:500])
    return Result(0, process.stdout.strip())


def redact(text: str) -> str:
    """The text with ~ for the home folder, and without the name of the user in other paths."""
    home = os.path.expanduser("~")
    text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text) if len(home) > 1 else text
    user = re.escape(os.path.basename(home))
    return re.sub(rf"(?<=[/\\@]){user}(?![\w-])", "…", text) if user else text
