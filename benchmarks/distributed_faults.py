"""Distributed fault test: killed ranks and a cut link; the run recovers by itself, with the weights of a quiet run.

    python benchmarks/distributed_faults.py --faults kill link

Two torchrun agents with one rank each train a small model. Each agent is in a network namespace of its own, as on a
host of its own, and the two are connected by a virtual cable (needs root and `ip`; without them, both agents run on the
loopback interface, and only ranks are killed). `kill`: ranks 1 and 0 are killed with SIGKILL, one after the other;
torchrun restarts both, and the run resumes from its last checkpoint. `link`: the cable is cut for some seconds; TCP
repeats what was lost. At the end the weights must be identical to those of a run without faults. Prints a Markdown
table; exit status 1 means a difference.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    from benchmarks.kill_test import child_processes
except ImportError:  # run as a script
    from kill_test import child_processes


RECIPE = """
[data]
files = ["phrasebook"]
limit = 400
[tokenizer]
vocab_size = 150
[model]
width = 32
heads = 2
feedforward = 64
encoder_layers = 1
decoder_layers = 1
max_len = 40
dropout = 0.1
[train]
batch_tokens = 256
steps = {steps}
warmup = 10
save_every = 5
validate_every = 1000
log_every = 1
device = "cpu"
precision = "float32"
"""
NAMES = ("regard-0", "regard-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces() -> Iterator[bool]:
    """Two network namespaces connected by a virtual cable; False where that is not permitted."""
    try:
        for name in NAMES:
            run_ip("netns", "add", name)
        run_ip("link", "add", "regard-a", "netns", NAMES[0], "type", "veth", "peer", "regard-b", "netns", NAMES[1])
        for name, link, address in zip(NAMES, ("regard-a", "regard-b"), ADDRESSES):
            for command in (["addr", "add", f"{address}/24", "dev", link], ["link", "set", link, "up"]):
                run_ip("-n", name, *command)
            run_ip("-n", name, "link", "set", "lo", "up")
        is_permitted = True
    except (OSError, subprocess.CalledProcessError):
        is_permitted = False
    try:
        yield is_permitted
    finally:
        for name in NAMES:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                run_ip("netns", "del", name)


def find_rank(agent: int, rank: int) -> list[int]:
    """The processes that a torchrun agent started for a rank: one, or none."""
    found = []
    for child in child_processes(agent):
        with contextlib.suppress(OSError):
            if b"RANK=%d" % rank in (child / "environ").read_bytes().split(b"\0"):
                found.append(int(child.name))
    return found


class Cluster:
    """Two torchrun agents that train together, each in its namespace if there are namespaces."""

    def __init__(self, recipe: Path, out: Path, isolated: bool, sharding: str, port: int) -> None:
        address = ADDRESSES[0] if isolated else "127.0.0.1"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
        train = ["-m", "regard", "train", str(recipe), "--out", str(out), "--quiet", "--train.sharding", sharding]
        self.agents = []
        for index, name in enumerate(NAMES):
            link = ("regard-a", "regard-b")[index] if isolated else "lo"
            prefix = ["ip", "netns", "exec", name] if isolated else []
            local = ["--local-addr", ADDRESSES[index] if isolated else "127.0.0.1"]
            is_host = ["--rdzv-conf", f"is_host={int(index == 0)}"]
            self.agents.append(
                subprocess.Popen(
                    [*prefix, *command, *local, *is_host, *train],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"},
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def rank_process(self, rank: int) -> int | None:
        """The process of a rank: a child of an agent with this RANK in its environment."""
        return next((process for agent in self.agents for process in find_rank(agent.pid, rank)), None)

    def finish(self, timeout: float) -> None:
        """Wait for both agents; an agent that fails or takes too long is an error."""
        deadline = time.monotonic() + timeout
        try:
            for agent in self.agents:
                _, errors = agent.communicate(timeout=max(1.0, deadline - time.monotonic()))
                if agent.returncode:
                    raise SystemExit(f"torchrun ended with status {agent.returncode}:\n{errors[-3000:]}")
        finally:
            self.stop()

    def stop(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)


def steps_done(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def wait_for_step(out: Path, step: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while steps_done(out) < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"no progress: {steps_done(out)} of {step} steps after {timeout:.0f} s")
        time.sleep(0.01)


def inject(cluster: Cluster, out: Path, fault: str, steps: int, timeout: float, seconds: float) -> None:
    if fault == "kill":
        for rank, step in ((1, steps // 4), (0, steps // 2)):
            wait_for_step(out, step, timeout)
            process = cluster.rank_process(rank)
            assert process is not None, f"rank {rank} is not running"
            os.kill(process, signal.SIGKILL)
            time.sleep(1)  # the log is truncated to the last checkpoint when the run resumes
    if fault == "link":
        wait_for_step(out, steps // 3, timeout)
        run_ip("-n", NAMES[1], "link", "set", "regard-b", "down")
        time.sleep(seconds)
        run_ip("-n", NAMES[1], "link", "set", "regard-b", "up")


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=["kill", "link"], default=["kill", "link"])
    parser.add_argument("--sharding", choices=["none", "fsdp"], default="none")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=5.0, help="time that the link is down")
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--loopback", action="store_true", help="use no network namespaces")
    options = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        isolated = not options.loopback and stack.enter_context(namespaces())
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE.format(steps=options.steps), encoding="utf-8")
        where = "two network namespaces" if isolated else "the loopback interface"
        print(f"| fault | sharding | hosts | same weights | seconds |\n{'| --- ' * 5}|")
        for index, fault in enumerate(["none", *options.faults]):
            if fault == "link" and not isolated:
                continue
            out, start = Path(folder) / fault, time.monotonic()
            cluster = Cluster(recipe, out, isolated, options.sharding, 29400 + os.getpid() % 1000 + index)
            try:
                inject(cluster, out, fault, options.steps, options.timeout, options.seconds)
                cluster.finish(options.timeout)
            finally:
                cluster.stop()
            equal = digest(out) == digest(Path(folder) / "none")
            same &= equal
            spent = time.monotonic() - start
            print(f"| {fault} | {options.sharding} | {where} | {'yes' if equal else 'NO'} | {spent:.0f} |", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
