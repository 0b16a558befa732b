"""Encoder-decoder Transformer (Vaswani et al. 2017; BART, Marian, T5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import causal
from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, NormPlacement, TransformerBlock
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import Activation
from regard.layers.norms import NormKind, make_norm
from regard.layers.packed import Tokens
from regard.layers.positions import PositionKind, RelativeBias
from regard.models.config_checks import check_heads, check_relative_bias
from regard.models.decoder import Decoder, DecoderState, StackModel
from regard.ranges import Count, Epsilon, Layers, Natural, Range, Rate, check_ranges


@dataclass(frozen=True)
class TransformerConfig:
    """Configuration of an encoder-decoder Transformer."""

    width: Count = 256
    heads: Count = 4
    feedforward: Count = 1024
    encoder_layers: Layers = 3
    decoder_layers: Layers = 3
    dropout: Rate = 0.1
    norm: NormPlacement = "pre"
    """before each sublayer (pre), or after the residual sum (post, as published)"""
    norm_kind: NormKind = "layer"
    norm_eps: Epsilon = 1e-5
    activation: Activation = "relu"
    positions: PositionKind = "sinusoidal"
    position_offset: Natural = 0
    """unused rows at the start of the learned position table (BART: 2)"""
    relative_buckets: Annotated[int, Range(low=4)] = 32
    """relative positions (T5): number of buckets per head and direction"""
    relative_distance: Count = 128
    """relative positions (T5): distance beyond which all share the last bucket"""
    encoder_score: ScoreName = "scaled_dot"
    """attention score of the encoder's self-attention"""
    decoder_score: ScoreName = "scaled_dot"
    """attention score of the decoder's masked self-attention"""
    cross_score: ScoreName = "scaled_dot"
    """attention score of the cross-attention"""
    kv_heads: Natural = 0
    """number of key/value heads (grouped-query attention); 0: as many as query heads"""
    head_width: Natural = 0
    """0: width / heads"""
    qk_norm: bool = False
    bias: bool = True
    embedding_scale: bool = True
    """multiply embeddings by √width"""
    embedding_norm: bool = False
    """norm after the sum of token and position embeddings (BART)"""
    output_scale: bool = False
    """divide the input of the output layer by √width (T5 with tied embeddings)"""
    output_bias: bool = False
    tied: bool = True
    """the output layer shares the target embedding; with a shared tokenizer, source and target share one embedding"""
    max_len: Count = 256
    """maximum length of a training sequence in tokens, source or target; not a limit for positions that extrapolate"""
    source_vocab: Natural = 0
    """set from the tokenizers"""
    target_vocab: Natural = 0
    shared_vocab: bool = False

    layer_fields: ClassVar = ("encoder_layers", "decoder_layers")
    """fields with numbers of layers"""

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    def check(self) -> None:
        """Raise if values are inconsistent."""
        check_heads(self.width, self.heads, self.kv_heads, self.head_width, rotary=self.positions == "rotary")
        if self.positions == "relative":
            check_relative_bias(self.relative_buckets, self.relative_distance)
        if self.shared_vocab and self.source_vocab != self.target_vocab:
            raise RegardError(
                f"A shared vocabulary has one size (got {self.source_vocab} and {self.target_vocab}).",
                "Give source_vocab and target_vocab the same value.",
            )

    def block_config(self) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or None,
            feedforward=self.feedforward,
            dropout=self.dropout,
            norm=self.norm,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            head_width=self.head_width or None,
            activation=self.activation,
            rotary_base=10000.0 if self.positions == "rotary" else None,
            qk_norm_eps=1e-6 if self.qk_norm else None,
            bias="all" if self.bias else "none",
            max_len=self.max_len,
        )


def transformer_tiny(**changes) -> TransformerConfig:
    """4+4 layers of width 128, for data sets of about 30,000 sentence pairs (Wu et al. 2021)."""
    return TransformerConfig(
        **(dict(width=128, heads=4, feedforward=256, encoder_layers=4, decoder_layers=4, dropout=0.3) | changes)
    )


def transformer_small(**changes) -> TransformerConfig:
    """3+3 layers of width 256."""
    return TransformerConfig(**changes)


def transformer_base(**changes) -> TransformerConfig:
    """6+6 layers of width 512, as published in 2017."""
    published: dict[str, Any] = dict(
        width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6, norm="post"
    )
    return TransformerConfig(**(published | changes))


