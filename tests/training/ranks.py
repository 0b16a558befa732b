"""Processes with the environment that torchrun gives its ranks, forked from a server that has imported torch."""

import os
import socket
from collections.abc import Callable
from typing import Any

from tests.forkserver import CONTEXT


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Call `function(*arguments)` in `size` ranks on this machine, and return their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [CONTEXT.Process(target=_run, args=(rank, size, port, function, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def _run(rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    function(*arguments)
