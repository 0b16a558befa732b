"""Checkpoints of llama2.c: a file of sizes and numbers, and its tokeniser.

The model's file begins with seven whole numbers (width, feed-forward width, layers, heads, heads of keys and values,
vocabulary, longest text); then come the weights as 32-bit floats, kind by kind, each for all layers. A vocabulary
below 0 says that the output layer is not the embedding. The tokeniser's file has the longest piece's length, then for
each piece its score, its length in bytes, and the bytes. All numbers are little-endian.
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

from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import FOREIGN, Tokenizer
from regard.errors import RegardError
from regard.files import read_file
from regard.interop.weight_mapping import STACKED, Change, Row, Table, read_model
from regard.models.gpt import GPTConfig
from regard.pipelines import LanguageModel, model_of

# Each story begins with <s>, and where one would begin, the last one has ended.
UNK, BOS = 0, 1
_SPECIAL = ("<unk>", "<s>", "</s>")
# The first pieces, whatever name a file has for them: the special ones and the bytes.
_NAMES = (*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
_MAGIC = 0x616B3432  # of later versions of the format, before anything else


class Header(NamedTuple):
    width: int
    feedforward: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    max_len: int


def import_llama2c(model_file: str | Path, tokenizer_file: str | Path) -> LanguageModel:
    """A checkpoint of llama2.c with its tokeniser, as a language model.

    >>> writer = import_llama2c("stories15M.bin", "tokenizer.bin")  # doctest: +SKIP
    >>> writer("Once upon a time")  # doctest: +SKIP
    ', there was a little girl named Lily.'
    """
    model_file, tokenizer_file = Path(model_file), Path(tokenizer_file)
    config, theirs = _read_model(model_file)
    tokenizer = _read_tokenizer(tokenizer_file, config.vocab)
    table = llama2c_table(config.width // config.heads)
    weights = read_model(config, table, {"blocks": config.layers}, theirs, str(model_file))
    model = model_of(config, weights, model_file)
    special = Special(pad=BOS, unk=UNK, sos=BOS, eos=BOS, begin=BOS)
    return LanguageModel(model.eval(), tokenizer, {"imported": {"file": model_file.name}}, special)


# -- the model -------------------------------------------------------------------------------------------------------


def _in_halves(weight: Tensor, head_width: int) -> Tensor:
    """Rows of a head in the order 0, 2, 4, …, 1, 3, 5, …: pairs that turn together are (i, i + D/2) here, and are
    neighbours there."""
    return weight.view(-1, head_width // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _in_pairs(weight: Tensor, head_width: int) -> Tensor:
    return weight.view(-1, 2, head_width // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def llama2c_table(head_width: int) -> Table:
    """The names that llama2.c's source has for its weights.

    >>> [row.theirs for row in llama2c_table(8).layers["blocks"]][:2]
    ['rms_att_weight.{i}', 'wq.{i}']
    """

    def stacked(ours: list[Tensor]) -> list[Tensor]:
        k, v = STACKED.write(ours)
        return [_in_pairs(k, head_width), v]

    turned = Change(lambda theirs: [_in_halves(theirs[0], head_width)], lambda ours: [_in_pairs(ours[0], head_width)])
    turned_stacked = Change(lambda theirs: STACKED.read([_in_halves(theirs[0], head_width), theirs[1]]), stacked)
    return Table(
        [
            Row("embedding.tokens.weight", "token_embedding_table"),
            Row("norm.weight", "rms_final_weight"),
            Row("output.weight", "wcls"),
        ],
        {
            "blocks": [
                Row("blocks.{i}.attention_norm.weight", "rms_att_weight.{i}"),
                Row("blocks.{i}.attention.query.weight", "wq.{i}", turned),
                Row("blocks.{i}.attention.key_value.weight", ("wk.{i}", "wv.{i}"), turned_stacked),
                Row("blocks.{i}.attention.out.weight", "wo.{i}"),
                Row("blocks.{i}.feedforward_norm.weight", "rms_ffn_weight.{i}"),
                Row("blocks.{i}.feedforward.inner.weight", ("w3.{i}", "w1.{i}"), STACKED),  # the value, then its gate
                Row("blocks.{i}.feedforward.outer.weight", "w2.{i}"),
            ]
        },
        beside=("freq_cis_*",),  # the angles of the positions, which are computed
    )


def _layout(header: Header) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """What comes after the header: a name, whether there is one for each layer, and the shape."""
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
    hint = "Put a good copy of a llama2.c checkpoint in its place."
    if len(content) < 28:
        raise RegardError(f"{path}: too short for a checkpoint.", hint)
    header = Header(*struct.unpack("<7i", content[:28]))
    if header.width == _MAGIC:
        raise RegardError(
            f"{path}: version {header.feedforward} of the format.", "Regard opens the first one, which has no version."
        )
    sizes = header._replace(vocab=abs(header.vocab))
    if min(sizes) < 1 or header.width % (2 * header.heads) or header.heads % header.kv_heads:
        raise RegardError(f"{path}: no model has such sizes: {sizes}.", hint)
    layout = list(_layout(header))
    wanted = 28 + 4 * sum(math.prod(shape) * (header.layers if each else 1) for _, each, shape in layout)
    if len(content) != wanted:
        raise RegardError(f"{path}: {len(content)} bytes, where its sizes ask for {wanted}.", hint)
    numbers = np.frombuffer(content, "<f4", offset=28).astype(np.float32)
    theirs: dict[str, Tensor] = {}
    for name, each, shape in layout:
        for key in [f"{name}.{i}" for i in range(header.layers)] if each else [name]:
            count = math.prod(shape)
            theirs[key], numbers = torch.from_numpy(numbers[:count]).view(shape), numbers[count:]
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
    return config, theirs


# -- the tokeniser ---------------------------------------------------------------------------------------------------


def _read_tokenizer(path: Path, size: int) -> Tokenizer:
    """The pieces and their scores as byte-pair encoding.

    llama2.c takes a text apart into characters (bytes, where it lacks one) and joins, again and again, the two
    neighbours that make the piece of the highest score. So each way to make a piece of two is a merge, and the merges
    are ordered by what they make.
    """
    pieces = list(_pieces(path, size))
    vocab = {piece: index for index, (piece, _) in enumerate(pieces)}
    if len(vocab) < size:
        raise RegardError(f"{path}: some piece is there twice.", "Put a good copy in its place.")
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _ in sorted(pieces[len(_NAMES) :], key=lambda one: -one[1])
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=_SPECIAL[UNK], byte_fallback=True))
    library.add_special_tokens(list(_SPECIAL))
    # A text is read as if a space stood before it, and written without that space.
    library.normalizer = normalizers.Prepend(" ")
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(library, FOREIGN)


def _pieces(path: Path, size: int) -> Iterator[tuple[str, float]]:
    content, place = read_file(path), 4
    for index in range(size):
        if place + 8 > len(content):
            raise RegardError(f"{path}: {index} pieces, where the model knows {size}.", "Name the model's own.")
        score, length = struct.unpack_from("<fi", content, place)
        piece = content[place + 8 : place + 8 + length]
        if length < 0 or len(piece) < length:
            raise RegardError(f"{path}: piece {index} is cut off.", "Put a good copy in its place.")
        place += 8 + length
        if index < len(_NAMES):
            yield _NAMES[index], score
            continue
        try:
            yield piece.decode(), score
        except UnicodeDecodeError:
            raise RegardError(f"{path}: piece {index} is no text.", "Is it a tokeniser of llama2.c?") from None
    if place != len(content):
        raise RegardError(f"{path}: there are more pieces than the {size} that the model knows.", "Name its own.")
