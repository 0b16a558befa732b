"""Cost of recording attention: time and peak memory of a forward pass of GPT-2, against transformers.

    python benchmarks/recording.py                             # 8192 and, for one layer, 16384 tokens, bf16, on a GPU
    python benchmarks/recording.py --length 1024 --device cpu  # a decoder with 4 layers of width 256, in float32

One text, causal, random weights, no gradients, not compiled, since a recorded model runs eagerly. Each time is the
median of several passes; the peak is measured in one more pass. Memory is all allocated memory, including parameters;
on a CPU, what the pass adds to it. "Weights" are those of every query and key, exact, in float32; those of a layer are
freed before the next layer is computed.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from measurement import peak_memory, synchronize
from torch import Tensor

from regard.attention import Recording, record
from regard.layers.packed import pack
from regard.models.gpt import GPT, gpt2

SIZES = {
    "cpu": dict(width=256, heads=4, layers=4, feedforward=1024, vocab=1000),
    "cuda": dict(width=768, heads=12, layers=12, feedforward=3072, vocab=50257),
}
PASSES = {"cpu": 3, "cuda": 15}


class Bench:
    """Measures time and peak memory on one device; rows are relative to the first row of a model."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.sizes = SIZES[device]
        self.baseline: tuple[float, float] | None = None

    def begin(self) -> None:
        """Start a new model: free memory and reset the baseline."""
        self.baseline = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def row(self, label: str, run: Callable[[], None]) -> None:
        try:
            seconds, peak = self.measure(run)
        except torch.OutOfMemoryError:
            print(f"| {label} | out of memory | | | |", flush=True)
            return
        self.baseline = self.baseline or (seconds, peak)
        times, sizes = (f"{now / before:.2f}" if before else "" for now, before in zip((seconds, peak), self.baseline))
        print(f"| {label} | {1000 * seconds:.2f} | {times} | {peak / 2**20:,.0f} | {sizes} |", flush=True)

    def measure(self, run: Callable[[], None]) -> tuple[float, float]:
        seconds = []
        for _ in range(PASSES[self.device.type] + 1):
            synchronize(self.device)
            start = time.perf_counter()
            run()
            synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        peak = peak_memory(run, self.device) or 0
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        return statistics.median(seconds[1:]), peak


def measure_regard(bench: Bench, ids: list[int], dtype: torch.dtype) -> float:
    """Print the rows of Regard; return the maximum error of the weights against float64."""
    bench.begin()
    model = GPT(gpt2(**bench.sizes, max_len=len(ids))).to(bench.device, dtype).eval()
    tokens = pack([ids]).to(bench.device)

    def run_recorded(weights: bool, heads: int | None = None) -> None:
        with record(model, heads=heads) as recording:
            model(tokens)
        if weights:
            for recorded in recording.values():
                recorded.weights()

    bench.row("Regard, no recording", lambda: model(tokens))
    bench.row("Regard, one head per layer recorded", lambda: run_recorded(False, heads=0))
    bench.row("Regard, one head per layer recorded, weights computed", lambda: run_recorded(True, heads=0))
    bench.row("Regard, all heads recorded", lambda: run_recorded(False))
    bench.row("Regard, all heads recorded, all weights computed", lambda: run_recorded(True))
    with record(model, heads=0) as recording:
        model(tokens)
    return max_weight_error(recording)


def measure_one_layer(bench: Bench, ids: list[int], dtype: torch.dtype) -> None:
    bench.begin()
    model = GPT(gpt2(**bench.sizes, max_len=len(ids))).to(bench.device, dtype).eval()
    tokens = pack([ids]).to(bench.device)

    layer = f"blocks.{bench.sizes['layers'] // 2 - 1}"

    def run_recorded() -> None:
        with record(model, f"{layer}.*") as recording:
            model(tokens)
        recording[f"{layer}.attention"].weights()

    bench.row(f"Regard, {len(ids)} tokens, no recording", lambda: model(tokens))
    bench.row(f"Regard, {len(ids)} tokens, all heads of one layer, weights computed", run_recorded)


def measure_transformers(bench: Bench, ids: list[int], dtype: torch.dtype) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.tensor([ids], device=bench.device)
    sizes = bench.sizes
    config = GPT2Config(
        n_positions=len(ids), vocab_size=sizes["vocab"], n_embd=sizes["width"], n_layer=sizes["layers"],
        n_head=sizes["heads"], bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    bench.begin()
    for attention, attentions in (("sdpa", False), ("eager", False), ("eager", True)):
        config._attn_implementation = attention
        model = GPT2LMHeadModel(config).to(bench.device, dtype).eval()
        label = f"transformers, {attention}{', output_attentions' if attentions else ''}"
        bench.row(label, lambda model=model, attentions=attentions: model(tokens, output_attentions=attentions))


def max_weight_error(recording: Recording) -> float:
    """Maximum error against float64, over a few rows of one head of the last layer."""
    recorded = list(recording.values())[-1]
    (call,) = recorded.calls
    q, k = (x[:, 0].double() for x in (call.q, call.k))
    rows = sorted({0, 1, len(q) // 2, len(q) - 1})
    scores = q[rows] @ k.mT * q.shape[-1] ** -0.5
    is_future = torch.arange(len(k), device=k.device) > torch.tensor(rows, device=k.device)[:, None]
    expected: Tensor = scores.masked_fill(is_future, -torch.inf).softmax(-1)
    return float((recorded.weights()[0, 0, rows].double() - expected).abs().max())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    bench, generator = Bench(options.device), torch.Generator().manual_seed(0)
    ids = torch.randint(bench.sizes["vocab"], (2 * options.length,), generator=generator).tolist()
    print(f"{options.length} tokens, {dtype}, {options.device}, torch {torch.__version__}\n")
    print("| | ms | × | peak MiB | × |\n| --- | ---: | ---: | ---: | ---: |")
    max_error = measure_regard(bench, ids[: options.length], dtype)
    measure_one_layer(bench, ids, dtype)
    try:
        measure_transformers(bench, ids[: options.length], dtype)
    except ImportError:
        print("| transformers is not installed | | | | |")
    print(f"\nMaximum error of the weights against float64: {max_error:.1e}")


if __name__ == "__main__":
    main()
