"""Import of llama2.c checkpoints: a model file and a tokenizer file.

The model file starts with seven 32-bit integers (width, feed-forward width, layers, heads, key-value heads, vocabulary
size, maximum length), followed by the weights as 32-bit floats, each kind for all layers. A negative vocabulary size
means that the output layer is not tied to the embedding. The tokenizer file holds the length of the longest piece, then
for each piece its score, its length in bytes, and the bytes. All numbers are little-endian.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, normalizers
from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.errors import RegardError
from regard.files import read_file
from regard.interop.weight_mapping import CONCATENATED, Conversion, MappingRow, MappingTable, read_model_weights
from regard.models.gpt import GPTConfig
from regard.pipelines import TextGenerator, model_from_weights

# Each text starts with <s>, which therefore also ends the previous one.
UNK, BOS = 0, 1
_SPECIAL = ("<unk>", "<s>", "</s>")
# The first pieces, whatever their names in the file: special tokens and bytes.
_NAMES = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
_MAGIC = 0x616B3432  # first number of files in later versions of the format


class Llama2cHeader(NamedTuple):
    """The seven integers at the start of a model file."""

    width: int
    feedforward: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    max_len: int


def import_llama2c(model_file: str | Path, tokenizer_file: str | Path) -> TextGenerator:
    """Import a checkpoint of llama2.c and its tokenizer as a language model.

    >>> writer = import_llama2c("stories15M.bin", "tokenizer.bin")  # doctest: +SKIP
    >>> writer("Once upon a time")  # doctest: +SKIP
    ', there was a little girl named Lily.'
    """
    model_file, tokenizer_file = Path(model_file), Path(tokenizer_file)
    config, tensors = _read_model(model_file)
    tokenizer = _read_tokenizer(tokenizer_file, config.vocab)
    table = llama2c_table(config.width // config.heads)
    weights = read_model_weights(config, table, {"blocks": config.layers}, tensors, str(model_file))
    model = model_from_weights(config, weights, model_file)
    special = SpecialTokens(pad=BOS, unk=UNK, sos=BOS, eos=BOS, begin=BOS)
    return TextGenerator(model.eval(), tokenizer, {"imported": {"file": model_file.name}}, special)


# -- model ------------------------------------------------------------------------------------------------------------


def to_half_split(weight: Tensor, head_width: int) -> Tensor:
    """Reorder the rows of each head as 0, 2, 4, …, 1, 3, 5, …

    Rotary positions rotate the channel pairs (i, i + D/2) in Regard and (2i, 2i + 1) in llama2.c and llama.cpp.

    >>> to_half_split(torch.arange(4), 4)
    tensor([0, 2, 1, 3])
    """
    return weight.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _to_interleaved(weight: Tensor, head_width: int) -> Tensor:
    return weight.view(-1, 2, head_width // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def llama2c_table(head_width: int) -> MappingTable:
    """The mapping table of llama2.c, with the names of its source code.

    >>> [row.foreign_names for row in llama2c_table(8).layers["blocks"]][:2]
    ['rms_att_weight.{i}', 'wq.{i}']
    """

    def split(native: list[Tensor]) -> list[Tensor]:
        k, v = CONCATENATED.write(native)
        return [_to_interleaved(k, head_width), v]

    query = Conversion(
        lambda foreign: [to_half_split(foreign[0], head_width)],
        lambda native: [_to_interleaved(native[0], head_width)],
    )
    key_value = Conversion(
        lambda foreign: CONCATENATED.read([to_half_split(foreign[0], head_width), foreign[1]]), split
    )
    return MappingTable(
        [
            MappingRow("embedding.tokens.weight", "token_embedding_table"),
            MappingRow("norm.weight", "rms_final_weight"),
            MappingRow("output.weight", "wcls"),
        ],
        {
            "blocks": [
                MappingRow("blocks.{i}.attention_norm.weight", "rms_att_weight.{i}"),
                MappingRow("blocks.{i}.attention.query.weight", "wq.{i}", query),
                MappingRow("blocks.{i}.attention.key_value.weight", ("wk.{i}", "wv.{i}"), key_value),
                MappingRow("blocks.{i}.attention.out.weight", "wo.{i}"),
                MappingRow("blocks.{i}.feedforward_norm.weight", "rms_ffn_weight.{i}"),
                MappingRow("blocks.{i}.feedforward.fc1.weight", ("w3.{i}", "w1.{i}"), CONCATENATED),  # value, then gate
                MappingRow("blocks.{i}.feedforward.fc2.weight", "w2.{i}"),
            ]
        },
        ignored=("freq_cis_*",),  # tables of rotary positions, which Regard computes
    )


def _layout(header: Llama2cHeader) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """The content after the header: name, whether there is one per layer, and shape."""
    E, F, V = header.width, header.feedforward, abs(header.vocab)
    D = E // header.heads
    K = D * header.kv_heads
    yield "token_embedding_table", False, (V, E)
    yield "rms_att_weight", True, (E,)
    yield "wq", True, (E, E)
    yield "wk", True, (K, E)
    yield "wv", True, (K, E)
    yield "wo", True, (E, E)
    yield "rms_ffn_weight", True, (E,)
    yield "w1", True, (F, E)
    yield "w2", True, (E, F)
    yield "w3", True, (F, E)
    yield "rms_final_weight", False, (E,)
    yield "freq_cis_real", False, (header.max_len, D // 2)
    yield "freq_cis_imag", False, (header.max_len, D // 2)
    if header.vocab < 0:
        yield "wcls", False, (V, E)


def _read_model(path: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    content = read_file(path)
    hint = "Replace it with an intact llama2.c checkpoint."
    if len(content) < 28:
        raise RegardError(f"{path}: the file is too short for a checkpoint.", hint)
    header = Llama2cHeader(*struct.unpack("<7i", content[:28]))
    if header.width == _MAGIC:
        raise RegardError(
            f"{path}: unsupported version {header.feedforward} of the format.",
            "Use a file of version 0, without a version number.",
        )
    sizes = header._replace(vocab=abs(header.vocab))
    if min(sizes) < 1 or header.width % (2 * header.heads) or header.heads % header.kv_heads:
        raise RegardError(f"{path}: invalid sizes: {sizes}.", hint)
    layout = list(_layout(header))
    expected = 28 + 4 * sum(math.prod(shape) * (header.layers if per_layer else 1) for _, per_layer, shape in layout)
    if len(content) != expected:
        raise RegardError(f"{path}: the file has {len(content)} bytes; expected {expected} from its sizes.", hint)
    numbers = np.frombuffer(content, "<f4", offset=28).astype(np.float32)
    tensors: dict[str, Tensor] = {}
    for name, per_layer, shape in layout:
        for key in [f"{name}.{i}" for i in range(header.layers)] if per_layer else [name]:
            count = math.prod(shape)
            tensors[key], numbers = torch.from_numpy(numbers[:count]).view(shape), numbers[count:]
    config = GPTConfig(
        width=header.width,
        heads=header.heads,
        layers=header.layers,
        feedforward=header.feedforward,
        dropout=0.0,
        norm_kind="rms",
        norm_eps=1e-5,
        activation="swiglu",
        positions="rotary",
        kv_heads=header.kv_heads,
        qk_norm=False,
        bias="none",
        tied=header.vocab > 0,
        max_len=header.max_len,
        vocab=abs(header.vocab),
    )
    return config, tensors


# -- tokenizer --------------------------------------------------------------------------------------------------------


def _read_tokenizer(path: Path, size: int) -> Tokenizer:
    """Build byte-pair encoding from the pieces and their scores.

    llama2.c splits a text into characters (or bytes, if a character has no piece) and repeatedly merges the adjacent
    pair whose result has the highest score. So each way to split a piece in two is a merge, ordered by that score.
    """
    pieces = list(_read_pieces(path, size))
    vocab = {piece: index for index, (piece, _) in enumerate(pieces)}
    if len(vocab) < size:
        raise RegardError(f"{path}: duplicate piece.", "Replace it with an intact copy.")
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _ in sorted(pieces[len(_NAMES) :], key=lambda scored: -scored[1])
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=_SPECIAL[UNK], byte_fallback=True))
    library.add_special_tokens(list(_SPECIAL))
    # A space is added before a text when encoding, and removed when decoding.
    library.normalizer = normalizers.Prepend(" ")
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(library, FOREIGN_KIND)


def _read_pieces(path: Path, size: int) -> Iterator[tuple[str, float]]:
    content, offset = read_file(path), 4
    for index in range(size):
        if offset + 8 > len(content):
            raise RegardError(
                f"{path}: {index} pieces, but the model has a vocabulary of {size}.",
                "Pass the tokenizer of this model.",
            )
        score, length = struct.unpack_from("<fi", content, offset)
        piece = content[offset + 8 : offset + 8 + length]
        if length < 0 or len(piece) < length:
            raise RegardError(f"{path}: piece {index} is truncated.", "Replace it with an intact copy.")
        offset += 8 + length
        if index < len(_NAMES):
            yield _NAMES[index], score
            continue
        try:
            yield piece.decode(), score
        except UnicodeDecodeError:
            raise RegardError(
                f"{path}: piece {index} is not valid UTF-8.", "Check that it is a tokenizer of llama2.c."
            ) from None
    if offset != len(content):
        raise RegardError(
            f"{path}: more pieces than the vocabulary of the model ({size}).", "Pass the tokenizer of this model."
        )
