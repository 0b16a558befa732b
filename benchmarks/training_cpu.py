"""Training on a CPU: tokens per second, against Hugging Face Marian, nn.Transformer and x-transformers.

    python benchmarks/training_cpu.py --rounds 3

`regard bench training` with more steps and rounds. All models have width 256, 3+3 layers, feed-forward 1024, vocabulary
8000; 4096 + 4096 tokens per step, sentences of 16.
"""

import argparse

from regard.bench import bench_training

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(bench_training("cpu", steps=options.steps, rounds=options.rounds))
