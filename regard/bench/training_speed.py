"""`regard bench training`: tokens a second of whole training steps, beside other libraries' models of the same shape.

Each entrant runs in processes of its own, with the same allocator settings, on synthetic sentences of one length, so
that nobody pads. A step is forward, loss, backward, clipping and Adam. On a CPU, peers run as one process of all
threads and as processes of one thread each, whose speeds are added up although they exchange no gradients.
"""

import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.bench.bench_report import Report
from regard.bench.measurement import Ceilings, Row, measure_ceilings
from regard.bench.peers import installed
from regard.models import TransformerConfig
from regard.pipelines import Device, find_device
from regard.training import Dataset, Recipe, TokenizerConfig, TrainConfig, train
from regard.training.runtime.allocator import keep_freed_memory
from regard.training.runtime.precision import settle_precision

MAX_LEN = 64
WARM = 2


@dataclass(frozen=True)
class TrainingShape:
    """An encoder and decoder of so many layers each; `tokens` of each side an update, in sentences of `length`."""

    width: int = 256
    heads: int = 4
    layers: int = 3
    feedforward: int = 1024
    vocabulary: int = 8000
    length: int = 16
    tokens: int = 4096

    @property
    def flops(self) -> float:
        """Of the matrix products of an update, attention's own small ones left out: 2 forward and 4 backward each."""
        E, F = self.width, self.feedforward
        weights = self.layers * ((4 * E * E + 2 * E * F) + (8 * E * E + 2 * E * F)) + E * self.vocabulary
        return 6.0 * self.tokens * weights


SHAPES = {
    "cpu": TrainingShape(),
    "mps": TrainingShape(),
    "cuda": TrainingShape(512, 8, 6, 2048, 32000, length=32, tokens=25600),
}


class Order(NamedTuple):
    """What a process is to do; `processes` of them run at once, each with its share."""

    model: str
    says: str
    precision: str = "float32"
    processes: int = 1
    threads: int = 1
    compiled: bool = False


def bench_training(
    device: Device = "auto",
    *,
    shape: TrainingShape | None = None,
    steps: int = 5,
    rounds: int = 1,
    compiled: bool = True,
) -> Report:
    """Tokens of both sides a second: Regard as it trains by default beside Marian, nn.Transformer and x-transformers.

    Rounds alternate between the entrants, and the median counts; so does, within each, the median of the steps.
    """
    where = find_device(device)
    shape = shape or SHAPES[where.type]
    precision = settle_precision(_recipe(shape, where.type, steps)).train.precision
    orders = _orders(where, precision, compiled)
    ceilings = measure_ceilings(where, getattr(torch, precision))
    seconds: dict[str, list[float]] = {order.says: [] for order in orders}
    notes: dict[str, str] = {}
    for _ in range(rounds):
        for order in orders:
            if order.says not in notes:
                try:
                    seconds[order.says].append(_run(order, shape, where, steps))
                except _Failed as failed:
                    notes[order.says] = str(failed)
    case = f"width {shape.width}, {shape.layers}+{shape.layers} layers, {shape.tokens}+{shape.tokens} tokens"
    rows = [_row(case, order, seconds[order.says], notes.get(order.says, ""), shape, ceilings) for order in orders]
    absent = tuple(name for name in ("transformers", "x-transformers") if not installed(name))
    return Report("training", ceilings, rows, absent)


def _row(case: str, order: Order, seconds: list[float], note: str, shape: TrainingShape, ceilings: Ceilings) -> Row:
    if note or not seconds:
        return Row(case, order.says, order.model == "regard", note=note)
    took = statistics.median(seconds)
    rate, share = 2 * shape.tokens / took, shape.flops / ceilings.flops / took
    low, high = (round(2 * shape.tokens / chosen) for chosen in (max(seconds), min(seconds)))
    note = f"{low} to {high}" if len(seconds) > 1 else ""
    return Row(case, order.says, order.model == "regard", None, took, None, rate, " tokens/s", share, note)


def _orders(device: torch.device, precision: str, compiled: bool) -> list[Order]:
    peers = {"nn.Transformer": "nn.Transformer"}
    peers = {"marian": "transformers' Marian"} | peers if installed("transformers") else peers
    peers = peers | {"x-transformers": "x-transformers"} if installed("x-transformers") else peers
    ours = Order("regard", f"Regard, as by default ({precision})")
    if device.type != "cpu":
        ways = [Order("", "bfloat16", "bfloat16"), Order("", "bfloat16, compiled", "bfloat16", compiled=True)]
        ways = ways if compiled else ways[:1]
    else:
        cores = torch.get_num_threads()
        ways = [Order("", f"{cores} threads", threads=cores), Order("", f"{cores} processes", processes=cores)]
        ways = ways if cores > 1 else ways[:1]
        if precision == "bfloat16":  # what is good for us is offered to them
            ways.append(Order("", f"{cores} processes, bfloat16", "bfloat16", processes=cores))
    return [ours] + [
        way._replace(model=name, says=f"{says}, {way.says}") for name, says in peers.items() for way in ways
    ]


class _Failed(Exception):
    pass


