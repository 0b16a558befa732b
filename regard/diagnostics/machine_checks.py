"""Checks of the machine: each finds out whether something that Regard needs works, and says what to do if not."""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from regard.diagnostics.machine_facts import free_disk, installed_version
from regard.diagnostics.probes import FINISHED, Probe, ProbeResult
from regard.optional_packages import declared_requirements, install_command

Status = Literal["ok", "warning", "problem"]

LIMITED_ISA = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
"""the environment variable that limits the instructions of oneDNN, for machines on which its CPU detection is wrong"""
TESTED_PYTHON = ((3, 11), (3, 13))
"""oldest and newest version of Python that the tests run with"""
EXTRAS = {
    "chat": "chat templates of language models",
    "ctranslate2": "export to CTranslate2",
    "datasets": "datasets of the Hugging Face hub",
    "fast": "compiled decoding on a CPU",
    "gguf": "importing GGUF files",
    "notebook": "interactive pages in notebooks",
    "onnx": "export to ONNX, and running the exported graphs",
    "parquet": "reading Parquet files",
    "ray": "translating and embedding on a Ray cluster",
    "serve": "serving models over HTTP",
    "tensorboard": "TensorBoard logs of training runs",
    "wandb": "Weights & Biases logs of training runs",
    "zstd": "reading .zst files",
}
"""extras and what each enables"""
# Free disk space below which training or writing results is likely to fail.
_SCARCE_DISK, _FULL_DISK = 2 << 30, 100 << 20
_PROBE_SECONDS = 60.0


class MachineCheck(NamedTuple):
    """The result of a check: "ok", "warning" (works, but something is missing or slow) or "problem"."""

    name: str
    status: Status
    message: str
    advice: str = ""


def run_checks() -> tuple[list[MachineCheck], dict[str, str]]:
    """Run all checks; also the facts about torch and GPUs that the probes found."""
    cpu = Probe("cpu")
    gpu = Probe("gpu") if has_nvidia_device() else None
    checks = [check_python(), check_versions(), *check_extras(), check_loopback(), *check_folders()]
    cpu_result = cpu.result(_PROBE_SECONDS)
    checks += check_cpu(cpu_result, lambda: Probe("cpu", **dict([LIMITED_ISA])).result(_PROBE_SECONDS))
    gpu_result = gpu.result(_PROBE_SECONDS) if gpu is not None else None
    checks.append(check_gpu(cpu_result, gpu_result))
    if gpu_result is not None and gpu_result.step == FINISHED:
        checks.append(check_triton())
    return checks, describe_torch(cpu_result, gpu_result)


def describe_torch(cpu: ProbeResult, gpu: ProbeResult | None) -> dict[str, str]:
    """Build of torch, GPUs and driver."""
    facts = {"torch build": f"CUDA {cpu.facts['cuda']}" if cpu.facts.get("cuda") else "without CUDA"}
    if "threads" in cpu.facts:
        facts["torch threads"] = str(cpu.facts["threads"])
    facts["GPU"] = "none" if gpu is None else "; ".join(gpu.facts.get("gpus", [])) or "unknown"
    if gpu is not None:
        facts["NVIDIA driver"] = f"{driver_version() or 'unknown'}, supports CUDA {gpu.facts.get('driver_cuda', '?')}"
    return facts


# -- software ---------------------------------------------------------------------------------------------------------


def check_python() -> MachineCheck:
    version, (oldest, newest) = sys.version_info[:2], TESTED_PYTHON
    text = ".".join(map(str, version))
    if oldest <= version <= newest:
        return MachineCheck("Python", "ok", text)
    tested = " to ".join(".".join(map(str, one)) for one in TESTED_PYTHON)
    return MachineCheck("Python", "warning", f"{text} is not among the tested versions", f"Use Python {tested}.")


def check_versions() -> MachineCheck:
    """Check the installed packages against the declared requirements; those of extras only if they are installed."""
    name, declared = "packages", declared_requirements()
    if not declared:
        message = "Regard is not installed as a package, so the versions of its requirements are unknown"
        return MachineCheck(name, "warning", message, "Install it with pip.")
    wrong, needed = [], []
    for requirement in declared:
        version, is_extra = installed_version(requirement.name), "extra" in str(requirement.marker or "")
        if requirement.marker is not None and not requirement.marker.evaluate(
            {"extra": _extra(str(requirement.marker))}
        ):
            continue
        if not version and not is_extra:
            wrong.append(f"{requirement.name} is missing")
            needed.append(requirement)
        elif version and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (needed: {requirement.specifier})")
            needed.append(requirement)
    if wrong:
        return MachineCheck(name, "problem", "; ".join(wrong), f"Run: {install_command(needed)}")
    return MachineCheck(name, "ok", "versions satisfy the requirements of Regard")


def _extra(marker: str) -> str:
    """The extra that a marker such as `extra == "onnx"` names; empty if it names none."""
    return marker.partition('extra == "')[2].partition('"')[0]


def check_extras() -> Iterator[MachineCheck]:
    """Report the optional packages that are missing. Having none of them is not an error."""
    missing: dict[str, list[Requirement]] = {}
    for requirement in declared_requirements():
        extra = _extra(str(requirement.marker or ""))
        applies = extra and requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        if applies and not installed_version(requirement.name):
            missing.setdefault(extra, []).append(requirement)
    for extra, packages in sorted(missing.items()):
        purpose = EXTRAS.get(extra, "optional features")
        message = f"{' and '.join(package.name for package in packages)} not installed (optional): {purpose}"
        yield MachineCheck(f"regard[{extra}]", "ok", message, f"For it: {install_command(packages)}")


