"""Transformer decoders on a CPU: compiled kernels between the matrix products of a decoding step."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.protocol import StepPositions
from regard.decode.rules import check_no_nan
from regard.decode.search import BeamSearch
from regard.decode.slots import DecodingJob, SlotDecoder
from regard.decode.steppers.packed_weights import (
    EMPTY_TABLE,
    OUTPUT_COLUMNS,
    Array,
    PackedAttention,
    PackedBlock,
    PackedEncoder,
    PackedFeedForward,
    PackedLinear,
    PackedNorm,
    packed_decoder,
    to_array,
)
from regard.decode.steppers.packed_weights import supports as supports
from regard.decode.steppers.static import StaticDecoder
from regard.kernels.cpu import decode_attention, decode_choice, decode_layers, decode_rows
from regard.kernels.cpu.packed_product import multiply_panels

NOTHING_REFUSED = np.zeros((0, 0), np.bool_)


# Tokens that are encoded at once: their activations stay in the cache of the processor.
ENCODER_TOKENS = 256


# Up to this many rows, the memory of float32 weights limits the speed.
FEW_ROWS = 3


# Memory of caches that a model keeps between calls.
MAX_KEPT_BYTES = 1 << 26


class CpuSlotDecoder(SlotDecoder):
    """A `SlotDecoder` with a `CpuDecoder`."""

    model: "CpuDecoder"

    def __init__(self, model: "CpuDecoder", job: DecodingJob, *sizes: Any, **options: Any) -> None:
        super().__init__(model, job, *sizes, **options)
        self.needs_logits = job.needs_logits

    def run(self) -> None:
        super().run()
        _return_memory(self.model.model, self.model.memory)

    def step(self) -> None:
        """A step of kernels that also choose the tokens, or of the search with the logits of the kernels."""
        if self.needs_logits:
            super().step()
        else:
            self.model.advance(self.state, self.offsets.numpy(), self.constraints)


class CpuDecoder(StaticDecoder):
    """A `StaticDecoder` whose step runs compiled kernels."""

    def __init__(self, model: Any, slots: int, hypotheses: int, capacity: int, source_capacity: int) -> None:
        self.packed = packed = packed_decoder(model)
        self.memory = _take_memory(model)
        # The torch code that processes prompts multiplies masked values, which must be finite.
        allocate = torch.zeros if packed.encoder is None else self.memory.allocate
        super().__init__(model, slots, hypotheses, capacity, source_capacity, allocate)
        self.workspace = Workspace(packed.output.is_int8)
        self.encoder = None
        if packed.encoder is not None:
            self.encoder = CpuEncoder(packed.encoder, packed.blocks, self.workspace)
        self.embedding_arguments = packed.embedding.arguments(capacity - 1)
        self.x = np.zeros((slots * hypotheses, packed.embedding.width), np.float32)
        self.rotary = EMPTY_TABLE
        rotary = self.blocks[0].attention.rotary
        if rotary is not None:
            self.rotary = to_array(torch.cat(rotary.tables(torch.arange(capacity)), dim=-1)[:, 0])
        bias = self.self_attention[0].distance_bias
        self.distance_bias = EMPTY_TABLE if bias is None else to_array(bias.float())
        self.output_layer = packed.output
        self.output_parts: list[PackedLinear] = [] if packed.output.has_panels else packed.output_parts
        self._take_views()

    def prepare_layers(self) -> None:
        if self.packed.encoder is None:  # torch code processes prompts, or encodes the source
            super().prepare_layers()

    def _take_views(self) -> None:
        """Arrays that share the memory of the caches."""
        self.self_caches = [tuple(attention.cache.numpy()) for attention in self.self_attention]
        self.cross_caches = [tuple(attention.cache.numpy()) for attention in self.cross_attention]
        no_source = (np.empty((0, 0, 0, 0), np.float32),) * 2
        sources = self.cross_caches or [no_source] * len(self.self_caches)
        self.caches = tuple((*own, *source) for own, source in zip(self.self_caches, sources))
        self.lengths = self.source_lengths.numpy()
        slots = len(self.lengths)
        self.positions, self.forced = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.ban_eos = np.zeros(slots, np.bool_)
        self.top, self.ids = EMPTY_TABLE, np.empty((0, 0), np.int64)

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        """Encode new source sentences, or process all but the last token of new prompts."""
        if self.encoder is None:
            super().load(slots, sources)
            return
        self.encoder.load(slots, sources, self.cross_caches)
        self.lengths[slots] = [len(source) for source in sources]
        for slot, ids in zip(slots, sources):
            self.host_lengths[slot] = len(ids)

    @cached_property
    def _whole_output(self) -> PackedLinear:
        """The output layer of all tokens, without panels."""
        return PackedLinear.from_modules([self.stack.output])

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None:
        """Compute the logits of these tokens only."""
        layer = self._whole_output.select(tokens.numpy())
        if self.packed.output.has_panels:
            self.output_layer = layer.with_panels()
        else:
            self.output_layer, self.output_parts = layer, layer.split(OUTPUT_COLUMNS)

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        super().select_slots(slots)
        rows = len(slots) * self.hypotheses
        if rows > len(self.x):
            self.x = np.zeros((rows, self.x.shape[1]), np.float32)
        self._take_views()

    def step(
        self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None
    ) -> Float[Tensor, "B K V"]:
        """The logits of the token after the last token of each hypothesis, which enters the caches."""
        assert ancestors is not None
        self.positions[:] = at.positions.numpy()
        x = self.x[: last.numel()]
        decode_rows.embed_rows(last.numpy(), self.positions, *self.embedding_arguments, x)
        inputs, logits, first = (
            self._run_layers(x, ancestors.numpy()),
            torch.empty(len(x), self.output_layer.outputs),
            0,
        )
        for part in self.output_parts or [self.output_layer]:
            y = self.workspace.multiply(inputs, part)
            scaled = y * self.workspace.scales[: len(x), None] * part.scale + part.bias
            logits[:, first : first + part.outputs] = torch.from_numpy(scaled)
            first += part.outputs
        return logits.view(*last.shape, -1)

    def advance(self, state: Any, offsets: Array, constraints: Any) -> None:
        """One step of all slots: embeddings, layers, the choice of tokens, and the bookkeeping of the search."""
        K = self.hypotheses
        arrays = {name: getattr(state, name).numpy() for name in state.tensors()}
        special, limit, last = constraints.special, constraints.limit.numpy(), arrays["last"]
        rows = last.size
        decode_choice.start_step(
            *(arrays["step"], arrays["done"], offsets, limit, constraints.prefix.numpy(), special.eos),
            *(constraints.min_len, self.positions, self.forced, self.ban_eos),
        )
        x = self.x[:rows]
        decode_rows.embed_rows(last, self.positions, *self.embedding_arguments, x)
        count = min(2 * K, self.output_layer.outputs) if isinstance(state, BeamSearch) else 1
        if self.top.shape != (rows, count):
            self.top, self.ids = np.zeros((rows, count), np.float32), np.zeros((rows, count), np.int64)
        choice = self._choice_arguments(constraints)
        if self.output_layer.has_panels or rows <= (1 if self.output_layer.is_int8 else FEW_ROWS):
            self._step_in_one_call(x, arrays["ancestors"], choice)
        else:
            self._choose(self._run_layers(x, arrays["ancestors"]), choice)
        if constraints.shortlist is not None:
            self.ids = constraints.tokens(torch.from_numpy(self.ids)).numpy()
        if np.isnan(self.top[:, 0]).any():
            check_no_nan(torch.from_numpy(self.top[:, 0]))
        if isinstance(state, BeamSearch):
            decode_choice.beam_update(
                *(self.top, self.ids, self.positions, constraints.last_step.numpy(), special.eos),
                *(float(state.config.length_penalty), float(state.config.enough), state.config.early_stopping),
                **arrays,
            )
        else:
            names = ("step", "done", "live", "last", "tokens", "token_log_p", "lengths")
            decode_choice.greedy_update(self.top, self.ids, special.eos, *(arrays[name] for name in names))

    def _choice_arguments(self, constraints: Any) -> tuple[Any, ...]:
        """Arguments of `best_tokens_rows`. Tokens are columns of the output layer."""
        forced, refused = self.forced, NOTHING_REFUSED
        if constraints.shortlist is not None:
            columns = constraints.columns(torch.from_numpy(forced).clamp(min=0)).numpy()
            forced, refused = np.where(forced < 0, forced, columns), constraints.shortlist.refused.numpy()
        banned = np.array(constraints.banned_columns, np.int64)
        return self.positions, self.hypotheses, refused, banned, constraints.end_columns[0], forced, self.ban_eos

    def _step_in_one_call(self, x: Array, ancestors: Array, choice: tuple[Any, ...]) -> None:
        """The layers and the best tokens, without calls between the kernels."""
        packed, workspace, output = self.packed, self.workspace, self.output_layer
        inputs, products = workspace.flat(len(x), packed.widest, max(packed.widest, output.outputs))
        workspace.start(x, packed.norm_first, packed.blocks[0].attention.norm)
        decode_layers.run_layers(
            *(
                x,
                inputs,
                products,
                workspace.scales,
                packed.layers,
                self.caches,
                ancestors,
                self.positions,
                self.lengths,
            ),
            *(self.distance_bias, self.rotary, packed.norm_first),
        )
        statistics = np.empty((len(x), 3), np.float32)
        decode_layers.choose_tokens(
            inputs, products, workspace.scales, output.arguments, *choice, self.top, self.ids, statistics
        )

    def _run_layers(self, x: Array, ancestors: Any) -> Tensor:
        """The rows that enter the output layer."""
        sublayers: list[Any] = []
        for i, block in enumerate(self.packed.blocks):
            attention, cross, feedforward = block.attention, block.cross, block.feedforward
            sublayers.append((attention, partial(self._self_attention, attention, i, ancestors)))
            if cross is not None:
                sublayers.append((cross, partial(self._cross_attention, cross, i)))
            sublayers.append((feedforward, partial(self.workspace.feedforward, packed=feedforward)))
        return self.workspace.run_sublayers(x, sublayers, self.packed.norm_first, self.packed.final_norm)

    def _self_attention(self, packed: PackedAttention, i: int, ancestors: Any, inputs: Tensor) -> Array:
        workspace, keys, values = self.workspace, *self.self_caches[i]
        joint, rows = packed.inputs, inputs.shape[0]
        y = workspace.multiply(inputs, joint)
        out, array = workspace.inputs(rows, packed.out.inputs)
        decode_attention.self_attention(
            *(y, workspace.scales, joint.scale, joint.bias, keys, values, ancestors, self.positions, packed.factor),
            *(self.distance_bias, packed.q_gain, packed.k_gain, packed.eps, self.rotary, array, workspace.scales),
        )
        return workspace.multiply(out, packed.out)

    def _cross_attention(self, packed: PackedAttention, i: int, inputs: Tensor) -> Array:
        workspace, keys, values = self.workspace, *self.cross_caches[i]
        y = workspace.multiply(inputs, packed.inputs)
        out, array = workspace.inputs(inputs.shape[0], packed.out.inputs)
        decode_attention.cross_attention(
            *(y, workspace.scales, packed.inputs.scale, packed.inputs.bias, keys, values, self.lengths),
            *(self.positions, packed.factor, packed.q_gain, packed.eps, array, workspace.scales),
        )
        return workspace.multiply(out, packed.out)

    def _choose(self, inputs: Tensor, choice: tuple[Any, ...]) -> None:
        """The best tokens of every row."""
        statistics = np.empty((inputs.shape[0], 3), np.float32)
        decode_choice.start_rows(self.top, self.ids, statistics)
        first = 0
        for part in self.output_parts:
            y = self.workspace.multiply(inputs, part)
            decode_choice.best_tokens_rows(
                *(y, self.workspace.scales, part.scale, part.bias, first),
                *(*choice, self.top, self.ids, statistics),
            )
            first += part.outputs
        forced = choice[-2]
        decode_choice.finish_rows(forced, self.hypotheses, self.top, self.ids, statistics)


class Workspace:
    """Buffers for rows of activations, used again by every step; they grow when needed.

    The rows that enter a matrix product are int8 with one scale per row, or float32; its result is int32 or float32.
    Every input overwrites the previous one, and every product the previous product.
    """

    def __init__(self, is_int8: bool) -> None:
        self.is_int8 = is_int8
        self.scales = np.ones(0, np.float32)
        """of the rows of the current input"""
        dtypes = (torch.int8, torch.int32) if is_int8 else (torch.float32, torch.float32)
        self._buffers = {name: torch.empty(0, dtype=dtype) for name, dtype in zip(("inputs", "products"), dtypes)}
        self._views: dict[tuple[str, int, int], tuple[Tensor, Array]] = {}

    def _view(self, name: str, rows: int, columns: int) -> tuple[Tensor, Array]:
        key = name, rows, columns
        if key not in self._views:
            buffer = self._buffers[name]
            if len(buffer) < rows * columns:
                buffer = self._buffers[name] = torch.zeros(rows * columns, dtype=buffer.dtype)
                self._views = {other: view for other, view in self._views.items() if other[0] != name}
            tensor = buffer[: rows * columns].view(rows, columns)
            self._views[key] = tensor, tensor.numpy()
        return self._views[key]

    def inputs(self, rows: int, columns: int) -> tuple[Tensor, Array]:
        """The buffer of the rows that enter a matrix product, as a tensor and as an array."""
        if len(self.scales) < rows:
            self.scales = np.ones(rows, np.float32)
        return self._view("inputs", rows, columns)

    def multiply(self, inputs: Tensor, linear: PackedLinear) -> Array:
        """The products of rows and the weight of a linear layer."""
        rows = inputs.shape[0]
        tensor, array = self._view("products", rows, linear.outputs)
        if linear.has_panels:
            multiply_panels(inputs.numpy(), linear.weight, 0, array)
        elif linear.is_int8:
            torch._int_mm(inputs, linear.transposed, out=tensor)
        elif rows <= FEW_ROWS:
            decode_rows.multiply_few_rows(inputs.numpy(), linear.weight, array)
        else:
            torch.mm(inputs, linear.transposed, out=tensor)
        return array

    def feedforward(self, inputs: Tensor, packed: PackedFeedForward) -> Array:
        """The products of the second layer of a feed-forward network."""
        fc1 = packed.fc1
        y = self.multiply(inputs, fc1)
        hidden, array = self.inputs(inputs.shape[0], packed.fc2.inputs)
        decode_rows.activate_rows(y, self.scales, fc1.scale, fc1.bias, packed.activation, array, self.scales)
        return self.multiply(hidden, packed.fc2)

    def start(self, x: Array, norm_first: bool, norm: PackedNorm) -> tuple[Tensor, Array]:
        """The input of the first sublayer."""
        inputs, array = self.inputs(len(x), x.shape[1])
        if norm_first:
            decode_rows.norm_rows(x, *norm.arguments, array, self.scales)
        else:
            decode_rows.quantize_rows(x, array, self.scales)
        return inputs, array

    def flat(self, rows: int, widest: int, outputs: int) -> tuple[Array, Array]:
        """The buffers of inputs and products with room for rows of these widths."""
        self.inputs(rows, widest)
        self._view("products", rows, outputs)
        return self._buffers["inputs"].numpy(), self._buffers["products"].numpy()

    def run_sublayers(
        self,
        x: Array,
        sublayers: Sequence[tuple[Any, Callable[[Tensor], Array]]],
        norm_first: bool,
        final_norm: PackedNorm,
    ) -> Tensor:
        """Apply sublayers, given as packed weights and a function of their input, to the rows x; returns the input of
        the matrix product after them. x is overwritten.
        """
        # A function may need larger buffers, which replace the current ones.
        widest = max(packed.output_layer.inputs for packed, _ in sublayers)
        self.inputs(len(x), max(widest, x.shape[1]))
        norms = [packed.norm for packed, _ in sublayers]
        inputs, array = self.start(x, norm_first, norms[0])
        scales = self.scales
        norms = [*norms[1:], final_norm] if norm_first else norms
        for (packed, function), norm in zip(sublayers, norms):
            layer = packed.output_layer
            decode_rows.add_norm_rows(
                x, function(inputs), scales, layer.scale, layer.bias, *norm.arguments, norm_first, array, scales
            )
        return inputs


class CpuEncoder:
    """Encodes source sentences and stores the keys and values of cross-attention in caches."""

    def __init__(self, packed: PackedEncoder, blocks: list[PackedBlock], workspace: Workspace) -> None:
        self.packed, self.workspace = packed, workspace
        self.cross: list[Any] = [block.cross for block in blocks]

    def load(self, slots: list[int], sources: list[list[int]], caches: list[tuple[Array, Array]]) -> None:
        """Encode sentences, a few at a time, into these slots of the caches of every layer."""
        start = 0
        while start < len(sources):
            end, tokens = start + 1, len(sources[start])
            while end < len(sources) and tokens + len(sources[end]) <= ENCODER_TOKENS:
                tokens += len(sources[end])
                end += 1
            self._load(np.array(slots[start:end]), sources[start:end], caches)
            start = end

    def _load(self, slots: Array, sources: list[list[int]], caches: list[tuple[Array, Array]]) -> None:
        workspace, packed = self.workspace, self.packed
        starts = np.cumsum([0, *map(len, sources)])
        ids = np.concatenate([np.asarray(source, np.int64) for source in sources])
        positions = np.concatenate([np.arange(len(source)) for source in sources])
        x = np.empty((len(ids), packed.embedding.width), np.float32)
        embedding = packed.embedding.arguments(max(map(len, sources)))
        decode_rows.embed_rows(ids[:, None], positions, *embedding, x)
        sublayers: list[Any] = []
        for block in packed.blocks:
            sublayers.append((block.attention, partial(self._attention, starts, block.attention)))
            sublayers.append((block.feedforward, partial(workspace.feedforward, packed=block.feedforward)))
        memory = workspace.run_sublayers(x, sublayers, packed.norm_first, packed.final_norm)
        for cross, (keys, values) in zip(self.cross, caches):
            layer = cross.key_value
            y = workspace.multiply(memory, layer)
            decode_attention.store_keys_values(
                y, workspace.scales, layer.scale, layer.bias, starts, slots, cross.k_gain, cross.eps, keys, values
            )

    def _attention(self, starts: Array, packed: PackedAttention, inputs: Tensor) -> Array:
        workspace, joint = self.workspace, packed.inputs
        y = workspace.multiply(inputs, joint)
        out, array = workspace.inputs(inputs.shape[0], packed.out.inputs)
        decode_attention.encoder_attention(
            *(y, workspace.scales, joint.scale, joint.bias, starts, packed.heads, packed.kv_heads),
            *(packed.factor, array, workspace.scales),
        )
        return workspace.multiply(out, packed.out)


class CacheMemory:
    """Memory of key/value caches that is used again by the next decoder: new pages cost more than a short search."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.in_use = 0

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor; the tensors of a decoder do not overlap."""
        count = math.prod(size)
        if self.in_use == len(self.buffers):
            self.buffers.append(torch.empty(0))
        buffer = self.buffers[self.in_use]
        if len(buffer) < count or buffer.dtype != dtype:
            buffer = self.buffers[self.in_use] = torch.empty(count, dtype=dtype, device=device)
        self.in_use += 1
        return buffer[:count].view(size)

    def free(self) -> None:
        """End the use of all tensors; large buffers are returned to the system."""
        self.in_use = 0
        if sum(buffer.nbytes for buffer in self.buffers) > MAX_KEPT_BYTES:
            self.buffers = []


# Memory of the caches of earlier decoders, by model. A decoder in use has taken its own out of the list.
_memories: "WeakKeyDictionary[Any, list[CacheMemory]]" = WeakKeyDictionary()


def _take_memory(model: Any) -> CacheMemory:
    try:
        return _memories.setdefault(model, []).pop()
    except IndexError:
        return CacheMemory()


def _return_memory(model: Any, memory: CacheMemory) -> None:
    memory.free()
    _memories.setdefault(model, []).append(memory)


@cache
def log_compilation() -> None:
    """Log, once, that the kernels are compiled, unless they are stored on disk."""
    stored: Any = getattr(decode_attention.cross_attention, "_cache", None)
    if stored is not None and not list(Path(stored.cache_path).glob("decode_attention.cross_attention*.nbi")):
        logging.getLogger("regard").info("Compiling the CPU kernels of the decoding engine (once per machine).")
