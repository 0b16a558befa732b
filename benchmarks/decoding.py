"""Decoding: tokens per second of greedy and beam search, against transformers and CTranslate2.

    python benchmarks/decoding.py                                 # small and base on a CPU, base and gpt2 on a GPU
    python benchmarks/decoding.py --shapes small --device cpu

All implementations have the same weights, take the same token ids, and choose the same number of tokens per sentence:
the work is the same. Ids are prepared outside of the measured time. For one sentence, which is limited by memory, "of
the ceiling" is the share of the memory bandwidth if the decoder's weights are read once per token.
"""

import argparse
import copy
import dataclasses
import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from measurement import (
    DTYPES,
    Implementation,
    Measurement,
    Report,
    Roofline,
    Unsupported,
    Work,
    compare,
    format_seconds,
    format_si,
    is_installed,
    measure_roofline,
)

from regard.data import Tokenizer
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, SEQ2SEQ_TOKENS, SpecialTokens
from regard.decode import DecodeConfig, Request, decode_all
from regard.decode.engine import COMPILED_SENTENCES
from regard.devices import find_device
from regard.interop import export_ctranslate2
from regard.interop.huggingface.encoder_decoders import write_encoder_decoder
from regard.interop.huggingface.gpt import write_gpt_model
from regard.models import GPT, Transformer, TransformerConfig, make_model
from regard.models.gpt import GPTConfig, gpt2
from regard.pipelines import Translator

Sources = Sequence[Sequence[int]]
# Seconds of warm-up after which no further batch shape of a model is compiled.
COMPILE_SECONDS = 25.0


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


# -- implementations --------------------------------------------------------------------------------------------------


class BenchDecoder(Protocol):
    """An implementation of decoding. `prepare` returns a function that decodes the sources; it sets `note`."""

    note: str

    def prepare(self, sources: Sources, config: DecodeConfig) -> Callable[[], Any]: ...


class RegardDecoder:
    """`decode_all` in one precision; returns the output ids without `<eos>`."""

    note = ""

    def __init__(self, model: Any, special: SpecialTokens, precision: Any = "auto") -> None:
        self.model, self.special, self.precision = model, special, precision
        self.device = next(model.parameters()).device

    def prepare(self, sources: Sources, config: DecodeConfig) -> Callable[[], list[list[int]]]:
        config = dataclasses.replace(config, precision=self.precision)
        if self.device.type == "cpu":  # as in a process that has decoded a few sentences: with compiled kernels
            short = dataclasses.replace(config, method="greedy", n_best=1, min_len=0, max_len=1)
            decode_all(self.model, Request(list(sources[:1]) * COMPILED_SENTENCES, short, special=self.special))

        def call() -> list[list[int]]:
            results = decode_all(self.model, Request(sources, config, special=self.special))
            return [n_best[0].ids for n_best in results]

        return call


