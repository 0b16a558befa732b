"""Several processes on one machine that train one model, each on its share of every update.

On a CPU two processes of one thread each are faster than one of two threads, and where something else wants a core they
are faster by far: threads inside an operation wait for each other hundreds of times a step, processes once.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What a member runs. It is told what to do through its standard input, by the leader alone.
_MEMBER = "from regard.train.team import follow; follow()"


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
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        """The leader's end is the team's: members wait for nothing but it."""
        for process in self.processes:
            process.kill()
            process.wait()
        if self.size > 1:
            dist.destroy_process_group()
        if self.meeting_place is not None:
            self.meeting_place.cleanup()


def lead(size: int, task: dict[str, Any]) -> Team:
    """Starts the members, each of which calls `regard.train.loop.work(team, **task)`, and joins them as the leader."""
    if size == 1:
        return Team()
    place = tempfile.TemporaryDirectory(prefix="regard-")
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    members = []
    for rank in range(1, size):
        # A session of its own: Ctrl-C is for the leader, which then ends the team in good order.
        member = subprocess.Popen(
            [sys.executable, "-c", _MEMBER], stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert member.stdin is not None
        pickle.dump(
            {"rank": rank, "size": size, "place": place.name, "leader": os.getpid(), "task": task}, member.stdin
        )
        member.stdin.close()
        members.append(member)
    _join(0, size, place.name)
    return Team(0, size, members, place)


def follow() -> None:
    """The life of a member: hear what to do, do it, and end with the leader."""
    from regard.train.loop import work

    order = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        _join(order["rank"], order["size"], order["place"])
        work(Team(order["rank"], order["size"]), **order["task"])
    except Exception:
        # When the leader is gone (killed, or done early) the connection breaks: nothing to say. Else it is an error.
        if os.getppid() == order["leader"]:
            raise


def _join(rank: int, size: int, place: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", init_method=f"file://{Path(place) / 'store'}", rank=rank, world_size=size)
