"""Entry points of decoding: calls and files (`decode_all`) and servers (`LiveDecoder`), and what computes the steps."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from regard.attention import dispatch
from regard.decode.ensemble import Ensemble, EnsembleStepper
from regard.decode.phrases import check_phrases
from regard.decode.precision import convert_model, iterate_modules, weight_versions
from regard.decode.protocol import Decodable, SpecialTokens, Stepper, continues_source
from regard.decode.request import DecodeConfig, NBest, Request
from regard.decode.rules import has_token_rules, length_limits
from regard.decode.slots import ArrivingSentences, DecodingJob, LiveSentence, LiveShape, OnToken, SlotDecoder
from regard.decode.steppers.model import ModelStepper
from regard.decode.steppers.static import StaticDecoder, StaticSeq2Seq
from regard.kernels.cpu.support import numba_available
from regard.kernels.triton.support import next_power_of_two
from regard.layers.packed import pack
from regard.models.config_checks import length_limit
from regard.models.decoder import Decoder
from regard.models.parameters import find_replacement
from regard.models.seq2seq import Seq2Seq

# Hypotheses in the batch of one CPU process: more are not faster.
CPU_ROWS = 160
# Hypotheses in the batch of a GPU.
GPU_ROWS = 2048
# So few hypotheses fit into the memory of any GPU.
SMALL_GPU_ROWS = 16
# CUDA graphs kept per model, each with its caches.
KEPT_GRAPHS = 4
# Sentences of a process from which on compiled CPU kernels are used.
COMPILED_SENTENCES = 16
# Sentences per process: fewer are not worth a worker.
MIN_SENTENCES = 8
# Sentences of a process from which on workers are started, which takes seconds of computing.
WORKER_SENTENCES = 64
# Capacities are powers of two from here on, so that sentences of similar length share a batch.
MIN_CAPACITY = 64
# Rows * source length of a batch.
BUDGET = 8192


def decode_all(
    model: Decodable,
    request: Request,
    *,
    on_token: OnToken | None = None,
    progress: Callable[[int, int], None] | None = None,
    budget: int = 8192,
) -> list[NBest]:
    """Decode the sentences of a request; results are in its order.

    `on_token(sentence, token)` is called for every generated token, except in beam search, where the output is known
    only at the end. `progress(done, total)` is called for every finished sentence. `budget` limits
    sentences * hypotheses * longest source of a batch.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> len(decode_all(Transformer(sizes).eval(), Request([[4, 5, 3], [6, 3], [7, 3]], DecodeConfig(beam=2))))
    3
    """
    results: list[NBest] = [NBest() for _ in request.sources]
    done = 0

    def on_result(index: int, n_best: NBest) -> None:
        nonlocal done
        results[index] = n_best
        done += 1
        if progress is not None:
            progress(done, len(request))

    limits = length_limits(request)
    job = DecodingJob(
        sources=request.sources,
        prefixes=[request.prefix(i) for i in range(len(request))],
        limits=limits,
        sample_indices=[request.sample_index(i) for i in range(len(request))],
        config=request.config,
        special=request.special,
        continues_source=continues_source(model),
        token_lists=request.token_lists(),
        vocab=request.vocab,
        lexical=request.lexical,
        history=request.history,
        is_compiled=uses_compiled_kernels(len(request)),
        on_token=on_token if request.config.method != "beam" else None,
        on_result=on_result,
    )
    stepper, reason = choose_stepper(model, job)
    note_choice(stepper, reason, len(request))
    if not request.sources:
        return []
    try:
        if request.lexical is not None:
            check_phrases(request.lexical, request.config.method, limits, request.prefixes)
        if stepper == "model":
            device = device_of(model)
            job.pack = lambda sources: pack(sources).to(device)
            run_job(model, job, budget)
        else:
            _run_static(convert_model(model, request.config.precision), job, budget)
    finally:
        for phrases in request.lexical or ():
            phrases.clear_caches()
    return results


class LiveDecoder:
    """A batch of one decoding configuration that sentences enter and leave at any step.

    `add` is cheap; `advance` loads waiting sentences, runs one step and calls back for finished ones. All calls must
    come from one thread, in `torch.inference_mode()`. Results are those of `decode_all`, whatever else is in the batch.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> results = []
    >>> with torch.inference_mode():
    ...     decoder = LiveDecoder(Transformer(sizes).eval(), DecodeConfig(beam=2), SpecialTokens(), LiveShape(8, 16, 0))
    ...     index = decoder.add(LiveSentence([4, 5, 3], limit=5, on_result=results.append))
    ...     while not decoder.is_idle:
    ...         decoder.advance()
    >>> len(results)
    1
    """

    def __init__(
        self,
        model: Any,
        config: DecodeConfig,
        special: SpecialTokens,
        shape: LiveShape,
        *,
        vocab: int = 0,
        history: bool = False,
        has_phrases: bool = False,
    ) -> None:
        self.config = config
        shape = round_shape(model, shape)
        self.shape = shape
        self.job = ArrivingSentences(config, special, continues_source(model), shape)
        self.job.vocab, self.job.history, self.job.has_phrases = vocab, history, has_phrases
        device = device_of(model)
        stepper, _ = choose_stepper(model, self.job)
        if stepper == "model":
            self.job.pack = lambda sources: pack(sources).to(device)
        else:
            model = convert_model(model, config.precision)
            stepper, _ = choose_stepper(model, self.job)
        rows = min(CPU_ROWS if device.type == "cpu" else GPU_ROWS, BUDGET // shape.source_capacity)
        self.is_graph = stepper == "captured"
        if self.is_graph:
            rows = min(GPU_ROWS, rows_in_memory(model, shape.capacity))
        self.max_slots = max(1, rows // self.job.hypotheses)
        if self.is_graph:
            from regard.decode.steppers.captured import GraphSlotDecoder

            self.max_slots = 1 << (self.max_slots.bit_length() - 1)
            sizes = (shape.capacity, shape.source_capacity, shape.prefix_len)
            self.decoder: SlotDecoder = GraphSlotDecoder(
                model, self.job, self.max_slots, *sizes, is_refilled_often=True
            )
            self.decoder.use_job(self.job)
        else:
            # One slot; their number grows with that of the sentences.
            self.decoder = make_slot_decoder(model, self.job, stepper, 1, shape.source_capacity)
            self.decoder.max_slots = self.max_slots

    def add(self, sentence: LiveSentence) -> int:
        """Queue a sentence; returns its index for `cancel`."""
        return self.job.add(sentence)

    def cancel(self, index: int) -> None:
        """Drop a sentence, without a result; nothing happens if it is finished."""
        if self.job.remove(index) is not None:
            if index in self.job.pending:
                self.job.pending.remove(index)
            else:
                self.decoder.drop(index)

    @property
    def is_idle(self) -> bool:
        """Whether there is no sentence to decode."""
        return self.decoder.is_idle

    @property
    def room(self) -> int:
        """The number of sentences that can be added without waiting for others to finish."""
        return max(0, self.max_slots - self.decoder.in_use - len(self.job.pending))

    def advance(self) -> None:
        """Load waiting sentences, run one step, and deliver finished sentences."""
        self.decoder.advance()


StepperName = Literal["model", "static", "compiled", "captured"]


class EngineChoice(NamedTuple):
    """What computed the steps of a call of `decode_all`: the model itself, a decoder with static caches, or such a
    decoder with kernels compiled for the CPU or captured in CUDA graphs.
    """

    stepper: StepperName
    reason: str
    """why nothing faster did"""
    sentences: int
    """number of sentences of the call"""


@contextmanager
def explain() -> Iterator[list[EngineChoice]]:
    """List how each call of `decode_all` in this thread inside the with block is decoded.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> with explain() as choices:
    ...     _ = decode_all(Transformer(sizes).eval(), Request([[4, 3]], DecodeConfig(coverage_penalty=0.2)))
    >>> choices[0].stepper, choices[0].reason
    ('static', 'the coverage penalty needs the attention weights of every step')
    """
    choices: list[EngineChoice] = []
    previous = _thread.choices
    _thread.choices = (*previous, choices)
    try:
        yield choices
    finally:
        _thread.choices = previous


def note_choice(stepper: StepperName, reason: str, sentences: int) -> None:
    """Add a call to the lists of `explain`."""
    for choices in _thread.choices:
        choices.append(EngineChoice(stepper, reason, sentences))


class _Thread(threading.local):
    choices: tuple[list[EngineChoice], ...] = ()


_thread = _Thread()


def choose_stepper(model: Any, job: DecodingJob) -> tuple[StepperName, str]:
    """What computes the steps of a job, and why nothing faster does.

    The model itself; a decoder with static caches; or such a decoder with kernels compiled for the CPU, or captured in
    CUDA graphs. The search is the same with all of them.
    """
    reason = model_reason(model, job.config)
    return ("model", reason) if reason else choose_static_stepper(model, job)


def model_reason(model: Any, config: DecodeConfig) -> str:
    """Why the model itself computes each step; "" if a decoder with static caches does.

    >>> from regard.models.transformer import Transformer, TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> model_reason(Transformer(sizes).train(), DecodeConfig())
    'the model is in training mode'
    """
    if config.engine == "plain":
        return 'engine="plain"'
    if dispatch.has_context():
        return "attention is recorded, changed or forced to a backend"
    members = member_models(model)
    for member in members:
        if not has_static_decoder(member):
            return f"{type(member).__name__} has no decoder stack"
        if member.training:
            return "the model is in training mode"
        if any(module._forward_hooks or module._forward_pre_hooks for module in iterate_modules(member)):
            return "the model has forward hooks"
        if path := find_replacement(member):
            return f"{path} was replaced"
    if torch.is_autocast_enabled(device_of(model).type):
        return "autocast is enabled"
    return ""


def has_static_decoder(model: Any) -> bool:
    """Whether a model can be decoded with static caches: it has a decoder stack, or is a recurrent encoder-decoder."""
    return isinstance(getattr(model, "stack", None), Decoder) or isinstance(model, Seq2Seq)


def choose_static_stepper(model: Any, job: DecodingJob) -> tuple[StepperName, str]:
    """The stepper of a model that has a decoder with static caches."""
    if job.needs_attention:
        return "static", "the coverage penalty needs the attention weights of every step"
    on_gpu = device_of(model).type != "cpu"
    if on_gpu or uses_graphs(model, job.hypotheses):
        if job.history:
            return "static", "the search history is recorded"
        if job.lexical is not None:
            return "static", "phrases are required or forbidden"
        if job.special.other_eos:
            return "static", "several tokens end an output"
        if has_token_rules(job.config):
            return "static", "rules about repetition depend on the tokens so far"
        if job.token_lists is None and uses_graphs(model, job.hypotheses):
            return "captured", ""
        return "static", "the captured kernels do not support this model, or a shortlist"
    if not job.is_compiled:
        return "static", f"compiled kernels are loaded for {COMPILED_SENTENCES} sentences or more"
    if not compiled_kernels().supports(model):
        return "static", "the compiled kernels do not support this model"
    return "compiled", ""


def compiled_kernels() -> ModuleType:
    """The module with the decoder of compiled CPU kernels."""
    from regard.decode.steppers import compiled  # imports numba

    return compiled


_decoded = 0  # sentences that this process decoded


def uses_compiled_kernels(sentences: int) -> bool:
    """Whether to decode these sentences with compiled CPU kernels.

    Importing numba takes half a second, more than decoding a few sentences: it is worth it if there are
    COMPILED_SENTENCES in this call, or if this process decoded that many before.
    """
    global _decoded
    _decoded += sentences
    return _decoded >= COMPILED_SENTENCES and numba_available()


def uses_graphs(model: Any, hypotheses: int) -> bool:
    """Whether the steps of a model are captured in a CUDA graph."""
    if not hasattr(model, "stack") or not next(model.parameters()).is_cuda:
        return False
    supported = _supported.setdefault(model, {})
    if hypotheses not in supported:
        from regard.decode.steppers.captured import CudaDecoder

        supported[hypotheses] = CudaDecoder.supports(model, hypotheses)
    return supported[hypotheses]


# Whether `CudaDecoder` supports a model, by number of hypotheses.
_supported: "WeakKeyDictionary[Any, dict[int, bool]]" = WeakKeyDictionary()


def _run_static(model: Any, job: DecodingJob, budget: int) -> None:
    """Decode with static caches, in several processes if there is enough to do."""
    with single_threaded(device_of(model)) as threads, torch.inference_mode():
        is_alone = job.on_token is not None or job.lexical is not None  # callbacks, and phrases with their caches
        processes = 1 if is_alone else min(threads, len(job.sources) // MIN_SENTENCES)
        if processes > 1 and _decoded >= WORKER_SENTENCES:
            from regard.decode import workers

            members = member_models(model)
            key = tuple((id(member), *weight_versions(member)) for member in members)
            workers.decode_in_parallel(model, key, members[0], job, budget, processes - 1, run_job)
        else:
            run_job(model, job, budget)


def run_job(model: Any, job: DecodingJob, budget: int) -> None:
    """Decode the sentences of a job in this thread."""
    longest = max(len(job.sources[i]) for i in job.pending)
    if job.pack is not None:
        while job.pending:  # batches of similar length, longest first
            longest = len(job.sources[job.pending[-1]])
            slots = max(1, min(len(job.pending), budget // job.hypotheses // max(1, longest)))
            make_slot_decoder(model, job, "model", slots, longest).run()
        return
    stepper, _ = choose_static_stepper(model, job)
    if stepper == "captured":
        _graph_decoder(model, job, longest).run()
        return
    rows = min(CPU_ROWS if device_of(model).type == "cpu" else GPU_ROWS, budget // longest)
    slots = max(1, min(len(job.pending), rows // job.hypotheses))
    make_slot_decoder(model, job, stepper, slots, longest).run()


def make_slot_decoder(
    model: Any, job: DecodingJob, stepper: StepperName, slots: int, source_capacity: int
) -> SlotDecoder:
    """A decoder without captured steps."""
    device = device_of(model)
    capacity = job.capacity
    sizes = (slots, job.hypotheses, capacity, source_capacity)
    options: Any = {"source_capacity": source_capacity}
    if stepper == "compiled":
        kernels = compiled_kernels()
        kernels.log_compilation()
        return kernels.CpuSlotDecoder(
            kernels.CpuDecoder(model, *sizes), job, slots, capacity, device, job.prefix_len, **options
        )
    static: Any
    if stepper == "model":
        assert job.pack is not None
        capacity_of_attention = source_capacity if job.needs_attention else 0
        static = ModelStepper(model, slots, job.hypotheses, job.pack, device, attention_capacity=capacity_of_attention)
    else:
        static = make_static_model(model, *sizes, keeps_attention=job.needs_attention)
    return SlotDecoder(static, job, slots, capacity, device, job.prefix_len, **options)


def make_static_model(
    model: Any, slots: int, hypotheses: int, capacity: int, source_capacity: int, *, keeps_attention: bool = False
) -> Stepper:
    """The model with static caches."""
    if isinstance(model, Ensemble):
        sizes = slots, hypotheses, capacity, source_capacity
        members = [make_static_model(member, *sizes, keeps_attention=keeps_attention) for member in model.models]
        return EnsembleStepper(members)
    static: StaticSeq2Seq | StaticDecoder
    if isinstance(model, Seq2Seq):
        static = StaticSeq2Seq(model, slots, hypotheses, source_capacity)
    else:
        static = StaticDecoder(model, slots, hypotheses, capacity, source_capacity)
    if keeps_attention:
        static.keep_attention()
    return static


_graphs: "WeakKeyDictionary[Any, OrderedDict[Any, SlotDecoder]]" = WeakKeyDictionary()


def _graph_decoder(model: Any, job: DecodingJob, longest: int) -> SlotDecoder:
    """A decoder with a captured step for the shapes of this job, rounded up; a few are kept per model."""
    capacity, source_capacity = (-(-length // 32) * 32 for length in (job.capacity, longest))
    prefix_len = next_power_of_two(job.prefix_len) if job.prefix_len else 0
    limit = length_limit(model.config)
    if limit is not None:
        capacity = min(capacity, limit + 1)
    wanted = next_power_of_two(len(job.pending)) * job.hypotheses
    rows = min(GPU_ROWS, wanted if wanted <= SMALL_GPU_ROWS else rows_in_memory(model, capacity))
    slots = min(next_power_of_two(len(job.pending)), 1 << (max(1, rows // job.hypotheses).bit_length() - 1))
    shapes = slots, capacity, source_capacity, prefix_len
    # The seed and the limits of a job are data of the graph; these options are part of it.
    names = ("method", "beam", "n_best", "length_penalty", "patience", "early_stopping", "min_len", "unknown")
    more = ("suppress_sequences", "temperature", "top_k", "top_p")
    options = tuple(getattr(job.config, name) for name in (*names, *more))
    key = shapes, options, job.special, weight_versions(model)
    decoders = _graphs.setdefault(model, OrderedDict())
    if key not in decoders:
        from regard.decode.steppers.captured import GraphSlotDecoder

        decoders[key] = GraphSlotDecoder(model, job, *shapes)
        if len(decoders) > KEPT_GRAPHS:
            decoders.popitem(last=False)
    decoders.move_to_end(key)
    decoders[key].use_job(job)
    return decoders[key]


def rows_in_memory(model: Any, capacity: int) -> int:
    """The number of hypotheses whose keys and values take at most a quarter of the free memory of the GPU."""
    blocks = model.stack.blocks
    attention, itemsize = blocks[0].attention, next(model.parameters()).element_size()
    row_bytes = 2 * len(blocks) * attention.kv_heads * attention.head_width * capacity * itemsize
    if not torch.cuda.is_available():
        return GPU_ROWS
    return max(1, torch.cuda.mem_get_info(next(model.parameters()).device)[0] // 4 // row_bytes)


@contextmanager
def single_threaded(device: torch.device) -> Iterator[int]:
    """One thread per operation on a CPU: the matrices of a step are too small to divide. Yields the previous number."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1:
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def round_shape(model: Any, shape: LiveShape) -> LiveShape:
    """The shape rounded up to powers of two, within the length limit of the model."""
    rounded = LiveShape(
        max(MIN_CAPACITY, next_power_of_two(shape.source_capacity)),
        max(MIN_CAPACITY, next_power_of_two(shape.capacity)),
        next_power_of_two(shape.prefix_len) if shape.prefix_len else 0,
    )
    limits = [limit for member in member_models(model) if (limit := length_limit(member.config)) is not None]
    if limits:
        capacity = max(shape.capacity, min(rounded.capacity, min(limits) + 1))
        rounded = replace(rounded, capacity=capacity)
    return rounded


def member_models(model: Any) -> list[Any]:
    """The models of an ensemble, or the model itself."""
    return list(model.models) if isinstance(model, Ensemble) else [model]


def device_of(model: Any) -> torch.device:
    """The device of a model; the CPU for one without parameters."""
    for member in member_models(model):
        parameter = next(member.parameters(), None) if isinstance(member, nn.Module) else None
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")
