"""Recurrent encoder-decoder with Luong attention, Bahdanau attention, or no attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.dropout import Dropout
from regard.layers.embeddings import Embedding
from regard.layers.kv_cache import CrossAttentionCache
from regard.layers.packed import Tokens
from regard.layers.recurrent import (
    GATES,
    PARTS,
    Bidirectional,
    CellKind,
    Recurrent,
    StateAttention,
    TimeMajorLayout,
    Unidirectional,
    scan,
)
from regard.ranges import Count, Layers, Natural, Rate, check_ranges

AttentionVariant = Literal["luong", "bahdanau", "none"]


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Configuration of a recurrent encoder-decoder."""

    width: Count = 256
    """width of embeddings and states"""
    layers: Layers = 1
    """number of layers of the encoder and of the decoder"""
    cell: CellKind = "gru"
    """tanh (rnn), gru or lstm"""
    bidirectional: bool = True
    """bidirectional encoder"""
    memory_projection: bool = True
    """a linear map of the encoder states to the width of the decoder, if theirs differs; false: keys and values are the
    encoder states themselves, of a bidirectional encoder with half of the width in each direction"""
    attention: AttentionVariant = "luong"
    """after the cell (luong), before it (bahdanau), or none: only the final encoder states reach the decoder"""
    score: ScoreName = "general"
    score_hidden: Natural = 0
    """hidden width of the score concat; 0: the model width"""
    dropout: Rate = 0.2
    tied: bool = True
    """the output layer shares the target embedding; with a shared tokenizer, the source embedding too"""
    max_len: Count = 256
    """maximum length of a training sequence in tokens, source or target"""
    source_vocab: Natural = 0
    """set from the tokenizers"""
    target_vocab: Natural = 0
    shared_vocab: bool = False

    is_recurrent: ClassVar = True

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    @property
    def encoded_width(self) -> int:
        """Width of the encoder output: the concatenated states of its directions."""
        return 2 * self.width if self.bidirectional and self.memory_projection else self.width

    def check(self) -> None:
        """Raise if values are inconsistent."""
        if self.bidirectional and not self.memory_projection and self.width % 2:
            raise RegardError(
                f"Without memory_projection, a direction of the encoder has half of the width, which is {self.width}.",
                "Set model.width to an even number.",
            )
        if self.shared_vocab and self.source_vocab != self.target_vocab:
            raise RegardError(
                f"A shared vocabulary has one size (got {self.source_vocab} and {self.target_vocab}).",
                "Give source_vocab and target_vocab the same value.",
            )


def seq2seq_tiny(**changes) -> Seq2SeqConfig:
    """One layer of width 128, for words and short sentences."""
    return Seq2SeqConfig(**({"width": 128} | changes))


def seq2seq_small(**changes) -> Seq2SeqConfig:
    """One layer of width 256."""
    return Seq2SeqConfig(**changes)


def seq2seq_base(**changes) -> Seq2SeqConfig:
    """Two layers of width 512."""
    return Seq2SeqConfig(**({"width": 512, "layers": 2, "dropout": 0.3} | changes))


@dataclass
class Seq2SeqState:
    """Decoding state between steps: rows are (B, K) hypotheses."""

    cells: Float[Tensor, "B K L P E"]
    memory: CrossAttentionCache | None
    """None for a model without attention"""


class RecurrentEncoder(nn.Module):
    """Recurrent encoder: a state per source token, and the initial states of the decoder."""

    layers: Sequence[Bidirectional | Unidirectional]  # a ModuleList

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.width = width = config.width
        widths = [width] + [config.encoded_width] * (config.layers - 1)
        layer = Bidirectional if config.bidirectional else Unidirectional
        state_width = config.encoded_width // (2 if config.bidirectional else 1)
        self.layers = nn.ModuleList(layer(config.cell, w, state_width) for w in widths)  # type: ignore[assignment]
        self.dropout = Dropout(config.dropout)
        self.bridges = nn.ModuleList(nn.Linear(config.encoded_width, PARTS[config.cell] * width) for _ in widths)

    def forward(self, x: Float[Tensor, "M E"], source: Tokens) -> tuple[Float[Tensor, "M C"], Float[Tensor, "B L P E"]]:
        """Encoder output per source token; initial decoder states tanh(W h), from each layer's final state h."""
        forward, backward = (TimeMajorLayout.from_offsets(source.offsets, backward) for backward in (False, True))
        states = []
        for i, (layer, bridge) in enumerate(zip(self.layers, self.bridges)):
            x = layer(self.dropout(x) if i else x, forward, backward)
            initial = torch.tanh(bridge(layer.final_state(x, source.offsets)))
            states.append(initial.unflatten(-1, (-1, self.width)))
        return x, torch.stack(states, dim=1)


