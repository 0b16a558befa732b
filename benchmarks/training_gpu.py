"""Training on a GPU: real tokens a second and the share of the matrix ceiling, beside peers of the same shape.

    python benchmarks/training_gpu.py --only base

base: Transformer-base (6+6 layers, 512, 2048, 8 heads, 32,000 shared entries) on synthetic sentences of 28 tokens on
average, 25,600 + 25,600 tokens an update; big: 1024, 4096, 16 heads; parts: base with and without each part of ours;
loop: base through `regard.training.train`, with everything that a user's run does; char: nanoGPT's character model;
scaling: tokens/s against width, length and batch. bf16 under autocast, Adam, dropout, gradient clipping. Batches lie on
the device beforehand, for all entrants alike. Nothing new begins after --seconds; a table comes last.
"""

import argparse
import contextlib
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch._inductor.config
import training_peers as peers
from gpu_common import changed, matrix_ceiling, sentence_lengths, sentence_pairs, table

from regard.attention import use
from regard.data import Batch
from regard.data.batching.token_streams import TokenStreamBatches
from regard.kernels import add_norm_cuda, cross_entropy_cuda, linear_relu_cuda
from regard.layers.embeddings import Embedding
from regard.models import GPTConfig, TransformerConfig, make_model
from regard.models.gpt import gpt2, gpt_small
from regard.training.checkpoint import unique_parameters
from regard.training.losses import LossParts, token_loss
from regard.training.optim.optimizers import make_optimizer, scale_gradients
from regard.training.runtime.compilation import compiled_features
from regard.training.runtime.cuda_graphs import WARM_UP, GraphedUpdate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels by what they are for, from a part of their names; the first that fits.
KINDS = {
    "attention": ("varlen_short", "flash", "fmha", "attention"),
    "loss": ("cross_entropy", "r_drop"),
    "norms": ("add_norm",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "optimiser": ("adam", "multi_tensor", "lpnorm"),
    "compiled passes": ("triton_", "relu_backward"),
}


class Sizes(NamedTuple):
    width: int
    heads: int
    layers: int
    feedforward: int
    vocab: int
    tokens: int
    longest: int = 128
    mean: float = 28

    def flops(self, source: int, target: int) -> float:
        """Of all products with weights, forward and backward; attention's own are left out."""
        square, hidden = self.width**2, 2 * self.width * self.feedforward
        encoder, decoder = 4 * square + hidden, 6 * square + hidden
        of_source = self.layers * (encoder + 2 * square)  # and the keys and values of cross-attention
        of_target = self.layers * decoder + self.width * self.vocab
        return 6.0 * (source * of_source + target * of_target)


BASE = Sizes(512, 8, 6, 2048, 32_000, 25_600)
BIG = Sizes(1024, 16, 6, 4096, 32_000, 25_600)
TINY = Sizes(32, 2, 1, 64, 100, 256, 32, 8)


class Variant(NamedTuple):
    """How a step of ours runs; as it stands here, that of `regard train` with train.compile."""

    compile: str = "blocks"  # no, blocks, whole
    graph: bool = True
    attention: str | None = None
    narrow: bool = True
    fused_loss: bool = True
    fused_relu: bool = True
    fused_norm: bool = True
    combined: bool = False
    """small compiled passes that do not depend on each other are one launch"""
    patterns: bool = True
    """the compiler makes one call of a product and a sum, which copies the sum first"""


class Row(NamedTuple):
    name: str
    milliseconds: float
    tokens: float
    """real ones a second"""
    share: float
    """of the ceiling"""
    setup: float
    gigabytes: float


def ours(config: TransformerConfig | GPTConfig, variant: Variant, smoothing: float = 0.1) -> peers.Step:
    """One update as the training loop makes it."""
    torch._inductor.config.combo_kernels = variant.combined
    torch._inductor.config.pattern_matcher = variant.patterns
    torch.manual_seed(0)
    model = make_model(config).to(DEVICE).train()
    for module in model.modules():
        if isinstance(module, Embedding):
            module.narrow = variant.narrow
    parameters = list(unique_parameters(model).values())
    optimizer = make_optimizer("adam", model, 1e-4, 0.98, 0.0)
    features = model.features
    if variant.compile != "no":
        whole = variant.compile == "whole"
        features = torch.compile(model.features, dynamic=False) if whole else compiled_features(model)

    def update(group: list[Batch]) -> LossParts:
        (batch,) = group
        with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False, enabled=DEVICE == "cuda"):
            parts = token_loss(features(*batch.inputs), model.output.weight, batch.targets, smoothing)
        parts.loss.backward()
        scale_gradients([p.grad for p in parameters], parts.tokens, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return LossParts(*(part.detach() for part in parts))

    run = GraphedUpdate(update) if variant.graph and DEVICE == "cuda" else update
    forced = (lambda: use(variant.attention)) if variant.attention else contextlib.nullcontext
    kernels = {  # module and condition of each, and whether it runs
        (cross_entropy_cuda, "supports"): variant.fused_loss,
        (linear_relu_cuda, "supports"): variant.fused_relu,
        (add_norm_cuda, "supports"): variant.fused_norm,
    }

    def step(batch: Batch) -> object:
        with forced(), contextlib.ExitStack() as stack:
            for (module, condition), runs in kernels.items():
                if not runs:
                    stack.enter_context(changed(module, **{condition: lambda *given: False}))
            return run([batch])

    return step


class Race:
    """Measures entrants one after another on the same batches."""

    def __init__(self, batches: list[Batch], flops: float, ceiling: float, deadline: float) -> None:
        self.batches = [batch.to(DEVICE) for batch in batches]
        self.flops, self.ceiling, self.deadline = flops, ceiling, deadline
        # Both sides count, <eos> and <sos> as a sentence's own.
        self.tokens = sum(batch.tokens + source_tokens(batch) for batch in batches)
        self.rows: list[Row] = []

    def enter(self, name: str, make: Callable[[], peers.Step], profiled: bool = False) -> None:
        if time.monotonic() > self.deadline:
            print(f"{name}: no time left", flush=True)
            return
        torch.compiler.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            self._measure(name, make, profiled)
        except Exception as error:  # a peer that fails must not take the others with it
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)

    def _measure(self, name: str, make: Callable[[], peers.Step], profiled: bool) -> None:
        began = time.monotonic()
        step = make()
        for _ in range(WARM_UP + 1):
            for batch in self.batches:
                step(batch)
        _wait()
        setup = time.monotonic() - began
        seconds = []
        began = time.monotonic()
        while len(seconds) < 3 or (time.monotonic() - began < 3 and len(seconds) < 30):
            start = time.perf_counter()
            for batch in self.batches:
                step(batch)
            _wait()
            seconds.append(time.perf_counter() - start)
        spent = statistics.median(seconds)
        memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
        row = Row(
            name,
            1e3 * spent / len(self.batches),
            self.tokens / spent,
            self.flops / spent / 1e12 / self.ceiling,
            setup,
            memory,
        )
        self.rows.append(row)
        print(f"{name}: {row.milliseconds:.2f} ms, {row.tokens:,.0f} tokens/s, {row.share:.1%}", flush=True)
        if profiled and DEVICE == "cuda":
            print(kernels(lambda: [step(batch) for batch in self.batches], len(self.batches)), flush=True)

    def table(self) -> str:
        return table(
            ["entrant", "ms a step", "real tokens/s", "of the ceiling", "set-up s", "GiB"],
            [
                [
                    row.name,
                    f"{row.milliseconds:.2f}",
                    f"{row.tokens:,.0f}",
                    f"{row.share:.1%}",
                    f"{row.setup:.0f}",
                    f"{row.gigabytes:.1f}",
                ]
                for row in self.rows
            ],
        )


