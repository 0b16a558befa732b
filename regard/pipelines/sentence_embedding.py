"""Sentence embeddings: pooling of token vectors and the layers after it, as in sentence-transformers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as weights_to_bytes
from torch import Tensor, nn

from regard.config_reader import fill_config
from regard.errors import RegardError
from regard.files import write_atomically
from regard.ranges import Natural, check_ranges

SENTENCE_FILE = "sentence_embedding.safetensors"
_HINT = "Restore the file from a good copy."

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
SentenceLayer = Literal["normalize", "linear", "tanh", "relu", "gelu", "silu", "sigmoid"]
_ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class SentenceConfig:
    """How the embedding of a text is computed from its token vectors."""

    pooling: tuple[Pooling, ...] = ("mean",)
    """vectors of a text that are concatenated: of its first (cls) or last token, or over all tokens"""
    layers: tuple[SentenceLayer, ...] = ("normalize",)
    """layers after pooling: normalization to length 1, or a linear layer, named by the activation after it"""
    max_len: Natural = 0
    """maximum length of a text in tokens including special ones, longer texts are cut; 0: that of the model"""
    prompt: str = ""
    """text that is put in front of every text"""
    dimensions: Natural = 0
    """number of dimensions that are kept; 0: all"""

    def __post_init__(self) -> None:
        check_ranges(self, "sentence.")


class SentenceEmbedding(nn.Module):
    """Pooling and the layers after it; `linear_layers` are weight and bias (or None) of the linear ones.

    >>> tokens = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> SentenceEmbedding()(tokens, [2, 1])
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(
        self, config: SentenceConfig | None = None, linear_layers: Sequence[tuple[Tensor, Tensor | None]] = ()
    ) -> None:
        super().__init__()
        self.config = config or SentenceConfig()
        self.linear = nn.ModuleDict()
        names = [str(i) for i, layer in enumerate(self.config.layers) if layer != "normalize"]
        for name, (weight, bias) in zip(names, linear_layers, strict=True):
            with torch.device("meta"):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            linear.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
            self.linear[name] = linear

    @property
    def is_default(self) -> bool:
        """Whether this is the mean of the token vectors, normalized to length 1, of texts of any length."""
        return self.config == SentenceConfig()

    def output_width(self, width: int) -> int:
        """The number of dimensions of an embedding, for a model of this width.

        >>> SentenceEmbedding(SentenceConfig(pooling=("cls", "mean"))).output_width(8)
        16
        """
        linear = list(self.linear.values())
        size: Any = linear[-1].out_features if linear else width * len(self.config.pooling)
        return min(size, self.config.dimensions or size)

    def forward(self, tokens: Float[Tensor, "N E"], lengths: Sequence[int]) -> Float[Tensor, "B F"]:
        """The embeddings of texts of these lengths, whose token vectors are concatenated."""
        texts = tokens.split(list(lengths))
        return self.project(torch.stack([torch.cat([_pool(x, mode) for mode in self.config.pooling]) for x in texts]))

    def project(self, pooled: Float[Tensor, "B E"]) -> Float[Tensor, "B F"]:
        """Apply the layers after pooling."""
        x = pooled
        for i, layer in enumerate(self.config.layers):
            if layer == "normalize":
                x = nn.functional.normalize(x, dim=-1)
            else:
                x = self.linear[str(i)](x)
                x = _ACTIVATIONS[layer](x) if layer in _ACTIVATIONS else x
        return x[:, : self.config.dimensions] if self.config.dimensions else x

    def to_bytes(self) -> bytes:
        """The linear layers as a safetensors file; empty if there are none."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.linear.named_parameters()}
        return weights_to_bytes(weights, metadata={"format": "pt"}) if weights else b""


def _pool(x: Float[Tensor, "T E"], mode: Pooling) -> Float[Tensor, "E"]:
    """One vector for the token vectors of a text."""
    if mode == "cls":
        return x[0]
    if mode == "lasttoken":
        return x[-1]
    if mode == "max":
        return x.amax(0)
    if mode == "weightedmean":  # later tokens weigh more: 1, 2, 3, …
        positions = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype)
        return (positions[:, None] * x).sum(0) / positions.sum()
    return x.mean(0) if mode == "mean" else x.sum(0) / len(x) ** 0.5


def write_sentence_embedding(folder: Path, sentence: SentenceEmbedding) -> dict[str, Any]:
    """Write the linear layers of a model folder, if there are any; return the settings for its config.json."""
    path, content = folder / SENTENCE_FILE, sentence.to_bytes()
    if content:
        write_atomically(path, content)
    else:
        path.unlink(missing_ok=True)  # left by a previous model in this folder
    return {} if sentence.is_default else {"sentence": dataclasses.asdict(sentence.config)}


def read_sentence_embedding(folder: Path, table: Mapping[str, Any], width: int) -> SentenceEmbedding:
    """The sentence embedding of a model folder; `table` is its config.json, `width` the width of the model."""
    settings = table.get("sentence")
    if settings is None:
        return SentenceEmbedding()
    path = folder / "config.json"
    if not isinstance(settings, dict):
        raise RegardError(f"{path}: sentence must be an object (got {settings!r}).", _HINT)
    config = fill_config(SentenceConfig(), settings, path, "sentence.", hint="Upgrade regard, or fix the file.")
    indices = [i for i, layer in enumerate(config.layers) if layer != "normalize"]
    if not indices:
        return SentenceEmbedding(config)
    file = folder / SENTENCE_FILE
    try:
        tensors = load_file(file, backend="pread")
    except (SafetensorError, OSError, ValueError) as error:
        raise RegardError(f"{file}: the file is missing or damaged ({error}).", _HINT) from None
    layers = [(tensors.get(f"{i}.weight"), tensors.get(f"{i}.bias")) for i in indices]
    return SentenceEmbedding(config, check_linear_layers(layers, width * len(config.pooling), file))


def check_linear_layers(
    layers: Sequence[tuple[Tensor | None, Tensor | None]], width: int, origin: object
) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases of consecutive layers; an error unless their shapes fit together and to this input width.

    >>> [weight.shape for weight, bias in check_linear_layers([(torch.ones(3, 2), None)], 2, "file")]
    [torch.Size([3, 2])]
    """
    checked = []
    for i, (weight, bias) in enumerate(layers):
        if weight is None or weight.dim() != 2 or weight.shape[1] != width:
            shape = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
            raise RegardError(f"{origin}: the weight of layer {i} is {shape}; expected {width} columns.", _HINT)
        width = weight.shape[0]
        if bias is not None and bias.shape != (width,):
            raise RegardError(f"{origin}: the bias of layer {i} has shape {tuple(bias.shape)}, not ({width},).", _HINT)
        checked.append((weight, bias))
    return checked
