"""Accepted requests, and the batches that their sentences enter."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from regard.decode import DecodeConfig, NBest
from regard.decode.engine import LiveDecoder, member_models
from regard.decode.slots import LiveSentence, LiveShape
from regard.pipelines.decoding_request import DecodingRequest
from regard.ranges import MAX_INT


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
    lane_config: DecodeConfig
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
    placed: list[tuple["Lane", int]] = field(default_factory=list)
    """lanes of the sentences that are being decoded, with their indices there"""


@dataclass(eq=False)
class CallJob(Job):
    kind: Hashable = None
    """calls of one kind run together; None: this one runs alone"""
    function: Callable[[list[Any]], Sequence[Any]] = list
    inputs: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class WaitingSentence:
    """A sentence that waits for a place in a lane."""

    job: DecodeJob
    live: LiveSentence
    shape: LiveShape


@dataclass(eq=False)
class Lane:
    key: Hashable
    decoder: LiveDecoder