def kernels(function: Callable[[], object], steps: int, top: int = 40) -> str:
    """Where the time of a step goes: by kind, and the kernels that take most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        _wait()
    spent = {e.key: (e.self_device_time_total / 1e3 / steps, e.count / steps) for e in profile.key_averages()}
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for key, (ms, _) in spent.items():
        kinds[next((kind for kind, parts in KINDS.items() if any(p in key.lower() for p in parts)), "other")] += ms
    lines = [f"kernels, ms a step: {', '.join(f'{kind} {ms:.2f}' for kind, ms in kinds.items())}"]
    for key, (ms, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:top]:
        lines.append(f"  {ms:7.3f} ms  {count:6.1f} ×  {key[:110]}")
    return "\n".join(lines)


def source_tokens(batch: Batch) -> int:
    source = batch.inputs[0]
    return int(source.offsets.lengths[: batch.sentences].sum()) if len(batch.inputs) > 1 else 0  # type: ignore[union-attr]


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def model_config(sizes: Sizes) -> TransformerConfig:
    return TransformerConfig(
        width=sizes.width,
        heads=sizes.heads,
        feedforward=sizes.feedforward,
        encoder_layers=sizes.layers,
        decoder_layers=sizes.layers,
        norm="post",
        max_len=sizes.longest,
    )


def race_of(sizes: Sizes, ceiling: float, deadline: float, batches: int = 6) -> tuple[Race, TransformerConfig]:
    made = sentence_pairs(sizes.tokens, sizes.longest, sizes.vocab, batches=batches, mean=sizes.mean)
    flops = sum(sizes.flops(source_tokens(batch), batch.tokens) for batch in made)
    vocab = dict(source_vocab=sizes.vocab, target_vocab=sizes.vocab, shared_vocab=True)
    return Race(made, flops, ceiling, deadline), replace(model_config(sizes), **vocab)


def translating(sizes: Sizes, ceiling: float, deadline: float) -> str:
    race, config = race_of(sizes, ceiling, deadline)
    shape = (DEVICE, sizes.width, sizes.heads, sizes.layers, sizes.feedforward, sizes.vocab)
    race.enter("Regard, compiled, captured", lambda: ours(config, Variant()), profiled=True)
    race.enter("HF Marian, compiled", lambda: peers.marian(*shape, "dynamic"))
    race.enter("nn.Transformer, compiled", lambda: peers.torch_transformer(*shape, "dynamic"))
    race.enter("Regard, eager", lambda: ours(config, Variant("no", False)))
    race.enter("HF Marian, eager", lambda: peers.marian(*shape, "eager"))
    return race.table()


def parts(sizes: Sizes, ceiling: float, deadline: float) -> str:
    race, config = race_of(sizes, ceiling, deadline)
    everything = Variant()
    variants = {
        "everything": everything,
        "small passes combined": everything._replace(combined=True),
        "sums apart from products": everything._replace(patterns=False),
        "sums in float32": everything._replace(narrow=False),
        "torch's varlen attention": everything._replace(attention="varlen"),
        "the plain sweep over the logits": everything._replace(fused_loss=False),
        "relu in passes of its own": everything._replace(fused_relu=False),
        "norms as they are compiled": everything._replace(fused_norm=False),
        "compiled, not captured": everything._replace(graph=False),
        "compiled as a whole, captured": everything._replace(compile="whole"),
        "captured, not compiled": everything._replace(compile="no"),
    }
    for name, variant in variants.items():
        race.enter(
            name, lambda variant=variant: ours(config, variant), profiled=name == "compiled as a whole, captured"
        )
    return race.table()


def scaling(sizes: Sizes, ceiling: float, deadline: float) -> str:
    rows: list[Row] = []
    changes = [
        *({"width": w, "heads": w // 64, "feedforward": 4 * w} for w in (256, 512, 1024)),
        *({"mean": m} for m in (12, 56)),
        *({"tokens": n} for n in (6_400, 51_200)),
    ]
    for change in changes if sizes is not TINY else [{"mean": 6}]:
        race, config = race_of(sizes._replace(**change), ceiling, deadline, batches=3)
        name = ", ".join(f"{key} {value}" for key, value in change.items() if key not in ("heads", "feedforward"))
        race.enter(name, lambda config=config: ours(config, Variant()))
        rows += race.rows
    race.rows = rows
    return race.table()


def characters(tiny: bool, ceiling: float, deadline: float) -> str:
    width, heads, layers, context, vocab, count = (32, 2, 1, 16, 20, 4) if tiny else (384, 6, 6, 256, 65, 64)
    ids = np.random.default_rng(0).integers(0, vocab, count * context * 4)
    batches = list(TokenStreamBatches(ids, context, budget=count * context, seed=0, constant_shapes=True).epoch(0))[:2]
    weights = layers * 12 * width**2 + width * vocab
    race = Race(batches, 6.0 * weights * context * count * len(batches), ceiling, deadline)
    size = dict(width=width, heads=heads, layers=layers, feedforward=4 * width, vocab=vocab, max_len=context)
    alike = gpt2(**size, dropout=0.2, bias="none")
    own = gpt_small(**size)
    shape = (DEVICE, width, heads, layers, context, vocab)
    race.enter("Regard, GPT-2's form, compiled, captured", lambda: ours(alike, Variant(), 0.0), profiled=True)
    race.enter("HF GPT-2, compiled", lambda: peers.gpt2(*shape, "static"))
    race.enter("Regard, its own form, compiled, captured", lambda: ours(own, Variant(), 0.0), profiled=True)
    race.enter("Regard, GPT-2's form, compiled", lambda: ours(alike, Variant(graph=False), 0.0))
    race.enter("HF GPT-2, compiled with CUDA graphs", lambda: peers.gpt2(*shape, "graphs"))
    race.enter("Regard, compiled as a whole, captured", lambda: ours(alike, Variant("whole"), 0.0))
    return race.table()


def loop(sizes: Sizes, ceiling: float, deadline: float) -> str:
    """Through the training loop: its own batches, logging, learning rates and validation."""
    from regard.training import Dataset, Recipe, TokenizerConfig, TrainConfig, run_recipe

    steps = 4 if sizes is TINY else 150
    draw = np.random.default_rng(0)
    lengths = sentence_lengths(max(64, 40 * sizes.tokens // 28), sizes.longest - 2, seed=0, mean=sizes.mean)
    words = np.array([f"w{i}" for i in range(sizes.vocab - 4)])
    lines = [" ".join(draw.choice(words, n)) for n in lengths]
    pairs = list(zip(lines, reversed(lines))) if sizes is TINY else list(zip(lines, lines))
    recipe = Recipe(
        tokenizer=TokenizerConfig(kind="space", vocab_size=sizes.vocab),
        model=model_config(sizes),
        train=TrainConfig(steps=steps, batch_tokens=sizes.tokens, log_every=steps // 4, validate_every=10**9,
                          save_every=10**9, compile=DEVICE == "cuda"),
    )  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        run_recipe(recipe, out, dataset=Dataset(pairs, pairs[:8]), quiet=True)
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    speeds = [2 * line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    tokens = speeds[-1]
    share = sizes.flops(1, 1) / 2 * tokens / 1e12 / ceiling
    row = [f"{tokens:,.0f}", f"{share:.1%}", ", ".join(f"{x:,.0f}" for x in speeds), f"{time.monotonic() - began:.0f}"]
    return table(["", "tokens/s, both sides", "of the ceiling", "each quarter", "seconds in all"], [["the loop", *row]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("base", "big", "char", "parts", "loop", "scaling")
    parser.add_argument("--only", choices=names)
    parser.add_argument("--seconds", type=float, default=110, help="when no entrant is begun any more, for each table")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.tiny:  # traced all the same, without the minutes that machine code takes
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    ceiling = matrix_ceiling(DEVICE) if DEVICE == "cuda" else 0.1
    tables = []
    for name in names if options.only is None else (options.only,):
        deadline = time.monotonic() + options.seconds
        sizes = TINY if options.tiny else BIG if name == "big" else BASE
        run = {"parts": parts, "scaling": scaling, "loop": loop}.get(name, translating)
        made = characters(options.tiny, ceiling, deadline) if name == "char" else run(sizes, ceiling, deadline)
        tables.append(f"**{name}** (ceiling {ceiling:.0f} TFLOP/s)\n\n{made}")
    print("\n" + "\n\n".join(tables))


if __name__ == "__main__":
    main()
