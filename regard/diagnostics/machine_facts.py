"""Facts about the machine: versions, processor, memory, disks, environment variables. None of them imports torch."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from regard.optional_packages import declared_requirements
from regard.version import __version__

# Instruction sets that matrix products use, as /proc/cpuinfo names them.
_INSTRUCTIONS = """
    avx2 fma f16c avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_int8 amx_bf16 amx_fp16
    asimd asimddp sve sve2 bf16 i8mm
"""
_VARIABLES = """
    CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUBLAS_WORKSPACE_CONFIG PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    TORCH_LOGS TORCHDYNAMO_DISABLE TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TRITON_INTERPRET NUMBA_CACHE_DIR
    NUMBA_DISABLE_JIT ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ATEN_CPU_CAPABILITY MKL_NUM_THREADS OMP_NUM_THREADS
    OMP_PROC_BIND KMP_AFFINITY GOMP_CPU_AFFINITY LD_PRELOAD LD_LIBRARY_PATH MALLOC_ARENA_MAX NCCL_DEBUG
    NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME MASTER_ADDR RANK WORLD_SIZE LOCAL_RANK SLURM_JOB_ID TMPDIR PYTHONPATH
    PYTHONHASHSEED LANG LC_ALL
"""
_CGROUP_MEMORY = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_CPU = "/sys/fs/cgroup/cpu.max"


def describe_versions() -> dict[str, str]:
    """Versions of Regard, Python, the operating system and the packages that Regard uses.

    >>> list(describe_versions())[:3]
    ['regard', 'Python', 'operating system']
    """
    versions = {
        "regard": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "operating system": f"{platform.system()} {platform.release()} {platform.machine()}, {_system_library()}",
    }
    return versions | {
        name: installed_version(name) or "not installed" for name in sorted({"triton", *_package_names()})
    }


def _system_library() -> str:
    with contextlib.suppress(OSError, KeyError):
        release = platform.freedesktop_os_release()
        return f"{release['PRETTY_NAME']}, {' '.join(platform.libc_ver()).strip()}"
    return " ".join(platform.libc_ver()).strip() or platform.version()


def _package_names() -> set[str]:
    return {requirement.name for requirement in declared_requirements() if requirement.name != "regard"}


def installed_version(name: str) -> str:
    """Version of an installed package; empty if it is not installed.

    >>> installed_version("no-such-package")
    ''
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def describe_hardware() -> dict[str, str]:
    """Processor, cores, memory, and free space of the folders that Regard writes to."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = f"{os.cpu_count()}, of which this process may use {affinity}"
    if quota := _cpu_quota():
        cores += f" (container limit {quota:g})"
    flags = cpu_flags()
    return {
        "processor": processor_name(),
        "instruction sets": " ".join(name for name in _INSTRUCTIONS.split() if name in flags) or "unknown",
        "cores": cores,
        "memory": _describe_memory(),
        "disk, current folder": _describe_disk("."),
        "disk, temporary folder": _describe_disk(tempfile.gettempdir()),
    }


def processor_name() -> str:
    """Name of the processor."""
    match = re.search(r"^(model name|Model)\s*: (.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[2].strip() if match else platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets and features that the processor reports; empty if they are unknown."""
    match = re.search(r"^(flags|Features)\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(match[2].split()) if match else frozenset()


def _describe_memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    text = _gib(total)
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE):
        text += f", {_gib(int(match[1]) * 1024)} available"
    limits = [int(limit) for path in _CGROUP_MEMORY if (limit := _read(path).strip()).isdecimal()]
    if limits and min(limits) < total:
        text += f" (container limit {_gib(min(limits))})"
    return text


def _cpu_quota() -> float | None:
    """Number of cores that the container may use; None without a limit."""
    match = re.match(r"(\d+) (\d+)", _read(_CGROUP_CPU))
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def free_disk(folder: str) -> int | None:
    """Free bytes on the disk of a folder; None if they are unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _describe_disk(folder: str) -> str:
    free = free_disk(folder)
    return "unknown" if free is None else f"{_gib(free)} free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def describe_environment() -> dict[str, str]:
    """Environment variables that affect Regard."""
    return {name: os.environ[name] for name in sorted(_VARIABLES.split()) if name in os.environ}


def private_names() -> list[str]:
    """Names of the user and of the machine."""
    names = [socket.gethostname(), platform.node(), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")]
    with contextlib.suppress(Exception):  # no entry in the list of users
        import pwd

        names.append(pwd.getpwuid(os.getuid()).pw_name)
    return sorted({name for name in names if name})


def redact(text: str, names: Iterable[str] | None = None) -> str:
    """The text with the home folder as ~, and the names of the user and of the machine replaced where they are part of
    a path or follow an @.

    >>> redact("/data/ada/cache on ada@node7", names=["ada", "node7"])
    '/data/…/cache on …@…'
    """
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
    for name in private_names() if names is None else names:
        word = re.escape(name)
        text = re.sub(rf"(?<=[/\\@]){word}(?![\w-])|(?<![\w-]){word}(?=@)", "…", text)
    return text
