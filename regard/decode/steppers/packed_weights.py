"""The weights of a decoder stack as arrays for compiled CPU kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention import Dot, ScaledDot
from regard.decode.precision import iterate_modules, weight_versions
from regard.decode.steppers.static import kernels_support
from regard.kernels.cpu.decode_rows import ACTIVATIONS
from regard.kernels.cpu.packed_product import pack_weight, packing_available
from regard.layers.attention import MultiHeadAttention
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import FeedForward
from regard.layers.norms import RMSNorm
from regard.layers.positions import Learned, Sinusoidal
from regard.layers.quantized import Int8Linear
from regard.models.decoder import Decoder
from regard.models.transformer import Transformer

Array = np.ndarray[Any, Any]
# Tokens in a part of the output layer.
OUTPUT_COLUMNS = 1024
# Larger float32 weights are not copied into panels.
MAX_COPIED_BYTES = 1 << 29
EMPTY = np.empty(0, np.float32)
EMPTY_TABLE = np.empty((0, 0), np.float32)


def to_array(tensor: Tensor) -> Array:
    """A float32 array that shares the memory of a tensor."""
    return tensor.detach().contiguous().numpy()


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer: y * row_scale * scale + bias, where y are the products with an int8 or float32 weight."""

    weight: Array
    """(outputs, inputs), which shares the memory of the model where possible, or its panels (packed_product)"""
    inputs: int
    scale: Array
    bias: Array
    is_int8: bool

    @property
    def outputs(self) -> int:
        return len(self.scale)

    @property
    def has_panels(self) -> bool:
        return self.weight.ndim == 3

    @property
    def arguments(self) -> tuple[Array, Array, Array]:
        return self.weight, self.scale, self.bias

    @cached_property
    def transposed(self) -> Tensor:
        """The weight (inputs, outputs) for products of torch."""
        weight = torch.from_numpy(self.weight).t()
        return weight.contiguous() if self.is_int8 else weight  # makes products of int8 up to 25 % faster

    def with_panels(self) -> "PackedLinear":
        """The layer with its weight in panels."""
        return replace(self, weight=pack_weight(self.weight))

    def select(self, outputs: Array) -> "PackedLinear":
        """The layer with some of its outputs only."""
        return replace(self, weight=self.weight[outputs], scale=self.scale[outputs], bias=self.bias[outputs])

    def split(self, size: int) -> "list[PackedLinear]":
        """Layers with at most `size` of the outputs each."""
        parts = [slice(i, i + size) for i in range(0, self.outputs, size)]
        return [replace(self, weight=self.weight[p], scale=self.scale[p], bias=self.bias[p]) for p in parts]

    @staticmethod
    def from_modules(modules: Sequence[Any]) -> "PackedLinear":
        """Layers with the same input side by side. One layer shares its weight; several are copied."""
        is_int8 = isinstance(modules[0], Int8Linear)
        weights = [module.weight.detach() for module in modules]
        sizes = [len(weight) for weight in weights]
        scales = [module.scale if is_int8 else torch.ones(size) for module, size in zip(modules, sizes)]
        biases = [torch.zeros(n) if m.bias is None else m.bias.detach() for m, n in zip(modules, sizes)]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        return PackedLinear(
            weight.numpy(), weight.shape[1], to_array(torch.cat(scales)), to_array(torch.cat(biases)), is_int8
        )


@dataclass(frozen=True)
class PackedNorm:
    """A LayerNorm or RMSNorm; without gain: no norm."""

    gain: Array
    bias: Array
    eps: Any
    is_rms: bool

    @staticmethod
    def from_module(module: nn.Module) -> "PackedNorm":
        if isinstance(module, nn.Identity):
            return PackedNorm(EMPTY, EMPTY, np.float32(0), False)
        assert isinstance(module, nn.LayerNorm | RMSNorm)
        is_rms = isinstance(module, RMSNorm)
        gain = to_array(module.weight)
        bias: Any = None if is_rms else module.bias
        eps = module.eps if module.eps is not None else np.finfo(np.float32).eps
        return PackedNorm(gain, np.zeros_like(gain) if bias is None else to_array(bias), np.float32(eps), is_rms)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.gain, self.bias, self.eps, self.is_rms


