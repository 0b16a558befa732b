"""Entry point of the decoding engine: which calls it supports, and how it divides the work."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from regard.attention import dispatch
from regard.attention.offsets import Offsets
from regard.decode.engine import decoding_workers
from regard.decode.engine.captured.cuda_decoder import CudaDecoder
from regard.decode.engine.captured.graph_decoder import GraphSlotDecoder
from regard.decode.engine.model_precision import convert_model, iterate_modules, weight_versions
from regard.decode.engine.slot_decoder import DecodingJob, SlotDecoder, StaticModel
from regard.decode.engine.static.static_decoder import StaticDecoder
from regard.decode.engine.static.static_ensemble import StaticEnsemble
from regard.decode.engine.static.static_seq2seq import StaticSeq2Seq
from regard.decode.ensemble import Ensemble
from regard.decode.hypotheses import NBest
from regard.decode.request import Request
from regard.decode.rules.constraints import Constraints
from regard.decode.rules.token_rules import has_token_rules
from regard.decode.sampling import OnToken
from regard.kernels.cpu.support import numba_available
from regard.kernels.triton.support import next_power_of_two
from regard.models.gpt import GPT
from regard.models.lengths import length_limit
from regard.models.parameters import find_replacement
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer

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


def plain_search_reason(model: Any, request: Request) -> str:
    """Why the plain search decodes this request; "" if the engine does.

    >>> from regard.models.transformer import TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> plain_search_reason(Transformer(sizes).eval(), Request([[4, 3]], history=True))
    'the search history is recorded'
    """
    config = request.config
    if config.engine == "plain":
        return 'engine="plain"'
    if request.history:
        return "the search history is recorded"
    if request.lexical is not None:
        return "phrases are required or forbidden"
    if request.special.other_eos:
        return "several tokens end an output"
    if has_token_rules(config):
        return "rules about repetition depend on the tokens so far"
    if config.coverage_penalty:
        return "the coverage penalty needs the attention weights of every step"
    if dispatch.has_context():
        return "attention is recorded, changed or forced to a backend"
    members = member_models(model)
    for member in members:
        if type(member) not in (Transformer, GPT, Seq2Seq):
            return f"{type(member).__name__} has no static decoder"
        if member.training:
            return "the model is in training mode"
        if any(module._forward_hooks or module._forward_pre_hooks for module in iterate_modules(member)):
            return "the model has forward hooks"
        if path := find_replacement(member):
            return f"{path} was replaced"
        if isinstance(member, GPT) and member.config.rotary_scaling == "dynamic":
            return "dynamic rotary scaling depends on the length of the text"
        if isinstance(member, Transformer) and member.decoder_bias is not None:
            score = member.config.decoder_score
            if score not in ("dot", "scaled_dot"):
                return f"relative positions with the score {score}"
    device = next(members[0].parameters()).device
    if torch.is_autocast_enabled(device.type):
        return "autocast is enabled"
    return ""


def member_models(model: Any) -> list[Any]:
    """The models of an ensemble, or the model itself."""
    return list(model.models) if isinstance(model, Ensemble) else [model]


def decode_sentences(
    model: Any,
    request: Request,
    *,
    on_token: OnToken | None = None,
    progress: Callable[[int, int], None] | None = None,
    budget: int = 8192,
) -> list[NBest]:
    """Decode the sentences of a request with the engine: see `decode_all`. Call only if `plain_search_reason` is ""."""
    if not request.sources:
        return []
    sources, config = request.sources, request.config
    results: list[NBest] = [NBest() for _ in sources]
    done = 0

    def on_result(index: int, n_best: NBest) -> None:
        nonlocal done
        results[index] = n_best
        done += 1
        if progress is not None:
            progress(done, len(sources))

    job = DecodingJob(
        sources=sources,
        prefixes=request.prefixes if request.prefixes is not None else [()] * len(sources),
        limits=length_limits(request),
        sample_indices=[request.sample_index(i) for i in range(len(sources))],
        config=config,
        special=request.special,
        continues_source=isinstance(model, GPT),
        token_lists=request.token_lists(),
        vocab=request.vocab,
        is_compiled=uses_compiled_kernels(len(sources)),
        on_token=on_token if config.method != "beam" else None,
        on_result=on_result,
    )
    device = next(member_models(model)[0].parameters()).device
    converted = convert_model(model, config.precision)
    with single_threaded(device) as threads, torch.inference_mode():
        processes = min(threads, len(sources) // MIN_SENTENCES) if on_token is None else 1
        if processes > 1 and _decoded >= WORKER_SENTENCES and decoding_workers.can_start():
            members = member_models(converted)
            key = tuple((id(member), *weight_versions(member)) for member in members)
            decoding_workers.decode_in_parallel(converted, key, members[0], job, budget, processes - 1, run_job)
        else:
            run_job(converted, job, budget)
    return results


def length_limits(request: Request) -> list[int]:
    """The maximum number of tokens of each output, without `<eos>`; checks the prefixes."""
    lengths = list(map(len, request.sources))
    if request.prefixes is None and request.max_total_len is None:
        limits = {length: request.config.limit(length) for length in set(lengths)}
        return [limits[length] for length in lengths]
    batch: Any = SimpleNamespace(offsets=Offsets.from_starts(torch.tensor([0, *lengths]).cumsum(0)))
    constraints = Constraints.from_config(
        batch, request.config, request.special, request.prefixes, request.max_total_len
    )
    return constraints.limit.tolist()


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
    if not isinstance(model, Transformer | GPT) or not next(model.parameters()).is_cuda:
        return False
    supported = _supported.setdefault(model, {})
    if hypotheses not in supported:
        supported[hypotheses] = CudaDecoder.supports(model, hypotheses)
    return supported[hypotheses]


# Whether `CudaDecoder` supports a model, by number of hypotheses.
_supported: "WeakKeyDictionary[Any, dict[int, bool]]" = WeakKeyDictionary()


def run_job(model: Any, job: DecodingJob, budget: int) -> None:
    """Decode the sentences of a job in this thread."""
    longest = max(len(job.sources[i]) for i in job.pending)
    device = next(member_models(model)[0].parameters()).device
    if job.token_lists is None and uses_graphs(model, job.hypotheses):
        _graph_decoder(model, job, longest).run()
        return
    rows = min(CPU_ROWS if device.type == "cpu" else GPU_ROWS, budget // longest)
    slots = max(1, min(len(job.pending), rows // job.hypotheses))
    make_slot_decoder(model, job, slots, longest).run()


def make_slot_decoder(model: Any, job: DecodingJob, slots: int, source_capacity: int) -> SlotDecoder:
    """A decoder without captured steps, with compiled CPU kernels where they support the model and the search."""
    device = next(member_models(model)[0].parameters()).device
    sizes = (slots, job.hypotheses, job.capacity, source_capacity)
    compiled = compiled_kernels(model, job)
    decoder = SlotDecoder if compiled is None else compiled.CpuSlotDecoder
    static: Any = make_static_model(model, *sizes) if compiled is None else compiled.CpuDecoder(model, *sizes)
    return decoder(static, job, slots, job.capacity, device, job.prefix_len)


def compiled_kernels(model: Any, job: DecodingJob) -> ModuleType | None:
    """The module with the decoder of compiled CPU kernels, if they support the model and the search."""
    is_on_cpu = next(member_models(model)[0].parameters()).device.type == "cpu"
    if not (job.is_compiled and is_on_cpu) or job.config.method == "sample":
        return None
    from regard.decode.engine.compiled import cpu_decoder  # imports numba

    if not cpu_decoder.supports(model):
        return None
    cpu_decoder.log_compilation()
    return cpu_decoder


_graphs: "WeakKeyDictionary[Any, OrderedDict[Any, GraphSlotDecoder]]" = WeakKeyDictionary()


def _graph_decoder(model: Any, job: DecodingJob, longest: int) -> GraphSlotDecoder:
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
        decoders[key] = GraphSlotDecoder(model, job, *shapes)
        if len(decoders) > KEPT_GRAPHS:
            decoders.popitem(last=False)
    decoders.move_to_end(key)
    decoders[key].use_job(job)
    return decoders[key]


def rows_in_memory(model: Any, capacity: int) -> int:
    """The number of hypotheses whose keys and values take at most a quarter of the free memory of the GPU."""
    blocks = model.decoder if isinstance(model, Transformer) else model.blocks
    attention, itemsize = blocks[0].attention, next(model.parameters()).element_size()
    row_bytes = 2 * len(blocks) * attention.kv_heads * attention.head_width * capacity * itemsize
    if not torch.cuda.is_available():
        return GPU_ROWS
    return max(1, torch.cuda.mem_get_info(next(model.parameters()).device)[0] // 4 // row_bytes)


def make_static_model(model: Any, slots: int, hypotheses: int, capacity: int, source_capacity: int) -> StaticModel:
    """The model with static caches."""
    if isinstance(model, Ensemble):
        members = [make_static_model(one, slots, hypotheses, capacity, source_capacity) for one in model.models]
        return StaticEnsemble(members, model.log_weights)
    if isinstance(model, Seq2Seq):
        return StaticSeq2Seq(model, slots, hypotheses, source_capacity)
    return StaticDecoder(model, slots, hypotheses, capacity, source_capacity)


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
