"""How everything here is measured: in turns, medians, the machine's own ceilings first."""

import ctypes
import gc
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROUNDS = 5
TURN = 0.02
"""The least seconds of a turn: what is quicker is called several times."""

SIDE = {"cpu": 1024, "mps": 2048, "cuda": 8192}
"""Of the squares whose product is the ceiling."""


@dataclass(frozen=True)
class Row:
    """What one entrant did in one case. Without seconds, `note` says why there are none."""

    case: str
    entrant: str
    ours: bool = False
    length: int | None = None
    seconds: float | None = None
    memory: int | None = None
    """Peak of the memory in bytes, less what was there before the call."""
    rate: float | None = None
    """Work a second, in the row's unit."""
    unit: str = ""
    share: float | None = None
    """Of the machine's ceiling: 1.0 would be as fast as it can go."""
    note: str = ""


class Work(NamedTuple):
    """What a call has to do, whoever does it: the least operations and bytes, and what is counted as its rate."""

    flops: float = 0.0
    bytes: float = 0.0
    tanhs: float = 0.0
    amount: float | None = None
    """Of the unit's things; operations when not told."""
    unit: str = "FLOP/s"


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best: a large matrix product, a large copy (read and written), tanh in registers."""

    flops: float
    bytes: float
    tanhs: float | None = None
    machine: str = ""

    def least_seconds(self, work: Work) -> float:
        """The time below which nobody gets.

        >>> Ceilings(flops=100, bytes=10).least_seconds(Work(flops=200, bytes=50))
        5.0
        """
        return max(work.flops / self.flops, work.bytes / self.bytes, work.tanhs / self.tanhs if self.tanhs else 0.0)


class Entrant(NamedTuple):
    """A name, and a function that gets everything ready and gives the call to be timed.

    Raising `Cannot` says that it is no entrant here, and why.
    """

    name: str
    ready: Callable[[], Callable[[], Any]]
    ours: bool = False


class Cannot(Exception):
    """Why an entrant does not run: not installed, not supported, too large."""


def compare(
    case: str,
    entrants: Sequence[Entrant],
    work: Work,
    ceilings: Ceilings,
    device: torch.device,
    rounds: int = ROUNDS,
    length: int | None = None,
) -> list[Row]:
    """Times the entrants in turns, so that a machine's moods hit all alike; the median of each counts.

    Their order changes from round to round: nobody always comes after the same one.

    >>> cpu = torch.device("cpu")
    >>> rows = compare("nothing", [Entrant("ours", lambda: lambda: None)], Work(), Ceilings(1, 1), cpu, rounds=1)
    >>> rows[0].seconds < 1
    True
    """
    calls: dict[str, tuple[Callable[[], Any], int, int | None]] = {}
    rows: dict[str, Row] = {}
    for entrant in entrants:
        try:
            call = entrant.ready()
            call()  # compilers and caches
            began = time.perf_counter()
            memory = peak_memory(call, device)
            once = time.perf_counter() - began
            calls[entrant.name] = call, max(1, min(1000, round(TURN / max(once, 1e-7)))), memory
        except Exception as error:  # whatever a peer cannot do is a row of the table
            rows[entrant.name] = Row(case, entrant.name, entrant.ours, length, note=_why(error))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        first = turn // 2 % max(1, len(calls))
        order = [*calls][first:] + [*calls][:first]
        for name in order[:: -1 if turn % 2 else 1]:
            call, times, _ = calls[name]
            found[name].append(_seconds(call, times, device) / times)
    for entrant in entrants:
        if entrant.name not in calls:
            continue
        seconds = statistics.median(found[entrant.name])
        least = ceilings.least_seconds(work)
        amount = work.flops if work.amount is None else work.amount
        rows[entrant.name] = Row(
            case,
            entrant.name,
            entrant.ours,
            length,
            seconds,
            calls[entrant.name][2],
            amount / seconds if amount else None,
            work.unit,
            least / seconds if least else None,
        )
    return [rows[entrant.name] for entrant in entrants]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Times a large matrix product and a large copy."""
    size = SIDE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    product = _best(lambda: torch.mm(a, a, out=out), device)
    # Far larger than any cache.
    source = torch.empty(64 * size * size // a.element_size(), dtype=torch.float32, device=device)
    source.fill_(1.0)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device)
    return Ceilings(
        2 * size**3 / product, 2 * source.nbytes / copy, _tanhs(device), machine=describe_machine(device, dtype)
    )


def _tanhs(device: torch.device) -> float | None:
    """How many tanh a second: on a CPU by trying, in its cache; on a GPU from its special-function units."""
    if device.type == "cpu":
        x = torch.randn(1 << 14)
        return x.numel() * torch.get_num_threads() / _best(x.tanh, device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        clock = getattr(properties, "clock_rate", None)  # kHz; torch tells it from 2.8 on
        # 16 results a clock and multiprocessor, on all of NVIDIA's cards since Volta.
        return 16 * properties.multi_processor_count * clock * 1e3 if clock else None
    return None


def _best(call: Callable[[], Any], device: torch.device) -> float:
    for _ in range(3):
        call()
    times = max(1, round(TURN / max(_seconds(call, 1, device), 1e-7)))
    return min(_seconds(call, times, device) / times for _ in range(15))


def _seconds(call: Callable[[], Any], times: int, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Until a GPU has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes that are in use during a call, less those in use before; None where the system does not tell."""
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        wait_for(device)
        return torch.cuda.max_memory_allocated(device) - before
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if device.type != "cpu" or not marks.exists():
        return None
    # What the C library keeps of freed memory would hide what a call takes.
    ctypes.CDLL(None).malloc_trim(0)
    marks.write_text("5")  # forgets the peak so far
    before = _kibibytes(status, "VmRSS")
    call()
    return max(0, _kibibytes(status, "VmHWM") - before) * 1024


def _kibibytes(status: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", told.read_text(), re.MULTILINE) if told.exists() else None
    return int(found[1]) * 1024 if found else 4 << 30


def describe_machine(device: torch.device, dtype: torch.dtype) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_processor()}, {_threads()}"
    return f"{where}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", told.read_text(), re.MULTILINE) if told.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def _why(error: Exception) -> str:
    """What kept an entrant from running, in a few words."""
    if isinstance(error, Cannot):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:100]
