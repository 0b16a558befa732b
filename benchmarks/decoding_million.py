"""Translate a large file: lines per second and peak memory.

    python benchmarks/decoding_million.py MODEL --corpus train.en.gz --device cuda --method greedy

Writes a file of --lines lines (by default 1,000,000): those of the corpus, in random order, repeated as often as
needed. Translates it with `translate_file`, after a file of a tenth of the lines, which compiles kernels and shows
whether memory depends on the size. Prints a Markdown table with a row for each file. The memory is that of the main
process; worker processes on a CPU are not included.
"""

import argparse
import os
import random
import resource
import tempfile
import time
from pathlib import Path

import torch
from gpu_common import table

from regard.data import read_pairs
from regard.data.text.readers import read_lines
from regard.decode import DecodeConfig
from regard.pipelines import Translator, load
from regard.pipelines.files import FileProgress

HEADER = ["lines", "lines/s", "words/s", "seconds", "peak MiB", "peak MiB of the GPU"]
# Seconds between two lines of progress.
INTERVAL = 10.0


def write_shuffled(path: Path, lines: list[str], count: int, seed: int = 0) -> None:
    """Write `count` lines: all lines, repeated, each repetition in another random order."""
    draw = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        while count > 0:
            order = draw.sample(lines, min(len(lines), count))
            file.writelines(f"{line}\n" for line in order)
            count -= len(order)


class ProgressLines:
    """Prints the number of lines that are done, every few seconds."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def __call__(self, progress: FileProgress) -> None:
        now = time.perf_counter()
        if now - self.last >= INTERVAL:
            self.last = now
            print(progress, flush=True)


def translate(translator: Translator, source: Path, output: Path, config: DecodeConfig) -> list[str]:
    """Translate a file and remove the output; returns the row of the table."""
    on_gpu = translator.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    summary = translator.translate_file(source, output, config, progress=ProgressLines())
    written = words = 0
    with open(output, encoding="utf-8") as file:
        for line in file:
            written += 1
            words += len(line.split())
    assert written == summary.items, f"{written} of {summary.items} lines"
    os.remove(output)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gpu_memory = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f}" if on_gpu else ""
    rates = [f"{summary.items / summary.seconds:,.0f}", f"{words / summary.seconds:,.0f}"]
    return [f"{summary.items:,}", *rates, f"{summary.seconds:.1f}", f"{memory:,.0f}", gpu_memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a translation model")
    parser.add_argument("--corpus", help="file with one text per line; default: the phrasebook")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", choices=("greedy", "beam"), default="beam")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    config = DecodeConfig(options.method, options.beam, precision=options.precision)
    lines = [line for line in read_lines(options.corpus) if line] if options.corpus else None
    lines = lines or [source for source, _ in read_pairs(["phrasebook"])[:20_000]]
    translator = load(options.model, options.device, expect=Translator)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (max(1, options.lines // 10), options.lines):
            source, output = (Path(folder, f"{count}.{side}") for side in ("source", "output"))
            write_shuffled(source, lines, count)
            rows.append(translate(translator, source, output, config))
    search = f"beam {options.beam}" if options.method == "beam" else "greedy"
    print(f"\n{search}, precision {options.precision}, {translator.device}, torch {torch.__version__}\n")
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
