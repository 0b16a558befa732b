"""Prepare and train on a corpus larger than memory: speed and peak memory.

    python benchmarks/prepare_corpus.py --megabytes 500 5000 --folder /tmp/corpus

For each size, writes a TSV file of generated sentence pairs, runs `regard prepare` and a few steps of `regard train` on
the shards, each in its own process, and prints a row of a Markdown table. "Anonymous" is the peak of memory that the
system cannot reclaim, summed over a command and its processes; "resident" also counts pages of memory-mapped files,
which it can. Both are read every tenth of a second. Existing files of the right size are used again.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from gpu_common import table

HEADER = ["corpus", "pairs", "shards", "prepare", "anonymous", "resident", "training: anonymous", "resident"]
_STATUS = re.compile(r"^(RssAnon|VmRSS|PPid):\s+(\d+)", re.MULTILINE)


def write_corpus(path: Path, megabytes: int, seed: int = 0) -> None:
    """Write pairs of sentences of 4 to 30 generated words, whose frequencies follow Zipf's law."""
    draw = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlu"))
    words = np.array(["".join(draw.choice(letters, draw.integers(1, 10))) for _ in range(50_000)])
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 10**6:
            lengths = draw.integers(4, 31, 20_000)
            ids = np.minimum(draw.zipf(1.3, (2, lengths.sum())) - 1, len(words) - 1)
            ends = np.cumsum(lengths)
            for begin, end in zip(ends - lengths, ends):
                file.write(f"{' '.join(words[ids[0, begin:end]])}\t{' '.join(words[ids[1, begin:end]])}\n")


class MemoryPeak(threading.Thread):
    """Peak memory of a process and its descendants, in MiB."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.anonymous, self.resident, self.stopped = process, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            status = {}
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    try:
                        status[int(entry.name)] = dict(_STATUS.findall((entry / "status").read_text()))
                    except OSError:  # it has ended
                        continue
            family = {self.process}
            while more := {one for one, values in status.items() if int(values["PPid"]) in family} - family:
                family |= more
            sums = [
                sum(int(status.get(process, {}).get(name, 0)) for process in family) for name in ("RssAnon", "VmRSS")
            ]
            self.anonymous, self.resident = max(self.anonymous, sums[0] >> 10), max(self.resident, sums[1] >> 10)


def measure(*arguments: str) -> tuple[float, MemoryPeak]:
    """Run a command of regard; returns its seconds and its peak memory."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "regard", *arguments])
    peak = MemoryPeak(process.pid)
    peak.start()
    if process.wait():
        sys.exit(f"regard {' '.join(arguments)} failed.")
    peak.stopped.set()
    peak.join()
    return time.perf_counter() - start, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--folder", type=Path, default=Path("runs/prepare"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for megabytes in options.megabytes:
        corpus, shards, model = (options.folder / f"{name}-{megabytes}" for name in ("pairs.tsv", "shards", "model"))
        if not corpus.exists() or corpus.stat().st_size < megabytes * 10**6:
            write_corpus(corpus, megabytes)
        for folder in (shards, model):
            shutil.rmtree(folder, ignore_errors=True)
        seconds, preparing = measure("prepare", str(corpus), "--out", str(shards))
        settings = ["--steps", str(options.steps), "--train.workers", "2", "--batch-tokens", "4096"]
        sizes = [
            "--model.width",
            "64",
            "--model.heads",
            "4",
            "--model.encoder-layers",
            "1",
            "--model.decoder-layers",
            "1",
        ]
        _, training = measure(
            "train", str(shards), "--out", str(model), *settings, *sizes, "--train.validate-by", "loss"
        )
        size = os.path.getsize(corpus)
        with open(corpus, "rb") as file:
            pairs = sum(1 for _ in file)
        stored = sum(path.stat().st_size for path in shards.iterdir())
        rows.append(
            [
                f"{size / 1e9:.2f} GB",
                f"{pairs / 1e6:.1f} M",
                f"{stored / 1e9:.2f} GB",
                f"{size / 1e6 / seconds:.1f} MB/s",
                *(f"{peak:,} MiB" for peak in (preparing.anonymous, preparing.resident)),
                *(f"{peak:,} MiB" for peak in (training.anonymous, training.resident)),
            ]
        )
        print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
