"""`regard bench decoding`: sentences per second of greedy and beam decoding, against transformers and CTranslate2.

All models have the same shape and random weights, and all outputs have the same length: the work is the same.
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
from regard.bench.bench_report import BenchReport
from regard.bench.measurement import Implementation, Measurement, Work, compare, measure_ceilings
from regard.bench.peers import is_installed
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.devices import Device, find_device
from regard.interop import export_ctranslate2
from regard.models import TransformerConfig, make_model
from regard.pipelines import Translator


@dataclass(frozen=True)
class DecodingShape:
    """Sizes of an encoder-decoder with `layers` layers each, and source and target lengths of sentences in tokens."""

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
        """Matrix products of all tokens; memory traffic: each step reads all weights of the decoder once."""
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


def bench_decoding(device: Device = "auto", *, shape: DecodingShape | None = None, rounds: int = 2) -> BenchReport:
    """Measure greedy decoding of one sentence and of a batch, and beam search of a batch.

    >>> tiny = DecodingShape(16, 2, 1, 16, vocabulary=20, source=3, target=2, sentences=2, beam=2)
    >>> report = bench_decoding("cpu", shape=tiny, rounds=1)
    >>> [row.case for row in report.rows if row.is_regard]
    ['greedy, 1 sentence', 'greedy, 2 sentences', 'beam 2, 2 sentences']
    """
    target = find_device(device)
    shape, dtype = shape or SHAPES[target.type], DTYPES[target.type]
    ceilings = measure_ceilings(target, dtype)
    rng = random.Random(0)
    words = [f"w{i}" for i in range(shape.vocabulary - 4)]
    lines = [" ".join(rng.choices(words, k=shape.source - 1)) for _ in range(shape.sentences)]
    translator = _make_translator(shape, words)
    translator.model.to(target, dtype)
    cases = [("greedy", 1, 1), ("greedy", shape.sentences, 1), (f"beam {shape.beam}", shape.sentences, shape.beam)]
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        factories = _translator_factories(shape, translator, target, Path(folder))
        for name, count, beam in cases:
            config = DecodeConfig(
                method="beam" if beam > 1 else "greedy", beam=beam, min_len=shape.target, max_len=shape.target
            )
            implementations = [
                Implementation(label, functools.partial(_prepare, make, lines[:count], config), is_regard)
                for label, make, is_regard in factories
            ]
            case = f"{name}, {count} sentence{'s' if count > 1 else ''}"
            rows += compare(case, implementations, shape.work(count, beam, dtype.itemsize), ceilings, target, rounds)
    not_installed = tuple(peer for peer in ("transformers", "CTranslate2") if not is_installed(peer))
    return BenchReport("decoding", ceilings, rows, not_installed)


def _prepare(make: Callable[[], Translate], lines: list[str], config: DecodeConfig) -> Callable[[], Any]:
    translate = make()
    return lambda: translate(lines, config)


def _translator_factories(
    shape: DecodingShape, translator: Translator, device: torch.device, folder: Path
) -> list[tuple[str, Callable[[], Translate], bool]]:
    factories: list[tuple[str, Callable[[], Translate], bool]] = [("Regard", lambda: translator.translate, True)]
    if is_installed("transformers"):
        factories.append(("transformers, generate", functools.cache(lambda: _make_marian(shape, translator)), False))
    if is_installed("CTranslate2"):
        kinds = ("float32", "int8") if device.type == "cpu" else ("float16", "int8_float16")
        for kind in kinds:
            make = functools.cache(functools.partial(_make_ctranslate2, translator, device, kind, folder / kind))
            factories.append((f"CTranslate2, {kind}", make, False))
    return factories


def _make_translator(shape: DecodingShape, words: list[str]) -> Translator:
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


def _make_marian(shape: DecodingShape, translator: Translator) -> Translate:
    """A Marian model of transformers with the same shape, on ids: without tokenizing and detokenizing."""
    from transformers import MarianConfig, MarianMTModel

    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": shape.layers, f"{side}_attention_heads": shape.heads}
        sizes |= {f"{side}_ffn_dim": shape.feedforward}
    sizes |= dict(vocab_size=shape.vocabulary, d_model=shape.width, max_position_embeddings=64)
    special: dict[str, Any] = dict(pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, forced_eos_token_id=None)
    parameter = next(translator.model.parameters())
    model: Any = MarianMTModel(MarianConfig(**sizes, **special)).eval()
    model.to(parameter.device, parameter.dtype)

    @torch.inference_mode()
    def translate(lines: Sequence[str], config: DecodeConfig) -> Any:
        ids = torch.tensor([translator.encode_source(line) for line in lines], device=parameter.device)
        length: dict[str, Any] = dict(min_new_tokens=config.min_len, max_new_tokens=config.max_len)
        return model.generate(input_ids=ids, num_beams=config.beam, do_sample=False, **length)

    return translate


def _make_ctranslate2(translator: Translator, device: torch.device, kind: str, folder: Path) -> Translate:
    """CTranslate2 with the weights of the Regard model; on a CPU one worker per thread, which was fastest."""
    import ctranslate2

    on_cpu = copy.deepcopy(translator)
    on_cpu.model.to("cpu", torch.float32)
    export_ctranslate2(on_cpu, folder)
    threads = torch.get_num_threads()
    workers = threads if device.type == "cpu" else 1
    runner = ctranslate2.Translator(str(folder), device.type, compute_type=kind, inter_threads=workers, intra_threads=1)
    torch.set_num_threads(threads)  # CTranslate2 changes the number of OpenMP threads of the whole process

    def translate(lines: Sequence[str], config: DecodeConfig) -> Any:
        pieces = [line.split() for line in lines]
        length: dict[str, Any] = dict(min_decoding_length=config.min_len, max_decoding_length=config.max_len)
        return runner.translate_batch(pieces, max_batch_size=-(-len(lines) // workers), beam_size=config.beam, **length)

    return translate