class RecurrentDecoder(nn.Module):
    """Recurrent decoder: attentional states s̃_t = tanh(W_o [c_t; s_t]), or tanh(W_o s_t) without attention.

    Luong et al. 2015: the context c_t is the attention output of s_t. It is not fed to the next step (no input
    feeding), so that all steps are one attention call. Bahdanau et al. 2015: c_t is the attention output of s_{t-1},
    and an input of the cell.
    """

    layers: Sequence[Recurrent]  # a ModuleList

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        width, self.variant = config.width, config.attention
        layers = (Recurrent(config.cell, width, width) for _ in range(config.layers))
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.dropout = Dropout(config.dropout)
        if self.variant != "none":
            # Keys and values: the encoder states h, or their projection to the width of the queries, which scores need.
            has_width = config.encoded_width == width
            self.memory = nn.Identity() if has_width else nn.Linear(config.encoded_width, width)
            # Batches of constant shape round their maximum length up to a power of two.
            max_keys = max(16, 1 << (config.max_len - 1).bit_length())
            self.attention = StateAttention(width, config.score, config.score_hidden, max_keys=max_keys)
        if self.variant == "bahdanau":
            # The context part of W [y; c]. Separate, so that the part of y is computed for all steps at once.
            self.context = nn.Linear(width, GATES[config.cell] * width, bias=False)
        self.combine = nn.Linear(width if self.variant == "none" else 2 * width, width)

    def forward(
        self,
        y: Float[Tensor, "N E"],
        target: Tokens,
        cells: Float[Tensor, "B L P E"],
        encoded: Float[Tensor, "M C"],
        source: Tokens,
    ) -> Float[Tensor, "N E"]:
        """All steps of packed targets (teacher forcing)."""
        layout = TimeMajorLayout.from_offsets(target.offsets)
        if self.variant == "bahdanau":
            memory = self.make_cache(encoded, source)
            assert memory is not None
            lengths = () if memory.lengths is None else (memory.lengths,)

            def step(state: Tensor, inputs: Tensor, k: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor]:
                memory = CrossAttentionCache(k, k, *lengths)
                features, state = self._bahdanau_step(inputs, state, memory)
                return state, features[:, 0]

            inputs = layout.to_time_major(self.layers[0].inputs(y))[:, :, None]
            outputs = scan(self, step, cells[:, None], inputs, memory.k, *lengths)
            return self._combine(layout.from_time_major(outputs))
        for i, layer in enumerate(self.layers):
            y = layer(self.dropout(y) if i else y, layout, cells[:, i])
        if self.variant == "none":
            return self._combine(y)
        context = self.attention(y, self.memory(encoded), target.offsets, source.offsets)
        return self._combine(torch.cat((context, y), dim=-1))

    def make_cache(self, encoded: Float[Tensor, "M C"], source: Tokens) -> CrossAttentionCache | None:
        """Keys and values of the source for `step`."""
        if self.variant == "none":
            return None
        memory = self.memory(encoded)[..., None, :]
        return CrossAttentionCache.from_sequences(memory, memory, source.offsets)

    def step(
        self, y: Float[Tensor, "B K E"], cells: Float[Tensor, "B K L P E"], memory: CrossAttentionCache | None
    ) -> tuple[Float[Tensor, "B K E"], Float[Tensor, "B K L P E"]]:
        """One token per hypothesis."""
        inputs = self.layers[0].inputs(y)
        if self.variant == "bahdanau":
            features, cells = self._bahdanau_step(inputs, cells, memory)
            return self._combine(features), cells
        cells = self._advance(inputs, cells)
        top = cells[..., -1, 0, :]
        if self.variant == "none":
            return self._combine(top), cells
        return self._combine(torch.cat((self.attention(top, memory), top), dim=-1)), cells

    def _bahdanau_step(
        self, inputs: Float[Tensor, "B K G"], cells: Float[Tensor, "B K L P E"], memory: CrossAttentionCache | None
    ) -> tuple[Float[Tensor, "B K C"], Float[Tensor, "B K L P E"]]:
        """Attend with s_{t-1}, then advance the cells: returns [c_t; s_t] and the new cells."""
        context = self.attention(cells[..., -1, 0, :], memory)
        cells = self._advance(inputs + self.context(context), cells)
        return torch.cat((context, cells[..., -1, 0, :]), dim=-1), cells

    def _advance(self, inputs: Float[Tensor, "B K G"], cells: Float[Tensor, "B K L P E"]) -> Float[Tensor, "B K L P E"]:
        states: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i:
                inputs = layer.inputs(self.dropout(states[-1][..., 0, :]))
            states.append(layer.step(inputs, cells[:, :, i]))
        return torch.stack(states, dim=2)

    def _combine(self, x: Float[Tensor, "*n J"]) -> Float[Tensor, "*n E"]:
        return self.dropout(torch.tanh(self.combine(x)))


