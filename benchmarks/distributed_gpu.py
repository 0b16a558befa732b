"""Overhead of DDP and FSDP2 on one GPU, and the weak scaling that follows for 8, 64 and 512 GPUs.

    python benchmarks/distributed_gpu.py            # on a GPU: about three minutes
    python benchmarks/distributed_gpu.py --tiny     # rehearsal on a CPU

A process group of one rank: an update with DDP or FSDP2 sends nothing, so the difference from an update without them is
their overhead. All variants take turns on the same batches; the median over rounds is printed. `eager` updates launch
each kernel from the host, `graph` updates are CUDA graphs, as in a training run. First, another process compares the
losses of 30 updates of a smaller model; variants that fail there are left out. The scaling is arithmetic
(`tools/plan.py`) from the times of `ddp` and `fsdp` and the stated link speeds, not a measurement.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_common import sentence_pairs, table
from torch.distributed.device_mesh import DeviceMesh

from regard.data.batching.batch import Batch
from regard.data.batching.streams import TokenStreamBatches
from regard.models import GPTConfig, TransformerConfig, make_model
from regard.models.gpt import gpt2
from regard.training import DataConfig, Recipe, run_recipe
from regard.training.checkpoint import METRICS, unique_parameters
from regard.training.cuda_graphs import GraphedUpdate
from regard.training.distributed import TaskLoss, accumulating, replicate, shard
from regard.training.guards import LossGuard, mark_non_finite
from regard.training.log import read_metrics
from regard.training.losses import LossParts
from regard.training.optimizers import make_optimizer, scale_gradients, step_optimizer
from regard.training.recipe import TrainConfig
from regard.training.tasks import TASKS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from plan import exposed_exchange

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
# Graphs last: after a failed capture, other variants may fail too.
VARIANTS = [f"{kind}, {mode}" for mode in ("eager", "graph")[: 1 + ON_GPU] for kind in ("none", "ddp", "fsdp")]
ROUNDS, WARM_UP, SECONDS, LIMIT = 20, 3, 20.0, 170.0
Update = Callable[[list[Batch]], LossParts]


def make_update(kind: str, config: TransformerConfig | GPTConfig, batch: Batch) -> Update:
    """An update as in the training loop, without a CUDA graph."""
    train = TrainConfig(precision="bfloat16" if ON_GPU else "float32", optimizer="adamw")
    torch.manual_seed(0)
    model = make_model(config).train()
    loss = TaskLoss(TASKS["language" if isinstance(config, GPTConfig) else "translate"], model, train, DEVICE)
    group = dist.group.WORLD
    if kind == "fsdp":
        mesh = DeviceMesh.from_group(group, DEVICE.type)
        shard(loss, mesh, torch.bfloat16 if ON_GPU else None)
    else:
        model.to(DEVICE)
    if kind == "ddp":
        replicate(loss, group, batch)
    parameters = list(unique_parameters(model).values())
    optimizer = make_optimizer("adamw", model, 1e-4, 0.98, 0.01)
    guard = LossGuard(DEVICE, skips_spikes=False)

    def update(batches: list[Batch]) -> LossParts:
        with accumulating(loss, is_last=True):
            parts = loss(batches[0])
            parts.loss.backward()
        totals = torch.stack([part.detach() for part in parts])
        if kind != "none":
            dist.all_reduce(totals, group=group)
        grads = [p.grad for p in parameters if p.grad is not None]
        result = mark_non_finite(LossParts(*totals.unbind()), scale_gradients(grads, totals[2], 1.0))
        step_optimizer(optimizer, guard.accepts(result))
        loss.zero_grad()
        return result

    return update


def make_variant(name: str, config: TransformerConfig | GPTConfig, batch: Batch, pool: Any) -> Update:
    """An update, eager or as a CUDA graph; all graphs share one memory pool."""
    kind, _, mode = name.rpartition(", ")
    update = make_update(kind, config, batch)
    if mode == "eager":
        return update
    graphed = GraphedUpdate(update)
    graphed.pool = pool
    return graphed


@contextlib.contextmanager
def report_errors(name: str) -> Iterator[None]:
    """Print an error and continue."""
    try:
        yield
    except Exception:
        print(f"{name} failed:\n{traceback.format_exc()}", flush=True)


def measure(
    name: str, config: TransformerConfig | GPTConfig, batches: list[Batch], variants: list[str], rounds: int
) -> dict[str, float]:
    """Median seconds per update of each variant; the variants take turns."""
    batches = [batch.to(DEVICE) for batch in batches]
    pool = torch.cuda.graph_pool_handle() if ON_GPU else None
    updates: dict[str, Update] = {}
    for variant in variants:
        with report_errors(f"{name}, {variant}"):
            updates[variant] = make_variant(variant, config, batches[0], pool)
    seconds: dict[str, list[float]] = {variant: [] for variant in updates}
    started = time.perf_counter()
    for index in range(rounds + WARM_UP):
        if index == WARM_UP:
            progress(f"{name}: warmed up")
            started = time.perf_counter()
        if time.perf_counter() - started > SECONDS and index > WARM_UP + 3:
            break
        for variant in list(updates):
            with report_errors(f"{name}, {variant}"):
                start, update = time.perf_counter(), updates.pop(variant)  # a failed one is not repeated
                for batch in batches:
                    update([batch])
                synchronize()
                updates[variant] = update
                if index >= WARM_UP:
                    seconds[variant].append((time.perf_counter() - start) / len(batches))
    medians = {variant: statistics.median(values) for variant, values in seconds.items() if variant in updates}
    progress(f"{name}: {len(next(iter(seconds.values())))} rounds")
    print(table(["", "ms per update", "against none"], compare(name, medians)) + "\n", flush=True)
    return medians


def compare(name: str, seconds: dict[str, float]) -> list[list[str]]:
    """Rows with the time of each variant and its overhead over the same update without distribution."""
    rows = []
    for variant, value in seconds.items():
        none = seconds.get(f"none, {variant.rpartition(', ')[2]}", float("nan"))
        rows.append([f"{name}: {variant}", f"{1e3 * value:.2f}", f"{100 * (value / none - 1):+.1f}%"])
    return rows


def check_losses(config: TransformerConfig, batches: list[Batch], succeeded: Path, updates: int = 30) -> None:
    """Compare the losses of every variant with those of eager updates without a process group, which run twice.

    The names of the variants that do not fail are written to `succeeded`.
    """
    batches = [batch.to(DEVICE) for batch in batches]
    losses: dict[str, list[float]] = {}
    for variant in ["none, eager", *VARIANTS]:
        with report_errors(f"losses, {variant}"):
            update = make_variant(variant, config, batches[0], torch.cuda.graph_pool_handle() if ON_GPU else None)
            results = []
            for step in range(updates):
                torch.manual_seed(step)
                results.append(update([batches[step % len(batches)]]))
            name = "none, again" if variant in losses else variant
            losses[name] = [float(parts.loss / parts.tokens) for parts in results]
            progress(f"{name}: losses {losses[name][0]:.6f} … {losses[name][-1]:.6f}")
            with succeeded.open("a") as file:
                file.write(variant + "\n")
    rows = []
    for variant, values in losses.items():
        kind = variant.rpartition(", ")[0]
        differences = []
        for reference in (losses.get("none, eager"), losses.get(f"{kind}, eager")):
            pairs = zip(values, reference or [])
            differences.append(f"{max((abs(a / b - 1) for a, b in pairs), default=float('nan')):.1e}")
        rows.append([variant, f"{values[0]:.6f}", f"{values[-1]:.6f}", *differences])
    header = [
        "",
        "first loss",
        f"loss {updates}",
        "largest relative difference from none, eager",
        "from the same, eager",
    ]
    print(table(header, rows) + "\n", flush=True)


def check_training_run(sharding: str) -> None:
    """Train with `regard train` settings as the only rank of torchrun; print the first and last losses."""
    model = TransformerConfig(width=128, heads=2, feedforward=256, encoder_layers=1, decoder_layers=1, dropout=0.0)
    train = TrainConfig(
        steps=30, batch_tokens=2048, log_every=1, validate_every=30, save_every=30, optimizer="adamw", sharding=sharding
    )
    recipe = Recipe(data=DataConfig(limit=2000), model=replace(model, max_len=64), train=train)
    with tempfile.TemporaryDirectory() as folder:
        run_recipe(recipe, Path(folder) / "run", quiet=True)
        lines = read_metrics(Path(folder) / "run" / METRICS)
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    progress(f"training run, sharding {sharding}: losses {', '.join(f'{x:.5f}' for x in losses[::5] + losses[-1:])}")


def find_working_variants(tiny: bool) -> list[str]:
    """Compare the losses of all variants in another process, which a failed capture may leave unusable."""
    with tempfile.TemporaryDirectory() as folder:
        succeeded = Path(folder) / "succeeded"
        command = [sys.executable, __file__, "--losses", str(succeeded), *(["--tiny"] if tiny else [])]
        with report_errors("losses"):
            subprocess.run(command, check=True, timeout=100)
        names = succeeded.read_text().splitlines() if succeeded.exists() else []
    return [variant for variant in VARIANTS if variant in names or variant.startswith("none")]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


STARTED = time.perf_counter()


def progress(line: str) -> None:
    print(f"[{time.perf_counter() - STARTED:.0f} s] {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny models and few rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--losses", type=Path, help="only compare losses; write the variants that succeed to this file")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    if ON_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", rank=0, world_size=1)
    torch.set_float32_matmul_precision("high")
    sizes = dict(width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6)
    vocab, gpt, windows, context, tokens = 32_000, gpt2(vocab=50_304, dropout=0.0), 32, 1024, 25_000
    if options.tiny:
        sizes = dict(width=32, heads=2, feedforward=64, encoder_layers=1, decoder_layers=1)
        vocab, windows, context, tokens = 100, 4, 64, 512
        gpt = GPTConfig(width=32, heads=2, layers=1, feedforward=64, vocab=vocab)
    transformer = TransformerConfig(source_vocab=vocab, target_vocab=vocab, shared_vocab=True, max_len=256, **sizes)
    ids = np.random.default_rng(0).integers(4, gpt.vocab, 8 * windows * context + 1)
    stream = TokenStreamBatches(ids, context, budget=windows * context, seed=0, constant_shapes=True)
    pairs = sentence_pairs(tokens, 256, vocab, batches=4)
    prefix = "tiny " if options.tiny else ""
    shapes: dict[str, tuple[TransformerConfig | GPTConfig, list[Batch]]] = {
        f"{prefix}Transformer base": (transformer, pairs),
        f"{prefix}GPT-2": (gpt, list(stream.epoch(0))[:4]),
    }
    progress(f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}, one rank\n")

    if options.losses:
        check_losses(replace(transformer, encoder_layers=1, decoder_layers=1, dropout=0.0), pairs, options.losses)
        dist.destroy_process_group()
        return
    variants = find_working_variants(options.tiny)
    overheads, scaling = [], []
    for name, (config, batches) in shapes.items():
        with report_errors(name):
            seconds = measure(name, config, batches, variants, 3 if options.tiny else options.rounds)
            overheads += compare(name, seconds)
            parameters = sum(p.numel() for p in make_model(config).parameters())
            for kind in ("ddp", "fsdp"):
                one = seconds.get(f"{kind}, graph") or seconds[f"{kind}, eager"]
                exposed = [
                    exposed_exchange(parameters, 2 / 3 * one, gpus, fsdp=kind == "fsdp") for gpus in (8, 64, 512)
                ]
                scaling.append([f"{name}, {kind}", *(f"{100 * one / (one + extra):.1f}%" for extra in exposed)])
        if ON_GPU:
            torch.cuda.empty_cache()
    print(table(["", "ms per update", "against none"], overheads))
    print("\nSimulated weak scaling (not measured): 8 GPUs per node, 450 GB/s inside, 50 GB/s per GPU between nodes\n")
    print(table(["", "8 GPUs", "64 GPUs", "512 GPUs"], scaling), flush=True)
    dist.destroy_process_group()
    for sharding in ("none", "fsdp"):
        if ON_GPU and time.perf_counter() - STARTED > LIMIT:
            progress("no time left for training runs")
            break
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        with report_errors(f"training run, sharding {sharding}"):
            check_training_run(sharding)


if __name__ == "__main__":
    main()
