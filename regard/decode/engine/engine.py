"""Entry point of the decoding engine: which calls it supports, and how it divides the work."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from regard.attention import dispatch
from regard.attention.offsets import Offsets
from regard.decode.constraints import Constraints
from regard.decode.decode_config import DecodeConfig
from regard.decode.engine.slot_decoder import DecodingJob, SlotDecoder, StaticModel
from regard.decode.engine.static_decoder import StaticDecoder
from regard.decode.engine.static_ensemble import StaticEnsemble
from regard.decode.engine.static_seq2seq import StaticSeq2Seq
from regard.decode.ensemble import Ensemble
from regard.decode.hypotheses import NBest
from regard.decode.protocol import SpecialTokens
from regard.decode.sampling import OnToken
from regard.layers.packed import Packed
from regard.models.gpt import GPT
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer

# Hypotheses in the batch of one CPU worker: more are not faster, and their caches leave the processor's caches.
CPU_ROWS = 64


def plain_search_reason(model: Any, config: DecodeConfig, *, history: bool = False) -> str:
    """Why the plain search decodes this call; "" if the engine does.

    >>> from regard.models.transformer import TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> plain_search_reason(Transformer(sizes).eval(), DecodeConfig(), history=True)
    'the search history is recorded'
    """
    if config.engine == "plain":
        return 'engine="plain"'
    if history:
        return "the search history is recorded"
    if config.coverage_penalty:
        return "the coverage penalty needs the attention weights of every step"
    if dispatch.has_context():
        return "attention is recorded, changed or forced to a backend"
    members = model.models if isinstance(model, Ensemble) else [model]
    for member in members:
        if type(member) not in (Transformer, GPT, Seq2Seq):
            return f"{type(member).__name__} has no static decoder"
        if member.training:
            return "the model is in training mode"
        if any(module._forward_hooks or module._forward_pre_hooks for module in member.modules()):
            return "the model has forward hooks"
        if isinstance(member, Transformer) and member.decoder_bias is not None:
            score = member.config.decoder_score
            if score not in ("dot", "scaled_dot"):
                return f"relative positions with the score {score}"
    device = next(members[0].parameters()).device
    if torch.is_autocast_enabled(device.type):
        return "autocast is enabled"
    return ""


def decode_sentences(
    model: Any,
    sources: Sequence[Sequence[int]],
    pack: Callable[[list[list[int]]], Packed],
    config: DecodeConfig,
    *,
    special: SpecialTokens,
    prefixes: Sequence[Sequence[int]] | None = None,
    sample_indices: Sequence[int] | None = None,
    max_total_len: int | None = None,
    on_token: OnToken | None = None,
    budget: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[NBest]:
    """Decode any number of sentences with the engine: see `decode_all`. Call only if `plain_search_reason` is ""."""
    if not sources:
        return []
    lengths = torch.tensor([0, *map(len, sources)]).cumsum(0)
    batch: Any = SimpleNamespace(offsets=Offsets.from_starts(lengths))
    constraints = Constraints.from_config(batch, config, special, prefixes, max_total_len)
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
        prefixes=prefixes if prefixes is not None else [()] * len(sources),
        limits=constraints.limit.tolist(),
        sample_indices=sample_indices if sample_indices is not None else range(len(sources)),
        config=config,
        special=special,
        continues_source=isinstance(model, GPT),
        pack=pack,
        on_token=on_token,
        on_result=on_result,
    )
    device = next((model.models[0] if isinstance(model, Ensemble) else model).parameters()).device
    workers = 1
    if device.type == "cpu" and on_token is None:
        workers = max(1, min(torch.get_num_threads(), len(sources) // 2))
    longest = max(map(len, sources))
    slots = max(1, min(-(-len(sources) // workers), min(CPU_ROWS, budget // longest) // job.hypotheses))
    capacity = job.capacity
    decoders = [
        SlotDecoder(make_static_model(model, slots, job.hypotheses, capacity, longest), job, slots, capacity)
        for _ in range(workers)
    ]
    with single_threaded(device):
        _run(decoders, job)
    return results


def make_static_model(model: Any, slots: int, hypotheses: int, capacity: int, source_capacity: int) -> StaticModel:
    """The model with static caches."""
    if isinstance(model, Ensemble):
        members = [make_static_model(one, slots, hypotheses, capacity, source_capacity) for one in model.models]
        return StaticEnsemble(members, model.log_weights)
    if isinstance(model, Seq2Seq):
        return StaticSeq2Seq(model, slots, hypotheses, source_capacity)
    return StaticDecoder(model, slots, hypotheses, capacity, source_capacity)


@contextmanager
def single_threaded(device: torch.device):
    """One thread per operation on a CPU: the matrices of a step are too small to divide."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(decoders: list[SlotDecoder], job: DecodingJob) -> None:
    """Run one decoder in this thread, or each in a thread of its own; results are delivered in this thread."""
    if len(decoders) == 1:
        with torch.inference_mode():
            decoders[0].run()
        return
    finished: SimpleQueue[tuple[int, NBest] | None] = SimpleQueue()
    deliver, job.on_result = job.on_result, lambda index, n_best: finished.put((index, n_best))

    @torch.inference_mode()
    def run(decoder: SlotDecoder) -> None:
        torch.set_num_threads(1)  # the setting is per thread
        try:
            decoder.run()
        finally:
            finished.put(None)

    with ThreadPoolExecutor(len(decoders), thread_name_prefix="decode") as pool:
        futures = [pool.submit(run, decoder) for decoder in decoders]
        try:
            running = len(futures)
            while running:
                item = finished.get()
                if item is None:
                    running -= 1
                else:
                    deliver(*item)
            for future in futures:
                future.result()
        finally:
            job.is_cancelled = True
