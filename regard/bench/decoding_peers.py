"""Peer libraries that decode the same model: `generate` of transformers, and CTranslate2.

Each class prepares one implementation: the constructor copies the weights of a Regard model, and `prepare` returns a
function that decodes given token ids. All of them stop at the same lengths as Regard.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from regard.bench.measurement import Unsupported
from regard.data import Tokenizer
from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig, decode_all
from regard.decode.engine.engine_runner import COMPILED_SENTENCES
from regard.interop import export_ctranslate2
from regard.interop.huggingface.decoders.gpt_models import write_gpt_model
from regard.interop.huggingface.encoder_decoders.encoder_decoder_models import write_encoder_decoder
from regard.layers.packed import Packed, pack
from regard.models import GPT, Transformer
from regard.pipelines import Translator

Sources = Sequence[Sequence[int]]
# Seconds of warm-up after which no further batch shape of a model is compiled.
COMPILE_SECONDS = 25.0


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

    def _pack(self, rows: list[list[int]]) -> Packed:
        return pack(rows).to(self.device)

    def prepare(self, sources: Sources, config: DecodeConfig) -> Callable[[], list[list[int]]]:
        config = dataclasses.replace(config, precision=self.precision)
        if self.device.type == "cpu":  # as in a process that has decoded a few sentences: with compiled kernels
            short = dataclasses.replace(config, method="greedy", n_best=1, min_len=0, max_len=1)
            decode_all(self.model, list(sources[:1]) * COMPILED_SENTENCES, self._pack, short, special=self.special)

        def call() -> list[list[int]]:
            results = decode_all(self.model, sources, self._pack, config, special=self.special)
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
