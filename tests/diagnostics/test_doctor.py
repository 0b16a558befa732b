"""`regard doctor`: the report of this machine, and each check with a faked failure."""

import getpass
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import regard
from regard.cli import main
from regard.diagnostics import MachineReport, machine_checks, machine_facts, machine_report, probes
from regard.diagnostics.machine_checks import EXTRAS, MachineCheck
from regard.diagnostics.probes import FINISHED, Probe, ProbeResult

WORKING = ProbeResult({"torch": "2.13.0", "cuda": "13.0"}, FINISHED, "", 0)


@pytest.fixture(scope="module")
def report() -> MachineReport:
    return regard.doctor()


def test_report_of_this_machine(report):
    text = str(report)
    statuses = {check.name: check.status for check in report.checks}
    for name in ("packages", "loopback network", "temporary folder", "torch", "matrix products on the CPU"):
        assert statuses[name] == "ok", text
    assert "GPU" in statuses
    assert re.search(rf"^  regard +{re.escape(regard.__version__)}$", text, re.MULTILINE)
    assert {"torch", "tokenizers", "safetensors", "triton", "numba"} <= report.facts["versions"].keys()
    assert {"processor", "cores", "memory", "GPU", "disk, current folder"} <= report.facts["machine"].keys()
    assert text.endswith(" warnings") or text.endswith(" warning")


def test_report_has_nothing_private(report, monkeypatch):
    facts = {
        "environment": {"TMPDIR": f"{Path.home()}/tmp:/scratch/{getpass.getuser()}/tmp:/net/{socket.gethostname()}"}
    }
    text = str(MachineReport({**report.facts, **facts}, report.checks))
    assert "TMPDIR" in text
    assert f"{Path.home()}/" not in text
    assert f"/{getpass.getuser()}" not in text
    assert f"/{socket.gethostname()}" not in text


def test_command_prints_the_report_and_fails_with_a_problem(monkeypatch, capsys):
    checks = [MachineCheck("torch", "ok", "can be imported")]
    monkeypatch.setattr(machine_report, "run_checks", lambda: (checks, {"GPU": "none"}))
    assert main(["doctor"]) == 0
    assert "0 problems, 0 warnings" in capsys.readouterr().out
    checks.append(MachineCheck("disk", "problem", "full", "Free some space."))
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert re.search(r"^  problem  disk +full\. Free some space\.$", output, re.MULTILINE)
    assert "1 problem, 0 warnings" in output


def test_command_does_not_import_torch():
    """Otherwise a broken torch could not be diagnosed."""
    code = "import sys, regard.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_extra_is_described():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys()


# -- packages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch):
    """Fake packages: the requirements of Regard, and the installed versions."""
    requirements: list[Requirement] = []
    versions: dict[str, str] = {}
    monkeypatch.setattr(machine_checks, "declared_requirements", lambda: requirements)
    monkeypatch.setattr(machine_checks, "installed_version", lambda name: versions.get(name, ""))
    return requirements, versions


def test_versions_out_of_range_are_a_problem(packages):
    requirements, versions = packages
    requirements += [Requirement("torch>=2.11"), Requirement('onnx>=1.17; extra == "onnx"'), Requirement("rich>=13")]
    versions |= {"torch": "2.12.0+cpu", "rich": "14.0"}
    assert machine_checks.check_versions().status == "ok"  # onnx is optional
    versions |= {"torch": "2.9.1", "onnx": "1.2"}
    check = machine_checks.check_versions()
    assert check.status == "problem"
    assert check.message == "torch 2.9.1 (needed: >=2.11); onnx 1.2 (needed: >=1.17)"
    del versions["torch"]
    assert "torch is missing" in machine_checks.check_versions().message


def test_requirements_of_other_platforms_are_ignored(packages):
    packages[0].append(Requirement("winapi>=1; sys_platform == 'win32'"))
    assert machine_checks.check_versions().status == "ok"


def test_missing_metadata_is_a_warning(packages):
    check = machine_checks.check_versions()
    assert check.status == "warning"
    assert "not installed as a package" in check.message


def test_missing_extras_say_what_they_enable(packages):
    requirements, versions = packages
    requirements += [Requirement('onnx>=1; extra == "onnx"'), Requirement('numba>=1; extra == "fast"')]
    versions["numba"] = "1.0"
    [check] = machine_checks.check_extras()
    assert check.status == "ok"
    assert "onnx not installed (optional): export to ONNX" in check.message
    assert check.advice == f'For it: {sys.executable} -m pip install "onnx>=1"'


def test_untested_python_is_a_warning(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 20, 0, "final", 0))
    check = machine_checks.check_python()
    assert (check.status, check.message) == ("warning", "3.20 is not among the tested versions")


# -- operating system -------------------------------------------------------------------------------------------------


