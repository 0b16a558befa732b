"""Memory of preparation and training does not grow with the corpus."""

import json
import subprocess
import sys

import pytest

ROWS = {"first": 12_000, "small": 12_000, "large": 90_000}
# Prints how much the peak memory grows, in MiB, from the small corpus to the large one: while preparing, in training on
# shards, and in reading the same pairs into memory.
PROGRAM = """
import json, re, sys, threading
from pathlib import Path
import regard
from regard.data import read_pairs
from regard.training.shards import preparation
from regard.training.shards import encoder
from regard.training.shards import row_file
from regard.training.shards import preparation

preparation.TOKENIZER_BYTES, encoder.SHARD_BYTES = 200_000, 1 << 20
preparation.SAMPLE_SIZE, row_file.RECORD_ROWS, row_file.BLOCK_ROWS = 500, 8192, 1024
preparation.BUCKET_ROWS = 8192
encoder._count_cores = lambda: 1
tiny = dict(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, max_len=64)
folder = sys.argv[1]

def peak(work, size):
    # Pages of memory-mapped files, which the system can reclaim, do not count.
    values, stopped = [], threading.Event()
    def watch():
        while not stopped.wait(0.003):
            values.append(int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
    thread = threading.Thread(target=watch)
    thread.start()
    result = work(size)
    stopped.set()
    thread.join()
    return max(values)

def prepare(size):
    options = dict(tokenizer={"kind": "space", "vocab_size": 900}, validation=f"{folder}/validation.tsv", quiet=True)
    regard.prepare(f"{folder}/{size}.tsv", f"{folder}/{size}", **options)

def train(size):
    options = dict(steps=3, batch_tokens=1024, validate_by="loss", workers=1, quiet=True)
    regard.train(f"{folder}/{size}", f"{folder}/model-{size}", model=tiny, **options)

def read(size):
    return read_pairs([f"{folder}/{size}.tsv"])

growth = {}
for work in (prepare, train, read):
    _, small, large = (peak(work, size) for size in ("first", "small", "large"))  # the first one also grows the heap
    growth[work.__name__] = large - small
print(json.dumps(growth))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    for name, rows in (ROWS | {"validation": 20}).items():
        with open(tmp_path / f"{name}.tsv", "w", encoding="utf-8") as file:
            for row in range(rows):
                words = " ".join(f"w{row // 97**i % 97}" for i in range(3)) + " and so on" * 4
                file.write(f"{words}\t{words}\n")
    megabytes = (tmp_path / "large.tsv").stat().st_size >> 20
    output = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, capture_output=True, text=True)
    growth = json.loads(output.stdout)
    assert growth["prepare"] < megabytes, growth
    assert growth["train"] < megabytes, growth
    assert growth["read"] > 2 * megabytes, growth  # a corpus in memory shows in this measurement
