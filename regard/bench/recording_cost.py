"""`regard bench recording`: what it costs to look: a language model alone, recorded, and with its weights computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.attention import record
from regard.bench.attention_speed import DTYPES, known_lengths
from regard.bench.bench_report import Report
from regard.bench.measurement import Entrant, Row, Work, compare, measure_ceilings
from regard.bench.peers import installed
from regard.layers.packed import pack
from regard.models.gpt import GPT, gpt2
from regard.pipelines import Device, find_device


@dataclass(frozen=True)
class RecordingShape:
    """A decoder of GPT-2's kind."""

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
) -> Report:
    """One text: nobody looks; one head of each layer is looked at; every weight of every head is computed.

    transformers gives weights only through its slow path (`output_attentions`), all of them at once.

    >>> report = bench_recording("cpu", [8], shape=RecordingShape(16, 2, 1, 50), rounds=1)
    >>> [row.case for row in report.rows if row.ours]
    ['nobody looks', 'a head of each layer', 'every weight']
    """
    where = find_device(device)
    dtype, shape = DTYPES[where.type], shape or SHAPES[where.type]
    lengths = known_lengths(lengths or LENGTHS[where.type])
    ceilings = measure_ceilings(where, dtype)
    rows: list[Row] = []
    for length in lengths:
        ids = torch.randint(shape.vocabulary, (length,), generator=torch.Generator().manual_seed(0))
        for case, entrants in _cases(shape, ids, where, dtype).items():
            rows += compare(case, entrants, shape.work(length), ceilings, where, rounds, length)
    return Report("recording", ceilings, rows, () if installed("transformers") else ("transformers",))


def _cases(
    shape: RecordingShape, ids: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> dict[str, list[Entrant]]:
    sizes = dict(width=shape.width, heads=shape.heads, feedforward=4 * shape.width, layers=shape.layers)
    model = GPT(gpt2(vocab=shape.vocabulary, max_len=len(ids), **sizes)).to(device, dtype).eval()
    tokens = pack([ids.tolist()]).to(device)

    @torch.no_grad()
    def alone() -> None:
        model(tokens)

    def looked(heads: int | None) -> Callable[[], None]:
        @torch.no_grad()
        def call() -> None:
            with record(model, heads=heads) as recording:
                model(tokens)
            for one in recording.values():
                one.weights(heads=None)

        return call

    cases = {
        "nobody looks": [Entrant("Regard", lambda: alone, ours=True)],
        "a head of each layer": [Entrant("Regard", lambda: looked(0), ours=True)],
        "every weight": [Entrant("Regard", lambda: looked(None), ours=True)],
    }
    if installed("transformers"):

        def theirs(implementation: str, weights: bool) -> Callable[[], Callable[[], Any]]:
            return lambda: _transformers(shape, ids[None].to(device), dtype, implementation, weights)

        cases["nobody looks"].append(Entrant("transformers, SDPA", theirs("sdpa", False)))
        for case in ("a head of each layer", "every weight"):
            cases[case].append(Entrant("transformers, output_attentions", theirs("eager", True)))
    return cases


def _transformers(
    shape: RecordingShape, ids: torch.Tensor, dtype: torch.dtype, implementation: str, weights: bool
) -> Callable[[], Any]:
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
    config._attn_implementation = implementation
    model: Any = GPT2LMHeadModel(config).eval()
    model.to(ids.device, dtype)
    return torch.no_grad()(lambda: model(ids, output_attentions=weights))
