"""Several processes on one machine that train one model, each on its share of every update.

On a CPU two processes of one thread each are faster than one of two threads, and where something else wants a core they
are faster by far: threads inside an operation wait for each other hundreds of times a step, processes once.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import RegardError

# What a member runs. It is told what to do through its standard input, by the leader alone.
_MEMBER = "from regard.training.workers import follow; follow()"
# Nobody waits in vain, for the death of a member closes its connection; a validation may well take an hour.
_PATIENCE = timedelta(days=7)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass
class Team:
    """The leader (rank 0) or a member of a team; alone, a team of one."""

    rank: int = 0
    size: int = 1
    processes: list[subprocess.Popen] = field(default_factory=list)
    meeting_place: tempfile.TemporaryDirectory | None = None

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes, in place, its sum over the team; every member gets the same bits."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:
            raise RegardError(
                f"A process of the team has died while training ({str(error).splitlines()[0]}).",
                "Is there enough memory? The same command goes on from the last save.",
            ) from None
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        """The leader's end is the team's: members wait for nothing but it."""
        _end(self.processes)
        if self.size > 1:
            dist.destroy_process_group()
        if self.meeting_place is not None:
            self.meeting_place.cleanup()


def usable_workers(size: int) -> int:
    """The number of workers that can connect: `size`, or 1, with a note on stderr, without a loopback interface.

    >>> usable_workers(1)
    1
    """
    if size == 1 or has_loopback():
        return size
    print("regard: no loopback network interface, so training runs on 1 worker.", file=sys.stderr)
    return 1


def has_loopback() -> bool:
    """Whether processes on this machine can connect to each other; some containers have no loopback interface."""
    if os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK) != _LOOPBACK:  # another interface was chosen
        return True
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True


def lead(size: int, task: dict[str, Any]) -> Team:
    """Starts the workers, each of which calls `regard.training.trainer.work`, and joins them as rank 0.

    However this fails, Ctrl-C included, no process and no file is left behind.
    """
    if size == 1:
        return Team()
    if not has_loopback():
        raise RegardError(
            f"No loopback network interface: {size} workers cannot connect.",
            "Enable it (ip link set lo up), or start a new run with --train.workers 1.",
        )
    members: list[subprocess.Popen] = []
    place = tempfile.TemporaryDirectory(prefix="regard-")
    try:
        for rank in range(1, size):
            members.append(_start())
            _tell(members[-1], {"rank": rank, "size": size, "place": place.name, "task": task})
        for member in members:
            if not member.stdout.read(1):  # type: ignore[union-attr]
                raise _not_started(member)
        _join_members(size, place.name, members)
    except BaseException:
        _end(members)
        place.cleanup()
        raise
    return Team(0, size, members, place)


def _join_members(size: int, place: str, members: list[subprocess.Popen]) -> None:
    """Joins the process group in a thread, for that blocks: meanwhile the members are watched, and Ctrl-C works."""
    errors: list[BaseException] = []

    def join() -> None:
        try:
            _join(0, size, place)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=join, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        for member in members:
            if member.poll() is not None:
                raise _not_started(member)
    if errors:
        why = str(errors[0]).splitlines() or [type(errors[0]).__name__]
        raise RegardError(f"The workers could not connect ({why[0]}).", "Try again with --train.workers 1.")


def _not_started(member: subprocess.Popen) -> RegardError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        member.wait(timeout=5)  # its pipe may close a moment before it ends
    how = f"signal {-member.returncode}" if (member.returncode or 0) < 0 else f"status {member.returncode}"
    return RegardError(
        f"A worker process ended while starting ({how}).",
        "Is there enough memory? Otherwise try again with --train.workers 1.",
    )


def _start() -> subprocess.Popen:
    # A session of its own: Ctrl-C is for the leader, which then ends the team in good order.
    return subprocess.Popen(
        [sys.executable, "-c", _MEMBER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        start_new_session=True,
    )


def _tell(member: subprocess.Popen, order: dict[str, Any]) -> None:
    """Sends the order. The pipe stays open as long as the leader lives: that is how members learn of its death."""
    assert member.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the member is dead, which its silence will tell
        pickle.dump(order, member.stdin)
        member.stdin.flush()


def _end(members: list[subprocess.Popen]) -> None:
    for member in members:
        member.kill()
    for member in members:
        member.communicate()


def follow() -> None:
    """The life of a member: hear what to do, do it, and end with the leader."""
    from regard.training.trainer import work

    try:
        order = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # the leader ended before it had said what to do
        sys.exit(1)
    threading.Thread(target=_die_with_leader, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.write(sys.stdout.fileno(), b"!")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe any more
    try:
        _join(order["rank"], order["size"], order["place"])
    except RuntimeError:
        sys.exit(2)  # the leader meets the same error, or notices the end of this process
    try:
        work(Team(order["rank"], order["size"]), **order["task"])
    except RegardError:
        sys.exit(2)  # the leader meets the same error, and says it once


def _die_with_leader() -> None:
    """However the leader ends, by SIGKILL too, the system closes its end of the pipe."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _join(rank: int, size: int, place: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(place) / 'store'}", rank=rank, world_size=size, timeout=_PATIENCE
    )
