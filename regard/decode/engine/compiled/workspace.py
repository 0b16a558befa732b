"""Buffers and sublayers of Transformers that run compiled CPU kernels between matrix products."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.decode.engine.compiled.packed_weights import Array, PackedFeedForward, PackedLinear, PackedNorm
from regard.kernels.cpu import decode_rows
from regard.kernels.cpu.packed_product import multiply_panels

# Up to this many rows, the memory of float32 weights limits the speed.
FEW_ROWS = 3
# Memory of caches that a model keeps between calls.
MAX_KEPT_BYTES = 1 << 26


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
        """The products of the outer layer of a feed-forward network."""
        inner = packed.inner
        y = self.multiply(inputs, inner)
        hidden, array = self.inputs(inputs.shape[0], packed.outer.inputs)
        decode_rows.activate_rows(y, self.scales, inner.scale, inner.bias, packed.activation, array, self.scales)
        return self.multiply(hidden, packed.outer)

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
