"""Continuous batching for servers: sentences arrive while others are decoded."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from regard.decode.decode_config import DecodeConfig
from regard.decode.engine import engine_runner
from regard.decode.engine.captured.graph_decoder import GRAPHS_AHEAD, UNROLLED_STEPS, GraphSlotDecoder
from regard.decode.engine.engine_runner import (
    choose_stepper,
    device_of,
    make_slot_decoder,
    member_models,
    rows_in_memory,
)
from regard.decode.engine.model_precision import convert_model
from regard.decode.engine.slot_decoder import REFILL_SHARE, DecodingJob, SlotDecoder
from regard.decode.hypotheses import NBest
from regard.decode.protocol import SpecialTokens, continues_source
from regard.decode.rules.lexical_constraints import LexicalConstraints
from regard.errors import RegardError
from regard.kernels.cpu.support import numba_available
from regard.kernels.triton.support import next_power_of_two
from regard.layers.packed import pack
from regard.models.lengths import length_limit

# Capacities are powers of two from here on, so that sentences of similar length share a batch.
MIN_CAPACITY = 64
# Rows * source length of a batch.
BUDGET = 8192
# On a GPU, results are collected at the latest after this many replays of the graph.
COLLECT_INTERVAL = 8


@dataclass
class LiveSentence:
    """A sentence to decode, and the callbacks for its tokens and its result."""

    source: Sequence[int]
    limit: int
    """maximum number of output tokens, without `<eos>`"""
    on_result: Callable[[NBest], None]
    on_token: Callable[[int], None] | None = None
    prefix: Sequence[int] = ()
    random_key: tuple[int, int] = (0, 0)
    """seed and index on which samples depend"""
    allowed_tokens: Int[np.ndarray, "_"] | None = None
    """the tokens that the output may contain; None: all"""
    phrases: LexicalConstraints | None = None
    """required and forbidden phrases"""
    on_error: Callable[[RegardError], None] | None = None
    """is called instead of `on_result` if there is no output"""


@dataclass(frozen=True)
class LiveShape:
    """The sizes of a live batch: the longest source, the number of cache positions, and the longest prefix."""

    source_capacity: int
    capacity: int
    prefix_len: int

    def contains(self, other: "LiveShape") -> bool:
        """Whether sentences of the other shape fit.

        >>> LiveShape(64, 128, 0).contains(LiveShape(20, 62, 0))
        True
        """
        return (
            self.source_capacity >= other.source_capacity
            and self.capacity >= other.capacity
            and self.prefix_len >= other.prefix_len
        )


class _ArrivingSentences(DecodingJob):
    """A job whose sentences arrive one by one; they are decoded in this order."""

    def __init__(self, config: DecodeConfig, special: SpecialTokens, continues_source: bool, shape: LiveShape) -> None:
        self.has_phrases = False
        # By index, instead of lists that would grow forever.
        columns: Any = {name: {} for name in ("sources", "prefixes", "limits", "sample_indices")}
        options: Any = {"continues_source": continues_source, "is_compiled": numba_available()}
        super().__init__(**columns, config=config, special=special, **options)
        self.shape, self.sentences, self.count, self.streaming = shape, dict[int, LiveSentence](), 0, 0
        self.on_result, self.on_error = self._finish, self._fail

    def add(self, sentence: LiveSentence) -> int:
        index = self.count
        self.count += 1
        self.sentences[index] = sentence
        for column, value in zip(self._columns, (sentence.source, sentence.prefix, sentence.limit)):
            column[index] = value
        self.pending.append(index)
        self._count_streaming(sentence, 1)
        return index

    @property
    def _columns(self) -> list[Any]:
        return [self.sources, self.prefixes, self.limits]

    @property
    def token_lists(self) -> Any:
        """Not None if all sentences are restricted to lists of tokens: sentences of one batch agree in this."""
        if not self.vocab:
            return None
        return {index: sentence.allowed_tokens for index, sentence in self.sentences.items()}

    @token_lists.setter
    def token_lists(self, value: Any) -> None:
        """Set by the constructor of the base class only."""

    @property
    def lexical(self) -> Any:
        """Not None if all sentences have required or forbidden phrases, or none of them."""
        if not self.has_phrases:
            return None
        return {index: sentence.phrases for index, sentence in self.sentences.items()}

    @lexical.setter
    def lexical(self, value: Any) -> None:
        """Set by the constructor of the base class only."""

    def remove(self, index: int) -> LiveSentence | None:
        """Forget a sentence that is not pending; None if it is not known any more."""
        sentence = self.sentences.pop(index, None)
        if sentence is not None:
            for column in self._columns:
                del column[index]
            if sentence.phrases is not None:
                sentence.phrases.clear_caches()
            self._count_streaming(sentence, -1)
        return sentence

    def _count_streaming(self, sentence: LiveSentence, change: int) -> None:
        # In beam search the output is known only at the end.
        if sentence.on_token is not None and self.config.method != "beam":
            self.streaming += change
            self.on_token = self._report_token if self.streaming else None

    def _report_token(self, index: int, token: int) -> None:
        sentence = self.sentences.get(index)
        if sentence is not None and sentence.on_token is not None:
            sentence.on_token(token)

    def _finish(self, index: int, n_best: NBest) -> None:
        sentence = self.remove(index)
        if sentence is not None:
            sentence.on_result(n_best)

    def _fail(self, index: int, error: RegardError) -> None:
        sentence = self.remove(index)
        if sentence is not None and sentence.on_error is not None:
            sentence.on_error(error)

    def take(self, count: int) -> list[int]:
        taken, self.pending = self.pending[:count], self.pending[count:]
        return taken

    def random_key(self, index: int) -> tuple[int, int]:
        return self.sentences[index].random_key

    @property
    def capacity(self) -> int:
        return self.shape.capacity

    @property
    def prefix_len(self) -> int:
        return self.shape.prefix_len


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
        self.job = _ArrivingSentences(config, special, continues_source(model), shape)
        self.job.vocab, self.job.history, self.job.has_phrases = vocab, history, has_phrases
        device = device_of(model)
        stepper, _ = choose_stepper(model, self.job)
        if stepper == "model":
            self.job.pack = lambda sources: pack(sources).to(device)
        else:
            model = convert_model(model, config.precision)
            stepper, _ = choose_stepper(model, self.job)
        rows = min(
            engine_runner.CPU_ROWS if device.type == "cpu" else engine_runner.GPU_ROWS, BUDGET // shape.source_capacity
        )
        self.is_graph = stepper == "captured"
        if self.is_graph:
            rows = min(engine_runner.GPU_ROWS, rows_in_memory(model, shape.capacity))
        self.max_slots = max(1, rows // self.job.hypotheses)
        if self.is_graph:
            self.max_slots = 1 << (self.max_slots.bit_length() - 1)
            sizes = (shape.capacity, shape.source_capacity, shape.prefix_len)
            self.decoder: SlotDecoder = GraphSlotDecoder(
                model, self.job, self.max_slots, *sizes, is_refilled_often=True
            )
            self.decoder.use_job(self.job)
            self._in_flight: deque[tuple[int, torch.cuda.Event]] = deque()
            self._events = [torch.cuda.Event() for _ in range(GRAPHS_AHEAD + 1)]
            self._replays = self._replays_since_collect = 0
        else:
            # One slot; their number grows with that of the sentences.
            self.decoder = make_slot_decoder(model, self.job, stepper, 1, shape.source_capacity)

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
        return not self.job.pending and not self.decoder.in_use

    @property
    def room(self) -> int:
        """The number of sentences that can be added without waiting for others to finish."""
        return max(0, self.max_slots - self.decoder.in_use - len(self.job.pending))

    def advance(self) -> None:
        """Load waiting sentences, run one step, and deliver finished sentences."""
        if self.is_graph:
            self._advance_graph()
            return
        decoder = self.decoder
        if self.job.pending:
            self._resize()
            decoder.fill_free_slots()
        if decoder.in_use:
            decoder.step()
            decoder.collect()
        if not self.job.pending and decoder.in_use <= len(decoder.sentences) // 4 and len(decoder.sentences) > 1:
            decoder.resize(max(1, next_power_of_two(decoder.in_use)) if decoder.in_use else 1)

    def _resize(self) -> None:
        """Make room for waiting sentences; the number of slots doubles, because the caches are copied."""
        wanted = self.decoder.in_use + len(self.job.pending)
        if wanted > len(self.decoder.sentences) < self.max_slots:
            self.decoder.resize(min(self.max_slots, next_power_of_two(wanted)))

    def _advance_graph(self) -> None:
        decoder, job = self.decoder, self.job
        assert isinstance(decoder, GraphSlotDecoder)
        slots = len(decoder.sentences)
        free = slots - decoder.in_use
        if job.pending and free >= min(len(job.pending), REFILL_SHARE * slots):
            decoder.fill_free_slots()
            self._in_flight.clear()  # their counts are from before
        if not decoder.in_use:
            return
        is_streaming = job.on_token is not None
        if decoder.steps_left > 0:
            steps = 1 if is_streaming or decoder.steps_left < UNROLLED_STEPS else UNROLLED_STEPS
            self._in_flight.append(decoder.replay(steps, self._replays % len(self._events), self._events))
            self._replays += 1
            self._replays_since_collect += 1
            if not is_streaming and len(self._in_flight) <= GRAPHS_AHEAD and decoder.steps_left > 0:
                return
        done = slots
        if self._in_flight:
            entry, event = self._in_flight.popleft()
            event.synchronize()
            done = int(decoder.counts[entry])
        if is_streaming:
            decoder.report_tokens()
        finished = done - (slots - decoder.in_use)
        is_due = finished >= REFILL_SHARE * slots or self._replays_since_collect >= COLLECT_INTERVAL
        if finished > 0 and (is_due or not job.pending):
            self._in_flight.clear()
            self._replays_since_collect = 0
            decoder.collect()


def needed_shape(source: Sequence[int], limit: int, prefix: Sequence[int], *, continues_source: bool) -> LiveShape:
    """The smallest shape in which a sentence can be decoded.

    >>> needed_shape([4, 5, 3], 10, (), continues_source=False)
    LiveShape(source_capacity=3, capacity=12, prefix_len=0)
    """
    first = len(source) - 1 if continues_source else 0
    return LiveShape(len(source), first + limit + 2, len(prefix))


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
