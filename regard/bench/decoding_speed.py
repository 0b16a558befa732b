"""`regard bench decoding`: sentences a second of greedy and beam decoding, beside transformers and CTranslate2.

Models of one shape with random weights; every output has the same length, so that all do the same work.
"""

import copy
import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.bench.attention_speed import DTYPES
from regard.bench.bench_report import Report
from regard.bench.measurement import Entrant, Row, Work, compare, measure_ceilings
from regard.bench.peers import installed
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.interop import export_ctranslate2
from regard.models import TransformerConfig, make_model
from regard.pipelines import Device, Translator, find_device


@dataclass(frozen=True)
class DecodingShape:
    """An encoder and decoder of so many layers each; sentences of `source` tokens in and `target` out."""

    width: int = 256
    heads: int = 4
    layers: int = 3
    feedforward: int = 1024
    vocabulary: int = 8000
    source: int = 16
    target: int = 20
    sentences: int = 32
    beam: int = 5

    def work(self, sentences: int, rows: int, itemsize: int) -> Work:
        """The products of all tokens; and each step reads every weight of the decoder once."""
        E, F = self.width, self.feedforward
        encoder = self.layers * (4 * E * E + 2 * E * F)
        decoder = self.layers * (8 * E * E + 2 * E * F) + E * self.vocabulary
        flops = 2.0 * sentences * (self.source * encoder + self.target * rows * decoder)
        read = itemsize * (encoder + self.target * decoder)
        return Work(flops, read, amount=sentences, unit=" sentences/s")


SHAPES = {
    "cpu": DecodingShape(),
    "mps": DecodingShape(),
    "cuda": DecodingShape(512, 8, 6, 2048, 32000, source=30, target=30, sentences=512, beam=4),
}
Translate = Callable[[Sequence[str], DecodeConfig], Any]


def bench_decoding(device: Device = "auto", *, shape: DecodingShape | None = None, rounds: int = 2) -> Report:
    """One sentence greedily, many greedily, many with a beam.

    >>> tiny = DecodingShape(16, 2, 1, 16, vocabulary=20, source=3, target=2, sentences=2, beam=2)
    >>> report = bench_decoding("cpu", shape=tiny, rounds=1)
    >>> [row.case for row in report.rows if row.ours]
    ['greedy, 1 sentence', 'greedy, 2 sentences', 'beam 2, 2 sentences']
    """
    where = find_device(device)
    shape, dtype = shape or SHAPES[where.type], DTYPES[where.type]
    ceilings = measure_ceilings(where, dtype)
    draw = random.Random(0)
    words = [f"w{i}" for i in range(shape.vocabulary - 4)]
    lines = [" ".join(draw.choices(words, k=shape.source - 1)) for _ in range(shape.sentences)]
    translator = _translator(shape, words)
    translator.model.to(where, dtype)
    cases = [("greedy", 1, 1), ("greedy", shape.sentences, 1), (f"beam {shape.beam}", shape.sentences, shape.beam)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        entrants = _entrants(shape, translator, where, Path(folder))
        for name, count, beam in cases:
            config = DecodeConfig(
                method="beam" if beam > 1 else "greedy", beam=beam, min_len=shape.target, max_len=shape.target
            )
            timed = [
                Entrant(says, functools.partial(_ready, make, lines[:count], config), ours)
                for says, make, ours in entrants
            ]
            case = f"{name}, {count} sentence{'s' if count > 1 else ''}"
            rows += compare(case, timed, shape.work(count, beam, dtype.itemsize), ceilings, where, rounds)
    absent = tuple(peer for peer in ("transformers", "CTranslate2") if not installed(peer))
    return Report("decoding", ceilings, rows, absent)


def _ready(make: Callable[[], Translate], lines: list[str], config: DecodeConfig) -> Callable[[], Any]:
    translate = make()
    return lambda: translate(lines, config)


def _entrants(
    shape: DecodingShape, translator: Translator, device: torch.device, folder: Path
) -> list[tuple[str, Callable[[], Translate], bool]]:
    entrants: list[tuple[str, Callable[[], Translate], bool]] = [("Regard", lambda: translator.translate, True)]
    if installed("transformers"):
        entrants.append(("transformers, generate", functools.cache(lambda: _generate(shape, translator)), False))
    if installed("CTranslate2"):
        kinds = ("float32", "int8") if device.type == "cpu" else ("float16", "int8_float16")
        for kind in kinds:
            make = functools.cache(functools.partial(_ctranslate2, translator, device, kind, folder / kind))
            entrants.append((f"CTranslate2, {kind}", make, False))
    return entrants


def _translator(shape: DecodingShape, words: list[str]) -> Translator:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(words)], "space", vocab_size=shape.vocabulary)
    config = TransformerConfig(
        width=shape.width,
        heads=shape.heads,
        feedforward=shape.feedforward,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        source_vocab=shape.vocabulary,
        target_vocab=shape.vocabulary,
        shared_vocab=True,
        max_len=64,
        norm="post",
    )
    return Translator(make_model(config).eval(), tokenizer, tokenizer)


def _generate(shape: DecodingShape, translator: Translator) -> Translate:
    """transformers' Marian of the same shape; it is given ids, and its answers are not made into text."""
    from transformers import MarianConfig, MarianMTModel

    both: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        both |= {f"{side}_layers": shape.layers, f"{side}_attention_heads": shape.heads}
        both |= {f"{side}_ffn_dim": shape.feedforward}
    both |= dict(vocab_size=shape.vocabulary, d_model=shape.width, max_position_embeddings=64)
    special: dict[str, Any] = dict(pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, forced_eos_token_id=None)
    parameter = next(translator.model.parameters())
    model: Any = MarianMTModel(MarianConfig(**both, **special)).eval()
    model.to(parameter.device, parameter.dtype)

    @torch.inference_mode()
    def translate(lines: Sequence[str], config: DecodeConfig) -> Any:
        ids = torch.tensor([translator.source_ids(line) for line in lines], device=parameter.device)
        length: dict[str, Any] = dict(min_new_tokens=config.min_len, max_new_tokens=config.max_len)
        return model.generate(input_ids=ids, num_beams=config.beam, do_sample=False, **length)

    return translate


def _ctranslate2(translator: Translator, device: torch.device, kind: str, folder: Path) -> Translate:
    """CTranslate2 with our own weights; on a CPU a worker for each thread, which was fastest."""
    import ctranslate2

    on_cpu = copy.deepcopy(translator)
    on_cpu.model.to("cpu", torch.float32)
    export_ctranslate2(on_cpu, folder)
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    runner = ctranslate2.Translator(str(folder), device.type, compute_type=kind, inter_threads=workers, intra_threads=1)

    def translate(lines: Sequence[str], config: DecodeConfig) -> Any:
        pieces = [line.split() for line in lines]
        length: dict[str, Any] = dict(min_decoding_length=config.min_len, max_decoding_length=config.max_len)
        return runner.translate_batch(pieces, max_batch_size=-(-len(lines) // workers), beam_size=config.beam, **length)

    return translate
