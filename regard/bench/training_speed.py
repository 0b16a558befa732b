"""`regard bench training`: tokens per second of training steps, against models of peer libraries of the same shape.

Every run is a separate process (or several), with the same allocator settings, on synthetic sentences of one length, so
that there is no padding. A step is forward, loss, backward, clipping and Adam. On a CPU, peers run as one process with
all threads and as one process per thread; the speeds of the latter are summed although they exchange no gradients.
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

from regard.allocator import keep_freed_memory
from regard.bench.bench_report import BenchReport
from regard.bench.measurement import Ceilings, Measurement, measure_ceilings
from regard.bench.peers import is_installed
from regard.devices import Device, find_device
from regard.models import TransformerConfig
from regard.training import Dataset, Recipe, TokenizerConfig, TrainConfig, run_recipe
from regard.training.runtime.precision import resolve_precision

MAX_LEN = 64
WARMUP_STEPS = 2


@dataclass(frozen=True)
class TrainingShape:
    """Sizes of an encoder-decoder with `layers` layers each; `tokens` per side and step, in sentences of `length`."""

    width: int = 256
    heads: int = 4
    layers: int = 3
    feedforward: int = 1024
    vocabulary: int = 8000
    length: int = 16
    tokens: int = 4096

    @property
    def flops(self) -> float:
        """FLOPs of a step: 2 forward and 4 backward per weight and token; the products of attention are neglected."""
        E, F = self.width, self.feedforward
        weights = self.layers * ((4 * E * E + 2 * E * F) + (8 * E * E + 2 * E * F)) + E * self.vocabulary
        return 6.0 * self.tokens * weights


SHAPES = {
    "cpu": TrainingShape(),
    "mps": TrainingShape(),
    "cuda": TrainingShape(512, 8, 6, 2048, 32000, length=32, tokens=25600),
}


class BenchRun(NamedTuple):
    """One run: `processes` processes in parallel, each with an equal part of the tokens."""

    model: str
    label: str
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
) -> BenchReport:
    """Measure tokens (of both sides) per second: Regard with its defaults, Marian, nn.Transformer and x-transformers.

    The implementations alternate from round to round; results are medians over rounds of medians over steps.
    """
    target = find_device(device)
    shape = shape or SHAPES[target.type]
    precision = resolve_precision(_make_recipe(shape, target.type, steps)).train.precision
    runs = _make_runs(target, precision, compiled)
    ceilings = measure_ceilings(target, getattr(torch, precision))
    seconds: dict[str, list[float]] = {run.label: [] for run in runs}
    notes: dict[str, str] = {}
    for _ in range(rounds):
        for run in runs:
            if run.label not in notes:
                try:
                    seconds[run.label].append(_run_processes(run, shape, target, steps))
                except _RunFailed as error:
                    notes[run.label] = str(error)
    case = f"width {shape.width}, {shape.layers}+{shape.layers} layers, {shape.tokens}+{shape.tokens} tokens"
    rows = [_make_measurement(case, run, seconds[run.label], notes.get(run.label, ""), shape, ceilings) for run in runs]
    not_installed = tuple(name for name in ("transformers", "x-transformers") if not is_installed(name))
    return BenchReport("training", ceilings, rows, not_installed)


def _make_measurement(
    case: str, run: BenchRun, seconds: list[float], note: str, shape: TrainingShape, ceilings: Ceilings
) -> Measurement:
    is_regard = run.model == "regard"
    if note or not seconds:
        return Measurement(case, run.label, is_regard, note=note)
    median = statistics.median(seconds)
    rate, share = 2 * shape.tokens / median, shape.flops / ceilings.flops / median
    low, high = (round(2 * shape.tokens / extreme) for extreme in (max(seconds), min(seconds)))
    note = f"{low} to {high}" if len(seconds) > 1 else ""
    return Measurement(case, run.label, is_regard, None, median, None, rate, " tokens/s", share, note)


def _make_runs(device: torch.device, precision: str, compiled: bool) -> list[BenchRun]:
    peers = {"nn.Transformer": "nn.Transformer"}
    peers = {"marian": "transformers' Marian"} | peers if is_installed("transformers") else peers
    peers = peers | {"x-transformers": "x-transformers"} if is_installed("x-transformers") else peers
    regard_run = BenchRun("regard", f"Regard, defaults ({precision})")
    if device.type != "cpu":
        variants = [BenchRun("", "bfloat16", "bfloat16"), BenchRun("", "bfloat16, compiled", "bfloat16", compiled=True)]
        variants = variants if compiled else variants[:1]
    else:
        cores = torch.get_num_threads()
        variants = [
            BenchRun("", f"{cores} threads", threads=cores),
            BenchRun("", f"{cores} processes", processes=cores),
        ]
        variants = variants if cores > 1 else variants[:1]
        if precision == "bfloat16":  # peers get the same precision as Regard
            variants.append(BenchRun("", f"{cores} processes, bfloat16", "bfloat16", processes=cores))
    return [regard_run] + [
        variant._replace(model=name, label=f"{label}, {variant.label}")
        for name, label in peers.items()
        for variant in variants
    ]


class _RunFailed(Exception):
    """A process of a run ended with an error."""


def _run_processes(run: BenchRun, shape: TrainingShape, device: torch.device, steps: int) -> float:
    """Run the processes in parallel and return the seconds per step."""
    part = dataclasses.replace(shape, tokens=shape.tokens // run.processes)
    job = json.dumps([run._asdict(), dataclasses.asdict(part), device.type, steps])
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if run.model != "regard":
        environment |= {"OMP_NUM_THREADS": str(run.threads)}
    command = [sys.executable, "-c", f"from {__name__} import _process_main; _process_main()", job]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(run.processes)
    ]
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode:
            raise _RunFailed((errors.strip().splitlines() or ["the process ended without a message"])[-1][:100])
    # Each process does its part: the total speed is the sum of their speeds.
    speeds = [part.tokens / float(output.split()[-1]) for output, _ in outputs]
    return shape.tokens / sum(speeds)


def _process_main() -> None:
    """Entry point of a process: prints the median seconds per step."""
    run, shape, device, steps = json.loads(sys.argv[1])
    run, shape = BenchRun(**run), TrainingShape(**shape)
    if run.model == "regard":
        print(_train_regard(shape, device, steps))
    else:
        print(_train_peer(run, shape, torch.device(device), steps))


def _make_recipe(shape: TrainingShape, device: Any, steps: int) -> Recipe:
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
            steps=steps + WARMUP_STEPS,
            batch_tokens=shape.tokens,
            log_every=1,
            validate_every=10**9,
            device=device,
            compile=device == "cuda",
        ),
    )


def _train_regard(shape: TrainingShape, device: str, steps: int) -> float:
    """Median seconds per step of `run_recipe`, including data loading and logging."""
    rng = random.Random(0)
    words = [f"w{i}" for i in range(shape.vocabulary - 4)]
    sentences = max(2 * shape.tokens // shape.length, shape.vocabulary // shape.length) * 4
    lines = [" ".join(rng.choices(words, k=shape.length - 1)) for _ in range(sentences)]
    pairs = list(zip(lines[::2], lines[1::2]))
    with tempfile.TemporaryDirectory() as out:
        run_recipe(_make_recipe(shape, device, steps), out, dataset=Dataset(pairs, pairs[:8]), quiet=True)
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return shape.tokens / statistics.median(record["tokens_per_second"] for record in records[WARMUP_STEPS:])


def _train_peer(run: BenchRun, shape: TrainingShape, device: torch.device, steps: int) -> float:
    """Median seconds per step of a peer model."""
    keep_freed_memory()
    model, compute_loss = PEERS[run.model](shape)
    model.to(device).train()
    if run.compiled:
        compute_loss = torch.compile(compute_loss, dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(steps + WARMUP_STEPS):
        batch = [torch.randint(4, shape.vocabulary, (shape.tokens // shape.length, shape.length)) for _ in range(2)]
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bfloat16"):
            loss = compute_loss(*(side.to(device) for side in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARMUP_STEPS:])


Peer = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]
"""a model and its loss as a function of source and target ids"""


def _make_marian(shape: TrainingShape) -> Peer:
    from transformers import MarianConfig, MarianMTModel

    per_side: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        per_side |= {f"{side}_layers": shape.layers, f"{side}_attention_heads": shape.heads}
        per_side |= {f"{side}_ffn_dim": shape.feedforward}
    special: dict[str, Any] = dict(pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, use_cache=False)
    sizes: dict[str, Any] = dict(
        vocab_size=shape.vocabulary, d_model=shape.width, dropout=0.1, max_position_embeddings=MAX_LEN
    )
    model = MarianMTModel(MarianConfig(**sizes, **per_side, **special))
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
        positions = self.positions(torch.arange(length, device=source.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=source.device)
        x, y = (self.embedding(side) + positions for side in (source, target))
        logits = self.body(x, y, tgt_mask=mask, tgt_is_causal=True) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _make_torch_transformer(shape: TrainingShape) -> Peer:
    model = _TorchTransformer(shape)
    return model, model


def _make_x_transformer(shape: TrainingShape) -> Peer:
    from x_transformers import XTransformer

    options: dict[str, Any] = {}
    for side in ("enc", "dec"):
        options |= {f"{side}_num_tokens": shape.vocabulary, f"{side}_depth": shape.layers, f"{side}_heads": shape.heads}
        options |= {f"{side}_max_seq_len": MAX_LEN, f"{side}_ff_mult": shape.feedforward / shape.width}
        options |= {f"{side}_attn_dim_head": shape.width // shape.heads, f"{side}_layer_dropout": 0.0}
        options |= {f"{side}_attn_flash": True}
    model = XTransformer(dim=shape.width, tie_token_emb=True, **options)
    # The loss predicts each token from the ones before it, so the target needs one more token than is counted.
    return model, lambda source, target: model(source, torch.cat((target, target[:, :1]), dim=1))


PEERS = {"marian": _make_marian, "nn.Transformer": _make_torch_transformer, "x-transformers": _make_x_transformer}
