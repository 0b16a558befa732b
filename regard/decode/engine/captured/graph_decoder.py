"""Continuous batching on a GPU: a decoding step is one CUDA graph, and the host follows a few steps behind."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from regard.decode.engine.captured.captured_load import CapturedLoad, capture_graph
from regard.decode.engine.captured.cuda_decoder import CudaDecoder
from regard.decode.engine.slot_decoder import DecodingJob, SlotDecoder
from regard.models.transformer import Transformer

# Steps per graph. Graphs in flight: the device never waits for the host, which sees a few steps late that all ended.
UNROLLED_STEPS, GRAPHS_AHEAD = 4, 1
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
        self.steps_left = 0
        # Graphs by their number of steps. All slots are done, so that nothing is decoded meanwhile.
        self.graphs = {steps: self._capture(steps) for steps in (1, UNROLLED_STEPS)}

    def _capture(self, steps: int) -> Any:
        return capture_graph(partial(self._device_steps, steps), self.device)

    def _device_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.model.device_step(self.state, self.offsets)
        torch.sum(self.state.done, dim=0, keepdim=True, out=self.done_count)

    def run(self) -> None:
        """Decode until no sentence is left."""
        in_flight: deque[tuple[int, torch.cuda.Event]] = deque()
        events = [torch.cuda.Event() for _ in self.counts]
        is_streaming, replays = self.job.on_token is not None, 0
        self.fill()
        while self.in_use:
            if self.steps_left > 0:
                steps = 1 if is_streaming or self.steps_left < UNROLLED_STEPS else UNROLLED_STEPS
                in_flight.append(self.replay(steps, replays % len(self.counts), events))
                replays += 1
                if not is_streaming and len(in_flight) <= GRAPHS_AHEAD and self.steps_left > 0:
                    continue
            entry, event = in_flight.popleft()
            event.synchronize()
            if is_streaming:
                self.report_tokens()
            done, slots = int(self.counts[entry]), len(self.sentences)
            # Results are copied to the host when there is room for new sentences, or when all are finished.
            can_fill = self.job.pending and self.should_fill(done) and done > slots - self.in_use
            if done == slots or can_fill:
                in_flight.clear()
                self.collect()
                self.fill()

    def replay(self, steps: int, entry: int, events: Sequence[torch.cuda.Event]) -> tuple[int, torch.cuda.Event]:
        """Start some steps; after the event of the returned pair, `counts[entry]` is the number of slots done."""
        self.graphs[steps].replay()
        self.steps_left -= steps
        self.counts[entry : entry + 1].copy_(self.done_count, non_blocking=True)
        events[entry].record()
        return entry, events[entry]

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
