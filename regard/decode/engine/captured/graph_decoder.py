"""Continuous batching on a GPU: a decoding step is one CUDA graph, and the host follows a few steps behind."""

from collections import OrderedDict, deque
from functools import partial
from typing import Any

import torch

from regard.decode.engine.captured.captured_load import CapturedLoad, capture_graph
from regard.decode.engine.captured.cuda_decoder import CudaDecoder
from regard.decode.engine.slot_decoder import REFILL_SHARE, DecodingJob, SlotDecoder
from regard.models.transformer import Transformer

# Steps per graph. Graphs in flight: the device never waits for the host, which sees a few steps late that all ended.
UNROLLED_STEPS, GRAPHS_AHEAD = 4, 1
# In a server, results are collected at the latest after this many replays.
COLLECT_INTERVAL = 8
# Graphs that load new sentences, by shape; and the tokens of prompts up to which their processing is captured.
KEPT_LOADS, MAX_CAPTURED_PROMPT = 8, 8192
# The same, for batches that are refilled at any time.
KEPT_COARSE_LOADS = 32


class GraphSlotDecoder(SlotDecoder):
    """A `SlotDecoder` whose steps are replays of a CUDA graph. It is reused for other jobs of the same shapes."""

    model: CudaDecoder

    def __init__(
        self,
        model: Any,
        job: DecodingJob,
        slots: int,
        capacity: int,
        source_capacity: int,
        prefix_len: int,
        *,
        is_refilled_often: bool = False,
    ) -> None:
        super().__init__(None, job, slots, capacity, device=next(model.parameters()).device, prefix_len=prefix_len)
        self.model = CudaDecoder(model, slots, job.hypotheses, capacity, source_capacity, self.constraints)
        self.is_encoder_decoder = isinstance(model, Transformer)
        self.max_len = source_capacity if self.is_encoder_decoder else capacity - 1
        self.is_refilled_often = is_refilled_often
        self.loads: OrderedDict[tuple[int, int, int], CapturedLoad] = OrderedDict()
        # How many slots are done: written by the device after each step, into a ring of pinned memory.
        self.done_count = torch.zeros(1, dtype=torch.long, device=self.device)
        self.counts = torch.zeros(GRAPHS_AHEAD + 1, dtype=torch.long, pin_memory=self.device.type == "cuda")
        self.events = [torch.cuda.Event() for _ in self.counts]
        self.in_flight: deque[int] = deque()
        """entries of `counts` and `events`"""
        self.steps_left = self.replays = self.replays_since_collect = 0
        # Graphs by their number of steps. All slots are done, so that nothing is decoded meanwhile.
        self.graphs = {steps: self._capture(steps) for steps in (1, UNROLLED_STEPS)}

    def _capture(self, steps: int) -> Any:
        return capture_graph(partial(self._device_steps, steps), self.device)

    def _device_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.model.device_step(self.state, self.offsets)
        torch.sum(self.state.done, dim=0, keepdim=True, out=self.done_count)

    def use_job(self, job: DecodingJob) -> None:
        super().use_job(job)
        self.in_flight.clear()
        self.replays_since_collect = 0

    def advance(self) -> None:
        """Start some steps, and follow those that the device has finished."""
        job, slots = self.job, len(self.sentences)
        if job.pending and slots - self.in_use >= min(len(job.pending), REFILL_SHARE * slots):
            self.fill_free_slots()
            self.in_flight.clear()  # their counts are from before
        if not self.in_use:
            return
        is_streaming = job.on_token is not None
        if self.steps_left > 0:
            self._replay(1 if is_streaming or self.steps_left < UNROLLED_STEPS else UNROLLED_STEPS)
            if not is_streaming and len(self.in_flight) <= GRAPHS_AHEAD and self.steps_left > 0:
                return
        done = slots
        if self.in_flight:
            entry = self.in_flight.popleft()
            self.events[entry].synchronize()
            done = int(self.counts[entry])
        if is_streaming:
            self.report_tokens()
        finished = done - (slots - self.in_use)
        if finished > 0 and self._should_collect(done, finished):
            self.in_flight.clear()
            self.replays_since_collect = 0
            self.collect()

    def _should_collect(self, done: int, finished: int) -> bool:
        """Results are copied to the host when all are finished or there is room for new sentences; in a server, where
        somebody waits for each, also if no sentence is waiting, and at the latest after some replays.
        """
        slots, is_waiting = len(self.sentences), bool(self.job.pending)
        if not self.is_refilled_often:
            return done == slots or (is_waiting and self.should_fill(done))
        return not is_waiting or self.should_fill(finished) or self.replays_since_collect >= COLLECT_INTERVAL

    def _replay(self, steps: int) -> None:
        """Start some steps; after the event of the entry that is now in flight, its count is the slots done."""
        entry = self.replays % len(self.counts)
        self.graphs[steps].replay()
        self.steps_left -= steps
        self.counts[entry : entry + 1].copy_(self.done_count, non_blocking=True)
        self.events[entry].record()
        self.in_flight.append(entry)
        self.replays += 1
        self.replays_since_collect += 1

    def load(self, slots: list[int], taken: list[int]) -> None:
        is_coarse = self.is_refilled_often
        if is_coarse:  # the last sentence, which is repeated, is the shortest
            taken = sorted(taken, key=lambda i: -len(self.job.sources[i]))
        sources = [list(self.job.sources[i]) for i in taken]
        lengths = [len(ids) for ids in sources]
        shape = CapturedLoad.shape_of(lengths, len(self.sentences), self.max_len, self.is_encoder_decoder, is_coarse)
        if not self.is_encoder_decoder and shape[1] > MAX_CAPTURED_PROMPT:
            super().load(slots, taken)
        else:
            if shape not in self.loads:
                self.loads[shape] = CapturedLoad(self.model, self.state, self.offsets, *shape)
                if len(self.loads) > (KEPT_COARSE_LOADS if is_coarse else KEPT_LOADS):
                    self.loads.popitem(last=False)
            self.loads.move_to_end(shape)
            self.loads[shape].run(slots, sources, self.job, taken)
            self._assign(slots, taken)
        # No sentence takes more steps: its limit, and one for <eos>.
        self.steps_left = max(self.steps_left, max(self.job.limits[i] for i in taken) + 1)

    def compact(self) -> None:
        """A graph has a fixed number of slots."""