# -- operating system -------------------------------------------------------------------------------------------------


def check_loopback() -> MachineCheck:
    """Send a byte through 127.0.0.1, as training with several processes and live pages do."""
    name = "loopback network"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    accepted.settimeout(2)
                    accepted.recv(1)
    except OSError as error:
        advice = "Enable the interface lo (ip link set lo up), or train with --train.workers 1."
        return MachineCheck(name, "problem", f"127.0.0.1 cannot be reached ({error.strerror or error})", advice)
    return MachineCheck(name, "ok", "127.0.0.1 can be reached")


def check_folders() -> Iterator[MachineCheck]:
    """Check that folders are writable and have free space."""
    yield _check_folder("temporary folder", tempfile.gettempdir, "Set TMPDIR to a writable folder.")
    yield _check_folder("current folder", os.getcwd, "Change to another folder, or pass --out elsewhere.")
    yield _check_folder("cache of compiled kernels", _cache_folder, "Set TRITON_CACHE_DIR to a writable folder.")


def _cache_folder() -> str:
    """The folder in which Triton stores compiled kernels, or its nearest parent that exists."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return str(folder)


def _check_folder(name: str, locate: Callable[[], str], advice: str) -> MachineCheck:
    try:
        folder = locate()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return MachineCheck(name, "problem", f"not writable ({getattr(error, 'strerror', None) or error})", advice)
    free = free_disk(folder)
    if free is not None and free < _SCARCE_DISK:
        status: Status = "problem" if free < _FULL_DISK else "warning"
        return MachineCheck(name, status, f"only {free / 2**20:,.0f} MiB free", f"Free some space. {advice}")
    return MachineCheck(name, "ok", "writable")


# -- processors -------------------------------------------------------------------------------------------------------


def check_cpu(result: ProbeResult, retry_limited: Callable[[], ProbeResult]) -> list[MachineCheck]:
    """Check that torch works, and that the instructions which the CPU advertises are legal.

    Virtual machines may advertise AMX or AVX512 instructions that they do not have. `retry_limited` runs the probe
    again with oneDNN limited to AVX512-BF16.
    """
    name = "matrix products on the CPU"
    if result.step == FINISHED:
        return [MachineCheck("torch", "ok", "can be imported"), MachineCheck(name, "ok", "bfloat16 and int8 work")]
    if result.step in ("start", "import torch"):
        return [_torch_problem(result)]
    torch_check = MachineCheck("torch", "ok", "can be imported")
    if result.exit_code != -signal.SIGILL:
        advice = "Report this with the output of regard doctor; meanwhile train with --train.precision float32."
        return [torch_check, MachineCheck(name, "problem", f"{result.step}: {_describe_end(result)}", advice)]
    variable, value = LIMITED_ISA
    message = f"{result.step}: illegal instruction; the CPU advertises instructions that it does not have"
    advice = "Train with --train.precision float32, and translate without --precision int8."
    if variable not in os.environ and retry_limited().step == FINISHED:
        advice = f"Set {variable}={value}"
    return [torch_check, MachineCheck(name, "problem", message, advice)]


def _torch_problem(result: ProbeResult) -> MachineCheck:
    advice = "Install torch again: pip install --force-reinstall torch"
    return MachineCheck("torch", "problem", f"cannot be imported: {_describe_end(result)}", advice)


def _describe_end(result: ProbeResult) -> str:
    if result.error:
        return result.error
    if result.exit_code is None:
        return f"no answer within {_PROBE_SECONDS:.0f} s"
    if result.exit_code < 0:
        return f"the process died of {signal.Signals(-result.exit_code).name}"
    return f"the process ended with exit code {result.exit_code}"


def has_nvidia_device() -> bool:
    """Whether the operating system has an NVIDIA GPU, with or without a usable driver."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/nvidiactl"))


def driver_version() -> str:
    """Version of the NVIDIA driver; empty if it is unknown."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdecimal()), "")


def check_gpu(cpu: ProbeResult, gpu: ProbeResult | None) -> MachineCheck:
    """Check that torch can use the GPU that the operating system has; `gpu` is None if it has none."""
    name, built_for = "GPU", cpu.facts.get("cuda")
    if gpu is None:
        return MachineCheck(name, "ok", "no NVIDIA GPU; models run on the CPU")
    if not built_for and "torch" in cpu.facts:
        advice = "Install a build of torch with CUDA."
        return MachineCheck(name, "warning", "there is an NVIDIA GPU, but torch is built without CUDA", advice)
    if gpu.step == FINISHED:
        return MachineCheck(name, "ok", "works")
    advice = "Set the device to cpu until it works, and look at the output of nvidia-smi."
    if "too old" in gpu.error or "insufficient" in gpu.error:
        advice = (
            f"Update the NVIDIA driver, or install a torch built for CUDA {gpu.facts.get('driver_cuda', '')} or older."
        )
    elif "no kernel image" in gpu.error:
        advice = "Install a build of torch that supports this GPU."
    elif gpu.step == "Triton kernel":
        advice = "Install a C compiler (apt install gcc), and the version of Triton that torch requires."
    return MachineCheck(name, "problem", f"{gpu.step}: {_describe_end(gpu)}", advice)


def check_triton() -> MachineCheck:
    if installed_version("triton"):
        return MachineCheck("Triton", "ok", "compiles kernels")
    return MachineCheck("Triton", "warning", "not installed; training on the GPU is slower", "Run: pip install triton")