class TransformersDecoder:
    """`generate` of transformers with the weights of a Regard model: a Marian or a GPT-2 model.

    With `compiled`, the cache is static, and on a GPU `generate` compiles the forward pass of a token with
    `torch.compile(mode="reduce-overhead")`, the method of gpt-fast.
    """

    note = ""

    def __init__(self, model: Any, special: SpecialTokens, compiled: bool = False) -> None:
        self.model, self.special, self.compiled = model, special, compiled
        self.compile_seconds = 0.0
        self.failure: Exception | None = None

    @cached_property
    def peer(self) -> Any:
        """The model of transformers, on the device and in the dtype of the Regard model."""
        import transformers

        write = write_encoder_decoder if isinstance(self.model, Transformer) else write_gpt_model
        weights = {name: tensor.detach().float().cpu() for name, tensor in self.model.named_parameters()}
        table, _, tensors = write(self.model.config, self.special, weights)
        (name,) = table.pop("architectures")
        # Outputs have a given length: their last token is not forced.
        table = {key: value for key, value in table.items() if not key.startswith("forced")}
        model_class = getattr(transformers, name)
        peer = model_class(model_class.config_class(**table)).eval()
        _, unexpected = peer.load_state_dict(tensors, strict=False)
        if unexpected:
            raise Unsupported(f"this version of transformers has no {unexpected[0]}")
        parameter = next(self.model.parameters())
        return peer.to(parameter.device, parameter.dtype)

    def prepare(self, sources: Sources, config: DecodeConfig) -> Callable[[], list[list[int]]]:
        if self.compile_seconds > COMPILE_SECONDS:
            raise Unsupported(f"not compiled: other batch shapes took {self.compile_seconds:.0f} s")
        if self.failure is not None:  # compiling the next batch shape would fail in the same way
            raise self.failure
        peer, special = self.peer, self.special
        ids = torch.tensor(sources, device=peer.device)
        options: dict[str, Any] = {"min_new_tokens": config.min_len, "max_new_tokens": config.max_len + 1}
        if config.beam > 1 and config.method == "beam":
            options |= {"num_beams": config.beam, "early_stopping": True, "length_penalty": config.length_penalty}
        if self.compiled:
            options["cache_implementation"] = "static"
        options |= {"do_sample": False, "pad_token_id": special.pad, "eos_token_id": special.eos}
        # The output begins with the prompt, or with the first input of the decoder.
        start = ids.shape[1] if isinstance(self.model, GPT) else 1

        @torch.inference_mode()
        def call() -> list[list[int]]:
            output = peer.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            return output[:, start:].tolist()

        if self.compiled:
            self._compile(call)
        return call

    def _compile(self, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            for _ in range(2):  # the first call compiles, the second one captures CUDA graphs
                call()
        except Exception as error:
            self.failure = error
            raise
        self.compile_seconds += time.perf_counter() - start


class CTranslate2Decoder:
    """CTranslate2 with the weights of a Regard model, in the faster arrangement of workers and threads.

    Several sentences are divided among one worker per core, each with one thread. One sentence has one worker, with one
    thread or with one per core: `prepare` measures both. Returns the output tokens.
    """

    note = ""

    def __init__(self, model: Transformer, special: SpecialTokens, kind: str, folder: Path) -> None:
        self.model, self.special, self.kind, self.folder = model, special, kind, folder
        self.device = next(model.parameters()).device.type
        self.cores = torch.get_num_threads() if self.device == "cpu" else 1
        self.runners: dict[tuple[int, int], Any] = {}

    @cached_property
    def token_names(self) -> list[str]:
        """The name of each id, after the model has been written to the folder."""
        vocabulary = self.model.config.target_vocab
        words = " ".join(f"w{i}" for i in range(vocabulary - 4))
        tokenizer = Tokenizer.train([words], "space", vocab_size=vocabulary)
        if not (self.folder / "model.bin").exists():
            on_cpu = copy.deepcopy(self.model).to("cpu", torch.float32)
            export_ctranslate2(Translator(on_cpu, tokenizer, tokenizer, special=self.special), self.folder)
        return [tokenizer.backend_tokenizer.id_to_token(i) for i in range(vocabulary)]

    def _runner(self, workers: int, threads: int) -> Any:
        import ctranslate2

        if (workers, threads) not in self.runners:
            options: dict[str, Any] = {"inter_threads": workers, "intra_threads": threads}
            before = torch.get_num_threads()
            self.runners[workers, threads] = ctranslate2.Translator(
                str(self.folder), self.device, compute_type=self.kind, **options
            )
            # CTranslate2 sets the number of OpenMP threads of the calling thread, which is also that of torch.
            torch.set_num_threads(before)
        return self.runners[workers, threads]

    def prepare(self, sources: Sources, config: DecodeConfig) -> Callable[[], list[list[str]]]:
        names = self.token_names
        pieces = [[names[i] for i in row[:-1]] for row in sources]  # CTranslate2 adds <eos>
        options: dict[str, Any] = {"beam_size": config.beam if config.method == "beam" else 1}
        options |= {"min_decoding_length": config.min_len, "max_decoding_length": config.max_len + 1}

        def make_call(workers: int, threads: int) -> Callable[[], list[list[str]]]:
            runner, size = self._runner(workers, threads), -(-len(pieces) // workers)
            return lambda: [
                result.hypotheses[0] for result in runner.translate_batch(pieces, max_batch_size=size, **options)
            ]

        if len(sources) > 1 or self.cores == 1:
            arrangements = [(self.cores, 1)]
        else:
            arrangements = [(1, 1), (1, self.cores)]
        calls = [make_call(*arrangement) for arrangement in arrangements]
        seconds = [_best_seconds(call) for call in calls] if len(calls) > 1 else [0.0]
        fastest = seconds.index(min(seconds))
        workers, threads = arrangements[fastest]
        self.note = f"workers: {workers}, threads per worker: {threads}" if self.device == "cpu" else ""
        return calls[fastest]


def _best_seconds(call: Callable[[], Any], rounds: int = 5) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# -- measurements -----------------------------------------------------------------------------------------------------


def measure(
    shape: DecodingShape, device: torch.device, roofline: Roofline, rounds: int, compiled: bool
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
            measured = compare(case, implementations, work, roofline, device, repeats * rounds)
            measured = [_add_note(row, measured, decoders, work, sentences) for row in measured]
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
    # The roofline was measured in the dtype of the device.
    share = None if is_quantized else row.share
    return dataclasses.replace(row, note=", ".join(filter(None, notes)), share=share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", nargs="+", choices=("small", "base", "gpt2"))
    parser.add_argument("--rounds", type=int, default=2, help="measurements per row, of which the median is reported")
    parser.add_argument(
        "--no-compiled", action="store_true", help="leave out the compiled forward pass of transformers"
    )
    parser.add_argument("--out", help="JSON file of the measurements")
    options = parser.parse_args()
    device = find_device(options.device)
    roofline, rows = measure_roofline(device, DTYPES[device.type]), []
    for name in options.shapes or DEFAULT_SHAPES[device.type]:
        rows += measure(SHAPES[device.type][name], device, roofline, options.rounds, not options.no_compiled)
    missing = tuple(peer for peer in ("transformers", "CTranslate2") if not is_installed(peer))
    report = Report("decoding", roofline, rows, missing)
    print(report)
    if options.out:
        report.save(options.out)


if __name__ == "__main__":
    main()
