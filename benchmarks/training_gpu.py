"""Training on a GPU: real tokens per second and fraction of the matrix ceiling, against peers of the same shape.

    python benchmarks/training_gpu.py --only base

base: Transformer-base (6+6 layers, 512, 2048, 8 heads, 32,000 shared entries) on synthetic sentences of 28 tokens on
average, 25,600 + 25,600 tokens per step; big: 1024, 4096, 16 heads; parts: ablation of the optimizations of base; loop:
base through `run_recipe`, including data, logging and validation; char: nanoGPT's character model; scaling:
tokens/s over width, length and batch size. bf16 autocast, Adam, dropout, gradient clipping. Batches are on the device
beforehand, for all implementations. No measurement starts after --seconds; tables are printed at the end.
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
from gpu_common import matrix_ceiling, override, sentence_lengths, sentence_pairs, table

from regard.attention import use
from regard.data.batching.batch import Batch
from regard.data.batching.streams import TokenStreamBatches
from regard.kernels.triton import add_norm, cross_entropy, linear_relu
from regard.layers.embeddings import Embedding
from regard.layers.fusion import fuse_residuals
from regard.models import GPTConfig, TransformerConfig, make_model
from regard.models.gpt import gpt2, gpt_small
from regard.training.checkpoint import unique_parameters
from regard.training.cuda_graphs import WARM_UP, GraphedUpdate
from regard.training.distributed import compiled_features
from regard.training.losses import LossParts, token_loss
from regard.training.optimizers import make_optimizer, scale_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kinds of kernels by parts of their names; the first match counts.
KINDS = {
    "attention": ("varlen_short", "flash", "fmha", "attention"),
    "loss": ("cross_entropy", "r_drop"),
    "norms": ("add_norm",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "compiled element-wise": ("triton_", "relu_backward"),
}


class Sizes(NamedTuple):
    width: int
    heads: int
    layers: int
    feedforward: int
    vocab: int
    tokens: int
    max_len: int = 128
    mean: float = 28

    def flops(self, source: int, target: int) -> float:
        """FLOPs of all products with weights, forward and backward, without those of attention."""
        square, hidden = self.width**2, 2 * self.width * self.feedforward
        encoder, decoder = 4 * square + hidden, 6 * square + hidden
        source_weights = self.layers * (encoder + 2 * square)  # with keys and values of cross-attention
        target_weights = self.layers * decoder + self.width * self.vocab
        return 6.0 * (source * source_weights + target * target_weights)


BASE = Sizes(512, 8, 6, 2048, 32_000, 25_600)
BIG = Sizes(1024, 16, 6, 4096, 32_000, 25_600)
TINY = Sizes(32, 2, 1, 64, 100, 256, 32, 8)


class Variant(NamedTuple):
    """Optimizations of a training step; the defaults are those of `regard train` with train.compile."""

    compile: str = "blocks"  # no, blocks, model
    graph: bool = True
    attention: str | None = None
    low_precision: bool = True
    """residual stream in bfloat16"""
    fused_loss: bool = True
    fused_relu: bool = True
    fused_norm: bool = True
    combined: bool = False
    """independent small compiled kernels are combined into one launch"""
    patterns: bool = True
    """the compiler fuses a matrix product and a sum into addmm, which copies the addend first"""


class Row(NamedTuple):
    name: str
    milliseconds: float
    tokens: float
    """real tokens per second"""
    share: float
    """fraction of the ceiling"""
    setup: float
    gigabytes: float


def regard_step(config: TransformerConfig | GPTConfig, variant: Variant, smoothing: float = 0.1) -> peers.Step:
    """A step as in the training loop."""
    torch._inductor.config.combo_kernels = variant.combined
    torch._inductor.config.pattern_matcher = variant.patterns
    torch.manual_seed(0)
    model = fuse_residuals(make_model(config).to(DEVICE).train())
    for module in model.modules():
        if isinstance(module, Embedding):
            module.low_precision = variant.low_precision
    parameters = list(unique_parameters(model).values())
    optimizer = make_optimizer("adam", model, 1e-4, 0.98, 0.0)
    features = model.features
    if variant.compile != "no":
        is_full_model = variant.compile == "model"
        features = torch.compile(model.features, dynamic=False) if is_full_model else compiled_features(model)

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
    kernels = {  # module and predicate of each fused kernel, and whether it is used
        (cross_entropy, "supports"): variant.fused_loss,
        (linear_relu, "supports"): variant.fused_relu,
        (add_norm, "supports"): variant.fused_norm,
    }

    def step(batch: Batch) -> object:
        with forced(), contextlib.ExitStack() as stack:
            for (module, predicate), is_used in kernels.items():
                if not is_used:
                    stack.enter_context(override(module, **{predicate: lambda *arguments: False}))
            return run([batch])

    return step


class Benchmark:
    """Measures implementations in sequence on the same batches."""

    def __init__(self, batches: list[Batch], flops: float, ceiling: float, deadline: float) -> None:
        self.batches = [batch.to(DEVICE) for batch in batches]
        self.flops, self.ceiling, self.deadline = flops, ceiling, deadline
        # Tokens of both sides, including <sos> and <eos>.
        self.tokens = sum(batch.tokens + source_tokens(batch) for batch in batches)
        self.rows: list[Row] = []

    def add(self, name: str, make: Callable[[], peers.Step], profiled: bool = False) -> None:
        if time.monotonic() > self.deadline:
            print(f"{name}: skipped, out of time", flush=True)
            return
        torch.compiler.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            self._measure(name, make, profiled)
        except Exception as error:  # failures must not stop the other measurements
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)

    def _measure(self, name: str, make: Callable[[], peers.Step], profiled: bool) -> None:
        setup_start = time.monotonic()
        step = make()
        for _ in range(WARM_UP + 1):
            for batch in self.batches:
                step(batch)
        _synchronize()
        setup = time.monotonic() - setup_start
        seconds = []
        first = time.monotonic()
        while len(seconds) < 3 or (time.monotonic() - first < 3 and len(seconds) < 30):
            start = time.perf_counter()
            for batch in self.batches:
                step(batch)
            _synchronize()
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
        row = Row(
            name,
            1e3 * median / len(self.batches),
            self.tokens / median,
            self.flops / median / 1e12 / self.ceiling,
            setup,
            memory,
        )
        self.rows.append(row)
        print(f"{name}: {row.milliseconds:.2f} ms, {row.tokens:,.0f} tokens/s, {row.share:.1%}", flush=True)
        if profiled and DEVICE == "cuda":
            print(profile_kernels(lambda: [step(batch) for batch in self.batches], len(self.batches)), flush=True)

    def table(self) -> str:
        return table(
            ["implementation", "ms per step", "real tokens/s", "of the ceiling", "set-up s", "GiB"],
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


def profile_kernels(function: Callable[[], object], steps: int, top: int = 40) -> str:
    """Time of a step by kind of kernel, and the slowest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        _synchronize()
    spent = {e.key: (e.self_device_time_total / 1e3 / steps, e.count / steps) for e in profile.key_averages()}
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for key, (ms, _) in spent.items():
        kinds[next((kind for kind, parts in KINDS.items() if any(p in key.lower() for p in parts)), "other")] += ms
    lines = [f"kernels, ms per step: {', '.join(f'{kind} {ms:.2f}' for kind, ms in kinds.items())}"]
    for key, (ms, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:top]:
        lines.append(f"  {ms:7.3f} ms  {count:6.1f} ×  {key[:110]}")
    return "\n".join(lines)