def test_unreachable_loopback_is_a_problem(monkeypatch):
    def refuse(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    check = machine_checks.check_loopback()
    assert check.status == "problem"
    assert "Network is unreachable" in check.message
    assert "--train.workers 1" in check.advice


def test_folder_that_is_not_writable_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_checks.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    check = next(machine_checks.check_folders())
    assert check.status == "problem"
    assert "not writable" in check.message
    assert "TMPDIR" in check.advice


@pytest.mark.parametrize(("free", "status"), [(10 << 20, "problem"), (1 << 30, "warning"), (1 << 40, "ok")])
def test_disk_space(monkeypatch, free, status):
    monkeypatch.setattr(machine_checks, "free_disk", lambda _: free)
    assert {check.status for check in machine_checks.check_folders()} == {status}


def test_cache_folder_that_does_not_exist_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert [check.status for check in machine_checks.check_folders()] == ["ok"] * 3
    assert list(tmp_path.iterdir()) == []


# -- processors -------------------------------------------------------------------------------------------------------


def test_illegal_instruction_names_the_variable_that_avoids_it(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    crashed = ProbeResult({"torch": "2"}, "bfloat16 product", "", -signal.SIGILL)
    _, check = machine_checks.check_cpu(crashed, lambda: WORKING)
    assert check.status == "problem"
    assert check.message.startswith("bfloat16 product: illegal instruction")
    assert check.advice == "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    _, check = machine_checks.check_cpu(crashed, lambda: crashed)
    assert "--train.precision float32" in check.advice
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    _, check = machine_checks.check_cpu(crashed, lambda: WORKING)
    assert "--train.precision float32" in check.advice


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            ProbeResult({}, "import torch", "ImportError: libcudart.so", 1),
            "cannot be imported: ImportError: libcudart.so",
        ),
        (ProbeResult({}, "import torch", "", -signal.SIGSEGV), "cannot be imported: the process died of SIGSEGV"),
        (ProbeResult({}, "int8 product", "", None), "int8 product: no answer within 60 s"),
        (ProbeResult({}, "int8 product", "", 3), "int8 product: the process ended with exit code 3"),
    ],
)
def test_failing_torch_is_a_problem(result, message):
    check = machine_checks.check_cpu(result, lambda: WORKING)[-1]
    assert (check.status, check.message) == ("problem", message)


@pytest.mark.parametrize(
    ("error", "step", "advice"),
    [
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
            "start CUDA",
            "Update the",
        ),
        (
            "RuntimeError: CUDA error: no kernel image is available",
            "product on the GPU",
            "build of torch that supports",
        ),
        ("CompilationError", "Triton kernel", "C compiler"),
        ("RuntimeError: torch finds no CUDA device", "start CUDA", "nvidia-smi"),
    ],
)
def test_gpu_that_torch_cannot_use_is_a_problem(error, step, advice):
    check = machine_checks.check_gpu(WORKING, ProbeResult({"driver_cuda": "11.4"}, step, error, 1))
    assert check.status == "problem"
    assert check.message == f"{step}: {error}"
    assert advice in check.advice


def test_gpu_with_a_cpu_build_of_torch_is_a_warning():
    cpu = WORKING._replace(facts={"torch": "2.13.0", "cuda": None})
    assert "built without CUDA" in machine_checks.check_gpu(cpu, WORKING).message
    assert machine_checks.check_gpu(cpu, None).status == "ok"


def test_gpus_and_driver_are_described(monkeypatch):
    monkeypatch.setattr(machine_checks, "driver_version", lambda: "570.1.2")
    gpu = ProbeResult({"gpus": ["H200, 140 GiB"], "driver_cuda": "12.8"}, FINISHED, "", 0)
    facts = machine_checks.describe_torch(WORKING, gpu)
    assert facts["GPU"] == "H200, 140 GiB"
    assert facts["NVIDIA driver"] == "570.1.2, supports CUDA 12.8"


def test_missing_triton_is_a_warning(packages):
    assert machine_checks.check_triton().status == "warning"
    packages[1]["triton"] = "3.6"
    assert machine_checks.check_triton().status == "ok"


# -- probes -----------------------------------------------------------------------------------------------------------


def run_code(monkeypatch, code: str, timeout: float = 300.0) -> ProbeResult:
    """The result of a probe that runs this code instead."""
    start = subprocess.Popen

    def replaced(command, **options):
        return start([sys.executable, "-c", code], **options)

    monkeypatch.setattr(probes.subprocess, "Popen", replaced)
    return Probe("cpu").result(timeout)


def test_crashing_probe_reports_its_last_step(monkeypatch):
    code = """import os, signal; print('{"step": "one"}'); print('noise'); print('{"step": "two"}', flush=True)
os.kill(os.getpid(), signal.SIGILL)"""
    assert run_code(monkeypatch, code) == ProbeResult({}, "two", "", -signal.SIGILL)


def test_hanging_probe_is_stopped(monkeypatch):
    assert run_code(monkeypatch, "import time; time.sleep(600)", timeout=0.5).exit_code is None


def test_failing_step_of_a_probe_is_reported(monkeypatch, capsys):
    def fail() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(probes, "_probe_gpu", fail)
    assert probes.main("gpu") == 1
    assert "RuntimeError: the driver is too old" in capsys.readouterr().out


def test_container_limits(monkeypatch):
    files = {
        "/proc/cpuinfo": "model name\t: Fast CPU\nflags\t\t: fpu avx2 avx512_bf16\n",
        "/sys/fs/cgroup/memory.max": f"{1 << 30}\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    monkeypatch.setattr(machine_facts, "_read", lambda path: files.get(path, ""))
    facts = machine_facts.describe_hardware()
    assert facts["processor"] == "Fast CPU"
    assert facts["instruction sets"] == "avx2 avx512_bf16"
    assert "(container limit 1.0 GiB)" in facts["memory"]
    assert "(container limit 1.5)" in facts["cores"]
