"""The kill test: a run that is killed with SIGKILL again and again ends with the weights of one that never was.

    python benchmarks/kill_test.py --kills 20

A small training runs as `regard train` in a process of its own. A third of the kills are aimed inside a save (the
moment a file that is still being written appears), a third come at a random moment after training has begun, a third
at a random moment after the process has started, which may be long before that. After each kill the same command is
given again. At the end every file with weights (the best model, and the state with its moments and averages) must
have the same bytes as in a run without kills, and no process may have been left behind. Prints a row of Markdown.
Exit status 1 means that something differs.
"""

import argparse
import hashlib
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
files = ["phrasebook"]
phrasebook_size = 2000

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
log_every = 2
device = "cpu"
workers = {workers}
"""
WEIGHTS = ("model.safetensors", "state/last.safetensors")
COMMAND = "import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Tally:
    """What the kills met."""

    kills: int = 0
    inside_a_save: int = 0
    left_behind: int = 0


def start(recipe: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", COMMAND, "train", str(recipe), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def half_written(out: Path) -> set[tuple[Path, int]]:
    """The files that a save has begun and not ended, each with the time of its last change."""
    return {(part, part.stat().st_mtime_ns) for pattern in ("*.part", "state/*.part") for part in out.glob(pattern)}


def progress(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.stat().st_size if metrics.exists() else -1


def wait_for_the_moment(process: subprocess.Popen, out: Path, draw: random.Random, aim: str) -> None:
    """Returns at the moment of the kill, or when the process has ended by itself."""
    if aim == "save":
        part = out / (WEIGHTS[1] + ".part")
        part.unlink(missing_ok=True)  # of the save that the last kill met
        for skipped in reversed(range(draw.randint(1, 3))):
            while process.poll() is None and not part.exists():
                time.sleep(0.0002)
            while skipped and process.poll() is None and part.exists():
                time.sleep(0.0002)
    if aim == "training":
        before = progress(out)
        while process.poll() is None and progress(out) == before:
            time.sleep(0.002)
        wait(process, draw.uniform(0, 1.5))
    if aim == "start":
        wait(process, draw.uniform(0.5, 8))


def wait(process: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def members_of(leader: int) -> list[Path]:
    """The processes that a leader has started, as their folders in /proc (elsewhere than on Linux: none are seen)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == leader:
            found.append(status.parent)
    return found


def alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_alive(members: list[Path], patience: float = 5.0) -> int:
    """How many members outlive their leader for longer than that many seconds."""
    end = time.monotonic() + patience
    while any(map(alive, members)) and time.monotonic() < end:
        time.sleep(0.01)
    return sum(map(alive, members))


def digests(out: Path) -> dict[str, str]:
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in WEIGHTS}


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"The training ended with status {process.returncode}:\n{errors}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="processes that train together (default 2)")
    parser.add_argument("--steps", type=int, default=240, help="enough for the run not to end before the last kill")
    parser.add_argument("--width", type=int, default=128, help="of the model: larger ones are longer in a save")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    options = parser.parse_args()
    began, draw, tally = time.monotonic(), random.Random(options.seed), Tally()
    with tempfile.TemporaryDirectory(prefix="regard-kill-") as name:
        folder = Path(name)
        recipe = folder / "recipe.toml"
        sizes = dict(width=options.width, feedforward=4 * options.width, workers=options.workers)
        recipe.write_text(
            RECIPE.format(steps=options.steps, validate_every=max(10, options.steps // 4), **sizes), encoding="utf-8"
        )
        finish(start(recipe, folder / "whole"))
        expected = digests(folder / "whole")
        out = folder / "killed"
        while tally.kills < options.kills:
            aim = ("save", "training", "start")[tally.kills % 3]
            before = half_written(out)
            process = start(recipe, out)
            wait_for_the_moment(process, out, draw, aim)
            process.send_signal(signal.SIGSTOP)  # the moment stands still while its members are looked up
            members = members_of(process.pid)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            if process.returncode != -signal.SIGKILL:
                print(f"The run was over after {tally.kills} kills; raise --steps.", file=sys.stderr)
                break
            tally.kills += 1
            met_a_save = bool(half_written(out) - before)
            tally.inside_a_save += met_a_save
            tally.left_behind += left_alive(members)
            print(f"kill {tally.kills}, {aim}{', inside a save' * met_a_save}", file=sys.stderr)
        finish(start(recipe, out))
        differs = [name for name, digest in digests(out).items() if digest != expected[name]]
        clean = not half_written(out)
    if differs:
        print(f"Different: {', '.join(differs)}.", file=sys.stderr)
    good = not differs and clean and tally.left_behind == 0 and tally.kills == options.kills
    print("| kills | inside a save | workers | processes left behind | same bits | seconds |")
    print("| ---: | ---: | ---: | ---: | --- | ---: |")
    print(
        f"| {tally.kills} | {tally.inside_a_save} | {options.workers} | {tally.left_behind} "
        f"| {'NO' if differs else 'yes'} | {time.monotonic() - began:.0f} |"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
