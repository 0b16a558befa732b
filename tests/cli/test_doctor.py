"""`regard doctor`: the report of this machine, and each problem, faked."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli import doctor, main
from regard.cli.doctor import Result
from regard.kernels.triton.support import is_interpreted, triton_available

ILLEGAL = Result(-signal.SIGILL, "the process died of SIGILL")


def test_report_of_this_machine(capsys):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"Regard {regard.__version__}, Python 3.")
    assert "\nsafetensors 0." in output
    assert "(extra onnx)" in output
    assert "PyTorch version: " in output
    assert "Model name: " in output or "CPU:" in output
    assert f"{Path.home()}/" not in output
    assert output.endswith("\n0 problems\n")


def test_command_does_not_import_torch():
    """Otherwise a broken torch could not be diagnosed."""
    code = "import sys, regard.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_private_names_are_replaced(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert doctor.redact("/home/ada/x /home/adam /data/ada/y") == "~/x /home/adam /data/…/y"


@pytest.mark.parametrize(
    ("torch", "products", "kernel", "problem"),
    [
        (Result(1, "ImportError: libcudart.so"), [], None, "torch does not work: ImportError: libcudart.so"),
        (Result(0, ""), [ILLEGAL, Result(0, "")], None, "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16."),
        (Result(0, ""), [ILLEGAL, ILLEGAL], None, "does not have. Train with --train.precision float32."),
        (Result(0, ""), [Result(1, "no answer")], None, "bfloat16 products fail: no answer. Train with"),
        (Result(0, ""), [Result(0, "")], Result(1, "no cc"), "Triton does not compile kernels, without which"),
    ],
    ids=["torch", "limited", "illegal", "bfloat16", "triton"],
)
def test_problems(monkeypatch, capsys, torch, products, kernel, problem):
    results = {doctor._BFLOAT16: iter(products), doctor._HAS_GPU: iter([Result(kernel is None, "")])}
    results |= {"torch.utils.collect_env": iter([torch]), doctor._TRITON: iter([kernel])}
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "run_python", lambda option, code, **variables: next(results[code]))
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "\nproblem: " in output
    assert problem in output
    assert output.endswith("\n1 problem\n")


def test_crashing_process_is_named():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    assert doctor.run_python("-c", code) == ILLEGAL
    assert doctor.run_python("-c", "import regard; raise ValueError('broken')") == Result(1, "ValueError: broken")


@pytest.mark.skipif(not triton_available(), reason="needs Triton")
def test_triton_check_runs_a_kernel():
    """On a GPU, or in Triton's interpreter."""
    exec(doctor._TRITON.replace("cuda", "cpu" if is_interpreted() else "cuda"), {})
