"""Training on a CPU: tokens a second beside Hugging Face Marian and torch's nn.Transformer of the same shape.

    python benchmarks/training_cpu.py --rounds 3

The shape: width 256, 3+3 layers, feed-forward 1024, vocabulary 8000, 4096 + 4096 tokens an update, sentences of 16.
Every entrant trains with Adam, gradient clipping and dropout 0.1, in float32, with the same allocator settings; peers
run as one process of all threads and as processes of one thread each whose speeds are added up (they exchange no
gradients, so this flatters them). Rounds alternate between the entrants; the median of each counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH, HEADS, LAYERS, FEEDFORWARD, VOCABULARY, LENGTH, TOKENS = 256, 4, 3, 1024, 8000, 16, 4096


def ours(steps: int) -> float:
    """Through `regard.train.train`, with everything that a user's run does, data and logging included."""
    import random

    from regard.data import Counts
    from regard.models import TransformerConfig
    from regard.train import Corpus, Recipe, TokenizerConfig, TrainConfig, train

    draw = random.Random(0)
    words = [f"w{i}" for i in range(VOCABULARY - 4)]
    lines = [" ".join(draw.choices(words, k=LENGTH - 1)) for _ in range(40_000)]
    pairs = list(zip(lines[::2], lines[1::2]))
    recipe = Recipe(
        tokenizer=TokenizerConfig(kind="space", vocab_size=VOCABULARY),
        model=TransformerConfig(width=WIDTH, heads=HEADS, feedforward=FEEDFORWARD, encoder_layers=LAYERS,
                                decoder_layers=LAYERS, max_len=64, norm="post"),
        train=TrainConfig(steps=steps, batch_tokens=TOKENS, log_every=1, validate_every=10**9, device="cpu"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        train(recipe, out, corpus=Corpus(pairs, pairs[:8], Counts(len(pairs))), quiet=True)
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return 2 * statistics.median(line["tokens_per_second"] for line in lines[2:] if line["kind"] == "train")


def peer(name: str, steps: int, tokens: int) -> float:
    import torch
    from torch import nn

    from regard.train.allocator import keep_freed_memory

    keep_freed_memory()
    if name == "marian":
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, dropout=0.1,
            encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=FEEDFORWARD,
            decoder_ffn_dim=FEEDFORWARD, max_position_embeddings=64, pad_token_id=0, eos_token_id=3,
            decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        model = MarianMTModel(config)

        def loss_of(source, target):
            return model(input_ids=source, decoder_input_ids=target, labels=target).loss
    else:
        model = nn.Module()
        model.embedding = nn.Embedding(VOCABULARY, WIDTH)
        model.positions = nn.Embedding(64, WIDTH)
        model.body = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, FEEDFORWARD, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

        def loss_of(source, target):
            place = model.positions(torch.arange(LENGTH))
            x = model.body(
                model.embedding(source) + place, model.embedding(target) + place, tgt_mask=mask, tgt_is_causal=True
            )
            return nn.functional.cross_entropy((x @ model.embedding.weight.T).flatten(0, 1), target.flatten())

    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(steps):
        source, target = (torch.randint(4, VOCABULARY, (tokens // LENGTH, LENGTH)) for _ in range(2))
        began = time.perf_counter()
        loss_of(source, target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return 2 * tokens / statistics.median(seconds[2:])


def measure(entrant: str, steps: int) -> float:
    """Runs an entrant in processes of its own."""
    name, _, arrangement = entrant.partition(", ")
    cores = os.cpu_count() or 1
    processes = cores if arrangement == "processes" else 1
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if name != "regard":
        environment |= {"OMP_NUM_THREADS": str(cores // processes)}
    command = [sys.executable, __file__, "--single", name, "--steps", str(steps), "--tokens", str(TOKENS // processes)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(processes)]
    return sum(float(process.communicate()[0].split()[-1]) for process in running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--single", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        single = (
            ours(options.steps) if options.single == "regard" else peer(options.single, options.steps, options.tokens)
        )
        print(single)
        return
    entrants = [
        "regard",
        *(f"{name}, {how}" for name in ("marian", "nn.Transformer") for how in ("threads", "processes")),
    ]
    speeds: dict[str, list[float]] = {entrant: [] for entrant in entrants}
    for _ in range(options.rounds):
        for entrant in entrants:
            speeds[entrant].append(measure(entrant, options.steps))
            print(f"{entrant}: {speeds[entrant][-1]:.0f}", file=sys.stderr, flush=True)
    print("| entrant | tokens/s, both sides (median) | lowest | highest |\n| --- | ---: | ---: | ---: |")
    for entrant, values in speeds.items():
        print(f"| {entrant} | {statistics.median(values):.0f} | {min(values):.0f} | {max(values):.0f} |")


if __name__ == "__main__":
    main()
