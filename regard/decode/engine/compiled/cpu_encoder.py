"""The encoder of a Transformer on a CPU, with compiled kernels between matrix products."""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from regard.decode.engine.compiled.packed_weights import Array, PackedAttention, PackedBlock, PackedEncoder
from regard.decode.engine.compiled.workspace import Workspace
from regard.kernels.cpu import decode_attention, decode_rows

# Tokens that are encoded at once: their activations stay in the cache of the processor.
ENCODER_TOKENS = 256


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
