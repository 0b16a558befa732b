"""`regard bench recording`: cost of recording the attention of a language model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.attention import record
from regard.bench.attention_speed import DTYPES, check_lengths
from regard.bench.bench_report import BenchReport
from regard.bench.measurement import Implementation, Measurement, Work, compare, measure_ceilings
from regard.bench.peers import is_installed
from regard.devices import Device, find_device
from regard.layers.packed import pack
from regard.models.gpt import GPT, gpt2


@dataclass(frozen=True)
class RecordingShape:
    """Sizes of a GPT-2-like decoder."""

    width: int = 256
    heads: int = 4
    layers: int = 4
    vocabulary: int = 1000

    def work(self, length: int) -> Work:
        E = self.width
        products = 2.0 * length * (self.layers * 12 * E * E + E * self.vocabulary)
        return Work(products + self.layers * 2.0 * length * length * E, amount=length, unit=" tokens/s")


SHAPES = {
    "cpu": RecordingShape(),
    "mps": RecordingShape(),
    "cuda": RecordingShape(width=768, heads=12, layers=12, vocabulary=50257),
}
LENGTHS = {"cpu": (256, 1024), "mps": (1024,), "cuda": (2048, 8192)}


def bench_recording(
    device: Device = "auto", lengths: Sequence[int] = (), *, shape: RecordingShape | None = None, rounds: int = 3
) -> BenchReport:
    """Measure a forward pass: without recording, with one head per layer recorded, and with all attention weights.

    transformers returns weights only with eager attention (`output_attentions`), for all heads at once.

    >>> report = bench_recording("cpu", [8], shape=RecordingShape(16, 2, 1, 50), rounds=1)
    >>> [row.case for row in report.rows if row.is_regard]
    ['no recording', 'one head per layer', 'all weights']
    """
    target = find_device(device)
    dtype, shape = DTYPES[target.type], shape or SHAPES[target.type]
    lengths = check_lengths(lengths or LENGTHS[target.type])
    ceilings = measure_ceilings(target, dtype)
    rows: list[Measurement] = []
    for length in lengths:
        ids = torch.randint(shape.vocabulary, (length,), generator=torch.Generator().manual_seed(0))
        for case, implementations in _make_cases(shape, ids, target, dtype).items():
            rows += compare(case, implementations, shape.work(length), ceilings, target, rounds, length)
    return BenchReport("recording", ceilings, rows, () if is_installed("transformers") else ("transformers",))


def _make_cases(
    shape: RecordingShape, ids: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> dict[str, list[Implementation]]:
    sizes = dict(width=shape.width, heads=shape.heads, feedforward=4 * shape.width, layers=shape.layers)
    model = GPT(gpt2(vocab=shape.vocabulary, max_len=len(ids), **sizes)).to(device, dtype).eval()
    tokens = pack([ids.tolist()]).to(device)

    @torch.no_grad()
    def run_plain() -> None:
        model(tokens)

    def run_recorded(heads: int | None) -> Callable[[], None]:
        @torch.no_grad()
        def call() -> None:
            with record(model, heads=heads) as recording:
                model(tokens)
            for recorded in recording.values():
                recorded.weights(heads=None)

        return call

    cases = {
        "no recording": [Implementation("Regard", lambda: run_plain, is_regard=True)],
        "one head per layer": [Implementation("Regard", lambda: run_recorded(0), is_regard=True)],
        "all weights": [Implementation("Regard", lambda: run_recorded(None), is_regard=True)],
    }
    if is_installed("transformers"):

        def peer(attention: str, weights: bool) -> Callable[[], Callable[[], Any]]:
            return lambda: _make_gpt2(shape, ids[None].to(device), dtype, attention, weights)

        cases["no recording"].append(Implementation("transformers, SDPA", peer("sdpa", False)))
        for case in ("one head per layer", "all weights"):
            cases[case].append(Implementation("transformers, output_attentions", peer("eager", True)))
    return cases


def _make_gpt2(
    shape: RecordingShape, ids: torch.Tensor, dtype: torch.dtype, attention: str, weights: bool
) -> Callable[[], Any]:
    """A GPT-2 of transformers with the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=ids.shape[1],
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    config._attn_implementation = attention
    model: Any = GPT2LMHeadModel(config).eval()
    model.to(ids.device, dtype)
    return torch.no_grad()(lambda: model(ids, output_attentions=weights))
