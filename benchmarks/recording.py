"""What looking costs: time and peak memory of a forward pass of GPT-2's shape, plain and recorded, beside transformers.

    python benchmarks/recording.py                            # 8192 and, for one layer, 16384 tokens, bf16, on a GPU
    python benchmarks/recording.py --length 256 --device cpu  # a small try, in float32

One text, causal, random weights, no gradients, nothing compiled: a recorded model runs as it is written. Each row is
the median of several passes; peaks are of one more. Memory is all that is allocated, parameters included. "Weights" are
those of every query and key, exact, in float32; each layer's are looked at and let go before the next layer's are made.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention import Recording, record
from regard.layers.packed import pack
from regard.models.gpt import GPT, gpt2

VOCABULARY = 50257
PASSES = {"cpu": 3, "cuda": 15}


class Bench:
    """Times and peaks on one device; the first row of a model is what its others are compared with."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.plain: tuple[float, float] | None = None

    def begin(self) -> None:
        """What the model before left behind is let go."""
        self.plain = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def row(self, what: str, run: Callable[[], None]) -> None:
        try:
            seconds, peak = self.measure(run)
        except torch.OutOfMemoryError:
            print(f"| {what} | out of memory | | | |", flush=True)
            return
        self.plain = self.plain or (seconds, peak)
        times, sizes = (f"{now / before:.2f}" if before else "" for now, before in zip((seconds, peak), self.plain))
        print(f"| {what} | {1000 * seconds:.2f} | {times} | {peak / 2**20:,.0f} | {sizes} |", flush=True)

    def measure(self, run: Callable[[], None]) -> tuple[float, float]:
        taken = []
        for _ in range(PASSES[self.device] + 1):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            taken.append(time.perf_counter() - began)
        peak = 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run()
            peak = torch.cuda.max_memory_allocated()
        return statistics.median(taken[1:]), peak

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def ours(bench: Bench, ids: list[int], dtype: torch.dtype) -> float:
    """Prints its rows; returns how far the weights are from those in float64."""
    bench.begin()
    model = GPT(gpt2(vocab=VOCABULARY, max_len=len(ids))).to(bench.device, dtype).eval()
    tokens = pack([ids]).to(bench.device)

    def recorded(weights: bool, heads: int | None = None) -> None:
        with record(model, heads=heads) as recording:
            model(tokens)
        if weights:
            for one in recording.values():
                one.weights()

    bench.row("Regard, nobody looks", lambda: model(tokens))
    bench.row("Regard, one head of each layer recorded", lambda: recorded(False, heads=0))
    bench.row("Regard, one head of each layer recorded, its weights computed", lambda: recorded(True, heads=0))
    bench.row("Regard, all heads recorded", lambda: recorded(False))
    bench.row("Regard, all heads recorded, all weights computed", lambda: recorded(True))
    with record(model, heads=0) as recording:
        model(tokens)
    return error(recording)


def one_layer(bench: Bench, ids: list[int], dtype: torch.dtype) -> None:
    bench.begin()
    model = GPT(gpt2(vocab=VOCABULARY, max_len=len(ids))).to(bench.device, dtype).eval()
    tokens = pack([ids]).to(bench.device)

    def recorded() -> None:
        with record(model, "blocks.5.*") as recording:
            model(tokens)
        recording["blocks.5.attention"].weights()

    bench.row(f"Regard, {len(ids)} tokens, nobody looks", lambda: model(tokens))
    bench.row(f"Regard, {len(ids)} tokens, all heads of one layer, weights computed", recorded)


def theirs(bench: Bench, ids: list[int], dtype: torch.dtype) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.tensor([ids], device=bench.device)
    config = GPT2Config(n_positions=len(ids), vocab_size=VOCABULARY, use_cache=False)
    bench.begin()
    for implementation, attentions in (("sdpa", False), ("eager", False), ("eager", True)):
        config._attn_implementation = implementation
        model = GPT2LMHeadModel(config).to(bench.device, dtype).eval()
        what = f"transformers, {implementation}{', output_attentions' if attentions else ''}"
        bench.row(what, lambda model=model, attentions=attentions: model(tokens, output_attentions=attentions))


def error(recording: Recording) -> float:
    """Of a few rows of one head of the last layer, how far the weights are from those in float64."""
    one = list(recording.values())[-1]
    (call,) = one.calls
    q, k = (x[:, 0].double() for x in (call.q, call.k))
    rows = sorted({0, 1, len(q) // 2, len(q) - 1})
    scores = q[rows] @ k.mT * q.shape[-1] ** -0.5
    ahead = torch.arange(len(k), device=k.device) > torch.tensor(rows, device=k.device)[:, None]
    expected: Tensor = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    return float((one.weights()[0, 0, rows].double() - expected).abs().max())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    bench, draw = Bench(options.device), torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (2 * options.length,), generator=draw).tolist()
    print(f"{options.length} tokens, {dtype}, {options.device}, torch {torch.__version__}\n")
    print("| what | ms | × | peak MiB | × |\n| --- | ---: | ---: | ---: | ---: |")
    far = ours(bench, ids[: options.length], dtype)
    one_layer(bench, ids, dtype)
    try:
        theirs(bench, ids[: options.length], dtype)
    except ImportError:
        print("| transformers is not installed | | | | |")
    print(f"\nWeights and the same in float64, farthest apart: {far:.1e}")


if __name__ == "__main__":
    main()