def _run(order: Order, shape: TrainingShape, device: torch.device, steps: int) -> float:
    """The seconds of an update, from processes that run side by side."""
    share = dataclasses.replace(shape, tokens=shape.tokens // order.processes)
    told = json.dumps([order._asdict(), dataclasses.asdict(share), device.type, steps])
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if order.model != "regard":
        environment |= {"OMP_NUM_THREADS": str(order.threads)}
    command = [sys.executable, "-c", "from regard.bench.training_speed import _process; _process()", told]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(order.processes)
    ]
    ended = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, ended):
        if process.returncode:
            raise _Failed((errors.strip().splitlines() or ["it ended without a word"])[-1][:100])
    # Side by side, each does its share: together as fast as the sum of their speeds.
    speeds = [share.tokens / float(printed.split()[-1]) for printed, _ in ended]
    return shape.tokens / sum(speeds)


def _process() -> None:
    """What a process of an entrant does: prints the median seconds of a step."""
    order, shape, device, steps = json.loads(sys.argv[1])
    order, shape = Order(**order), TrainingShape(**shape)
    print(_ours(shape, device, steps) if order.model == "regard" else _peer(order, shape, torch.device(device), steps))


def _recipe(shape: TrainingShape, device: Any, steps: int) -> Recipe:
    return Recipe(
        tokenizer=TokenizerConfig(kind="space", vocab_size=shape.vocabulary),
        model=TransformerConfig(
            width=shape.width,
            heads=shape.heads,
            feedforward=shape.feedforward,
            encoder_layers=shape.layers,
            decoder_layers=shape.layers,
            max_len=MAX_LEN,
            norm="post",
        ),
        train=TrainConfig(
            steps=steps + WARM,
            batch_tokens=shape.tokens,
            log_every=1,
            validate_every=10**9,
            device=device,
            compile=device == "cuda",
        ),
    )


def _ours(shape: TrainingShape, device: str, steps: int) -> float:
    """Through `regard.training.train`, with everything that a user's run does, data and logging included."""
    draw = random.Random(0)
    words = [f"w{i}" for i in range(shape.vocabulary - 4)]
    sentences = max(2 * shape.tokens // shape.length, shape.vocabulary // shape.length) * 4
    lines = [" ".join(draw.choices(words, k=shape.length - 1)) for _ in range(sentences)]
    pairs = list(zip(lines[::2], lines[1::2]))
    with tempfile.TemporaryDirectory() as out:
        train(_recipe(shape, device, steps), out, dataset=Dataset(pairs, pairs[:8]), quiet=True)
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    return shape.tokens / statistics.median(line["tokens_per_second"] for line in logged[WARM:])


def _peer(order: Order, shape: TrainingShape, device: torch.device, steps: int) -> float:
    keep_freed_memory()
    model, loss_of = PEERS[order.model](shape)
    model.to(device).train()
    if order.compiled:
        loss_of = torch.compile(loss_of, dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(steps + WARM):
        batch = [torch.randint(4, shape.vocabulary, (shape.tokens // shape.length, shape.length)) for _ in range(2)]
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=order.precision == "bfloat16"):
            loss = loss_of(*(side.to(device) for side in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM:])


Peer = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]


def _marian(shape: TrainingShape) -> Peer:
    from transformers import MarianConfig, MarianMTModel

    both: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        both |= {f"{side}_layers": shape.layers, f"{side}_attention_heads": shape.heads}
        both |= {f"{side}_ffn_dim": shape.feedforward}
    special: dict[str, Any] = dict(pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, use_cache=False)
    sizes: dict[str, Any] = dict(
        vocab_size=shape.vocabulary, d_model=shape.width, dropout=0.1, max_position_embeddings=MAX_LEN
    )
    model = MarianMTModel(MarianConfig(**sizes, **both, **special))
    return model, lambda source, target: model(input_ids=source, decoder_input_ids=target, labels=target).loss


class _TorchTransformer(nn.Module):
    def __init__(self, shape: TrainingShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(MAX_LEN, shape.width)
        layers = (shape.layers, shape.layers)
        self.body = nn.Transformer(shape.width, shape.heads, *layers, shape.feedforward, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        place = self.positions(torch.arange(length, device=source.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=source.device)
        x, y = (self.embedding(side) + place for side in (source, target))
        logits = self.body(x, y, tgt_mask=mask, tgt_is_causal=True) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _torch_transformer(shape: TrainingShape) -> Peer:
    model = _TorchTransformer(shape)
    return model, model


def _x_transformer(shape: TrainingShape) -> Peer:
    from x_transformers import XTransformer

    options: dict[str, Any] = {}
    for side in ("enc", "dec"):
        options |= {f"{side}_num_tokens": shape.vocabulary, f"{side}_depth": shape.layers, f"{side}_heads": shape.heads}
        options |= {f"{side}_max_seq_len": MAX_LEN, f"{side}_ff_mult": shape.feedforward / shape.width}
        options |= {f"{side}_attn_dim_head": shape.width // shape.heads, f"{side}_layer_dropout": 0.0}
        options |= {f"{side}_attn_flash": True}
    model = XTransformer(dim=shape.width, tie_token_emb=True, **options)
    # It predicts each token from those before it: one more than are counted.
    return model, lambda source, target: model(source, torch.cat((target, target[:, :1]), dim=1))


PEERS = {"marian": _marian, "nn.Transformer": _torch_transformer, "x-transformers": _x_transformer}
