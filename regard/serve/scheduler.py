"""Scheduler: dynamic batching across the requests of one model.

One thread per model runs the work. Texts to decode enter running batches of the decoding engine, which requests join
and leave at any step; each batch has one decoding configuration, and the batches take turns. Other work (embedding,
classification, …) runs in batches between the steps. What can take long and cannot be batched (recordings of attention,
whether required phrases fit) runs alone in other threads, so that nothing waits for it. Requests are served by earliest
deadline. A request is refused when the work already accepted, at the measured throughput, takes longer than the latency
target.
"""

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from regard.decode import DecodeConfig, NBest
from regard.decode.engine import LiveDecoder, member_models
from regard.decode.phrases import check_phrases
from regard.decode.protocol import continues_source, interruptible
from regard.decode.rules import length_limits
from regard.decode.slots import LiveSentence, LiveShape, needed_shape
from regard.errors import RegardError
from regard.pipelines.decoding_request import DecodingRequest
from regard.ranges import MAX_INT
from regard.serve.errors import DeadlineExceeded, Overloaded, ShuttingDown

logger = logging.getLogger("regard.serve")

# Running batches kept per model: those beyond it wait until another is idle.
MAX_BATCHES = 8
# Items of one batch of calls.
MAX_CALL_ITEMS = 64
# Share of the latency target that accepted work may take: predictions err.
TARGET_SHARE = 0.45
# Units of work that are always accepted: an idle server never refuses.
MIN_ITEMS = 4
# Seconds per call until its throughput is measured. Decoding is measured before the first request.
ASSUMED_SECONDS = 0.01
# Calls that run alone at the same time, so that a short one does not wait for a long one.
SIDE_THREADS = 2

# Seconds after which Python lets another thread run, in a server: the thread of a model waits for the device often,
# and must not wait for the threads that accept requests each time.
SWITCH_INTERVAL = 0.0005
# Different options of requests that are remembered.
MAX_KINDS = 256

OnToken = Callable[[int, int], None]
"""called with the index of a source and each of its tokens; in the thread of the scheduler"""


@dataclass
class SchedulerCounts:
    """What a scheduler did, for metrics."""

    accepted: int = 0
    completed: int = 0
    refused: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    output_tokens: int = 0
    steps: int = 0
    rows: int = 0
    """sentences in the batch, summed over steps"""
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class RequestKind:
    """What requests with the same model and options have in common."""

    model: Any
    batch_config: DecodeConfig
    """the options that sentences of one batch must share: length limits and seeds belong to each sentence"""
    models: tuple[int, ...]

    @staticmethod
    def of(request: DecodingRequest[Any]) -> "RequestKind":
        config = replace(request.encoded.config, max_len=MAX_INT, max_ratio=0.0, max_extra=0, seed=0)
        return RequestKind(request.model, config, tuple(id(model) for model in member_models(request.model)))


@dataclass(eq=False)
class Job:
    """An accepted request."""

    meter: str
    """name of the meter of its throughput"""
    deadline: float
    timeout: float
    units: float
    """estimated work"""
    items: int
    """number of texts"""
    future: "Future[Any]" = field(default_factory=Future)
    is_finished: bool = False


@dataclass(eq=False)
class DecodeJob(Job):
    results: list[NBest | None] = field(default_factory=list)
    remaining: int = 0
    placed: list[tuple["RunningBatch", int]] = field(default_factory=list)
    """batches of the sentences that are being decoded, with their indices there"""


@dataclass(eq=False)
class CallJob(Job):
    kind: Hashable = None
    """calls of one kind run together; None: this one runs alone"""
    function: Callable[[list[Any]], Sequence[Any]] = list
    inputs: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class WaitingSentence:
    """A sentence that waits for a place in a batch."""

    job: DecodeJob
    live: LiveSentence
    shape: LiveShape


@dataclass(eq=False)
class RunningBatch:
    key: Hashable
    decoder: LiveDecoder


# Time constant of the moving average, in seconds of work.
TIME_CONSTANT = 1.0