def source_tokens(batch: Batch) -> int:
    source = batch.inputs[0]
    return int(source.offsets.lengths[: batch.sentences].sum()) if len(batch.inputs) > 1 else 0  # type: ignore[union-attr]


def _synchronize() -> None:
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
        max_len=sizes.max_len,
    )


def make_benchmark(
    sizes: Sizes, ceiling: float, deadline: float, batches: int = 6
) -> tuple[Benchmark, TransformerConfig]:
    pairs = sentence_pairs(sizes.tokens, sizes.max_len, sizes.vocab, batches=batches, mean=sizes.mean)
    flops = sum(sizes.flops(source_tokens(batch), batch.tokens) for batch in pairs)
    vocab = dict(source_vocab=sizes.vocab, target_vocab=sizes.vocab, shared_vocab=True)
    return Benchmark(pairs, flops, ceiling, deadline), replace(model_config(sizes), **vocab)


def translation(sizes: Sizes, ceiling: float, deadline: float) -> str:
    benchmark, config = make_benchmark(sizes, ceiling, deadline)
    shape = (DEVICE, sizes.width, sizes.heads, sizes.layers, sizes.feedforward, sizes.vocab)
    benchmark.add("Regard, compiled, captured", lambda: regard_step(config, Variant()), profiled=True)
    benchmark.add("HF Marian, compiled", lambda: peers.marian(*shape, "dynamic"))
    benchmark.add("nn.Transformer, compiled", lambda: peers.torch_transformer(*shape, "dynamic"))
    benchmark.add("Regard, eager", lambda: regard_step(config, Variant("no", False)))
    benchmark.add("HF Marian, eager", lambda: peers.marian(*shape, "eager"))
    return benchmark.table()


