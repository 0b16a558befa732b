"""Time of an update with and without the check for non-finite losses, and a check that skipping works in a CUDA graph.

    python benchmarks/skip_overhead.py                  # on a GPU
    python benchmarks/skip_overhead.py --device cpu --width 32 --updates 2 --rounds 1 --warm-up 1     # rehearsal

Trains a Transformer on the phrasebook with the trainer's own update, alternating between the guard and an unconditional
optimizer step. Then the guard rejects three updates: weights and optimizer state must not change, and the next update
must change them. Exit status 1 means that they did not behave so.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from regard.models import TransformerConfig
from regard.training import DataConfig, Recipe, TokenizerConfig, TrainConfig, loop, read_dataset
from regard.training.checkpoint import gather_state
from regard.training.distributed import Workers
from regard.training.guards import Position
from regard.training.log import RunLog
from regard.training.machine import resolve_precision
from regard.training.run import Setup, make_provenance, prepare


def make_trainer(device: str, width: int, optimizer: str, folder: Path) -> loop.Trainer:
    recipe = resolve_precision(
        Recipe(
            data=DataConfig(limit=4000),
            tokenizer=TokenizerConfig(vocab_size=4000),
            model=TransformerConfig(width=width, heads=8, feedforward=4 * width, max_len=64),
            train=TrainConfig(steps=10_000, device=device, workers=1, batch_tokens=4096, optimizer=optimizer),
        )
    )
    dataset = read_dataset("translate", recipe.data)
    tokenizers = loop.TASKS["translate"].make_tokenizers(dataset, recipe.tokenizer)
    setup = Setup(recipe, dataset)
    spec, validation, *_ = prepare(setup, tokenizers, make_provenance(setup), folder, checkpoint=None)
    log = RunLog(folder / "metrics.jsonl", 10_000, is_silent=True, writes_files=False)
    return loop.Trainer(spec, Workers(), log, time.monotonic(), validation)


def time_updates(run: loop.Trainer, groups, update, updates: int) -> float:
    """Seconds per update."""
    start = time.monotonic()
    run.captured_step = update
    for _ in range(updates):
        run.update(*next(groups))
    run.guard.pending.clear()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.monotonic() - start) / updates


def snapshot(run: loop.Trainer) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in gather_state(run.model, run.optimizer, None).values()]


def is_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--updates", type=int, default=100, help="updates per measurement (default 100)")
    parser.add_argument("--warm-up", type=int, default=40, help="updates before the measurements (default 40)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating measurements (default 5)")
    parser.add_argument("--optimizers", nargs="+", default=["adam", "muon"])
    options = parser.parse_args()
    passed = True
    print("| optimizer | update, unconditional | update, skipped if not finite | overhead | skips in a graph |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name in options.optimizers:
        with tempfile.TemporaryDirectory(prefix="regard-skip-") as folder:
            run = make_trainer(options.device, options.width, name, Path(folder))
            groups = run.batches(Position(0, 0), run.workers.part, run.device)
            guarded = run.capture_step()

            def step(optimizer, _accepted) -> None:
                if hasattr(optimizer, "found_inf"):
                    del optimizer.found_inf
                optimizer.step()

            with mock.patch.object(loop, "step_optimizer", step):
                plain = run.capture_step()
                time_updates(run, groups, plain, options.warm_up)  # captures the graphs, with the unconditional step
            time_updates(run, groups, guarded, options.warm_up)
            times: dict[str, list[float]] = {"plain": [], "guarded": []}
            for _ in range(options.rounds):
                with mock.patch.object(loop, "step_optimizer", step):
                    times["plain"].append(time_updates(run, groups, plain, options.updates))
                times["guarded"].append(time_updates(run, groups, guarded, options.updates))
            # A limit of 0 rejects every update, also inside a graph that was captured before.
            before = snapshot(run)
            run.guard.limit.fill_(0.0)
            time_updates(run, groups, guarded, 3)
            is_skipped = is_same(before, snapshot(run))
            run.guard.limit.fill_(torch.inf)
            time_updates(run, groups, guarded, 1)
            is_correct = is_skipped and not is_same(before, snapshot(run))
            passed &= is_correct
            one, two = (1000 * statistics.median(times[kind]) for kind in ("plain", "guarded"))
            groups.close()
        print(f"| {name} | {one:.2f} ms | {two:.2f} ms | {two / one - 1:+.1%} | {'yes' if is_correct else 'NO'} |")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
