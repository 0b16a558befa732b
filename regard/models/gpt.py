"""Decoder-only language models (GPT-2, Llama, Gemma)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.blocks import BiasPlacement, BlockConfig, TransformerBlock
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import Activation
from regard.layers.norms import DecoderNormKind, make_norm
from regard.layers.packed import Packed, Tokens
from regard.layers.positions import RotaryScaling, StackPositionKind
from regard.models.config_checks import check_heads
from regard.models.decoder import Decoder, DecoderState, StackModel
from regard.models.variants import make_decoder_block
from regard.ranges import Count, Epsilon, Layers, Natural, Range, Rate, check_ranges


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a decoder-only Transformer."""

    width: Count = 256
    heads: Count = 4
    layers: Layers = 4
    feedforward: Count = 1024
    dropout: Rate = 0.1
    norm: Literal["pre", "sandwich", "output"] = "pre"
    """x + f(norm(x)), x + norm(f(norm(x))) (Gemma 2), or x + norm(f(x)) (OLMo 2)"""
    norm_kind: DecoderNormKind = "rms"
    """rms_zero_centered: the gain is 1 + weight (Gemma)"""
    norm_eps: Epsilon = 1e-6
    parallel: bool = False
    """attention and feed-forward of a block have the same input, x + attention(norm(x)) + feedforward(norm(x))"""
    activation: Activation = "relu2"
    positions: StackPositionKind = "rotary"
    rotary_base: Annotated[float, Range(low=1)] = 10000.0
    """rotary positions: base of the rotation rates base^(-2i/D)"""
    rotary_factor: Annotated[float, Range(low=1)] = 1.0
    """rotary positions: divisor of all rotation rates (position interpolation), for texts longer than in training"""
    rotary_context: Natural = 0
    """rotary positions: original training length; the divisor applies to low frequencies only (Llama 3); 0: to all"""
    rotary_scaling: RotaryScaling = "interpolate"
    """rotary positions: how the factor is applied: to the rates, as in YaRN, or to the base beyond the context"""
    rotary_share: Annotated[float, Range(above=0, high=1)] = 1.0
    """rotary positions: share of a head's channels that are rotated, from the first one"""
    unrotated_layers: tuple[Natural, ...] = ()
    """rotary positions: indices of layers without positions (SmolLM3)"""
    position_offset: Natural = 0
    """learned positions: unused rows at the start of the table (OPT)"""
    sliding_windows: tuple[Natural, ...] = ()
    """sliding window of each layer in tokens, 0 for none; repeated if there are more layers (Mistral, Gemma)"""
    window_rotary_base: Annotated[float, Range(low=0)] = 0.0
    """rotary positions: base in layers with a sliding window, without scaling (Gemma 3); 0: as in the others"""
    score: ScoreName = "scaled_dot"
    score_width: Annotated[float, Range(low=0)] = 0.0
    """scaled dot product: number whose square root divides the product; 0: width of a head"""
    score_cap: Annotated[float, Range(low=0)] = 0.0
    """soft-capping of the attention scores, cap · tanh(score / cap) (Gemma 2); 0: none"""
    kv_heads: Natural = 0
    """number of key/value heads (grouped-query attention); 0: as many as query heads"""
    head_width: Natural = 0
    """0: width / heads"""
    qk_norm: bool = True
    qk_norm_joint: bool = False
    """QK-norm over all heads of a token together (OLMo 2)"""
    bias: BiasPlacement = "none"
    """linear layers with a bias: all, attention, qkv (query, key, value), not_qkv (all others), feedforward, none"""
    embedding_scale: bool = False
    """multiply embeddings by √width (Gemma)"""
    tied: bool = True
    """the output layer shares the weights of the embedding"""
    logit_cap: Annotated[float, Range(low=0)] = 0.0
    """soft-capping of the logits, cap · tanh(logit / cap) (Gemma 2); 0: none"""
    max_len: Count = 256
    """maximum length of a training text in tokens; not a limit for positions that extrapolate"""
    vocab: Natural = 0
    """set from the tokenizer"""

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    def check(self) -> None:
        """Raise if values are inconsistent."""
        check_heads(self.width, self.heads, self.kv_heads, self.head_width, rotary=self.positions == "rotary")
        if self.parallel and self.norm != "pre":
            raise RegardError(
                f'Parallel blocks normalize their input (got model.norm = "{self.norm}").', 'Set model.norm to "pre".'
            )

    def sliding_window(self, layer: int) -> int:
        """The sliding window of a layer; 0: none."""
        return self.sliding_windows[layer % len(self.sliding_windows)] if self.sliding_windows else 0

    def block_config(self) -> BlockConfig:
        """The plain parts of the blocks."""
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
            qk_norm_eps=self.norm_eps if self.qk_norm else None,
            qk_norm_kind="rms" if self.norm_kind == "layer" else self.norm_kind,
            bias=self.bias,
            max_len=self.max_len,
        )


def gpt_small(**changes) -> GPTConfig:
    """6 layers of width 384 (nanoGPT's size for a corpus of a million characters)."""
    return GPTConfig(**(dict(width=384, heads=6, layers=6, feedforward=1536, dropout=0.2) | changes))


def gpt2(**changes) -> GPTConfig:
    """GPT-2 as published in 2019: 12 layers of width 768 (124 M parameters with its vocabulary)."""
    published: dict[str, Any] = dict(
        **dict(width=768, heads=12, layers=12, feedforward=3072, norm_kind="layer", norm_eps=1e-5, qk_norm=False),
        **dict(activation="gelu_tanh", positions="learned", bias="all", max_len=1024),
    )
    return GPTConfig(**(published | changes))


class GPT(StackModel):
    """Decoder-only Transformer: logits of the next token, given the tokens before it.

    >>> from regard.layers.packed import pack
    >>> model = GPT(GPTConfig(width=16, heads=2, layers=2, feedforward=32, vocab=11))
    >>> model(pack([[2, 4, 5], [2, 6]])).shape
    torch.Size([5, 11])
    """

    blocks: Sequence[TransformerBlock]  # a ModuleList
    continues_source = True
    """the output of decoding continues its source, the prompt"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = Embedding(
            config.vocab,
            config.width,
            config.positions,
            config.max_len,
            config.dropout,
            scaled=config.embedding_scale,
            offset=config.position_offset,
        )
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            make_decoder_block(config, i) for i in range(config.layers)
        )
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)
        self.output = nn.Linear(config.width, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if ".score." in name:
                continue
            if parameter.dim() == 2:
                # The residual stream sums 2 L updates: their initial scale is divided by √(2 L) (Radford et al. 2019).
                is_residual = name.endswith(("attention.out.weight", "feedforward.fc2.weight"))
                nn.init.normal_(parameter, std=0.02 * (2 * config.layers) ** -0.5 if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if config.tied:
            self.output.weight = self.embedding.tokens.weight

    @property
    def stack(self) -> Decoder:
        """The decoder stack, which is all of the model."""
        return Decoder(self.embedding, self.blocks, self.norm, self.output, logit_cap=self.config.logit_cap)

    def features(self, tokens: Tokens) -> Float[Tensor, "N E"]:
        """The input of the output layer, one row per token. Training computes its loss from it."""
        return self.stack.features(tokens)

    def forward(self, tokens: Tokens) -> Float[Tensor, "N V"]:
        """Logits of the token after each token."""
        return self.stack.logits(self.features(tokens))

    def start(self, source: Packed) -> DecoderState:
        return self.stack.start(source)
