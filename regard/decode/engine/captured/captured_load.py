"""Loading of new sentences into the slots of a batch on a GPU, as one CUDA graph."""

from itertools import chain
from typing import Any

import numpy as np
import torch

from regard.attention.offsets import Offsets
from regard.decode.engine.captured.cuda_decoder import CudaDecoder
from regard.layers.packed import Packed
from regard.models.transformer import Transformer

# The integers of each sentence: slot, first token, cache position of that token, and length limit.
FIELDS = 4


class CapturedLoad:
    """Encodes `count` sentences (or processes prompts) of `total` tokens in all, and starts their search.

    All inputs are copied to the device at once. Shapes are rounded up: the last sentence is repeated, and tokens are
    padded with sequences that belong to no slot.
    """

    def __init__(self, model: CudaDecoder, state: Any, offsets: torch.Tensor, count: int, total: int, max_len: int):
        self.model, self.state, self.offsets = model, state, offsets
        self.count, self.total, self.max_len = count, total, max_len
        self.is_encoder_decoder = isinstance(model.model, Transformer)
        self.prefix_len = model.constraints.prefix.shape[1]
        # Padding sequences have at most max_len tokens each.
        self.sequences = count + -(-total // max_len) if self.is_encoder_decoder else count
        self.sizes = (total, total, self.sequences + 1, FIELDS * count, self.prefix_len * count)
        is_cuda = model.device.type == "cuda"
        self.host = torch.zeros(sum(self.sizes), dtype=torch.long, pin_memory=is_cuda)
        self.inputs = torch.zeros(sum(self.sizes), dtype=torch.long, device=model.device)
        self.graph: Any = None

    @staticmethod
    def shape_of(
        lengths: list[int], slots: int, max_len: int, is_encoder_decoder: bool, is_coarse: bool = False
    ) -> tuple[int, int, int]:
        """The rounded shape of a load: number of sentences, of tokens, and length of the longest.

        With `is_coarse` there are fewer shapes, for batches that are refilled at any time: every shape is captured.

        >>> CapturedLoad.shape_of([5, 9, 7], slots=64, max_len=32, is_encoder_decoder=True)
        (4, 64, 32)
        """
        bits = (len(lengths) - 1).bit_length()
        count = min(slots, 1 << (bits + bits % 2 if is_coarse else bits))
        if not is_encoder_decoder:  # prompts without their last token, as rectangles
            longest = min(-(-max(1, max(lengths) - 1) // 32) * 32, max_len)
            return count, count * longest, longest
        real = sum(lengths) + (count - len(lengths)) * lengths[-1]
        granule = max(64, (1 << (real - 1).bit_length()) // (1 if is_coarse else 8))
        return count, -(-real // granule) * granule, max_len

    def run(self, slots: list[int], sources: list[list[int]], job: Any, taken: list[int]) -> None:
        """Load these sentences of the job into these slots."""
        self._write_inputs(slots, sources, job, taken)
        self.inputs.copy_(self.host, non_blocking=True)
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _write_inputs(self, slots: list[int], sources: list[list[int]], job: Any, taken: list[int]) -> None:
        host = self.host.numpy()
        ids, positions, starts, fields, prefix = np.split(host, np.cumsum(self.sizes)[:-1])
        repeated = self.count - len(slots)
        slots, taken = slots + slots[-1:] * repeated, taken + taken[-1:] * repeated
        sources = sources + sources[-1:] * repeated
        if self.is_encoder_decoder:
            lengths = np.fromiter(map(len, sources), np.int64, self.count)
            real = int(lengths.sum())
            ids[:real] = np.fromiter(chain.from_iterable(sources), np.int64, real)
            ids[real:] = 0
            full, rest = divmod(self.total - real, self.max_len)
            padding = [self.max_len] * full + [rest] * (rest > 0)
            padding += [0] * (self.sequences - self.count - len(padding))
            lengths = np.concatenate([lengths, padding])
        else:
            lengths = np.full(self.count, self.max_len)
            rows = ids.reshape(self.count, self.max_len)
            rows[:] = 0
            for row, prompt in zip(rows, sources):
                row[: len(prompt) - 1] = prompt[:-1]
        starts[0] = 0
        np.cumsum(lengths, out=starts[1:])
        positions[:] = np.arange(self.total) - np.repeat(starts[:-1], lengths)
        first = [job.first_token(i) for i in taken], [job.first_position(i) for i in taken]
        fields[:] = np.array([slots, *first, [job.limits[i] for i in taken]]).reshape(-1)
        if self.prefix_len:
            prefix[:] = -1
            for row, i in zip(prefix.reshape(self.count, -1), taken):
                row[: len(job.prefixes[i])] = job.prefixes[i]

    def _device_load(self) -> None:
        ids, positions, starts, fields, prefix = self.inputs.split(self.sizes)
        slots, first_tokens, first_positions, limits = fields.view(FIELDS, self.count)
        tokens = Packed(ids, Offsets(starts.int(), self.total, self.max_len), positions)
        if self.is_encoder_decoder:
            self.model.load_source(slots, tokens)
        else:
            token_slots = slots.repeat_interleave(self.max_len, output_size=self.total)
            self.model.prefill_tokens(tokens, token_slots, positions, 0)
        constraints = self.model.constraints
        constraints.limit[slots] = limits
        if self.prefix_len:
            constraints.prefix[slots] = prefix.view(self.count, -1)
        self.state.start(slots, first_tokens, first_positions)
        self.offsets[slots] = first_positions

    def _capture(self) -> Any:
        return capture_graph(self._device_load, self.model.device)


def capture_graph(run: Any, device: torch.device) -> Any:
    """A CUDA graph of a function, which runs twice before: this compiles its kernels and allocates workspaces."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
