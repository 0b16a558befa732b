"""Transformer decoders on a GPU: a decoding step of fused kernels, and the loading of sentences, as CUDA graphs."""

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.attention import Dot, ScaledDot
from regard.attention.offsets import Offsets
from regard.decode.rules import Constraints
from regard.decode.search import BeamSearch, StepwiseSearch
from regard.decode.slots import REFILL_SHARE, DecodingJob, SlotDecoder
from regard.decode.steppers.static import (
    CachedAttention,
    StaticCrossAttention,
    StaticDecoder,
    activation_dtype,
    kernels_support,
)
from regard.kernels.triton import add_norm, search_update, skinny_linear, topk_log_softmax
from regard.kernels.triton.decode_attention import decode_attention, decode_cross_attention
from regard.kernels.triton.decode_attention import supports as supports_attention
from regard.kernels.triton.skinny_linear import RowNorm, supports_float8
from regard.kernels.triton.start_step import StepTables, start_step
from regard.layers.feedforward import FeedForward, activate
from regard.layers.fusion import fuse_residuals
from regard.layers.norms import RMSNorm
from regard.layers.packed import Packed
from regard.layers.positions import Learned, Sinusoidal
from regard.layers.quantized import Float8Linear

# Steps per graph. Graphs in flight: the device never waits for the host, which sees a few steps late that all ended.
UNROLLED_STEPS, GRAPHS_AHEAD = 4, 1


# In a server, results are collected at the latest after this many replays.
COLLECT_INTERVAL = 8


# Graphs that load new sentences, by shape; and the tokens of prompts up to which their processing is captured.
KEPT_LOADS, MAX_CAPTURED_PROMPT = 8, 8192


# The same, for batches that are refilled at any time.
KEPT_COARSE_LOADS = 32


# The integers of each sentence: slot, first token, cache position of that token, and length limit.
FIELDS = 4


