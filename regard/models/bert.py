"""Encoder-only models (BERT, RoBERTa, DistilBERT, ALBERT, ELECTRA) with a head for each task."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, EncoderBlock, NormPlacement
from regard.layers.dropout import Dropout
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import Activation, activate
from regard.layers.heads import AttentionPooling
from regard.layers.norms import NormKind, make_norm
from regard.layers.packed import Padded, Tokens
from regard.models.config_checks import check_heads
from regard.ranges import Count, Epsilon, Layers, Natural, Rate, check_ranges

Head = Literal["none", "mask", "classify", "answer", "tag"]
ProblemType = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True)
class BertConfig:
    """Configuration of an encoder-only Transformer and its task head."""

    width: Count = 256
    heads: Count = 4
    layers: Layers = 4
    feedforward: Count = 1024
    dropout: Rate = 0.1
    norm: NormPlacement = "post"
    norm_kind: NormKind = "layer"
    norm_eps: Epsilon = 1e-12
    activation: Activation = "gelu"
    positions: Literal["learned", "rotary", "sinusoidal", "none"] = "learned"
    position_offset: Natural = 0
    """unused rows at the start of the learned position table (RoBERTa: 2)"""
    segments: Natural = 2
    """segment (token type) embeddings, which distinguish the first text from the second; 0: none"""
    embedding_width: Natural = 0
    """width of factorized embeddings, projected to the model width (ALBERT, ELECTRA); 0: the model width"""
    groups: Natural = 0
    """number of groups of layers with shared weights (ALBERT: 1); 0: no sharing"""
    score: ScoreName = "scaled_dot"
    qk_norm: bool = False
    head: Head = "mask"
    """output: features (none), masked tokens (mask), text label (classify), answer span (answer), token labels (tag)"""
    pooling: Literal["first", "query"] = "first"
    """input of the classifier: the first token (first), or attention pooling with a learned query (query)"""
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"
    """layer between pooling and classifier; required for classification from the first token"""
    labels: tuple[str, ...] = ()
    """set from the data"""
    problem_type: ProblemType = "single_label"
    """set from an imported model: one of the labels applies (softmax), any number (sigmoid), or each is a value"""
    max_len: Count = 512
    """maximum length of a training text in tokens; not a limit for positions that extrapolate"""
    vocab: Natural = 0
    """set from the tokenizer"""

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    def check(self) -> None:
        """Raise if values are inconsistent."""
        check_heads(self.width, self.heads, rotary=self.positions == "rotary")
        if self.groups and self.layers % self.groups:
            raise RegardError(
                f"model.groups is {self.groups}; it must divide model.layers ({self.layers}).", "Change one of them."
            )
        if self.head == "classify" and self.pooler == "none" and self.pooling == "first":
            raise RegardError("A model that classifies needs a pooler.", "Set model.pooler to tanh, relu or gelu.")
        if self.pooling == "query" and self.head in ("mask", "answer", "tag"):
            raise RegardError(
                f'model.pooling is "query", which is for classification; the head {self.head} reads every token.',
                'Set model.pooling to "first".',
            )

    def block_config(self) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            feedforward=self.feedforward,
            dropout=self.dropout,
            norm=self.norm,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            activation=self.activation,
            rotary_base=10000.0 if self.positions == "rotary" else None,
            qk_norm_eps=1e-6 if self.qk_norm else None,
            max_len=self.max_len,
        )


def bert_tiny(**changes) -> BertConfig:
    """3 layers of width 128 with pre-norm and rotary positions, for little training text."""
    modern: dict[str, Any] = dict(width=128, layers=3, feedforward=512, norm="pre", norm_eps=1e-5, positions="rotary")
    return BertConfig(**(modern | changes))


def bert_small(**changes) -> BertConfig:
    """6 layers of width 384 (the size of MiniLM)."""
    return BertConfig(**(dict(width=384, heads=12, layers=6, feedforward=1536) | changes))


def bert_base(**changes) -> BertConfig:
    """12 layers of width 768, as published in 2018."""
    published: dict[str, Any] = dict(width=768, heads=12, layers=12, feedforward=3072)
    return BertConfig(**(published | changes))


class MaskHead(nn.Module):
    """Head of masked language modeling before the output layer: linear layer, activation, norm."""

    def __init__(self, width: int, embedding_width: int, activation: str, norm: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(width, embedding_width)
        self.activation = activation
        self.norm = norm

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n W"]:
        return self.norm(activate(self.activation, self.dense(x)))


class Bert(nn.Module):
    """Encoder-only Transformer: every token attends to all tokens of its text.

    >>> from regard.layers.packed import pack
    >>> model = Bert(BertConfig(width=16, heads=2, layers=2, feedforward=32, vocab=11))
    >>> model(pack([[2, 4, 3], [2, 3]])).shape
    torch.Size([5, 11])
    """

    blocks: Sequence[EncoderBlock]  # a ModuleList

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        inner = config.embedding_width or config.width
        norm = partial(make_norm, config.norm_kind, eps=config.norm_eps)
        self.embedding = Embedding(
            config.vocab,
            inner,
            config.positions,
            config.max_len,
            config.dropout,
            scaled=False,
            offset=config.position_offset,
            segments=config.segments,
            norm=norm(inner),
            low_precision=config.norm == "post",
        )
        self.widen = nn.Linear(inner, config.width) if config.embedding_width else nn.Identity()
        block, count = config.block_config(), config.groups or config.layers
        self.blocks = nn.ModuleList(EncoderBlock(block, config.score) for _ in range(count))  # type: ignore[assignment]
        self.norm = norm(config.width) if config.norm == "pre" else nn.Identity()
        self.query_pool = AttentionPooling(block, config.score) if config.pooling == "query" else None
        self.pooler = nn.Linear(config.width, config.width) if config.pooler != "none" else None
        self.dropout = Dropout(config.dropout)
        labels = len(config.labels)
        outputs = {"none": 0, "mask": config.vocab, "classify": labels, "answer": 2, "tag": labels}[config.head]
        self.mask_head = None
        if config.head == "mask":
            self.mask_head = MaskHead(config.width, inner, config.activation, norm(inner))
        self.output = nn.Linear(inner if config.head == "mask" else config.width, outputs) if outputs else None
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and ".score." not in name:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias") and ".score." not in name:
                nn.init.zeros_(parameter)
        if config.head == "mask" and self.output is not None:
            self.output.weight = self.embedding.tokens.weight

    def encode(self, tokens: Tokens, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "N E"]:
        """The output of the encoder, one row per token."""
        x = self.widen(self.embedding(tokens.ids, tokens.positions, tokens.max_len, segments))
        for i in range(self.config.layers):
            x = self.blocks[i * len(self.blocks) // self.config.layers](x, tokens.offsets, tokens.positions)
        return self.norm(x)

    def pool(self, encoded: Float[Tensor, "N E"], tokens: Tokens) -> Float[Tensor, "B E"]:
        """One vector per text, from its first token or by attention pooling, through the pooler."""
        if self.query_pool is not None:
            x = self.query_pool(encoded, tokens.offsets)
        elif isinstance(tokens, Padded):
            x = encoded[:, 0]
        else:
            # Empty texts (batch padding) have no first token; the row selected for them is unused.
            x = encoded[tokens.offsets.starts[:-1].long().clamp(max=len(encoded) - 1)]
        return x if self.pooler is None else activate(self.config.pooler, self.pooler(x))

    def features(self, tokens: Tokens, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "rows E"]:
        """The input of the output layer: one row per token, or for classification one row per text."""
        return self.head_features(self.encode(tokens, segments), tokens)

    def head_features(self, x: Float[Tensor, "N E"], tokens: Tokens) -> Float[Tensor, "rows E"]:
        """`features`, from the output of the encoder."""
        if self.mask_head is not None:
            return self.mask_head(x)
        if self.config.head == "tag":
            return self.dropout(x)
        return self.dropout(self.pool(x, tokens)) if self.config.head == "classify" else x

    def forward(self, tokens: Tokens, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "rows V"]:
        """Logits by head: of the token or tag at each position, of the label of each text, or of the answer's ends."""
        x = self.features(tokens, segments)
        return x if self.output is None else self.output(x)