class ThroughputMeter:
    """Seconds of work per unit, as a moving average over the last seconds of work.

    >>> meter = ThroughputMeter()
    >>> meter.seconds_per_unit is None
    True
    >>> for _ in range(1000):
    ...     meter.add(0.1, units=2)
    >>> round(meter.seconds_per_unit, 6)
    0.05
    """

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: float) -> None:
        """Count work: its duration, and the units that were completed."""
        decay = math.exp(-seconds / TIME_CONSTANT)
        self._seconds = self._seconds * decay + seconds
        self._units = self._units * decay + units

    @property
    def seconds_per_unit(self) -> float | None:
        """None before the first unit is completed."""
        return self._seconds / self._units if self._units else None


class _Dropped(Exception):
    """The request of a running call is finished: cancelled or too late."""


class Scheduler:
    """Runs the requests of one model in one thread. Call `close` at the end.

    Results equal those of the pipeline itself, whatever other requests are in the batch.

    >>> translator = load("model")  # doctest: +SKIP
    >>> scheduler = Scheduler(latency_target=0.5)  # doctest: +SKIP
    >>> request = translator.prepare(["The cat sleeps."])  # doctest: +SKIP
    >>> request.finish(scheduler.submit(request).result())[0][0].text  # doctest: +SKIP
    'Le chat dort.'
    """

    def __init__(self, *, latency_target: float = 0.5, name: str = "model") -> None:
        self.latency_target = latency_target
        self.counts = SchedulerCounts()
        self._kinds: dict[Hashable, RequestKind] = {}
        self._meters: dict[str, ThroughputMeter] = {}
        self._outstanding: dict[str, float] = {}
        self._outstanding_items = 0
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._alone: list[tuple[float, int, CallJob]] = []
        self._side_threads = ThreadPoolExecutor(
            SIDE_THREADS,
            thread_name_prefix=f"regard-serve-{name}-side",
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        # The rest is used by the thread only. Heaps are ordered by deadline, then by arrival.
        self._numbers = itertools.count()
        self._jobs: set[Job] = set()
        self._deadlines: list[tuple[float, int, Job]] = []
        self._waiting: dict[Hashable, list[tuple[float, int, WaitingSentence]]] = {}
        self._calls: list[tuple[float, int, CallJob]] = []
        self._batches: list[RunningBatch] = []
        self._make_decoder: dict[Hashable, Callable[[LiveShape], LiveDecoder]] = {}
        self._thread = threading.Thread(target=self._run, name=f"regard-serve-{name}", daemon=True)
        self._thread.start()

    # Called by any thread.

    def submit(
        self, request: DecodingRequest[Any], *, timeout: float = 30.0, on_token: OnToken | None = None
    ) -> "Future[list[NBest]]":
        """Decode a request with others; raises `Overloaded` if it would wait too long.

        Cancel the future to stop the work. `on_token` is called for every token, except in beam search; with several
        samples, for the first only.
        """
        kind, encoded = self._kind_of(request), request.encoded
        limits, lexical = length_limits(encoded), encoded.lexical
        is_causal = continues_source(request.model)
        lengths = limits if is_causal else [len(source) for source in encoded.sources]
        job = DecodeJob(
            meter="decode",
            deadline=time.monotonic() + timeout,
            timeout=timeout,
            units=float(encoded.hypotheses * sum(lengths) + len(lengths)),
            items=len(encoded),
            results=[None] * len(encoded),
            remaining=len(encoded),
        )
        has_shortlist = encoded.shortlist is not None
        vocab, token_lists = (encoded.vocab, encoded.token_lists()) if has_shortlist else (0, None)
        options: Any = {"vocab": vocab, "history": encoded.history, "has_phrases": lexical is not None}
        key = (kind.batch_config, encoded.special, *options.values(), kind.models)
        sentences = []
        for i, (source, limit) in enumerate(zip(encoded.sources, limits)):
            live = LiveSentence(
                source,
                limit,
                on_result=lambda n_best, i=i: self._finish_sentence(job, i, n_best),
                on_token=None if on_token is None else lambda token, i=i: on_token(i, token),
                prefix=encoded.prefix(i),
                random_key=(encoded.config.seed, encoded.sample_index(i)),
                allowed_tokens=None if token_lists is None else token_lists[i],
                phrases=None if lexical is None else lexical[i],
                on_error=lambda error: self._fail(job, error),
            )
            shape = needed_shape(source, limit, live.prefix, continues_source=is_causal)
            sentences.append(WaitingSentence(job, live, shape))

        def make_decoder(shape: LiveShape) -> LiveDecoder:
            return LiveDecoder(request.model, kind.batch_config, encoded.special, shape, **options)

        def start() -> None:
            self._start(job)
            if lexical is None:
                wait()
            else:
                check = partial(check_phrases, lexical, encoded.config.method, limits, encoded.prefixes)
                self._side_threads.submit(self._check, job, check, wait)

        def wait() -> None:
            self._make_decoder[key] = make_decoder
            for sentence in sentences:
                heapq.heappush(self._waiting.setdefault(key, []), (job.deadline, next(self._numbers), sentence))
            if not sentences:
                self._finish(job, [])

        self._accept(job, start)
        return job.future

    def _kind_of(self, request: DecodingRequest[Any]) -> "RequestKind":
        """What requests with the same model and options have in common, computed once."""
        encoded = request.encoded
        key = (id(request.model), encoded.config, encoded.special, encoded.history, encoded.lexical is not None)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = RequestKind.of(request)
        return kind

    def call(
        self,
        kind: tuple[Hashable, ...],
        function: Callable[[list[Any]], Sequence[Any]],
        inputs: list[Any],
        *,
        timeout: float = 30.0,
        is_alone: bool = False,
    ) -> "Future[list[Any]]":
        """Run a function of a list of inputs, together with the inputs of other calls of the same kind, or alone.

        It returns one result per input. The future has the results of these inputs. The first entry of `kind` names
        the work; the others are its options.
        """
        job = CallJob(
            meter=str(kind[0]),
            deadline=time.monotonic() + timeout,
            timeout=timeout,
            units=float(max(1, len(inputs))),
            items=len(inputs),
            kind=None if is_alone else kind,
            function=function,
            inputs=inputs,
        )

        def start() -> None:
            self._start(job)
            entry = (job.deadline, next(self._numbers), job)
            if not is_alone:
                heapq.heappush(self._calls, entry)
                return
            with self._condition:
                heapq.heappush(self._alone, entry)
            self._side_threads.submit(self._run_alone)

        self._accept(job, start)
        return job.future

    def expected_seconds(self) -> float:
        """The time that the work accepted so far takes, at the measured throughput; 0 if nothing was measured."""
        with self._condition:
            return self._expected_seconds()

    @property
    def outstanding(self) -> int:
        """The number of texts that are accepted and not finished."""
        return self._outstanding_items

    def close(self, timeout: float | None = None) -> bool:
        """Take no new requests, finish those accepted, and end the thread; False if that took too long."""
        self.stop_accepting()
        self._thread.join(timeout)
        self._side_threads.shutdown(wait=False)
        return not self._thread.is_alive()

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()

    def excess_seconds(self, seconds: float = 0.0, items: int = 0) -> float:
        """How long the accepted work takes beyond what is allowed; 0: a request would be accepted.

        `seconds` and `items` are work that is not submitted yet.
        """
        with self._condition:
            return self._excess_seconds(seconds, items)

    def _excess_seconds(self, seconds: float = 0.0, items: int = 0) -> float:
        if self._outstanding_items + items < MIN_ITEMS:
            return 0.0
        return max(0.0, seconds + self._expected_seconds() - TARGET_SHARE * self.latency_target)

    def _expected_seconds(self) -> float:
        return sum(units * self._seconds_per_unit(meter) for meter, units in self._outstanding.items())

    def _seconds_per_unit(self, name: str) -> float:
        meter = self._meters.get(name)
        measured = None if meter is None else meter.seconds_per_unit
        return measured if measured is not None else 0.0 if name == "decode" else ASSUMED_SECONDS

    def _accept(self, job: Job, start: Callable[[], None]) -> None:
        job.future.add_done_callback(lambda future: self._post(lambda: self._drop(job)) if future.cancelled() else None)
        with self._condition:
            if self._is_closing:
                raise ShuttingDown
            if excess := self._excess_seconds():
                self.counts.refused += 1
                raise Overloaded(excess)
            self.counts.accepted += 1
            self._outstanding[job.meter] = self._outstanding.get(job.meter, 0.0) + job.units
            self._outstanding_items += job.items
            self._inbox.append(start)
            self._condition.notify()

    def _post(self, action: Callable[[], None]) -> None:
        """Run something in the thread."""
        with self._condition:
            self._inbox.append(action)
            self._condition.notify()

    # Called by the side threads.

    def _check(self, job: Job, check: Callable[[], None], proceed: Callable[[], None]) -> None:
        """Check a request, which may take long, before it proceeds."""

        def stop() -> None:
            if job.is_finished:
                raise _Dropped

        try:
            with interruptible(stop):
                check()
        except _Dropped:
            return
        except Exception as error:
            self._post(partial(self._fail, job, error))
        else:
            self._post(lambda: None if job.is_finished else proceed())

    def _run_alone(self) -> None:
        """Run the most urgent of the calls that run alone, until it is finished or dropped."""
        with self._condition:
            job = heapq.heappop(self._alone)[2]

        def check() -> None:
            if job.is_finished:
                raise _Dropped

        start = time.perf_counter()
        try:
            with interruptible(check), torch.no_grad():
                check()
                finish = partial(self._finish, job, job.function(job.inputs))
        except _Dropped:
            finish = partial(self._finish, job)
        except Exception as error:
            finish = partial(self._fail, job, error)
        seconds = time.perf_counter() - start

        def end() -> None:
            self._note_work(job.meter, seconds, job.units)
            finish()

        self._post(end)

    # Called by the thread.

    def _run(self) -> None:
        torch.set_num_threads(1)  # the matrices of a decoding step are too small to divide
        while True:
            with self._condition:
                while not (self._inbox or self._has_work() or self._has_expired()):
                    if self._is_closing and not self._jobs:
                        return
                    # Work in the side threads ends at its deadline.
                    self._condition.wait(self._deadlines[0][0] - time.monotonic() if self._deadlines else None)
                inbox, self._inbox = self._inbox, deque()
            start, units = time.perf_counter(), self._done_units
            for action in inbox:
                action()
            self._expire()
            call_seconds = self._run_calls() if self._calls else 0.0
            if self._waiting:
                self._place_sentences()
            batches = [batch for batch in self._batches if not batch.decoder.is_idle]
            for batch in batches:
                self._advance(batch)
            if batches:  # all that a request costs here, not only the steps
                seconds = time.perf_counter() - start - call_seconds
                self._note_work("decode", seconds, self._done_units - units)

    def _note_work(self, meter: str, seconds: float, units: float) -> None:
        self._meters.setdefault(meter, ThroughputMeter()).add(seconds, units)
        self.counts.busy_seconds += seconds

    def _has_expired(self) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] < time.monotonic()

    def _has_work(self) -> bool:
        return bool(self._calls or self._waiting) or any(not batch.decoder.is_idle for batch in self._batches)

    def _start(self, job: Job) -> None:
        self._jobs.add(job)
        heapq.heappush(self._deadlines, (job.deadline, next(self._numbers), job))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and (self._deadlines[0][2].is_finished or self._deadlines[0][0] < now):
            job = heapq.heappop(self._deadlines)[2]
            if not job.is_finished:
                self.counts.expired += 1
                self._finish(job, error=DeadlineExceeded(job.timeout))

    def _place_sentences(self) -> None:
        """Move waiting sentences into batches with room, or into new batches."""
        for key, heap in list(self._waiting.items()):
            batch, room = None, 0
            while heap:
                sentence = heap[0][2]
                if not sentence.job.is_finished:
                    if not room or batch is None or not batch.decoder.shape.contains(sentence.shape):
                        try:
                            batch = self._find_batch(key, sentence.shape)
                        except Exception as error:
                            self._fail(sentence.job, error)
                            continue
                        if batch is None:
                            break
                        room = batch.decoder.room
                    room -= 1
                    index = batch.decoder.add(sentence.live)
                    sentence.job.placed.append((batch, index))
                heapq.heappop(heap)
            if not heap:
                del self._waiting[key]

    def _find_batch(self, key: Hashable, shape: LiveShape) -> RunningBatch | None:
        """A batch with room for a sentence of this shape; None if it must wait."""
        batches = [batch for batch in self._batches if batch.key == key and batch.decoder.shape.contains(shape)]
        if batches:
            best = max(batches, key=lambda batch: batch.decoder.room)
            return best if best.decoder.room else None
        if len(self._batches) >= MAX_BATCHES:
            idle = [batch for batch in self._batches if batch.decoder.is_idle]
            if not idle:
                return None
            self._batches.remove(idle[0])
        with torch.inference_mode():
            batch = RunningBatch(key, self._make_decoder[key](shape))
        self._batches.append(batch)
        # Only batches and waiting sentences need their function.
        kept = {batch.key for batch in self._batches} | set(self._waiting)
        self._make_decoder = {key: make for key, make in self._make_decoder.items() if key in kept}
        return batch

    def _advance(self, batch: RunningBatch) -> None:
        """One step of a batch."""
        try:
            with torch.inference_mode():
                batch.decoder.advance()
        except Exception as error:  # the batch is lost; requests in other batches are not
            self._batches.remove(batch)
            for job in [job for job in self._jobs if isinstance(job, DecodeJob)]:
                if any(other is batch for other, _ in job.placed):
                    self._fail(job, error)
            return
        self.counts.steps += 1
        self.counts.rows += batch.decoder.decoder.in_use

    _done_units = 0.0
    """units of decoding jobs completed so far"""

    def _run_calls(self) -> float:
        """Run the most urgent call, with others of its kind; returns the seconds that they took."""
        kind = self._calls[0][2].kind
        batch: list[CallJob] = []
        others = []
        items = 0
        while self._calls:
            entry = heapq.heappop(self._calls)
            job = entry[2]
            if job.is_finished:
                continue
            if job.kind == kind and (not batch or items + job.items <= MAX_CALL_ITEMS):
                batch.append(job)
                items += job.items
            else:
                others.append(entry)
        self._calls = others
        heapq.heapify(self._calls)
        if not batch:
            return 0.0
        start = time.perf_counter()
        try:
            for job, result in zip(batch, self._call_batch(batch)):
                self._finish(job, result)
        except RegardError as error:
            # One of the inputs may be wrong: the others must not suffer.
            if len(batch) == 1:
                self._fail(batch[0], error)
            else:
                for job in batch:
                    self._run_single(job)
        except Exception as error:
            for job in batch:
                self._fail(job, error)
        seconds = time.perf_counter() - start
        self._note_work(batch[0].meter, seconds, sum(job.units for job in batch))
        return seconds

    def _run_single(self, job: CallJob) -> None:
        try:
            (result,) = self._call_batch([job])
        except Exception as error:
            self._fail(job, error)
        else:
            self._finish(job, result)

    def _call_batch(self, batch: list[CallJob]) -> list[list[Any]]:
        flat = [value for job in batch for value in job.inputs]
        with torch.no_grad():
            results = list(batch[0].function(flat))
        if len(batch) == 1:
            return [results]
        iterator = iter(results)
        return [list(itertools.islice(iterator, len(job.inputs))) for job in batch]

    def _finish_sentence(self, job: DecodeJob, index: int, n_best: NBest) -> None:
        job.results[index] = n_best
        job.remaining -= 1
        self.counts.output_tokens += sum(len(hypothesis.ids) for hypothesis in n_best)
        if not job.remaining:
            self._finish(job, job.results)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, RegardError):
            logger.error("A request failed.", exc_info=error)
        self.counts.failed += 1
        self._finish(job, error=error)

    def _drop(self, job: Job) -> None:
        """Stop the work of a cancelled request."""
        if not job.is_finished:
            self.counts.cancelled += 1
            self._finish(job)

    def _finish(self, job: Job, result: Any = None, error: Exception | None = None) -> None:
        """End a request: with its result, an error, or neither if it was cancelled."""
        if job.is_finished:
            return
        job.is_finished = True
        self._jobs.discard(job)
        if isinstance(job, DecodeJob):
            with torch.inference_mode():
                for batch, index in job.placed:
                    if batch in self._batches:
                        batch.decoder.cancel(index)
            job.placed = []
            if error is None and result is not None:
                self._done_units += job.units
        with self._condition:
            self._outstanding[job.meter] -= job.units
            self._outstanding_items -= job.items
        if job.future.set_running_or_notify_cancel():
            if error is not None:
                job.future.set_exception(error)
            else:
                self.counts.completed += 1
                job.future.set_result(result)