class LinearWeights(NamedTuple):
    """The parameters of a linear layer; float8 weights have a scale per output."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


class GraphSlotDecoder(SlotDecoder):
    """A `SlotDecoder` whose steps are replays of a CUDA graph. It is reused for other jobs of the same shapes."""

    model: "CudaDecoder"

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
        self.is_encoder_decoder = model.stack.has_cross
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


class CudaDecoder(StaticDecoder):
    """A `StaticDecoder` whose step runs fused kernels on tensors at fixed addresses, so that it can be captured."""

    def __init__(
        self,
        model: Any,
        slots: int,
        hypotheses: int,
        capacity: int,
        source_capacity: int,
        constraints: Constraints,
    ) -> None:
        super().__init__(fuse_residuals(model), slots, hypotheses, capacity, source_capacity)
        self.constraints = constraints
        table, offset = None, 0
        positions = self.embedding.positions
        if isinstance(positions, Sinusoidal):
            table = positions.table
        elif isinstance(positions, Learned):
            table, offset = positions.weight, positions.offset
        self.tables = StepTables(
            self.embedding.tokens.weight,
            table,
            self.embedding.scale,
            offset,
            constraints.special.eos,
            constraints.min_len,
        )
        self.rows = slots * hypotheses
        # Few rows: every sublayer is one kernel that reads its weights once. Many: matrix products of cuBLAS.
        self.is_skinny = skinny_linear.is_faster(self.rows, model.config.width)
        self.reads_float8 = self.is_skinny and supports_float8(self.device)
        self.norm_first: bool = self.blocks[0].norm_first
        self.fused = [self._fuse_block(i) for i in range(len(self.blocks))]
        self.last_norm, self.factor = self.stack.norm, self.stack.output_factor
        self.output_weights = self._weights(self.stack.output)

    def prepare_layers(self) -> None:
        """The layers of `StaticDecoder.step` are not used."""

    @staticmethod
    def supports(model: Any, hypotheses: int) -> bool:
        """Whether the kernels support the attention of this model and this number of hypotheses."""
        if not kernels_support(model):
            return False
        if not isinstance(model.stack.embedding.positions, Sinusoidal | Learned | None):
            return False
        for block in model.stack.blocks:
            for attention in (block.attention, block.cross):
                if attention is None:
                    continue
                shape = (1, attention.kv_heads, 1, 1, attention.head_width)
                cache = attention.out.weight.new_empty(shape, dtype=activation_dtype(attention.out))
                is_dot = type(attention.score) in (Dot, ScaledDot)
                if not is_dot or not supports_attention(cache, cache, hypotheses, attention.heads):
                    return False
        return True

    def _fuse_block(self, i: int) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
        """The sublayers of a block, each with its norm: functions of the input, its norm and the residual."""
        block, cached = self.blocks[i], self.self_attention[i]
        sublayers = [(block.attention_norm, self._self_attention(cached))]
        if self.cross_attention:
            sublayers.append((block.cross_norm, self._cross_attention(self.cross_attention[i])))
        return [*sublayers, (block.feedforward_norm, self._feedforward(block.feedforward))]

    def _weights(self, *modules: Any) -> LinearWeights:
        """The joint weights of linear layers with the same input.

        Float8 weights are converted here, once, unless the kernel for few rows reads them.
        """
        bias = None if modules[0].bias is None else _concatenate([module.bias for module in modules])
        if not isinstance(modules[0], Float8Linear):
            return LinearWeights(_concatenate([module.weight for module in modules]), bias, None)
        if not self.reads_float8:
            return LinearWeights(_concatenate([module.dequantize() for module in modules]), bias, None)
        weight, scale = (_concatenate([getattr(module, name) for module in modules]) for name in ("weight", "scale"))
        return LinearWeights(weight, bias, scale)

    def _linear(
        self,
        x: Tensor,
        weights: LinearWeights,
        norm: RowNorm | None = None,
        activation: Any = "none",
        residual: Tensor | None = None,
        residual_norm: RowNorm | None = None,
    ) -> Tensor:
        """A linear layer; with few rows, fused with the norm before it and the residual sum after it."""
        weight, bias, scale = weights
        if self.is_skinny:
            return skinny_linear.skinny_linear(
                *(x, weight, bias),
                scale=scale,
                norm=norm,
                activation=activation,
                residual=residual,
                residual_norm=residual_norm,
            )
        if activation == "relu" and bias is not None:
            return torch._addmm_activation(bias, x, weight.t())
        y = linear(x, weight, bias)
        return y if activation == "none" else activate(activation, y)

    def _self_attention(self, cached: CachedAttention) -> Callable[..., Tensor]:
        attention = cached.attention
        joint, outer = self._weights(attention.query, attention.key_value), self._weights(attention.out)
        k_cache, v_cache = cached.cache
        rotary = None
        if attention.rotary is not None:
            rotary = torch.cat(attention.rotary.tables(torch.arange(self.capacity, device=self.device)), dim=-1)[:, 0]
        has_norm = attention.query_norm is not None
        options: dict[str, Any] = {"heads": attention.heads, "scale": cached.scale, "rotary": rotary}
        if cached.distance_bias is not None:
            options["bias"] = cached.distance_bias.float().contiguous()

        def run(x: Tensor, norm: RowNorm | None, residual: Tensor | None, residual_norm: RowNorm | None) -> Tensor:
            qkv = self._linear(x, joint, norm)
            if has_norm:
                self._normalize_heads(qkv, attention)
            ancestors = self.ancestors if self.hypotheses > 1 else None
            out = decode_attention(qkv, k_cache, v_cache, ancestors, self.positions, **options)
            return self._linear(out, outer, None, "none", residual, residual_norm)

        return run

    @staticmethod
    def _normalize_heads(qkv: Float[Tensor, "R C"], attention: Any) -> None:
        """Normalize queries and keys per head, in place."""
        heads = qkv.view(len(qkv), -1, attention.head_width)
        q, k = heads[:, : attention.heads], heads[:, attention.heads : attention.heads + attention.kv_heads]
        q.copy_(attention.query_norm(q))
        k.copy_(attention.key_norm(k))

    def _cross_attention(self, cross: StaticCrossAttention) -> Callable[..., Tensor]:
        attention = cross.attention
        query, outer = self._weights(attention.query), self._weights(attention.out)
        k, v = cross.cache

        def run(x: Tensor, norm: RowNorm | None, residual: Tensor | None, residual_norm: RowNorm | None) -> Tensor:
            q = self._linear(x, query, norm)
            if attention.query_norm is not None:
                q = attention.query_norm(q.view(len(q), -1, attention.head_width)).flatten(1)
            out = decode_cross_attention(q, k, v, self.source_lengths, heads=attention.heads, scale=cross.scale)
            return self._linear(out, outer, None, "none", residual, residual_norm)

        return run

    def _feedforward(self, module: FeedForward) -> Callable[..., Tensor]:
        fc1, fc2 = self._weights(module.fc1), self._weights(module.fc2)
        name = "none" if module.is_gated else module.activation

        def run(x: Tensor, norm: RowNorm | None, residual: Tensor | None, residual_norm: RowNorm | None) -> Tensor:
            hidden = self._linear(x, fc1, norm, name)
            if module.is_gated:
                hidden = module.apply_gate(hidden)
            return self._linear(hidden, fc2, None, "none", residual, residual_norm)

        return run

    def device_step(self, state: Any, offsets: Int[Tensor, "B"]) -> None:
        """One step of all slots: embeddings, layers, the choice of tokens, and the bookkeeping of the search."""
        constraints = self.constraints
        self.ancestors = state.ancestors
        start = start_step(
            state.last, state.step, state.done, offsets, constraints.limit, constraints.prefix, self.tables
        )
        self.positions = start.positions
        x = start.x
        if not isinstance(self.embedding.norm, nn.Identity):
            x = self.embedding.norm(x)
        logits = self._skinny_logits(x) if self.is_skinny else self._logits(x)
        self._choose(state, logits, start.positions, start.forced, start.ban_eos)

    def _skinny_logits(self, x: Float[Tensor, "R E"]) -> Float[Tensor, "R V"]:
        previous: nn.Module | None = None  # post-norm: the norm of the residual stream, applied by its readers
        for block in self.fused:
            for norm, sublayer in block:
                if self.norm_first:
                    x = sublayer(x, row_norm(norm), x, None)
                else:
                    before = None if previous is None else row_norm(previous)
                    x, previous = sublayer(x, before, x, before), norm
        last = self.last_norm if self.norm_first else previous
        if self.factor != 1.0:
            assert last is not None
            return self._linear(last(x) * self.factor, self.output_weights)
        return self._linear(x, self.output_weights, None if last is None else row_norm(last))

    def _logits(self, x: Float[Tensor, "R E"]) -> Float[Tensor, "R V"]:
        sublayers = [pair for block in self.fused for pair in block]
        if self.norm_first:
            norms = [norm for norm, _ in sublayers[1:]] + [self.last_norm]
            h = sublayers[0][0](x)
            for (_, sublayer), norm in zip(sublayers, norms):
                x, h = sum_and_norm(x, sublayer(h, None, None, None), norm)
        else:
            h = x
            for norm, sublayer in sublayers:
                _, h = sum_and_norm(h, sublayer(h, None, None, None), norm)
        return self._linear(h * self.factor if self.factor != 1.0 else h, self.output_weights)

    def _choose(self, state: Any, logits: Tensor, positions: Tensor, forced: Tensor, ban_eos: Tensor) -> None:
        special, K, V = self.constraints.special, self.hypotheses, logits.shape[1]
        count = min(2 * K, V) if isinstance(state, BeamSearch) else 1
        is_sampling = isinstance(state, StepwiseSearch) and state.draws is not None
        is_supported = topk_log_softmax.supports(logits, count) and search_update.supports(logits, K, count)
        if is_sampling or not is_supported:
            state.advance(logits.view(-1, K, V), positions.clamp(min=0))
            return
        top, ids = topk_log_softmax.topk_log_softmax(
            logits,
            count,
            banned=self.constraints.banned,
            eos=special.eos,
            forced=forced,
            ban_eos=ban_eos if self.constraints.min_len else None,
        )
        if isinstance(state, BeamSearch):
            search_update.beam_update(
                *(top.view(-1, K, count), ids.view(-1, K, count), positions, self.constraints.last_step),
                **{name: getattr(state, name) for name in state.tensors()},
                eos=special.eos,
                length_penalty=state.config.length_penalty,
                enough=state.config.enough,
                early_stopping=state.config.early_stopping,
            )
        else:
            names = ("step", "done", "live", "last", "tokens", "token_log_p", "lengths")
            search_update.greedy_update(
                *(ids.view(-1, K), top.view(-1, K)), **{name: getattr(state, name) for name in names}, eos=special.eos
            )


class CapturedLoad:
    """Encodes `count` sentences (or processes prompts) of `total` tokens in all, and starts their search.

    All inputs are copied to the device at once. Shapes are rounded up: the last sentence is repeated, and tokens are
    padded with sequences that belong to no slot.
    """

    def __init__(self, model: CudaDecoder, state: Any, offsets: torch.Tensor, count: int, total: int, max_len: int):
        self.model, self.state, self.offsets = model, state, offsets
        self.count, self.total, self.max_len = count, total, max_len
        self.is_encoder_decoder = model.stack.has_cross
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


def _concatenate(tensors: list[Tensor]) -> Tensor:
    """Tensors along the first axis; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def row_norm(norm: nn.Module) -> RowNorm:
    """The parameters of a norm for `skinny_linear`."""
    assert isinstance(norm, nn.LayerNorm | RMSNorm)
    eps = norm.eps if norm.eps is not None else torch.finfo(norm.weight.dtype).eps
    if isinstance(norm, nn.LayerNorm):
        return RowNorm(norm.weight, norm.bias, eps, "layer")
    return RowNorm(norm.weight, None, eps, "rms")


def sum_and_norm(x: Float[Tensor, "R E"], update: Float[Tensor, "R E"], norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum x + update and its norm."""
    has_parameters = isinstance(norm, RMSNorm) or (isinstance(norm, nn.LayerNorm) and norm.bias is not None)
    if has_parameters and add_norm.supports(x, update):
        gain, bias, eps, _ = row_norm(norm)
        return add_norm.add_norm(x, update, gain, bias, eps, 0.0)
    x = x + update
    return x, norm(x)
