"""Decoder-only language models: GPT-2's form and Llama's, from one config."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.layers.blocks import BlockConfig, EncoderBlock
from regard.layers.cache import GrowingCache
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import Activation
from regard.layers.multihead import BiasPlace
from regard.layers.norms import NormKind, make_norm
from regard.layers.packed import Packed, Tokens
from regard.models.heads import check_heads
from regard.ranges import Count, Epsilon, Layers, Natural, Range, Rate, check_ranges


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a decoder-only Transformer; norms come before each sublayer."""

    width: Count = 256
    heads: Count = 4
    layers: Layers = 4
    feedforward: Count = 1024
    dropout: Rate = 0.1
    norm_kind: NormKind = "rms"
    norm_eps: Epsilon = 1e-6
    activation: Activation = "relu2"
    positions: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    rotary_base: Annotated[float, Range(low=1)] = 10000.0
    """rotary positions: how much slower each pair of channels turns than the one before"""
    rotary_factor: Annotated[float, Range(low=1)] = 1.0
    """rotary positions: all pairs turn so many times slower, so that longer texts look like shorter ones"""
    rotary_context: Natural = 0
    """rotary positions: only pairs that turn little over a text of this length are slowed (Llama 3); 0: all"""
    score: ScoreName = "scaled_dot"
    kv_heads: Natural = 0
    """fewer heads of keys and values than of queries; 0: as many"""
    head_width: Natural = 0
    """0: width / heads"""
    qk_norm: bool = True
    bias: BiasPlace = "none"
    """linear maps with a bias: all, those of attention, q k v of these, all but q k v, those of feed-forward, none"""
    tied: bool = True
    """the output layer is the embedding"""
    max_len: Count = 256
    """the longest text in tokens"""
    vocab: Natural = 0
    """filled in from the tokeniser"""

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    def check(self) -> None:
        """Refuse values that do not fit each other."""
        check_heads(self.width, self.heads, self.kv_heads, self.head_width, rotary=self.positions == "rotary")

    def block(self) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or None,
            head_width=self.head_width or None,
            feedforward=self.feedforward,
            dropout=self.dropout,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            activation=self.activation,
            rotary_base=self.rotary_base if self.positions == "rotary" else None,
            rotary_factor=self.rotary_factor,
            rotary_context=self.rotary_context,
            qk_norm_eps=self.norm_eps if self.qk_norm else None,
            bias=self.bias,
            max_len=self.max_len,
        )


def gpt_small(**changes) -> GPTConfig:
    """6 layers of width 384: nanoGPT's size for a million characters."""
    return GPTConfig(**(dict(width=384, heads=6, layers=6, feedforward=1536, dropout=0.2) | changes))


def gpt2(**changes) -> GPTConfig:
    """12 layers of width 768, as GPT-2 was published in 2019 (124 M parameters with its vocabulary)."""
    published: dict[str, Any] = dict(
        **dict(width=768, heads=12, layers=12, feedforward=3072, norm_kind="layer", norm_eps=1e-5, qk_norm=False),
        **dict(activation="gelu_tanh", positions="learned", bias="all", max_len=1024),
    )
    return GPTConfig(**(published | changes))


@dataclass
class GPTState:
    """What generation carries from token to token: rows are (B, K) texts."""

    caches: list[GrowingCache]
    positions: Int[Tensor, "B K"]
    ready: Float[Tensor, "B K V"] | None
    """scores of the token after the prompt, which reading it has given already"""


class GPT(nn.Module):
    """For each token the next one's probabilities, from what came before.

    >>> from regard.layers.packed import Packed, Tokens, pack
    >>> model = GPT(GPTConfig(width=16, heads=2, layers=2, feedforward=32, vocab=11))
    >>> model(pack([[2, 4, 5], [2, 6]])).shape
    torch.Size([5, 11])
    """

    blocks: Sequence[EncoderBlock]  # a ModuleList, which does not tell the type of what it holds

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = Embedding(
            config.vocab, config.width, config.positions, config.max_len, config.dropout, scaled=False
        )
        block = config.block()
        self.blocks = nn.ModuleList(EncoderBlock(block, config.score, "masked") for _ in range(config.layers))  # type: ignore[assignment]
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)
        self.output = nn.Linear(config.width, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if ".score." in name:
                continue
            if parameter.dim() == 2:
                # Each residual sum adds 2 L terms: what goes into it begins that much smaller (Radford et al. 2019).
                ends = name.endswith(("attention.out.weight", "feedforward.outer.weight"))
                nn.init.normal_(parameter, std=0.02 * (2 * config.layers) ** -0.5 if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if config.tied:
            self.output.weight = self.embedding.tokens.weight

    def features(self, tokens: Tokens) -> Float[Tensor, "N E"]:
        """What the output layer sees: one row a token. Training computes its loss from here."""
        return self._features(tokens, None)

    def _features(self, tokens: Tokens, caches: list[GrowingCache] | None) -> Float[Tensor, "N E"]:
        x = self.embedding(tokens.ids, tokens.positions, tokens.max_len)
        for i, block in enumerate(self.blocks):
            x = block(x, tokens.offsets, tokens.positions, cache=caches[i] if caches is not None else None)
        return self.norm(x)

    def forward(self, tokens: Tokens) -> Float[Tensor, "N V"]:
        """Logits for the token after each token."""
        return self.output(self.features(tokens))

    def start(self, source: Packed) -> GPTState:
        """Reads the prompts, none of which may be empty, at once."""
        caches = [GrowingCache() for _ in self.blocks]
        last = source.offsets.starts[1:].long() - 1
        ready = self.output(self._features(source, caches)[last])[:, None]
        return GPTState(caches, source.offsets.lengths.long()[:, None], ready)

    def step(self, state: GPTState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], GPTState]:
        """The first step's scores come from the prompt's last token; `last` is not needed there."""
        if state.ready is not None:
            return state.ready, GPTState(state.caches, state.positions, None)
        # Every row was reordered alike, so the longest position bounds them all.
        x = self.embedding(last, state.positions, state.caches[0].length + 1)
        for block, cache in zip(self.blocks, state.caches):
            x = block(x, None, state.positions, cache=cache)
        return self.output(self.norm(x)), GPTState(state.caches, state.positions + 1, None)

    def reorder(self, state: GPTState, indices: Int[Tensor, "B2 K2"]) -> GPTState:
        rows = indices.flatten()
        ready = None if state.ready is None else state.ready.flatten(0, 1)[rows].unflatten(0, indices.shape)
        positions = state.positions.flatten()[rows].view(indices.shape)
        return GPTState([cache.reorder(rows) for cache in state.caches], positions, ready)
