"""Encoder-only models (BERT, RoBERTa, DistilBERT, ALBERT, ELECTRA, MPNet, DeBERTa, ModernBERT) with task heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, NormPlacement, TransformerBlock
from regard.layers.dropout import Dropout
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import EncoderActivation, activate
from regard.layers.heads import AttentionPooling, mean_tokens
from regard.layers.norms import EncoderNormKind, make_norm
from regard.layers.packed import Padded, Tokens
from regard.layers.positions import RelativeBias, RelativeEmbedding, StackPositionKind
from regard.models.config_checks import check_heads, check_relative_bias
from regard.models.variants import make_encoder_block
from regard.ranges import Count, Epsilon, Layers, Natural, OneOf, Range, Rate, check_ranges

ProblemType = Literal["single_label", "multi_label", "regression"]


class TextHead:
    """The head of an encoder without a task: the output are the features of the tokens. Base class of other heads."""

    name = "none"
    """of the head and its subclasses in the page of a model"""
    runs_on_page = True
    """whether the page of a model can compute the output for new texts"""
    label_axis = -1
    """axis of the logits over which probabilities sum to 1"""
    fields: tuple[str, ...] = ("source",)
    """names of the texts that the model reads"""
    method = ""
    """method of the pipeline that runs the head, in addition to `embed`"""
    is_per_text = False
    """whether the output has one row per text, not one per token"""
    has_labels = False
    """whether the columns of the output are `config.labels`"""
    shares_embedding = False
    """whether the output layer has the weights of the token embedding"""

    def check(self, config: "BertConfig") -> None:
        """Raise if values of the config are inconsistent with the head."""

    def output_size(self, config: "BertConfig") -> int:
        """The number of columns of the output layer; 0: none."""
        return 0

    def has_transform(self, config: "BertConfig") -> bool:
        """Whether a linear layer, activation and norm precede the output layer."""
        return False

    def unused_fields(self, config: "BertConfig") -> set[str]:
        """Fields of the config that do not affect the output."""
        return {"head_transform", "head_bias", "pooling", "problem_type", "labels"}


class TokenHead(TextHead):
    """Base class of the heads that predict something for every token."""

    def check(self, config: "BertConfig") -> None:
        if config.pooling != "first":
            raise RegardError(
                f'model.pooling is "{config.pooling}", which is for classification; '
                f"the head {config.head} reads every token.",
                'Set model.pooling to "first".',
            )

    def has_transform(self, config: "BertConfig") -> bool:
        return config.head_transform

    def unused_fields(self, config: "BertConfig") -> set[str]:
        unused = {"pooler", "problem_type", *(() if self.has_labels else ("labels",))}
        return unused if config.head_transform else {*unused, "head_bias"}


class MaskedTokenHead(TokenHead):
    """Masked language modeling: the token at each position."""

    name = "mask"
    method = "fill"
    shares_embedding = True

    def output_size(self, config: "BertConfig") -> int:
        return config.vocab

    def has_transform(self, config: "BertConfig") -> bool:
        return True

    def unused_fields(self, config: "BertConfig") -> set[str]:
        return {"pooler", "problem_type", "labels", "head_transform", "pooling"}


class AnswerHead(TokenHead):
    """Question answering: the start and the end of the answer."""

    name = "answer"
    label_axis = 0  # start and end are distributions over the tokens
    fields = ("source", "context")
    method = "answer"

    def output_size(self, config: "BertConfig") -> int:
        return 2


class TokenLabelHead(TokenHead):
    """Token classification: a label, the tag, for every token."""

    name = "tag"
    runs_on_page = False
    method = "tag"
    has_labels = True

    def output_size(self, config: "BertConfig") -> int:
        return len(config.labels)


class TextLabelHead(TextHead):
    """Classification: a label for every text."""

    name = "classify"
    method = "classify"
    is_per_text = has_labels = True

    def check(self, config: "BertConfig") -> None:
        if config.pooler == "none" and config.pooling == "first" and not config.head_transform:
            raise RegardError("A model that classifies needs a pooler.", "Set model.pooler to tanh, relu or gelu.")

    def output_size(self, config: "BertConfig") -> int:
        return len(config.labels)

    def has_transform(self, config: "BertConfig") -> bool:
        return config.head_transform

    def unused_fields(self, config: "BertConfig") -> set[str]:
        return set() if config.head_transform else {"head_bias"}


TEXT_HEADS: dict[str, TextHead] = {
    "none": TextHead(),
    "mask": MaskedTokenHead(),
    "classify": TextLabelHead(),
    "answer": AnswerHead(),
    "tag": TokenLabelHead(),
}
Head = Annotated[str, OneOf(TEXT_HEADS)]


@dataclass(frozen=True)
class BertConfig:
    """Configuration of an encoder-only Transformer and its task head."""

    width: Count = 256
    heads: Count = 4
    layers: Layers = 4
    feedforward: Count = 1024
    dropout: Rate = 0.1
    norm: NormPlacement = "post"
    norm_kind: EncoderNormKind = "layer"
    norm_eps: Epsilon = 1e-12
    first_norm: bool = True
    """pre-norm: a norm before the attention of the first block, in addition to that of the embeddings"""
    activation: EncoderActivation = "gelu"
    bias: Literal["all", "attention", "feedforward", "none"] = "all"
    """linear layers of the blocks that have a bias"""
    positions: StackPositionKind = "learned"
    position_offset: Natural = 0
    """unused rows at the start of the learned position table (RoBERTa: 2)"""
    rotary_base: Annotated[float, Range(low=1)] = 10000.0
    """rotary positions: base of the rotation rates base^(-2i/D)"""
    relative: Literal["none", "bias", "disentangled"] = "none"
    """relative positions in all layers: a bias of the scores (T5, MPNet), or keys and queries of their own (DeBERTa)"""
    relative_buckets: Count = 32
    """relative positions: number of buckets, half of them for each direction"""
    relative_distance: Natural = 128
    """relative positions: distance from which on all share the last bucket; 0 (disentangled): a bucket per distance"""
    sliding_windows: tuple[Natural, ...] = ()
    """largest distance of a key in each layer, 0 for no limit; repeated if there are more layers (ModernBERT)"""
    window_rotary_base: Annotated[float, Range(low=0)] = 0.0
    """rotary positions: base in layers with a sliding window (ModernBERT); 0: as in the others"""
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
    pooling: Literal["first", "mean", "query"] = "first"
    """input of the classifier: the first token, the mean of all tokens, or attention pooling with a learned query"""
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"
    """layer between pooling and classifier; classification from the first token needs it or `head_transform`"""
    head_transform: bool = False
    """linear layer, activation and norm before the output layer of every head, as for masked tokens (ModernBERT)"""
    head_bias: bool = True
    """bias of the linear layer before the output layer"""
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
        TEXT_HEADS[self.head].check(self)
        if self.relative == "bias":
            check_relative_bias(self.relative_buckets, self.relative_distance)
        if self.relative == "disentangled" and (self.score, self.qk_norm) != ("scaled_dot", False):
            raise RegardError(
                "Disentangled attention needs the scaled dot product without QK-norm.",
                'Set model.score to "scaled_dot" and model.qk_norm to false.',
            )
        if self.groups and self.sliding_windows:
            raise RegardError(
                "Layers that share weights cannot have sliding windows.", "Set model.groups or model.sliding_windows."
            )

    @property
    def layer_fields(self) -> tuple[str, ...]:
        """Fields with numbers of layers; ALBERT: each group is one layer."""
        return ("groups" if self.groups else "layers",)

    def sliding_window(self, layer: int) -> int:
        """The largest distance of a key in a layer; 0: no limit."""
        return self.sliding_windows[layer % len(self.sliding_windows)] if self.sliding_windows else 0

    def block_config(self) -> BlockConfig:
        """The plain parts of the blocks."""
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            feedforward=self.feedforward,
            dropout=self.dropout,
            norm=self.norm,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            activation=self.activation,
            bias=self.bias,
            rotary_base=self.rotary_base if self.positions == "rotary" else None,
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

    def __init__(self, width: int, embedding_width: int, activation: str, norm: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.dense = nn.Linear(width, embedding_width, bias=bias)
        self.activation = activation
        self.norm = norm

    def forward(self, x: Float[Tensor, "*n E"]) -> Float[Tensor, "*n W"]:
        return self.norm(activate(self.activation, self.dense(x)))


def _make_relative(config: BertConfig, norm: nn.Module) -> RelativeBias | RelativeEmbedding | None:
    """The relative positions that all layers share."""
    buckets, distance = config.relative_buckets, config.relative_distance
    if config.relative == "bias":
        return RelativeBias(config.heads, bidirectional=True, buckets=buckets, distance=distance)
    return RelativeEmbedding(config.width, buckets, distance, norm) if config.relative == "disentangled" else None


class Bert(nn.Module):
    """Encoder-only Transformer: every token attends to all tokens of its text.

    >>> from regard.layers.packed import pack
    >>> model = Bert(BertConfig(width=16, heads=2, layers=2, feedforward=32, vocab=11))
    >>> model(pack([[2, 4, 3], [2, 3]])).shape
    torch.Size([5, 11])
    """

    blocks: Sequence[TransformerBlock]  # a ModuleList

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
        self.relative = _make_relative(config, norm(config.width))
        blocks = [make_encoder_block(config, i) for i in range(config.groups or config.layers)]
        if config.norm == "pre" and not config.first_norm:
            blocks[0].attention_norm = nn.Identity()
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.norm = norm(config.width) if config.norm == "pre" else nn.Identity()
        self.query_pool = AttentionPooling(config.block_config(), config.score) if config.pooling == "query" else None
        self.pooler = nn.Linear(config.width, config.width) if config.pooler != "none" else None
        self.dropout = Dropout(config.dropout)
        head = TEXT_HEADS[config.head]
        outputs, read = head.output_size(config), inner if head.shares_embedding else config.width
        self.mask_head = None
        if head.has_transform(config):
            self.mask_head = MaskHead(config.width, read, config.activation, norm(read), config.head_bias)
        self.output = nn.Linear(read, outputs) if outputs else None
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and ".score." not in name:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias") and ".score." not in name:
                nn.init.zeros_(parameter)
        if head.shares_embedding and self.output is not None:
            self.output.weight = self.embedding.tokens.weight

    def encode(self, tokens: Tokens, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "N E"]:
        """The output of the encoder, one row per token."""
        x = self.widen(self.embedding(tokens.ids, tokens.positions, tokens.max_len, segments))
        relative = self.relative() if isinstance(self.relative, RelativeEmbedding) else self.relative
        for i in range(self.config.layers):
            block = self.blocks[i * len(self.blocks) // self.config.layers]
            x = block(x, tokens.offsets, tokens.positions, relative)
        return self.norm(x)

    def pool(self, encoded: Float[Tensor, "N E"], tokens: Tokens) -> Float[Tensor, "B E"]:
        """One vector per text, from its first token, the mean or attention pooling, through the pooler."""
        if self.query_pool is not None:
            x = self.query_pool(encoded, tokens.offsets)
        elif self.config.pooling == "mean":
            x = mean_tokens(encoded, tokens.offsets)
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
        head = TEXT_HEADS[self.config.head]
        if head.is_per_text:
            x = self.pool(x, tokens)
        if self.mask_head is not None:
            x = self.mask_head(x)
        return self.dropout(x) if head.has_labels else x

    def forward(self, tokens: Tokens, segments: Int[Tensor, "N"] | None = None) -> Float[Tensor, "rows V"]:
        """Logits by head: of the token or tag at each position, of the label of each text, or of the answer's ends."""
        x = self.features(tokens, segments)
        return x if self.output is None else self.output(x)

    def unembed(self, stream: Float[Tensor, "*n E"], inputs: Any) -> Float[Tensor, "rows V"]:
        """The output from the residual stream after any block: final norm, head and output layer."""
        x = self.head_features(self.norm(stream), inputs)
        return x if self.output is None else self.output(x)