def parts(sizes: Sizes, ceiling: float, deadline: float) -> str:
    benchmark, config = make_benchmark(sizes, ceiling, deadline)
    full = Variant()
    variants = {
        "all optimizations": full,
        "small kernels combined": full._replace(combined=True),
        "sums separate from products": full._replace(patterns=False),
        "residual stream in float32": full._replace(low_precision=False),
        "torch's varlen attention": full._replace(attention="varlen"),
        "plain cross-entropy": full._replace(fused_loss=False),
        "separate ReLU": full._replace(fused_relu=False),
        "compiled norms": full._replace(fused_norm=False),
        "compiled, not captured": full._replace(graph=False),
        "full model compiled, captured": full._replace(compile="model"),
        "captured, not compiled": full._replace(compile="no"),
    }
    for name, variant in variants.items():
        benchmark.add(
            name, lambda variant=variant: regard_step(config, variant), profiled=name == "full model compiled, captured"
        )
    return benchmark.table()


def scaling(sizes: Sizes, ceiling: float, deadline: float) -> str:
    rows: list[Row] = []
    changes = [
        *({"width": w, "heads": w // 64, "feedforward": 4 * w} for w in (256, 512, 1024)),
        *({"mean": m} for m in (12, 56)),
        *({"tokens": n} for n in (6_400, 51_200)),
    ]
    for change in changes if sizes is not TINY else [{"mean": 6}]:
        benchmark, config = make_benchmark(sizes._replace(**change), ceiling, deadline, batches=3)
        name = ", ".join(f"{key} {value}" for key, value in change.items() if key not in ("heads", "feedforward"))
        benchmark.add(name, lambda config=config: regard_step(config, Variant()))
        rows += benchmark.rows
    benchmark.rows = rows
    return benchmark.table()


def characters(tiny: bool, ceiling: float, deadline: float) -> str:
    width, heads, layers, context, vocab, count = (32, 2, 1, 16, 20, 4) if tiny else (384, 6, 6, 256, 65, 64)
    ids = np.random.default_rng(0).integers(0, vocab, count * context * 4)
    batches = list(TokenStreamBatches(ids, context, budget=count * context, seed=0, constant_shapes=True).epoch(0))[:2]
    weights = layers * 12 * width**2 + width * vocab
    benchmark = Benchmark(batches, 6.0 * weights * context * count * len(batches), ceiling, deadline)
    size = dict(width=width, heads=heads, layers=layers, feedforward=4 * width, vocab=vocab, max_len=context)
    gpt2_form = gpt2(**size, dropout=0.2, bias="none")
    default_form = gpt_small(**size)
    shape = (DEVICE, width, heads, layers, context, vocab)
    benchmark.add(
        "Regard, GPT-2 form, compiled, captured", lambda: regard_step(gpt2_form, Variant(), 0.0), profiled=True
    )
    benchmark.add("HF GPT-2, compiled", lambda: peers.gpt2(*shape, "static"))
    benchmark.add(
        "Regard, default form, compiled, captured", lambda: regard_step(default_form, Variant(), 0.0), profiled=True
    )
    benchmark.add("Regard, GPT-2 form, compiled", lambda: regard_step(gpt2_form, Variant(graph=False), 0.0))
    benchmark.add("HF GPT-2, compiled with CUDA graphs", lambda: peers.gpt2(*shape, "graphs"))
    benchmark.add("Regard, full model compiled, captured", lambda: regard_step(gpt2_form, Variant("model"), 0.0))
    return benchmark.table()


def loop(sizes: Sizes, ceiling: float, deadline: float) -> str:
    """The complete training loop, with data, logging, learning rate schedule and validation."""
    from regard.training import Dataset, Recipe, TokenizerConfig, TrainConfig, run_recipe

    steps = 4 if sizes is TINY else 150
    rng = np.random.default_rng(0)
    lengths = sentence_lengths(max(64, 40 * sizes.tokens // 28), sizes.max_len - 2, seed=0, mean=sizes.mean)
    words = np.array([f"w{i}" for i in range(sizes.vocab - 4)])
    lines = [" ".join(rng.choice(words, n)) for n in lengths]
    pairs = list(zip(lines, reversed(lines))) if sizes is TINY else list(zip(lines, lines))
    recipe = Recipe(
        tokenizer=TokenizerConfig(kind="space", vocab_size=sizes.vocab),
        model=model_config(sizes),
        train=TrainConfig(steps=steps, batch_tokens=sizes.tokens, log_every=steps // 4, validate_every=10**9,
                          save_every=10**9, compile=DEVICE == "cuda"),
    )  # fmt: skip
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        run_recipe(recipe, out, dataset=Dataset(pairs, pairs[:8]), quiet=True)
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    speeds = [2 * line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    tokens = speeds[-1]
    share = sizes.flops(1, 1) / 2 * tokens / 1e12 / ceiling
    row = [f"{tokens:,.0f}", f"{share:.1%}", ", ".join(f"{x:,.0f}" for x in speeds), f"{time.monotonic() - start:.0f}"]
    return table(
        ["", "tokens/s, both sides", "of the ceiling", "each quarter", "total seconds"], [["training loop", *row]]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("base", "big", "char", "parts", "loop", "scaling")
    parser.add_argument("--only", choices=names)
    parser.add_argument(
        "--seconds",
        type=float,
        default=110,
        help="time limit per table, after which no measurement starts (default 110)",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the script")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.tiny:  # traced, but without minutes of code generation
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    ceiling = matrix_ceiling(DEVICE) if DEVICE == "cuda" else 0.1
    tables = []
    for name in names if options.only is None else (options.only,):
        deadline = time.monotonic() + options.seconds
        sizes = TINY if options.tiny else BIG if name == "big" else BASE
        run = {"parts": parts, "scaling": scaling, "loop": loop}.get(name, translation)
        result = characters(options.tiny, ceiling, deadline) if name == "char" else run(sizes, ceiling, deadline)
        tables.append(f"**{name}** (ceiling {ceiling:.0f} TFLOP/s)\n\n{result}")
    print("\n" + "\n\n".join(tables))


if __name__ == "__main__":
    main()
