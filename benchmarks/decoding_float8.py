"""Float8 weights in decoding: the kernel against its reference implementation, and tokens per second beside bfloat16.

    python benchmarks/decoding_float8.py
    python benchmarks/decoding_float8.py --tiny      # a rehearsal: without a GPU in Triton's interpreter, with int8

Prints two Markdown tables. The first has, for every shape of linear layers, the time of the kernel for few rows with
bf16 and with float8 weights, and the relative error with float8 weights against the reference in float64. The second
has tokens per second of greedy decoding of one sentence or prompt; the precisions alternate, medians of the rounds.
Weights are random: the share of equal tokens only shows that rounding acts; `decoding_quality.py` measures quality.
"""

import argparse
import dataclasses
import os
import random
import statistics
import sys
import time
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

from decoding import SHAPES, DecodingShape, RegardDecoder
from gpu_common import milliseconds, table

from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SEQ2SEQ_TOKENS
from regard.kernels.triton.skinny_linear import RowNorm, reference_skinny_linear, skinny_linear
from regard.layers.quantized import quantize_float8
from regard.models import make_model

# Outputs and inputs of linear layers: of the base shape, and of GPT-2.
LAYERS = [(512, 512), (1536, 512), (2048, 512), (512, 2048), (32000, 512)]
LAYERS += [(2304, 768), (768, 768), (3072, 768), (768, 3072), (50257, 768)]
MAX_ERROR = 1e-2  # of bf16 inputs and outputs


def check_layer(rows: int, outputs: int, width: int, device: torch.device, dtype: torch.dtype) -> list[str]:
    """A row of the first table. A wrong kernel stops the script."""
    torch.manual_seed(0)
    x, residual = (torch.randn(rows, n, device=device, dtype=dtype) for n in (width, outputs))
    weight = torch.randn(outputs, width, device=device) * width**-0.5
    bias, gain = (torch.randn(n, device=device, dtype=dtype) for n in (outputs, width))
    q, scale = quantize_float8(weight)
    weight = weight.to(dtype)
    norm = RowNorm(gain, None, 1e-5, "layer")
    double = RowNorm(gain.double(), None, 1e-5, "layer")
    options: Any = {"norm": norm, "activation": "relu", "residual": residual}
    expected = reference_skinny_linear(
        *(x.double(), q.double(), bias.double()),
        scale=scale.double(),
        norm=double,
        activation="relu",
        residual=residual.double(),
    )
    out = skinny_linear(x, q, bias, scale=scale, **options)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    if not error <= MAX_ERROR:
        sys.exit(f"{rows} rows, {width} to {outputs}: the relative error of the kernel is {error:.1e}.")
    times = [
        milliseconds(lambda: skinny_linear(x, weight, bias, **options)),
        milliseconds(lambda: skinny_linear(x, q, bias, scale=scale, **options)),
    ]
    cells = [f"{1e3 * ms:.1f}" for ms in times]
    return [f"{width} → {outputs}", str(rows), *cells, f"{times[0] / times[1]:.2f}×", f"{error:.1e}"]


def compare_precisions(shape: DecodingShape, device: torch.device, precisions: list[str], rounds: int) -> list[str]:
    """A row of the second table: one sentence or prompt, in both precisions alternately."""
    torch.manual_seed(0)
    # The model has the first precision, so that decoding makes a copy for the second one only, and keeps it.
    model = make_model(shape.config()).eval().to(device, getattr(torch, precisions[0]))
    special = CAUSAL_LM_TOKENS if shape.is_decoder_only else SEQ2SEQ_TOKENS
    source = [*random.Random(0).choices(range(4, shape.vocabulary), k=shape.source - 1), 3]
    config = shape.decode_config(beam=1)
    calls = [RegardDecoder(model, special, precision).prepare([source], config) for precision in precisions]
    outputs = [call()[0] for call in calls]  # compiles the kernels and captures the steps
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, seconds):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    rates = [shape.target / statistics.median(times) for times in seconds]
    equal = sum(a == b for a, b in zip(*outputs)) / len(outputs[0])
    cells = [f"{rate:,.0f}" for rate in rates]
    return [shape.name, str(shape.source), str(shape.target), *cells, f"{rates[1] / rates[0]:.2f}×", f"{equal:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--rounds", type=int, default=7, help="measured calls per precision")
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.tiny:
        parser.error("no CUDA device was found; try --tiny")
    device = torch.device("cuda" if is_cuda else "cpu")
    print(f"{torch.cuda.get_device_name() if is_cuda else 'CPU, interpreter'}, torch {torch.__version__}\n")
    # The interpreter cannot multiply bfloat16.
    dtype, precisions = (torch.bfloat16, ["bfloat16", "float8"]) if is_cuda else (torch.float16, ["float32", "int8"])
    layers, row_counts, shapes = LAYERS, (1, 4, 16), [SHAPES["cuda"][name] for name in ("base", "gpt2")]
    if options.tiny:
        layers, row_counts = [(20, 24), (8, 1500)], (1, 4)
        sizes: dict[str, Any] = dict(width=32, heads=2, layers=1, feedforward=32, vocabulary=50, source=5, target=4)
        shapes = [dataclasses.replace(shape, **sizes) for shape in shapes]
    rows = [check_layer(rows, *layer, device, dtype) for layer in layers for rows in row_counts]
    print(table(["layer", "rows", "16 bits, µs", "float8, µs", "speed", "error, float8"], rows), flush=True)
    rows = [compare_precisions(shape, device, precisions, options.rounds) for shape in shapes]
    rates = [f"{precision}, tokens/s" for precision in precisions]
    print("\n" + table(["model", "source", "target", *rates, "speed", "equal tokens"], rows))


if __name__ == "__main__":
    main()