class Seq2Seq(nn.Module):
    """Recurrent encoder-decoder: logits of the next target token, given the source and the target so far.

    >>> from regard.layers.packed import pack
    >>> model = Seq2Seq(Seq2SeqConfig(width=16, source_vocab=9, target_vocab=11))
    >>> model(pack([[4, 5, 3]]), pack([[2, 6]])).shape
    torch.Size([2, 11])
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        # No positional encoding: the recurrence is sensitive to order.
        self.source_embedding = Embedding(config.source_vocab, config.width, positions="none", dropout=config.dropout)
        shared = self.source_embedding.tokens if config.shared_vocab and config.tied else None
        self.target_embedding = Embedding(
            config.target_vocab, config.width, positions="none", dropout=config.dropout, tokens=shared
        )
        self.encoder = RecurrentEncoder(config)
        self.decoder = RecurrentDecoder(config)
        self.output = nn.Linear(config.width, config.target_vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.output:
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if config.tied:
            self.output.weight = self.target_embedding.tokens.weight
        else:
            nn.init.normal_(self.output.weight, std=config.width**-0.5)

    def encode(self, source: Tokens) -> tuple[Float[Tensor, "M C"], Float[Tensor, "B L P E"]]:
        """The output of the encoder, one row per source token, and the initial states of the decoder."""
        return self.encoder(self.source_embedding(source.ids, source.positions), source)

    def features(self, source: Tokens, target: Tokens) -> Float[Tensor, "N E"]:
        """The input of the output layer, one row per target token. Training computes its loss from it."""
        encoded, cells = self.encode(source)
        y = self.target_embedding(target.ids, target.positions)
        return self.decoder(y, target, cells, encoded, source)

    def forward(self, source: Tokens, target: Tokens) -> Float[Tensor, "N V"]:
        """Logits of the token after each target token (teacher forcing)."""
        return self.output(self.features(source, target))

    def start(self, source: Tokens) -> Seq2SeqState:
        encoded, cells = self.encode(source)
        return Seq2SeqState(cells[:, None], self.decoder.make_cache(encoded, source))

    def step(self, state: Seq2SeqState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], Seq2SeqState]:
        features, cells = self.decoder.step(
            self.target_embedding(last, torch.zeros_like(last)), state.cells, state.memory
        )
        return self.output(features), Seq2SeqState(cells, state.memory)

    def reorder(self, state: Seq2SeqState, indices: Int[Tensor, "B2 K2"]) -> Seq2SeqState:
        cells, memory = state.cells.flatten(0, 1)[indices], state.memory
        sentences = indices[:, 0] // state.cells.shape[1]
        if memory is not None and not torch.equal(sentences, torch.arange(len(memory.k), device=sentences.device)):
            memory = memory.reorder(sentences)
        return Seq2SeqState(cells, memory)
