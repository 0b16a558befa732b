"""Kill test: a run that is killed with SIGKILL repeatedly ends with the same weights as an uninterrupted one.

    python benchmarks/kill_test.py --kills 20

`regard train` runs a small training in a separate process. A third of the kills happen inside a save (when a partially
written file appears), a third at a random time after a random step, a third at a random time after the start of the
process, possibly before training. After each kill the same command is run again. At the end every file with weights
(the best model, and the training state with optimizer moments and averages) must be identical to that of a run without
kills, and no process may be left running. Prints a Markdown table. Exit status 1 means a difference.
"""

import argparse
import contextlib
import hashlib
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

RECIPE = """
task = "translate"

[data]
files = ["{data}"]
limit = 2000

[tokenizer]
vocab_size = 400
dropout = 0.1

[model]
width = {width}
heads = 4
feedforward = {feedforward}
encoder_layers = 2
decoder_layers = 2
dropout = 0.1
max_len = 64

[train]
steps = {steps}
batch_tokens = 512
accumulate = 2
ema = 0.99
warmup = 10
validate_every = {validate_every}
save_every = 4
log_every = 1
device = "cpu"
workers = {workers}
"""
COMMAND = "import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Tally:
    """Results of the kills."""

    kills: int = 0
    inside_a_save: int = 0
    left_behind: int = 0


def start_training(recipe: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", COMMAND, "train", str(recipe), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def partial_files(out: Path) -> set[tuple[Path, int]]:
    """Files of an unfinished save and folders of unfinished checkpoints, each with its modification time."""
    parts = {part for pattern in ("*.part", "state/*/*.part") for part in out.glob(pattern)}
    parts |= {folder for folder in out.glob("state/step-*") if not (folder / "checksums.json").exists()}
    found = set()
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            found.add((part, part.stat().st_mtime_ns))
    return found


def progress(out: Path) -> int:
    """Number of training steps and validations in the log."""
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_kill(process: subprocess.Popen, out: Path, rng: random.Random, aim: str, steps: int) -> None:
    """Return at the time of the kill, or when the process has ended; outside a save, after `steps` steps at most."""
    if aim == "save":
        before = partial_files(out)  # left by the previous kill
        for skipped in reversed(range(rng.randint(1, 3))):
            while process.poll() is None and not partial_files(out) - before:
                time.sleep(0.001)
            while skipped and process.poll() is None and partial_files(out) - before:
                time.sleep(0.001)
    if aim == "training":
        wait(process, out, rng.randint(1, steps))
        time.sleep(rng.uniform(0, 0.1))
    if aim == "start":
        wait(process, out, steps, rng.uniform(0.5, 8))


def wait(process: subprocess.Popen, out: Path, steps: int, seconds: float = math.inf) -> None:
    """Wait for the end of the process, for `steps` steps or for `seconds` seconds."""
    end, last = time.monotonic() + seconds, progress(out) + steps
    while process.poll() is None and time.monotonic() < end and progress(out) < last:
        time.sleep(0.002)


def child_processes(parent_id: int) -> list[Path]:
    """Child processes of a process, as folders in /proc (only on Linux)."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == parent_id:
            children.append(status.parent)
    return children


def is_alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def count_survivors(children: list[Path], timeout: float = 5.0) -> int:
    """Number of child processes that are still running after `timeout` seconds."""
    end = time.monotonic() + timeout
    while any(map(is_alive, children)) and time.monotonic() < end:
        time.sleep(0.01)
    return sum(map(is_alive, children))


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of the files with weights: the best model, and the last checkpoint."""
    checkpoint = max(out.glob("state/step-*/state.safetensors"))
    files = (out / "model.safetensors", checkpoint)
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"Training ended with status {process.returncode}:\n{errors}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="number of training processes (default 2)")
    parser.add_argument(
        "--steps",
        type=int,
        default=240,
        help="training steps, enough that the run does not end before the last kill (default 240)",
    )
    parser.add_argument(
        "--width", type=int, default=128, help="width of the model: saves of larger models take longer (default 128)"
    )
    parser.add_argument("--data", default="phrasebook", help="file of sentence pairs (default: the phrasebook)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the times of the kills (default 1)")
    options = parser.parse_args()
    start_time, rng, tally = time.monotonic(), random.Random(options.seed), Tally()
    with tempfile.TemporaryDirectory(prefix="regard-kill-") as name:
        folder = Path(name)
        recipe = folder / "recipe.toml"
        values = dict(steps=options.steps, validate_every=max(10, options.steps // 4), workers=options.workers)
        values |= dict(data=options.data, width=options.width, feedforward=4 * options.width)
        recipe.write_text(RECIPE.format(**values), encoding="utf-8")
        finish(start_training(recipe, folder / "uninterrupted"))
        expected = digests(folder / "uninterrupted")
        out = folder / "killed"
        while tally.kills < options.kills:
            aim = ("save", "training", "start")[tally.kills % 3]
            before = partial_files(out)
            process = start_training(recipe, out)
            wait_for_kill(process, out, rng, aim, max(1, options.steps // (2 * options.kills)))
            process.send_signal(signal.SIGSTOP)  # paused while its children are looked up
            children = child_processes(process.pid)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            if process.returncode != -signal.SIGKILL:
                print(f"The run ended after {tally.kills} kills; increase --steps.", file=sys.stderr)
                break
            tally.kills += 1
            is_inside_save = bool(partial_files(out) - before)
            tally.inside_a_save += is_inside_save
            tally.left_behind += count_survivors(children)
            print(f"kill {tally.kills}, {aim}{', inside a save' * is_inside_save}", file=sys.stderr)
        finish(start_training(recipe, out))
        found = digests(out)
        differs = [name for name in expected if found.get(name) != expected[name]]
        is_clean = not partial_files(out)
    if differs:
        print(f"Different: {', '.join(differs)}.", file=sys.stderr)
    passed = not differs and is_clean and tally.left_behind == 0 and tally.kills == options.kills
    print("| kills | inside a save | workers | processes left | identical | seconds |")
    print("| ---: | ---: | ---: | ---: | --- | ---: |")
    print(
        f"| {tally.kills} | {tally.inside_a_save} | {options.workers} | {tally.left_behind} "
        f"| {'NO' if differs else 'yes'} | {time.monotonic() - start_time:.0f} |"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
