"""The recurrent encoder-decoder: with Luong's attention, with Bahdanau's, or with none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.dropout import Dropout
from regard.layers.embeddings import Embedding
from regard.layers.kv_cache import MemoryCache
from regard.layers.packed import Tokens
from regard.layers.recurrent import (
    GATES,
    PARTS,
    Bidirectional,
    CellKind,
    Recurrent,
    StateAttention,
    Steps,
    Unidirectional,
    scan,
)
from regard.ranges import Count, Layers, Natural, Rate, check_ranges

AttentionPlace = Literal["luong", "bahdanau", "none"]


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes and choices of a recurrent encoder-decoder."""

    width: Count = 256
    """of embeddings and states"""
    layers: Layers = 1
    """of the encoder, and as many of the decoder"""
    cell: CellKind = "gru"
    """plain tanh (rnn), gru or lstm"""
    bidirectional: bool = True
    """the encoder reads the source from both ends; false: from the first token to the last"""
    attention: AttentionPlace = "luong"
    """after the cell (luong), before it (bahdanau), or the last states alone (none)"""
    score: ScoreName = "general"
    score_hidden: Natural = 0
    """inner width of the score concat; 0: the model's"""
    dropout: Rate = 0.2
    tied: bool = True
    """the output layer is the target embedding; the source embedding too, where the two sides share a tokeniser"""
    max_len: Count = 256
    """the longest sequence in training, in tokens, on either side; positions without a table go beyond it"""
    source_vocab: Natural = 0
    """filled in from the tokenisers"""
    target_vocab: Natural = 0
    shared_vocab: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    @property
    def encoded_width(self) -> int:
        """Width of the encoder's states: those of both directions side by side, or of one."""
        return 2 * self.width if self.bidirectional else self.width

    def check(self) -> None:
        """Refuse values that do not fit each other."""
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
    """What decoding carries from token to token: rows are (B, K) hypotheses."""

    cells: Float[Tensor, "B K L P E"]
    # none without attention
    memory: MemoryCache | None


class Encoder(nn.Module):
    """Reads the source, from both ends or from its beginning: a state per token, and the decoder's first states."""

    # A ModuleList, whose type says nothing of its items.
    layers: Sequence[Bidirectional | Unidirectional]

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.width = width = config.width
        widths = [width] + [config.encoded_width] * (config.layers - 1)
        layer = Bidirectional if config.bidirectional else Unidirectional
        self.layers = nn.ModuleList(layer(config.cell, w, width) for w in widths)  # type: ignore[assignment]
        self.dropout = Dropout(config.dropout)
        self.bridges = nn.ModuleList(nn.Linear(config.encoded_width, PARTS[config.cell] * width) for _ in widths)

    def forward(self, x: Float[Tensor, "M E"], source: Tokens) -> tuple[Float[Tensor, "M C"], Float[Tensor, "B L P E"]]:
        """A row for each source token, and each sequence's first decoder state: tanh(W [forward; backward]) per layer,
        or tanh(W forward) in one direction.
        """
        forward, backward = Steps.of(source.offsets), Steps.of(source.offsets, backward=True)
        states = []
        for above, (layer, bridge) in enumerate(zip(self.layers, self.bridges)):
            x = layer(self.dropout(x) if above else x, forward, backward)
            first = torch.tanh(bridge(layer.final(x, source.offsets)))
            states.append(first.unflatten(-1, (-1, self.width)))
        return x, torch.stack(states, dim=1)


