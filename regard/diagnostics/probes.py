"""Probes: small computations in a process of their own, which may crash. python -m regard.diagnostics.probes cpu|gpu

A probe prints JSON objects: before each step {"step": name}, then its facts; {"error": message} if a step fails. A
process that dies without an error crashed in the last step it printed.
"""

import json
import os
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

FINISHED = "finished"


class ProbeResult(NamedTuple):
    """The end of a probe: facts, the last step it started, its error message, and its exit code (negative: signal)."""

    facts: dict[str, Any]
    step: str
    error: str
    exit_code: int | None
    """None if it did not end in time"""


class Probe:
    """A probe that runs in the background until `result` waits for it."""

    def __init__(self, name: str, **variables: str) -> None:
        # The probe must import this copy of the package, and none of the current folder.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "regard.diagnostics.probes", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **variables},
        )

    def result(self, timeout: float) -> ProbeResult:
        """Wait for the end of the probe, at most `timeout` seconds."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
            exit_code: int | None = self.process.returncode
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            exit_code = None
        facts: dict[str, Any] = {}
        for line in output.decode(errors="replace").splitlines():
            try:
                facts |= json.loads(line)
            except (ValueError, TypeError):  # printed by a library
                continue
        return ProbeResult(facts, str(facts.pop("step", "start")), str(facts.pop("error", "")), exit_code)


def _report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _probe_cpu() -> None:
    _report(step="import torch")
    import torch

    _report(torch=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads())
    torch.set_num_threads(1)
    for name, dtype in (("bfloat16 product", torch.bfloat16), ("int8 product", torch.int8)):
        _report(step=name)
        x = torch.ones(64, 64, dtype=dtype)
        y = torch._int_mm(x, x.t()) if dtype == torch.int8 else torch.nn.functional.linear(x, x)
        if not bool((y == 64).all()):
            raise ValueError(f"the {name} of ones is wrong")


def _probe_gpu() -> None:
    _report(step="start CUDA")
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    _report(cuda=torch.version.cuda, driver_cuda=_driver_cuda_version(), available=available)
    if not available:
        messages = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
        raise RuntimeError(" ".join(messages) or "torch finds no CUDA device")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(len(names))]
    _report(gpus=[f"{name}, {size / 2**30:.0f} GiB" for name, size in zip(names, sizes)])
    _report(step="product on the GPU")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, dtype=dtype, device="cuda")
        if not bool((x @ x == 64).all()):
            raise ValueError(f"the {dtype} product of ones is wrong")
    from regard.kernels.triton.support import triton_available

    if triton_available():
        _report(step="Triton kernel")
        from regard.kernels.triton.linear_relu import relu_backward

        relu_backward(x, x)[1].cpu()


def _driver_cuda_version() -> str:
    """The newest CUDA version that the driver supports, such as 12.4."""
    import torch

    try:
        version = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return "unknown"
    return f"{version // 1000}.{version % 1000 // 10}"


def main(name: str) -> int:
    """Run a probe; the exit code is 1 if a step fails."""
    try:
        {"cpu": _probe_cpu, "gpu": _probe_gpu}[name]()
    except Exception as error:  # whatever a broken installation raises
        _report(error=f"{type(error).__name__}: {error}"[:500])
        return 1
    _report(step=FINISHED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
