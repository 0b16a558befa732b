"""Overhead of DDP and FSDP2 on one GPU, and the weak scaling that follows for 8, 64 and 512 GPUs.

    python benchmarks/distributed_gpu.py            # on a GPU
    python benchmarks/distributed_gpu.py --tiny     # rehearsal on a CPU

A process group of one rank: an update with DDP or FSDP2 sends nothing, so the difference from an update without them is
their overhead. All variants take turns on the same batches; the median over rounds is printed. `graph` is the update of
a run on one GPU (a CUDA graph), `none` the same update without a graph, as several ranks run it. The scaling is
arithmetic (`regard.training.planning`) from the time of `ddp` and `fsdp` and the stated link speeds, not a measurement.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from gpu_common import sentence_pairs, table
from torch.distributed.device_mesh import DeviceMesh

from regard.data.batching.pair_batches import Batch
from regard.data.batching.token_streams import TokenStreamBatches
from regard.models import GPTConfig, TransformerConfig, make_model
from regard.models.gpt import gpt2
from regard.training.checkpoint import unique_parameters
from regard.training.losses import LossParts
from regard.training.optim.optimizers import make_optimizer, scale_gradients
from regard.training.planning import exposed_exchange
from regard.training.recipe import TrainConfig
from regard.training.runtime.cuda_graphs import GraphedUpdate
from regard.training.runtime.data_parallel import TaskLoss, accumulating, replicate, shard
from regard.training.tasks import TASKS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_update(
    variant: str, config: TransformerConfig | GPTConfig, train: TrainConfig, batch: Batch
) -> Callable[[list[Batch]], LossParts]:
    """An update as in the training loop."""
    torch.manual_seed(0)
    model = make_model(config).train()
    task = TASKS["language" if isinstance(config, GPTConfig) else "translate"]
    loss: torch.nn.Module = TaskLoss(task, model, train, DEVICE)
    group = dist.group.WORLD
    if variant == "fsdp":
        mesh = DeviceMesh.from_group(group, DEVICE.type)
        shard(loss, mesh, torch.bfloat16 if train.precision == "bfloat16" else None)
    else:
        model.to(DEVICE)
    if variant == "ddp":
        loss = replicate(loss, group, DEVICE, batch)  # type: ignore[arg-type]
    parameters = list(unique_parameters(model).values())
    optimizer = make_optimizer("adamw", model, 1e-4, 0.98, 0.01)

    def update(batches: list[Batch]) -> LossParts:
        with accumulating(loss, is_last=True):
            parts = loss(batches[0])
            parts.loss.backward()
        scale_gradients([p.grad for p in parameters if p.grad is not None], parts.tokens, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return LossParts(*(part.detach() for part in parts))

    return GraphedUpdate(update) if variant == "graph" else update


def measure(config: TransformerConfig | GPTConfig, batches: list[Batch], rounds: int) -> dict[str, float]:
    """Median seconds per update of each variant; the variants take turns."""
    train = TrainConfig(precision="bfloat16" if DEVICE.type == "cuda" else "float32", optimizer="adamw")
    batches = [batch.to(DEVICE) for batch in batches]
    variants = ["none", "ddp", "fsdp", *(["graph"] if DEVICE.type == "cuda" else [])]
    updates = {variant: make_update(variant, config, train, batches[0]) for variant in variants}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for index in range(rounds + 3):
        for variant, update in updates.items():
            synchronize()
            start = time.perf_counter()
            for batch in batches:
                update([batch])
            synchronize()
            if index >= 3:
                seconds[variant].append((time.perf_counter() - start) / len(batches))
    return {variant: statistics.median(values) for variant, values in seconds.items()}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny models and few rounds")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", rank=0, world_size=1)
    torch.set_float32_matmul_precision("high")
    vocab = 100 if options.tiny else 32_000
    base = TransformerConfig(source_vocab=vocab, target_vocab=vocab, shared_vocab=True, max_len=256)
    sizes = dict(width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6)
    shapes: dict[str, tuple[TransformerConfig | GPTConfig, list[Batch]]] = {}
    if options.tiny:
        sizes = dict(width=32, heads=2, feedforward=64, encoder_layers=1, decoder_layers=1)
        gpt, windows, context, tokens = GPTConfig(width=32, heads=2, layers=1, feedforward=64, vocab=vocab), 4, 64, 512
    else:
        vocab_gpt = 50_304
        gpt, windows, context, tokens = gpt2(vocab=vocab_gpt, dropout=0.0), 32, 1024, 25_000
    transformer = TransformerConfig(**(vars(base) | sizes))
    ids = np.random.default_rng(0).integers(4, gpt.vocab, 8 * windows * context + 1)
    stream = TokenStreamBatches(ids, context, budget=windows * context, seed=0, constant_shapes=True)
    pairs = sentence_pairs(tokens, 256, vocab, batches=4)
    shapes["Transformer base" if not options.tiny else "tiny Transformer"] = (transformer, pairs)
    shapes["GPT-2 124 M" if not options.tiny else "tiny GPT"] = (gpt, list(stream.epoch(0))[:4])

    rounds = 3 if options.tiny else options.rounds
    overheads, scaling = [], []
    for name, (config, batches) in shapes.items():
        seconds = measure(config, batches, rounds)
        parameters = sum(p.numel() for p in make_model(config).parameters())
        none = seconds["none"]
        for variant, value in seconds.items():
            overheads.append([f"{name}, {variant}", f"{1e3 * value:.2f}", f"{100 * (value / none - 1):+.1f}%"])
        for variant in ("ddp", "fsdp"):
            one = seconds[variant]
            exposed = [exposed_exchange(parameters, 2 / 3 * one, gpus, sharding=variant) for gpus in (8, 64, 512)]
            scaling.append([f"{name}, {variant}", *(f"{100 * one / (one + extra):.1f}%" for extra in exposed)])
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"Updates on {device}, one rank\n")
    print(table(["variant", "ms per update", "against none"], overheads))
    print("\nSimulated weak scaling (not measured): 8 GPUs per node, 450 GB/s inside, 50 GB/s per GPU between nodes\n")
    print(table(["variant", "8 GPUs", "64 GPUs", "512 GPUs"], scaling))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
