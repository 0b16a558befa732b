"""Transformer decoders on a GPU: fused kernels for one decoding step that needs nothing from the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.attention import Dot, ScaledDot
from regard.decode.engine.static.projections import activation_dtype
from regard.decode.engine.static.static_attention import CachedAttention, StaticCrossAttention, kernels_support
from regard.decode.engine.static.static_decoder import StaticDecoder
from regard.decode.rules.constraints import Constraints
from regard.decode.search import BeamSearch, StepwiseSearch
from regard.kernels.triton import add_norm, search_update, skinny_linear, topk_log_softmax
from regard.kernels.triton.decode_attention import decode_attention, decode_cross_attention
from regard.kernels.triton.decode_attention import supports as supports_attention
from regard.kernels.triton.skinny_linear import RowNorm, supports_float8
from regard.kernels.triton.start_step import StepTables, start_step
from regard.layers.feedforward import FeedForward, activate
from regard.layers.float8_linear import Float8Linear
from regard.layers.norms import RMSNorm
from regard.layers.positions import Learned, Sinusoidal
from regard.models.transformer import Transformer


class LinearWeights(NamedTuple):
    """The parameters of a linear layer; float8 weights have a scale per output."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


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
        super().__init__(model, slots, hypotheses, capacity, source_capacity)
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
        self.last_norm = model.decoder_norm if isinstance(model, Transformer) else model.norm
        self.factor = model.output_factor if isinstance(model, Transformer) else 1.0
        self.output_weights = self._weights(model.output)

    def prepare_layers(self) -> None:
        """The layers of `StaticDecoder.step` are not used."""

    @staticmethod
    def supports(model: Any, hypotheses: int) -> bool:
        """Whether the kernels support the attention of this model and this number of hypotheses."""
        if not kernels_support(model):
            return False
        embedding = model.target_embedding if isinstance(model, Transformer) else model.embedding
        if not isinstance(embedding.positions, Sinusoidal | Learned | None):
            return False
        blocks = model.decoder if isinstance(model, Transformer) else model.blocks
        for block in blocks:
            for attention in (block.attention, getattr(block, "cross", None)):
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
        has_norm = not isinstance(attention.query_norm, nn.Identity)
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
            if not isinstance(attention.query_norm, nn.Identity):
                q = attention.query_norm(q.view(len(q), -1, attention.head_width)).flatten(1)
            out = decode_cross_attention(q, k, v, self.source_lengths, heads=attention.heads, scale=cross.scale)
            return self._linear(out, outer, None, "none", residual, residual_norm)

        return run

    def _feedforward(self, module: FeedForward) -> Callable[..., Tensor]:
        inner, outer = self._weights(module.inner), self._weights(module.outer)
        name = "none" if module.is_gated else module.activation

        def run(x: Tensor, norm: RowNorm | None, residual: Tensor | None, residual_norm: RowNorm | None) -> Tensor:
            hidden = self._linear(x, inner, norm, name)
            if module.is_gated:
                hidden = module.apply_gate(hidden)
            return self._linear(hidden, outer, None, "none", residual, residual_norm)

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
