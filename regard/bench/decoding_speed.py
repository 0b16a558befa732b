"""`regard bench decoding`: tokens per second of greedy and beam decoding, against transformers and CTranslate2.

All implementations have the same weights, take the same token ids, and choose the same number of tokens per sentence:
the work is the same. Ids are prepared outside of the measured time.
"""

import dataclasses
import functools
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.bench.attention_speed import DTYPES
from regard.bench.bench_report import BenchReport, format_seconds, format_si
from regard.bench.decoding_peers import BenchDecoder, CTranslate2Decoder, RegardDecoder, TransformersDecoder
from regard.bench.measurement import Ceilings, Implementation, Measurement, Work, compare, measure_ceilings
from regard.bench.peers import is_installed
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SEQ2SEQ_TOKENS
from regard.decode import DecodeConfig
from regard.devices import Device, find_device
from regard.errors import RegardError
from regard.models import TransformerConfig, make_model
from regard.models.gpt import GPTConfig, gpt2


@dataclass(frozen=True)
class DecodingShape:
    """Sizes of an encoder-decoder with `layers` layers each, or of a decoder-only model; and the cases to measure."""

    name: str = "small"
    width: int = 256
    heads: int = 4
    layers: int = 3
    feedforward: int = 1024
    vocabulary: int = 8000
    source: int = 16
    """tokens per source or prompt, including `<eos>`"""
    target: int = 20
    """tokens per output, including `<eos>`: decoding steps"""
    cases: tuple[tuple[int, int], ...] = ((1, 1), (64, 1), (64, 5))
    """number of sentences and beam width (1: greedy) of each case"""
    is_decoder_only: bool = False

    def work(self, sentences: int, beam: int, itemsize: int) -> Work:
        """Matrix products of all tokens; memory traffic: each step reads all weights of the decoder once."""
        E, F = self.width, self.feedforward
        encoder = self.layers * (4 * E * E + 2 * E * F)
        decoder = encoder if self.is_decoder_only else self.layers * (8 * E * E + 2 * E * F)
        decoder += E * self.vocabulary
        flops = 2.0 * sentences * (self.source * encoder + self.target * beam * decoder)
        read = itemsize * (encoder + self.target * decoder)
        return Work(flops, read, amount=sentences * self.target, unit=" tokens/s")

    def config(self) -> TransformerConfig | GPTConfig:
        """The model: a post-norm Transformer (Marian in transformers), or a GPT-2."""
        max_len = -(-(self.source + self.target) // 64) * 64
        sizes: dict[str, Any] = dict(width=self.width, heads=self.heads, feedforward=self.feedforward)
        if self.is_decoder_only:
            return gpt2(**sizes, layers=self.layers, vocab=self.vocabulary, max_len=max_len)
        return TransformerConfig(
            **sizes,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            source_vocab=self.vocabulary,
            target_vocab=self.vocabulary,
            shared_vocab=True,
            max_len=max_len,
            norm="post",
        )

    def decode_config(self, beam: int) -> DecodeConfig:
        """Outputs of exactly `target` tokens, of which the last is `<eos>`."""
        length = self.target - 1
        return DecodeConfig("beam" if beam > 1 else "greedy", beam, min_len=length, max_len=length, max_extra=length)


_GPU_CASES = ((1, 1), (8, 1), (64, 1), (512, 1), (64, 4), (512, 4))
_BASE = DecodingShape("base", 512, 8, 6, 2048, 32000)
_GPT2 = DecodingShape("gpt2", 768, 12, 12, 3072, 50257, 32, 128, ((1, 1), (8, 1), (64, 1)), is_decoder_only=True)
SHAPES = {
    "cpu": {"small": DecodingShape(), "base": _BASE, "gpt2": dataclasses.replace(_GPT2, cases=((1, 1), (8, 1)))},
    "cuda": {
        "small": DecodingShape(cases=_GPU_CASES),
        "base": dataclasses.replace(_BASE, source=30, target=30, cases=_GPU_CASES),
        "gpt2": _GPT2,
    },
}
SHAPES["mps"] = SHAPES["cpu"]
# Short cases are measured in more rounds.
SHORT_CASE_FLOPS, SHORT_CASE_ROUNDS = 30e9, 3
DEFAULT_SHAPES = {"cpu": ("small", "base"), "mps": ("small",), "cuda": ("base", "gpt2")}


def bench_decoding(
    device: Device = "auto",
    *,
    shapes: Sequence[str | DecodingShape] = (),
    rounds: int = 2,
    compiled: bool = True,
    quiet: bool = False,
) -> BenchReport:
    """Measure greedy decoding and beam search at several batch sizes.

    `shapes` are names (small, base, gpt2) or sizes; by default small and base on a CPU, base and gpt2 on a GPU.
    `compiled` includes, on a GPU, transformers with a static cache and a compiled forward pass. Unless `quiet`, the
    times of a case are written to standard error as soon as they are measured. For one sentence, which is limited by
    memory, "of the ceiling" is the share of the memory bandwidth if the decoder's weights are read once per token.

    >>> tiny = DecodingShape("tiny", 16, 2, 1, 16, vocabulary=20, source=3, target=2, cases=((1, 1), (2, 2)))
    >>> report = bench_decoding("cpu", shapes=[tiny], rounds=1, quiet=True)
    >>> [row.case for row in report.rows if row.implementation == "Regard, float32"]
    ['tiny, greedy, 1 sentence', 'tiny, beam 2, 2 sentences']
    """
    target = find_device(device)
    chosen = [_find_shape(shape, target) for shape in shapes or DEFAULT_SHAPES[target.type]]
    ceilings = measure_ceilings(target, DTYPES[target.type])
    rows: list[Measurement] = []
    for shape in chosen:
        rows += _bench_shape(shape, target, ceilings, rounds, compiled, quiet)
    not_installed = tuple(peer for peer in ("transformers", "CTranslate2") if not is_installed(peer))
    return BenchReport("decoding", ceilings, rows, not_installed)


def _find_shape(shape: str | DecodingShape, device: torch.device) -> DecodingShape:
    if isinstance(shape, DecodingShape):
        return shape
    known = SHAPES[device.type]
    if shape not in known:
        raise RegardError(f"No shape is called {shape!r}.", f"Choose from {', '.join(known)}.")
    return known[shape]


def _bench_shape(
    shape: DecodingShape, device: torch.device, ceilings: Ceilings, rounds: int, compiled: bool, quiet: bool
) -> list[Measurement]:
    """Measure all cases of one shape."""
    dtype = DTYPES[device.type]
    rng = random.Random(0)
    count = max(sentences for sentences, _ in shape.cases)
    sources = [[*rng.choices(range(4, shape.vocabulary), k=shape.source - 1), 3] for _ in range(count)]
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        decoders = make_decoders(shape, device, dtype, compiled, Path(folder))
        for sentences, beam in shape.cases:
            config = shape.decode_config(beam)
            name = f"beam {beam}" if beam > 1 else "greedy"
            case = f"{shape.name}, {name}, {sentences} sentence{'s' if sentences > 1 else ''}"
            implementations = [
                Implementation(
                    label,
                    functools.partial(decoder.prepare, sources[:sentences], config),
                    isinstance(decoder, RegardDecoder),
                )
                for label, decoder in decoders.items()
            ]
            work = shape.work(sentences, beam, dtype.itemsize)
            repeats = SHORT_CASE_ROUNDS if work.flops < SHORT_CASE_FLOPS else 1
            measured = compare(case, implementations, work, ceilings, device, repeats * rounds)
            measured = [_add_note(row, measured, decoders, work, sentences) for row in measured]
            if not quiet:
                for row in measured:
                    speed = format_seconds(row.seconds) if row.seconds else row.note
                    print(f"{row.case}: {row.implementation}: {speed}", file=sys.stderr, flush=True)
            rows += measured
    return rows


def make_decoders(
    shape: DecodingShape, device: torch.device, dtype: torch.dtype, compiled: bool, folder: Path
) -> dict[str, BenchDecoder]:
    """Regard and the installed peers, by name, all with the same random weights."""
    torch.manual_seed(0)
    model = make_model(shape.config()).eval().to(device, dtype)
    special = CAUSAL_LM_TOKENS if shape.is_decoder_only else SEQ2SEQ_TOKENS
    decoders: dict[str, BenchDecoder] = {f"Regard, {str(dtype).removeprefix('torch.')}": RegardDecoder(model, special)}
    if device.type == "cpu":
        decoders["Regard, int8"] = RegardDecoder(model, special, "int8")
    if is_installed("transformers"):
        decoders["transformers, generate"] = TransformersDecoder(model, special)
        if compiled and device.type == "cuda":
            decoders["transformers, static cache, compiled"] = TransformersDecoder(model, special, compiled=True)
    if is_installed("CTranslate2") and not shape.is_decoder_only:
        for kind in ("float32", "int8") if device.type == "cpu" else ("float16", "int8_float16"):
            decoders[f"CTranslate2, {kind}"] = CTranslate2Decoder(model, special, kind, folder)
    return decoders


def _add_note(
    row: Measurement, rows: Sequence[Measurement], decoders: dict[str, BenchDecoder], work: Work, sentences: int
) -> Measurement:
    """Add the speed of Regard relative to each peer, the arrangement of a peer, and the rate of reading weights."""
    if row.seconds is None:
        return row
    is_quantized = "int8" in row.implementation
    notes = [decoders[row.implementation].note] if not row.is_regard else []
    if row.is_regard:
        if sentences == 1 and not is_quantized:
            notes.append(f"weights read at {format_si(work.bytes / row.seconds)}B/s")
        notes += [
            f"{peer.seconds / row.seconds:.2f}× {peer.implementation.replace(', ', ' ')}"
            for peer in rows
            if peer.seconds and not peer.is_regard
        ]
    # The ceilings were measured in the dtype of the device.
    share = None if is_quantized else row.share
    return dataclasses.replace(row, note=", ".join(filter(None, notes)), share=share)
