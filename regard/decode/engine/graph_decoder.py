"""Continuous batching on a GPU: a decoding step is one CUDA graph, and the host follows a few steps behind."""

from collections import deque
from typing import Any

import torch

from regard.decode.engine.cuda_decoder import CudaDecoder
from regard.decode.engine.slot_decoder import DecodingJob, SlotDecoder

# Steps in flight: the device never waits for the host, and at most this many steps run after the last output ended.
STEPS_AHEAD = 2


class GraphSlotDecoder(SlotDecoder):
    """A `SlotDecoder` whose steps are replays of a CUDA graph. It is reused for other jobs of the same shapes."""

    model: CudaDecoder

    def __init__(
        self, model: Any, job: DecodingJob, slots: int, capacity: int, source_capacity: int, prefix_len: int
    ) -> None:
        super().__init__(None, job, slots, capacity, device=next(model.parameters()).device, prefix_len=prefix_len)
        self.model = CudaDecoder(model, slots, job.hypotheses, capacity, source_capacity, self.constraints)
        # How many slots are done: written by the device after each step, into a ring of pinned memory.
        self.done_count = torch.zeros(1, dtype=torch.long, device=self.device)
        self.counts = torch.zeros(STEPS_AHEAD + 1, dtype=torch.long, pin_memory=self.device.type == "cuda")
        self.graph = self._capture()

    def _capture(self) -> Any:
        """Record one step. All slots are done, so that nothing is decoded meanwhile."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles the kernels and allocates workspaces
                self._device_step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._device_step()
        return graph

    def _device_step(self) -> None:
        self.model.device_step(self.state, self.offsets)
        torch.sum(self.state.done, dim=0, keepdim=True, out=self.done_count)

    def run(self) -> None:
        """Decode until no sentence is left."""
        in_flight: deque[tuple[int, torch.cuda.Event]] = deque()
        steps = 0
        self._fill()
        while any(sentence is not None for sentence in self.sentences):
            self.graph.replay()
            entry = steps % len(self.counts)
            self.counts[entry : entry + 1].copy_(self.done_count, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            in_flight.append((entry, event))
            steps += 1
            if self.job.on_token is None and len(in_flight) <= STEPS_AHEAD:
                continue
            entry, event = in_flight.popleft()
            event.synchronize()
            if self.job.on_token is not None:
                self._report_tokens()
            done = int(self.counts[entry])
            free = sum(sentence is None for sentence in self.sentences)
            # Results are copied to the host when there is room for new sentences, or when all are finished.
            if done == len(self.sentences) or ((self.job.pending and self._should_fill(done)) and done > free):
                in_flight.clear()
                self._collect()
                self._fill()

    def _compact(self) -> None:
        """A graph has a fixed number of slots."""