@dataclass(frozen=True)
class PackedAttention:
    """Self-attention with joint query, key and value layers, or cross-attention with the query layer only."""

    inputs: PackedLinear
    out: PackedLinear
    norm: PackedNorm
    """the norm of the sublayer"""
    heads: int
    kv_heads: int
    factor: Any
    q_gain: Array
    k_gain: Array
    eps: Any
    key_value: PackedLinear | None = None
    """keys and values of cross-attention"""

    @property
    def output_layer(self) -> PackedLinear:
        return self.out

    def arguments(self, norm: PackedNorm) -> tuple[Any, ...]:
        """For `run_layers`, with the norm after the sublayer."""
        heads = self.factor, self.q_gain, self.k_gain, self.eps
        return self.inputs.arguments, self.out.arguments, norm.arguments, heads

    @staticmethod
    def from_module(attention: MultiHeadAttention, norm: nn.Module) -> "PackedAttention":
        is_cross = attention.kind == "cross"
        inputs = [attention.query] if is_cross else [attention.query, attention.key_value]
        score = attention.score
        factor = score.scale(attention.head_width) if isinstance(score, ScaledDot) else 1.0
        gains, eps = (EMPTY, EMPTY), 0.0
        if attention.query_norm is not None and attention.key_norm is not None:
            norms = PackedNorm.from_module(attention.query_norm), PackedNorm.from_module(attention.key_norm)
            gains, eps = (norms[0].gain, norms[1].gain), norms[0].eps
        return PackedAttention(
            PackedLinear.from_modules(inputs),
            PackedLinear.from_modules([attention.out]),
            PackedNorm.from_module(norm),
            attention.heads,
            attention.kv_heads,
            np.float32(factor),
            *gains,
            np.float32(eps),
            PackedLinear.from_modules([attention.key_value]) if is_cross else None,
        )


@dataclass(frozen=True)
class PackedFeedForward:
    fc1: PackedLinear
    fc2: PackedLinear
    activation: int
    norm: PackedNorm

    @property
    def output_layer(self) -> PackedLinear:
        return self.fc2

    def arguments(self, norm: PackedNorm) -> tuple[Any, ...]:
        """For `run_layers`, with the norm after the sublayer."""
        return self.fc1.arguments, self.fc2.arguments, norm.arguments, self.activation

    @staticmethod
    def from_module(module: FeedForward, norm: nn.Module) -> "PackedFeedForward":
        fc1, fc2 = PackedLinear.from_modules([module.fc1]), PackedLinear.from_modules([module.fc2])
        return PackedFeedForward(fc1, fc2, ACTIVATIONS.index(module.activation), PackedNorm.from_module(norm))


@dataclass(frozen=True)
class PackedBlock:
    attention: PackedAttention
    cross: PackedAttention | None
    feedforward: PackedFeedForward

    @staticmethod
    def from_module(block: Any) -> "PackedBlock":
        cross = block.cross
        return PackedBlock(
            PackedAttention.from_module(block.attention, block.attention_norm),
            None if cross is None else PackedAttention.from_module(cross, block.cross_norm),
            PackedFeedForward.from_module(block.feedforward, block.feedforward_norm),
        )


@dataclass(frozen=True)
class PackedEmbedding:
    """Token embeddings, times a scale, plus positional encodings."""

    tokens: Array
    scale: Any
    positions: Sinusoidal | Learned | None

    @staticmethod
    def from_module(embedding: Embedding) -> "PackedEmbedding":
        positions: Any = embedding.positions
        return PackedEmbedding(to_array(embedding.tokens.weight), np.float32(embedding.scale), positions)

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def arguments(self, length: int) -> tuple[Any, ...]:
        """For `embed_rows`, at positions less than `length`."""
        if self.positions is None:
            return self.tokens, self.scale, EMPTY_TABLE, 0
        self.positions.reserve(length)
        if isinstance(self.positions, Learned):
            return self.tokens, self.scale, to_array(self.positions.weight), self.positions.offset
        return self.tokens, self.scale, to_array(self.positions.table), 0


@dataclass(frozen=True)
class PackedEncoder:
    """The encoder of a Transformer."""

    embedding: PackedEmbedding
    blocks: list[PackedBlock]
    norm_first: bool
    final_norm: PackedNorm
    """of pre-norm models"""

    @staticmethod
    def from_model(model: Any) -> "PackedEncoder":
        return PackedEncoder(
            PackedEmbedding.from_module(model.source_embedding),
            [PackedBlock.from_module(block) for block in model.encoder],
            model.encoder[0].norm_first,
            PackedNorm.from_module(model.encoder_norm),
        )


