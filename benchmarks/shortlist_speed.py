"""Speed of decoding with a vocabulary shortlist, with random weights and lists.

    python benchmarks/shortlist_speed.py [--shape small] [--rounds 7]

Decodes 64 sentences on one thread with and without shortlist, in turn, and prints a Markdown table of the median CPU
time. A sentence may contain about 100 tokens of its own and 200 frequent ones. The tokens of all sentences together,
for which the output layer is computed, are about a tenth of the vocabulary or about half of it.
"""

import argparse
import dataclasses
import random
import statistics
import time

import numpy as np
import torch
from decoding import SHAPES

from regard.data.text.special_tokens import SEQ2SEQ_TOKENS
from regard.decode import DecodeConfig, Request, Shortlist, decode_all
from regard.models import make_model

SENTENCES, FREQUENT, PER_TOKEN = 64, 200, 7
POOLS = (600, None)  # tokens from which the lists are drawn; None: all


def make_shortlist(vocabulary: int, pool: int | None) -> Shortlist:
    rng = np.random.default_rng(0)
    tokens = np.arange(4, vocabulary) if pool is None else rng.choice(np.arange(4, vocabulary), pool, replace=False)
    targets = rng.choice(tokens, (vocabulary, PER_TOKEN)).astype(np.int32)
    return Shortlist(targets, rng.choice(np.arange(4, vocabulary), FREQUENT).astype(np.int32), vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("small", "base"), default="small")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = SHAPES["cpu"][options.shape]
    model = make_model(shape.config()).eval()
    rng = random.Random(0)
    sources = [[*rng.choices(range(4, shape.vocabulary), k=shape.source - 1), 3] for _ in range(SENTENCES)]
    shortlists = [None, *(make_shortlist(shape.vocabulary, pool) for pool in POOLS)]

    def measure(config: DecodeConfig, shortlist: Shortlist | None) -> float:
        config = dataclasses.replace(config, shortlist=shortlist is not None)
        start = time.process_time()
        decode_all(model, Request(sources, config, special=SEQ2SEQ_TOKENS, shortlist=shortlist))
        return time.process_time() - start

    print("| precision, search | tokens per list | all lists | CPU time, ms | speed |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for precision in ("float32", "int8"):
        for beam in (1, 5):
            config = dataclasses.replace(shape.decode_config(beam), precision=precision)
            times = [[measure(config, shortlist) for shortlist in shortlists] for _ in range(options.rounds + 1)][1:]
            medians = [statistics.median(column) for column in zip(*times)]
            for shortlist, median in zip(shortlists, medians):
                size = total = shape.vocabulary
                if shortlist is not None:
                    lists = [shortlist.allowed_tokens(source, SEQ2SEQ_TOKENS) for source in sources]
                    size, total = round(sum(map(len, lists)) / SENTENCES), len(np.unique(np.concatenate(lists)))
                search = "greedy" if beam == 1 else f"beam {beam}"
                speed = medians[0] / median
                print(
                    f"| {precision}, {search} | {size:,} | {total:,} | {1000 * median:.0f} | {speed:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