class Decoder(nn.Module):
    """Target tokens in, attentional states out: s̃_t = tanh(W_o [c_t; s_t]), or tanh(W_o s_t) without attention.

    After the cell (Luong et al. 2015) c_t is what s_t regards, and is not fed to the next step: all steps are one
    attention. Before it (Bahdanau et al. 2015) c_t is what s_{t-1} regards, and is a part of the cell's input.
    """

    # A ModuleList, which does not tell the type of what it holds.
    layers: Sequence[Recurrent]

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        width, self.place = config.width, config.attention
        layers = (Recurrent(config.cell, width, width) for _ in range(config.layers))
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.dropout = Dropout(config.dropout)
        if self.place != "none":
            # The encoder's states in the width of the decoder's, so that every score can compare them.
            self.memory = nn.Linear(config.encoded_width, width)
            # Batches of constant shapes state their longest sequence rounded up to a power of two.
            places = max(16, 1 << (config.max_len - 1).bit_length())
            self.attention = StateAttention(width, config.score, config.score_hidden, max_keys=places)
        if self.place == "bahdanau":
            # The context's share of W [y; c]: apart, so that y's share is computed for all steps at once.
            self.context = nn.Linear(width, GATES[config.cell] * width, bias=False)
        self.combine = nn.Linear(width if self.place == "none" else 2 * width, width)

    def forward(
        self,
        y: Float[Tensor, "N E"],
        target: Tokens,
        cells: Float[Tensor, "B L P E"],
        encoded: Float[Tensor, "M C"],
        source: Tokens,
    ) -> Float[Tensor, "N E"]:
        """All steps of packed targets."""
        steps = Steps.of(target.offsets)
        if self.place == "bahdanau":
            memory = self.remember(encoded, source)
            assert memory is not None
            lengths = () if memory.lengths is None else (memory.lengths,)

            def step(state: Tensor, inputs: Tensor, k: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor]:
                memory = MemoryCache(k, k, *lengths)
                pair, state = self._bahdanau(inputs, state, memory)
                return state, pair[:, 0]

            inputs = steps.spread(self.layers[0].inputs(y))[:, :, None]
            return self._attentional(steps.collect(scan(self, step, cells[:, None], inputs, memory.k, *lengths)))
        for above, layer in enumerate(self.layers):
            y = layer(self.dropout(y) if above else y, steps, cells[:, above])
        if self.place == "none":
            return self._attentional(y)
        context = self.attention(y, self.memory(encoded), target.offsets, source.offsets)
        return self._attentional(torch.cat((context, y), dim=-1))

    def remember(self, encoded: Float[Tensor, "M C"], source: Tokens) -> MemoryCache | None:
        """What single steps look at."""
        if self.place == "none":
            return None
        memory = self.memory(encoded)[..., None, :]
        return MemoryCache.of(memory, memory, source.offsets)

    def step(
        self, y: Float[Tensor, "B K E"], cells: Float[Tensor, "B K L P E"], memory: MemoryCache | None
    ) -> tuple[Float[Tensor, "B K E"], Float[Tensor, "B K L P E"]]:
        """One token for each hypothesis."""
        inputs = self.layers[0].inputs(y)
        if self.place == "bahdanau":
            pair, cells = self._bahdanau(inputs, cells, memory)
            return self._attentional(pair), cells
        cells = self._advance(inputs, cells)
        top = cells[..., -1, 0, :]
        if self.place == "none":
            return self._attentional(top), cells
        return self._attentional(torch.cat((self.attention(top, memory), top), dim=-1)), cells

    def _bahdanau(
        self, inputs: Float[Tensor, "B K G"], cells: Float[Tensor, "B K L P E"], memory: MemoryCache | None
    ) -> tuple[Float[Tensor, "B K C"], Float[Tensor, "B K L P E"]]:
        """Look with s_{t-1}, then step: [c_t; s_t] and the new cells."""
        context = self.attention(cells[..., -1, 0, :], memory)
        cells = self._advance(inputs + self.context(context), cells)
        return torch.cat((context, cells[..., -1, 0, :]), dim=-1), cells

    def _advance(self, inputs: Float[Tensor, "B K G"], cells: Float[Tensor, "B K L P E"]) -> Float[Tensor, "B K L P E"]:
        states: list[Tensor] = []
        for above, layer in enumerate(self.layers):
            if above:
                inputs = layer.inputs(self.dropout(states[-1][..., 0, :]))
            states.append(layer.step(inputs, cells[:, :, above]))
        return torch.stack(states, dim=2)

    def _attentional(self, joined: Float[Tensor, "*n J"]) -> Float[Tensor, "*n E"]:
        return self.dropout(torch.tanh(self.combine(joined)))


class Seq2Seq(nn.Module):
    """Source tokens in, for each target token the next one's probabilities out.

    >>> from regard.layers.packed import pack
    >>> model = Seq2Seq(Seq2SeqConfig(width=16, source_vocab=9, target_vocab=11))
    >>> model(pack([[4, 5, 3]]), pack([[2, 6]])).shape
    torch.Size([2, 11])
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        # The recurrence knows the order: no code of positions.
        self.source_embedding = Embedding(config.source_vocab, config.width, positions="none", dropout=config.dropout)
        shared = self.source_embedding.tokens if config.shared_vocab and config.tied else None
        self.target_embedding = Embedding(
            config.target_vocab, config.width, positions="none", dropout=config.dropout, tokens=shared
        )
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
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
        """The encoder's output, one row a source token, and the decoder's first states."""
        return self.encoder(self.source_embedding(source.ids, source.positions), source)

    def features(self, source: Tokens, target: Tokens) -> Float[Tensor, "N E"]:
        """What the output layer sees: one row a target token. Training computes its loss from here."""
        encoded, cells = self.encode(source)
        y = self.target_embedding(target.ids, target.positions)
        return self.decoder(y, target, cells, encoded, source)

    def forward(self, source: Tokens, target: Tokens) -> Float[Tensor, "N V"]:
        """Logits for the token after each target token, the target being given (teacher forcing)."""
        return self.output(self.features(source, target))

    def start(self, source: Tokens) -> Seq2SeqState:
        encoded, cells = self.encode(source)
        return Seq2SeqState(cells[:, None], self.decoder.remember(encoded, source))

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