def t5_small(**changes) -> TransformerConfig:
    """8+8 layers of width 512 in the style of T5 1.1: relative positions, unscaled dot scores, RMSNorm, GEGLU."""
    style: dict[str, Any] = dict(
        **dict(width=512, heads=6, head_width=64, feedforward=1024, encoder_layers=8, decoder_layers=8),
        **dict(norm_kind="rms", norm_eps=1e-6, activation="geglu", positions="relative", bias=False),
        **dict(encoder_score="dot", decoder_score="dot", cross_score="dot", embedding_scale=False, tied=False),
    )
    return TransformerConfig(**(style | changes))


class Transformer(StackModel):
    """Encoder-decoder Transformer: logits of the next target token, given the source and the target so far.

    >>> from regard.layers.packed import pack
    >>> model = Transformer(TransformerConfig(width=16, heads=2, feedforward=32, source_vocab=9, target_vocab=11))
    >>> model(pack([[4, 5, 3]]), pack([[2, 6]])).shape
    torch.Size([2, 11])
    """

    encoder: Sequence[TransformerBlock]  # a ModuleList
    decoder: Sequence[TransformerBlock]  # a ModuleList

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        norm = partial(make_norm, config.norm_kind, config.width, config.norm_eps)
        embedding = partial(
            Embedding,
            width=config.width,
            positions=config.positions,
            max_len=config.max_len,
            dropout=config.dropout,
            scaled=config.embedding_scale,
            offset=config.position_offset,
            low_precision=config.norm == "post",
        )
        self.source_embedding = embedding(config.source_vocab, norm=norm() if config.embedding_norm else None)
        shared = self.source_embedding.tokens if config.shared_vocab else None
        self.target_embedding = embedding(
            config.target_vocab, tokens=shared, norm=norm() if config.embedding_norm else None
        )
        relative = partial(
            RelativeBias, config.heads, buckets=config.relative_buckets, distance=config.relative_distance
        )
        self.encoder_bias = relative(bidirectional=True) if config.positions == "relative" else None
        self.decoder_bias = relative(bidirectional=False) if config.positions == "relative" else None
        block = config.block_config()
        encoder = (block.make_block(config.encoder_score) for _ in range(config.encoder_layers))
        decoder = (
            block.make_block(config.decoder_score, causal(), config.cross_score) for _ in range(config.decoder_layers)
        )
        self.encoder = nn.ModuleList(encoder)  # type: ignore[assignment]
        self.decoder = nn.ModuleList(decoder)  # type: ignore[assignment]
        # Post-norm blocks end in a norm already.
        self.encoder_norm, self.decoder_norm = (norm() if config.norm == "pre" else nn.Identity() for _ in range(2))
        self.output = nn.Linear(config.width, config.target_vocab, bias=config.output_bias)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and name.startswith(("encoder.", "decoder.")) and ".score." not in name:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias") and ".score." not in name:
                nn.init.zeros_(parameter)
        if config.tied:
            self.output.weight = self.target_embedding.tokens.weight
        else:
            nn.init.normal_(self.output.weight, std=config.width**-0.5)

    @property
    def stack(self) -> Decoder:
        """The decoder stack, between the target embedding and the output layer."""
        factor = self.config.width**-0.5 if self.config.output_scale else 1.0
        return Decoder(
            self.target_embedding, self.decoder, self.decoder_norm, self.output, self.decoder_bias, output_factor=factor
        )

    def encode(self, source: Tokens) -> Float[Tensor, "M E"]:
        """The output of the encoder, one row per source token."""
        x = self.source_embedding(source.ids, source.positions, source.max_len)
        for block in self.encoder:
            x = block(x, source.offsets, source.positions, self.encoder_bias)
        return self.encoder_norm(x)

    def features(self, source: Tokens, target: Tokens) -> Float[Tensor, "N E"]:
        """The input of the output layer, one row per target token. Training computes its loss from it."""
        return self.stack.features(target, self.encode(source), source.offsets)

    def forward(self, source: Tokens, target: Tokens) -> Float[Tensor, "N V"]:
        """Logits of the token after each target token (teacher forcing)."""
        return self.stack.logits(self.features(source, target))

    def start(self, source: Tokens) -> DecoderState:
        return self.stack.start_from(self.encode(source), source.offsets)