@dataclass(frozen=True)
class PackedDecoder:
    """A decoder stack, with the encoder that it reads."""

    embedding: PackedEmbedding
    blocks: list[PackedBlock]
    norm_first: bool
    final_norm: PackedNorm
    """of pre-norm models"""
    output: PackedLinear
    encoder: PackedEncoder | None
    """None: the kernels do not support the encoder, or there is none"""

    @cached_property
    def output_parts(self) -> list[PackedLinear]:
        """Parts of the output layer, so that their products stay in the cache of the processor."""
        return self.output.split(OUTPUT_COLUMNS)

    @cached_property
    def widest(self) -> int:
        """The largest number of inputs or outputs of a linear layer before the output layer."""
        return max(max(linear.inputs, linear.outputs) for linear in _list_linears(self.blocks))

    @cached_property
    def layers(self) -> tuple[Any, ...]:
        """The arguments of `run_layers`."""
        parts = [(block.attention, block.cross, block.feedforward) for block in self.blocks]
        sublayers = [part for block in parts for part in block if part is not None]
        norms = [part.norm for part in sublayers]
        norms = [*norms[1:], self.final_norm] if self.norm_first else norms
        arguments = [part.arguments(norm) for part, norm in zip(sublayers, norms)]
        if len(sublayers) == 3 * len(parts):
            return tuple(tuple(arguments[i : i + 3]) for i in range(0, len(arguments), 3))
        empty = np.empty((0,) * self.output.weight.ndim, self.output.weight.dtype), EMPTY, EMPTY
        none = empty, empty, PackedNorm(EMPTY, EMPTY, np.float32(0), False).arguments
        no_cross = *none, (np.float32(0), EMPTY, EMPTY, np.float32(0))
        return tuple((arguments[i], no_cross, arguments[i + 1]) for i in range(0, len(arguments), 2))

    @staticmethod
    def from_model(model: Any) -> "PackedDecoder":
        stack: Decoder = model.stack
        norm = PackedNorm.from_module(stack.norm)
        if stack.output_factor != 1.0:
            factor = np.float32(stack.output_factor)
            norm = replace(norm, gain=norm.gain * factor, bias=norm.bias * factor)
        return PackedDecoder(
            PackedEmbedding.from_module(stack.embedding),
            [PackedBlock.from_module(block) for block in stack.blocks],
            stack.blocks[0].norm_first,
            norm,
            PackedLinear.from_modules([stack.output]),
            PackedEncoder.from_model(model) if _supports_encoder(model) else None,
        )


def _list_linears(part: Any) -> list[PackedLinear]:
    """The linear layers in a list of packed parts, or in a part."""
    if isinstance(part, PackedLinear):
        return [part]
    parts = (
        part if isinstance(part, list) else [getattr(part, f.name) for f in fields(part)] if is_dataclass(part) else ()
    )
    return [linear for inner in parts for linear in _list_linears(inner)]


def _with_panels(part: Any) -> Any:
    """The same parts, with the weights of linear layers in panels."""
    if isinstance(part, PackedLinear):
        return part.with_panels()
    if isinstance(part, list):
        return [_with_panels(inner) for inner in part]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _with_panels(getattr(part, f.name)) for f in fields(part)})
    return part


def _can_pack(decoder: PackedDecoder) -> bool:
    """Whether the machine multiplies panels, and float32 weights are small enough for a copy of them."""
    linears, is_int8 = _list_linears(decoder), decoder.output.is_int8
    if not packing_available(is_int8):
        return False
    if is_int8:
        return all(linear.inputs % 4 == 0 for linear in linears)
    return sum(linear.weight.nbytes for linear in linears) <= MAX_COPIED_BYTES


_packed: "WeakKeyDictionary[Any, tuple[Any, PackedDecoder]]" = WeakKeyDictionary()


def packed_decoder(model: Any) -> PackedDecoder:
    """The packed weights of a model, kept until its weights change."""
    key = weight_versions(model)
    cached_key, packed = _packed.get(model, (None, None))
    if packed is None or cached_key != key:
        packed = PackedDecoder.from_model(model)
        packed = _with_panels(packed) if _can_pack(packed) else packed
        _packed[model] = key, packed
    return packed


def supports(model: Any) -> bool:
    """Whether the kernels support this model: float32 or int8 weights, dot-product scores, common norms.

    >>> from regard.models.transformer import TransformerConfig
    >>> sizes = TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=9)
    >>> supports(Transformer(sizes))
    True
    """
    if not hasattr(model, "stack") or not kernels_support(model):
        return False
    parameters = [p for module in iterate_modules(model) for p in module._parameters.values() if p is not None]
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in parameters):
        return False
    stack: Decoder = model.stack
    if not _supports_embedding(stack.embedding):
        return False
    blocks = stack.blocks
    if not blocks or isinstance(stack.norm, nn.Identity) == blocks[0].norm_first:
        return False
    if not blocks[0].norm_first and stack.output_factor != 1.0:
        return False
    return all(_supports_block(block) for block in blocks)


def _supports_block(block: Any) -> bool:
    attentions = [attention for attention in (block.attention, block.cross) if attention is not None]
    has_dot = all(type(attention.score) in (Dot, ScaledDot) for attention in attentions)
    has_norm = all(type(attention.query_norm) in (type(None), RMSNorm) for attention in attentions)
    return has_dot and has_norm and block.feedforward.activation in ACTIVATIONS


def _supports_embedding(embedding: Embedding) -> bool:
    is_simple = embedding.segments is None and isinstance(embedding.norm, nn.Identity)
    return is_simple and isinstance(embedding.positions, Sinusoidal | Learned | None)


def _supports_encoder(model: Any) -> bool:
    # The kernels compute this method: another model may have the same parts and combine them differently.
    if getattr(type(model), "encode", None) is not Transformer.encode:
        return False
    if not model.encoder or model.encoder_bias is not None:
        return False
    if isinstance(model.encoder_norm, nn.Identity) == model.encoder[0].norm_first:
        return False
    has_plain_heads = all(
        block.attention.rotary is None and block.attention.query_norm is None for block in model.encoder
    )
    return has_plain_heads and _supports_embedding(model.source_embedding) and all(map(_supports_block, model.encoder))
