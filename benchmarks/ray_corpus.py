"""Corpus on a Ray cluster of two local nodes: every line exactly once, in order, although a worker is killed.

    python benchmarks/ray_corpus.py --lines 100000

Trains a tiny translator of number words, translates a file in this process, and again with `cluster="ray"` on two nodes
with one CPU each; at a third of the lines, one of the two workers is killed with SIGKILL. The output must be identical,
byte for byte. Prints a Markdown table. Exit status 1 means a difference.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

import regard
from regard.pipelines import Translator
from regard.pipelines.files import FileProgress

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
FRENCH = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix"]
SIZES = {"width": 64, "heads": 4, "feedforward": 128, "encoder_layers": 1, "decoder_layers": 1, "max_len": 32}


def number_lines(count: int, seed: int) -> list[tuple[str, str]]:
    """Lines such as "one two" with their translations "deux un"."""
    draw = random.Random(seed)
    rows = [draw.choices(range(10), k=draw.randint(2, 8)) for _ in range(count)]
    return [(" ".join(ENGLISH[i] for i in row), " ".join(FRENCH[i] for i in reversed(row))) for row in rows]


def train(folder: Path, steps: int) -> Translator:
    pairs = "".join(f"{source}\t{target}\n" for source, target in number_lines(20_000, seed=1))
    (folder / "pairs.tsv").write_text(pairs)
    return regard.train(
        folder / "pairs.tsv",
        out=folder / "model",
        tokenizer={"kind": "word"},
        model=SIZES,
        steps=steps,
        workers=1,
        device="cpu",
        quiet=True,
    )


def worker_pids() -> list[int]:
    """The processes of Ray actors of Regard."""
    names = {folder: folder / "cmdline" for folder in Path("/proc").glob("[0-9]*")}
    return [int(folder.name) for folder, name in names.items() if name.read_bytes().startswith(b"ray::_Actor")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the translator")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    killed_at: list[int] = []

    def kill_worker(progress: FileProgress) -> None:
        if progress.items >= arguments.lines // 3 and not killed_at:
            os.kill(worker_pids()[0], signal.SIGKILL)
            killed_at.append(progress.items)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        translator = train(folder, arguments.steps)
        pairs = number_lines(arguments.lines, seed=2)
        (folder / "corpus.en").write_text("".join(f"{source}\n" for source, _ in pairs))
        config = regard.DecodeConfig(beam=2)
        alone = translator.translate_file(folder / "corpus.en", folder / "alone.fr", config)
        node = {"num_cpus": 1, "object_store_memory": 200 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        start = time.perf_counter()
        translator.translate_file(folder / "corpus.en", folder / "ray.fr", config, cluster="ray", progress=kill_worker)
        seconds = time.perf_counter() - start
        ray.shutdown()
        cluster.shutdown()
        output = (folder / "ray.fr").read_text()
        is_identical = output == (folder / "alone.fr").read_text()
        correct = sum(line == target for line, (_, target) in zip(output.splitlines(), pairs))
    print("| lines | lines in the output | worker killed at line | identical | correct | lines/s | one process |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    print(
        f"| {arguments.lines:,} | {output.count(chr(10)):,} | {''.join(f'{n:,}' for n in killed_at)} "
        f"| {'yes' if is_identical else 'NO'} | {correct / arguments.lines:.1%} "
        f"| {arguments.lines / seconds:,.0f} | {arguments.lines / alone.seconds:,.0f} |"
    )
    return 0 if is_identical and killed_at else 1


if __name__ == "__main__":
    sys.exit(main())
