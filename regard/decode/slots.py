"""Continuous batching: sentences enter free slots of a static batch and leave it when they are finished."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from regard.decode.phrases import LexicalConstraints
from regard.decode.protocol import SourceBatch, SpecialTokens, Stepper, check_interruption
from regard.decode.request import DecodeConfig, NBest
from regard.decode.rules import Constraints, check_no_nan, has_token_rules
from regard.decode.search import make_search
from regard.decode.steppers.static import StepPositions
from regard.errors import RegardError
from regard.kernels.cpu.support import numba_available
from regard.kernels.triton.support import next_power_of_two

# New sentences are loaded once this share of the slots is free: the encoder is faster on several at once.
REFILL_SHARE = 0.25
# Without new sentences, the batch is compacted once at most this share of its slots is in use.
COMPACTION_SHARE = 0.75


# Called with (sentence index, token id) for every generated token; with several samples, for the first only.
OnToken = Callable[[int, int], None]


@dataclass
class DecodingJob:
    """Sentences to decode."""

    sources: Sequence[Sequence[int]]
    prefixes: Sequence[Sequence[int]]
    limits: Sequence[int]
    sample_indices: Sequence[int]
    config: DecodeConfig
    special: SpecialTokens
    continues_source: bool
    """whether the output continues the source (language models)"""
    token_lists: Sequence[Int[np.ndarray, "_"]] | None = None
    """the allowed tokens of each sentence; None: all"""
    vocab: int = 0
    """size of the target vocabulary, with `token_lists`"""
    lexical: Sequence[LexicalConstraints] | None = None
    """required and forbidden phrases of each sentence"""
    history: bool = False
    """whether the search history is recorded"""
    pack: Callable[[list[list[int]]], SourceBatch] | None = None
    """makes the source of the model itself, if it runs without a static decoder"""
    is_compiled: bool = False
    """whether compiled CPU kernels may be used"""
    on_token: OnToken | None = None
    on_result: Callable[[int, NBest], None] | None = None
    on_error: Callable[[int, RegardError], None] | None = None
    """is called instead for a sentence without a result; None: the error ends the call"""
    pending: list[int] = field(init=False)
    """indices of the sentences that are left, shortest first"""

    def __post_init__(self) -> None:
        self.pending = sorted(range(len(self.sources)), key=lambda i: len(self.sources[i]))

    def take(self, count: int) -> list[int]:
        """Indices of the next sentences, at most `count`.

        Longest first: running out of memory shows at once, and the last sentences to finish are short.
        """
        return [self.pending.pop() for _ in range(min(count, len(self.pending)))]

    @property
    def prefix_len(self) -> int:
        """The length of the longest forced prefix."""
        return max(map(len, self.prefixes), default=0)

    def part(self, indices: Sequence[int]) -> "DecodingJob":
        """A job of these sentences, without callbacks."""
        names = ("sources", "prefixes", "limits", "sample_indices", "token_lists", "lexical")
        columns = {name: column for name in names if (column := getattr(self, name)) is not None}
        parts: dict[str, Any] = {name: [column[i] for i in indices] for name, column in columns.items()}
        return replace(self, **parts, on_token=None, on_result=None)

    def first_position(self, index: int) -> int:
        """The cache position of the first token that the decoder processes."""
        return len(self.sources[index]) - 1 if self.continues_source else 0

    def first_token(self, index: int) -> int:
        return self.sources[index][-1] if self.continues_source else self.special.sos

    def random_key(self, index: int) -> tuple[int, int]:
        """The seed and the index on which the samples of a sentence depend."""
        return self.config.seed, self.sample_indices[index]

    @property
    def capacity(self) -> int:
        """The number of cache positions that the longest sentence needs."""
        return max((self.first_position(i) + self.limits[i] for i in self.pending), default=0) + 2

    @property
    def needs_logits(self) -> bool:
        """Whether the search needs the logits of all tokens: kernels choose the best tokens without them."""
        has_parts = self.history or self.lexical is not None or has_token_rules(self.config)
        return has_parts or bool(self.special.other_eos) or self.config.method == "sample"

    @property
    def needs_attention(self) -> bool:
        """Whether the search needs the cross-attention of every step."""
        return self.config.method == "beam" and self.config.coverage_penalty > 0

    @property
    def hypotheses(self) -> int:
        return self.config.beam if self.config.method == "beam" else self.config.n_best


class SlotDecoder:
    """Decodes the sentences of a job in a static batch of `slots` sentences: of a call, a file or a server."""

    max_slots = 0
    """slots of a batch that grows and shrinks with the number of arriving sentences; 0: it is filled until the end"""

    def __init__(
        self,
        model: Any,
        job: DecodingJob,
        slots: int,
        capacity: int,
        device: torch.device,
        prefix_len: int,
        source_capacity: int = 0,
    ) -> None:
        self.model: Stepper = model
        self.job, self.device = job, device
        self.constraints = Constraints(
            slots, prefix_len, job.config, job.special, device, job.continues_source, capacity
        )
        self.state: Any = make_search(
            *(slots, capacity, job.config, self.constraints, device),
            history=job.history,
            source_capacity=source_capacity,
        )
        self.offsets = torch.zeros(slots, dtype=torch.long, device=device)
        self.sentences: list[int | None] = [None] * slots
        self.host_positions = [0] * slots

    @property
    def in_use(self) -> int:
        """The number of slots with a sentence."""
        return len(self.sentences) - self.sentences.count(None)

    def use_job(self, job: DecodingJob) -> None:
        """Decode another job of the same shapes and options."""
        self.job, self.state.config = job, job.config
        self.sentences = [None] * len(self.sentences)
        self.state.done.fill_(True)

    @property
    def is_idle(self) -> bool:
        """Whether there is no sentence to decode."""
        return not self.job.pending and not self.in_use

    @property
    def refills(self) -> bool:
        """Whether new sentences join others. With the model itself they are a group that costs a step each time, so
        that calls decode batches of similar length instead.
        """
        return self.job.pack is None or self.max_slots > 0

    def run(self) -> None:
        """Decode until no sentence is left, or none in this batch if new ones do not join it."""
        self.fill_free_slots()
        while self.in_use or (self.refills and self.job.pending):
            check_interruption()
            self.advance()

    def advance(self) -> None:
        """Load waiting sentences, run one step, and deliver finished sentences."""
        self.fill()
        if self.in_use:
            self.step()
            self.collect()
        slots = len(self.sentences)
        if 1 < slots <= self.max_slots and not self.job.pending and self.in_use <= slots // 4:
            self.resize(next_power_of_two(max(1, self.in_use)))

    def fill(self) -> None:
        """Load new sentences into free slots; without any, drop the free slots."""
        in_use, slots = self.in_use, len(self.sentences)
        if self.max_slots:  # the number of slots doubles, because the caches are copied
            wanted = in_use + len(self.job.pending)
            if wanted > slots < self.max_slots:
                self.resize(min(self.max_slots, next_power_of_two(wanted)))
            self.fill_free_slots()
            return
        if in_use and not self.should_fill(slots - in_use):
            return
        if not (self.refills and self.fill_free_slots()) and 0 < in_use <= COMPACTION_SHARE * slots:
            self.compact()

    def fill_free_slots(self) -> bool:
        """Load new sentences into the free slots; returns whether there were any."""
        free = [slot for slot, sentence in enumerate(self.sentences) if sentence is None]
        taken = self.job.take(len(free))
        if taken:
            self.load(free[: len(taken)], taken)
        return bool(taken)

    def should_fill(self, free: int) -> bool:
        return free >= REFILL_SHARE * len(self.sentences)

    def load(self, slots: list[int], taken: list[int]) -> None:
        job, device = self.job, self.device
        self.model.load(slots, [list(job.sources[i]) for i in taken])
        self.constraints.set_slots(slots, [job.limits[i] for i in taken], [job.prefixes[i] for i in taken])
        if job.token_lists is not None:
            token_lists = [job.token_lists[i] for i in taken]
            self.model.set_output_tokens(self.constraints.set_token_lists(slots, token_lists, job.vocab))
        if job.lexical is not None:
            limits = [job.limits[i] for i in taken]
            self.constraints.set_phrases(slots, [job.lexical[i] for i in taken], limits)
        if self.constraints.repetition is not None:
            contexts = [job.sources[i] if job.continues_source else [job.special.sos] for i in taken]
            self.constraints.repetition.set_slots(slots, contexts)
        if self.state.recorder is not None:
            self.state.recorder.start(slots)
        if self.state.coverage is not None:
            self.state.coverage.start(slots, [len(job.sources[i]) for i in taken])
        rows = torch.tensor(slots, device=device)
        first = torch.tensor([job.first_token(i) for i in taken], device=device)
        positions = torch.tensor([job.first_position(i) for i in taken], device=device)
        self.state.start(rows, first, positions)
        self.offsets[rows] = positions
        self._assign(slots, taken)

    def _assign(self, slots: list[int], taken: list[int]) -> None:
        """Note which sentences are in these slots."""
        if self.job.config.method == "sample":
            rows = torch.tensor(slots, device=self.device)
            self.state.set_draws(rows, [self.job.random_key(i) for i in taken])
        for slot, index in zip(slots, taken):
            self.sentences[slot] = index
            self.host_positions[slot] = self.job.first_position(index)

    def compact(self) -> None:
        """Drop the free slots."""
        self.resize(self.in_use)

    def resize(self, slots: int) -> None:
        """Change the number of slots to at least those in use, which become the first ones."""
        kept = [slot for slot, sentence in enumerate(self.sentences) if sentence is not None]
        free = slots - len(kept)
        # New slots are copies of any other; they are free.
        rows = torch.tensor([*kept, *[0] * free], device=self.device)
        self.model.select_slots(rows)
        self.state.select_slots(rows, len(kept))
        if self.constraints.shortlist is not None:
            self.model.set_output_tokens(self.constraints.shortlist.tokens)
        self.offsets = self.offsets[rows]
        self.sentences = [*(self.sentences[slot] for slot in kept), *[None] * free]
        self.host_positions = [*(self.host_positions[slot] for slot in kept), *[0] * free]

    def drop(self, index: int) -> None:
        """Stop decoding a sentence, without a result."""
        if index in self.sentences:
            slot = self.sentences.index(index)
            self.sentences[slot] = None
            self.state.stop(slice(slot, slot + 1))
            self.constraints.release([slot])

    def step(self) -> None:
        state = self.state
        active = {p for p, sentence in zip(self.host_positions, self.sentences) if sentence is not None}
        longest = max(active) + 1
        # The position after the last token of a finished sentence may not exist.
        positions = (self.offsets + state.step).masked_fill_(state.done, 0)
        in_use = [sentence is not None for sentence in self.sentences]
        at = StepPositions(positions, longest, longest - 1 if len(active) == 1 else None, in_use)
        logits = self.model.step(state.last, at, state.ancestors)
        if state.coverage is not None:
            state.coverage.add(self.model.attention)
        parents = state.advance(logits, at.positions)
        if parents is not None:
            self.model.reorder(parents)
        self.host_positions = [position + 1 for position in self.host_positions]

    def collect(self) -> None:
        """Deliver finished sentences and free their slots."""
        done = self.state.done.tolist()
        if self.job.on_token is not None:
            self.report_tokens()
        finished = [slot for slot, sentence in enumerate(self.sentences) if sentence is not None and done[slot]]
        if not finished:
            return
        results = self.state.results(finished)
        check_no_nan(torch.tensor([best.logprob for n_best in results if isinstance(n_best, NBest) for best in n_best]))
        for slot, n_best in zip(finished, results):
            index = self.sentences[slot]
            assert index is not None
            self.sentences[slot] = None
            if isinstance(n_best, RegardError):
                if self.job.on_error is None:
                    raise n_best
                self.job.on_error(index, n_best)
                continue
            if self.state.recorder is not None:
                n_best.history = self.state.recorder.histories[slot]
            if self.job.on_result is not None:
                self.job.on_result(index, n_best)
        self.constraints.release(finished)

    def report_tokens(self) -> None:
        on_token = self.job.on_token
        assert on_token is not None
        tokens, live = self.state.last[:, 0].tolist(), self.state.live[:, 0].tolist()
        for sentence, token, is_live in zip(self.sentences, tokens, live):
            if sentence is not None and is_live:
                on_token(sentence, token)


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


def needed_shape(source: Sequence[int], limit: int, prefix: Sequence[int], *, continues_source: bool) -> LiveShape:
    """The smallest shape in which a sentence can be decoded.

    >>> needed_shape([4, 5, 3], 10, (), continues_source=False)
    LiveShape(source_capacity=3, capacity=12, prefix_len=0)
    """
    first = len(source) - 1 if continues_source else 0
    return LiveShape(len(source), first + limit + 2, len(prefix))


class ArrivingSentences(DecodingJob):
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
