"""Encoders with local attention and relative positions on a GPU: time and memory, against transformers.

    python benchmarks/encoders_gpu.py                                  # base shapes, bf16
    python benchmarks/encoders_gpu.py --device cpu --tokens 128 --layers 2   # a small test, in float32

Random weights, imported from the class of transformers, so that both compute the same; no gradients, not compiled. All
texts of a batch have one length, the best case for padding. Times are medians of several passes, alternating; memory is
the peak above that before the pass. "difference" is the largest one of the outputs, relative to their largest value.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_common import table
from regard.attention import explain
from regard.interop import import_huggingface
from regard.layers.packed import pack
from tests.interop.model_comparison import write_tokenizer

VOCABULARY = 30_000
PASSES = 7
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 768, "num_attention_heads": 12}
DEBERTA = {"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
DEBERTA |= {"position_biased_input": False, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"]}
# Class, config and the lengths of texts that are measured.
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "ModernBert": (dict(SIZES, num_hidden_layers=22, intermediate_size=1152, pad_token_id=0), (512, 2048, 8192)),
    "MPNet": (dict(SIZES, num_hidden_layers=12, intermediate_size=3072, max_position_embeddings=514), (128, 512)),
    "DebertaV2": (dict(SIZES, num_hidden_layers=12, intermediate_size=3072, **DEBERTA), (128, 512)),
}


def measure(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds and peak memory in GiB of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return time.perf_counter() - start, peak / 2**30


@torch.no_grad()
def rows(family: str, options: argparse.Namespace) -> list[list[str]]:
    """The measurements of one class."""
    sizes, lengths = SHAPES[family]
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    sizes = sizes | ({"num_hidden_layers": options.layers} if options.layers else {})
    torch.manual_seed(0)
    hf_model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        write_tokenizer(Path(folder), vocab=100)
        model = import_huggingface(folder).model.to(device, dtype)
    hf_model = hf_model.to(device, dtype)
    found = []
    for length in (count for count in lengths if count <= options.tokens):
        ids = torch.randint(5, VOCABULARY, (max(1, options.tokens // length), length))
        packed, padded, mask = pack(ids.tolist()).to(device), ids.to(device), torch.ones_like(ids).to(device)
        runs = {
            "Regard": lambda packed=packed: model.encode(packed),
            "transformers": lambda padded=padded, mask=mask: hf_model(input_ids=padded, attention_mask=mask),
        }
        with explain() as choices:
            ours = runs["Regard"]()
        theirs = runs["transformers"]().last_hidden_state.flatten(0, 1)
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        del ours, theirs
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(PASSES):
            for name, run in runs.items():
                results[name].append(measure(run, device))
        (ms, gib), (hf_ms, hf_gib) = (
            (1e3 * statistics.median(time for time, _ in results[name]), max(memory for _, memory in results[name]))
            for name in runs
        )
        backends = ", ".join(dict.fromkeys(choice.backend for choice in choices))
        cells = [f"{family}, {len(ids)} × {length}", f"{ms:.1f}", f"{hf_ms:.1f}", f"{hf_ms / ms:.2f}"]
        found.append([*cells, f"{gib:.2f}", f"{hf_gib:.2f}", backends, f"{difference:.1e}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per batch")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: that of the base model")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    header = ["texts × tokens", "Regard, ms", "transformers, ms", "ratio"]
    header += ["Regard, GiB", "transformers, GiB", "backends", "difference"]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(table(header, [row for family in SHAPES for row in rows(family, options)]))


if __name__ == "__main__":
    main()
