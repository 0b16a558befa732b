"""Transformer decoders on a CPU: compiled kernels between the matrix products of a decoding step."""

import logging
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.decode.engine.compiled.cpu_encoder import CpuEncoder
from regard.decode.engine.compiled.packed_weights import (
    EMPTY_TABLE,
    OUTPUT_COLUMNS,
    Array,
    PackedAttention,
    PackedLinear,
    packed_decoder,
    to_array,
)
from regard.decode.engine.compiled.packed_weights import supports as supports
from regard.decode.engine.compiled.workspace import FEW_ROWS, CacheMemory, Workspace
from regard.decode.engine.slot_decoder import SlotDecoder
from regard.decode.engine.static.static_decoder import StaticDecoder
from regard.decode.rules.constraints import check_no_nan
from regard.decode.search import BeamSearch
from regard.kernels.cpu import decode_attention, decode_choice, decode_layers, decode_rows

NOTHING_REFUSED = np.zeros((0, 0), np.bool_)


class CpuDecoder(StaticDecoder):
    """A `StaticDecoder` whose step runs compiled kernels, for greedy decoding and beam search."""

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
        return PackedLinear.from_modules([self.model.output])

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


class CpuSlotDecoder(SlotDecoder):
    """A `SlotDecoder` with a `CpuDecoder`."""

    model: CpuDecoder

    def run(self) -> None:
        super().run()
        _return_memory(self.model.model, self.model.memory)

    def step(self) -> None:
        self.model.advance(self.state, self.offsets.numpy(), self.constraints)
