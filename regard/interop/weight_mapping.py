"""Mapping tables between the weights of Regard and those of other formats.

A table is used in both directions: to read foreign weights and to write them. Each row names some tensors of Regard,
the foreign tensors that hold the same numbers, and the conversion between them. "{i}" stands for the index of a layer.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.models import make_model
from regard.models.parameters import shapes_only

Tensors = list[Tensor]
logger = logging.getLogger("regard")


class Conversion(NamedTuple):
    """Conversion of foreign tensors to Regard's (`read`) and its exact inverse (`write`): a round trip is bit-exact."""

    read: Callable[[Tensors], Tensors]
    write: Callable[[Tensors], Tensors]


def _split_in_half(tensors: Tensors) -> Tensors:
    return [half.contiguous() for half in tensors[0].chunk(2)]


def _split_after_third(tensor: Tensor) -> Tensors:
    third = len(tensor) // 3
    return [tensor[:third].contiguous(), tensor[third:].contiguous()]


def _transpose(tensors: Tensors) -> Tensors:
    return [tensor.T.contiguous() for tensor in tensors]


IDENTITY = Conversion(lambda foreign: foreign, lambda native: native)
# Two foreign tensors are concatenated: keys and values, or the projections to value and gate of a gated feed-forward.
CONCATENATED = Conversion(lambda foreign: [torch.cat(foreign)], _split_in_half)
# The foreign weight is (in, out), as in GPT-2's Conv1D.
TRANSPOSED = Conversion(_transpose, _transpose)
# One foreign tensor holds queries, keys and values; Regard has one tensor for queries and one for keys and values.
FUSED_QKV = Conversion(lambda foreign: _split_after_third(foreign[0]), lambda native: [torch.cat(native)])
TRANSPOSED_QKV = Conversion(
    lambda foreign: _split_after_third(foreign[0].T), lambda native: [torch.cat(native).T.contiguous()]
)


# Both hold two parts, in opposite orders: a value and a gate.
SWAPPED_HALVES = Conversion(
    lambda foreign: [torch.cat(_split_in_half(foreign)[::-1])], lambda native: [torch.cat(_split_in_half(native)[::-1])]
)


def stacked_rows(*sizes: int) -> Conversion:
    """Conversion of one foreign tensor to several with these numbers of rows.

    >>> [len(part) for part in stacked_rows(4, 2).read([torch.ones(6, 3)])]
    [4, 2]
    """
    return Conversion(
        lambda foreign: [part.contiguous() for part in foreign[0].split(sizes)], lambda native: [torch.cat(native)]
    )


def qkv_by_head(heads: int) -> Conversion:
    """Conversion of a foreign tensor with the query, key and value rows of each head in turn (GPT-NeoX).

    >>> qkv_by_head(2).read([torch.arange(6)])
    [tensor([0, 3]), tensor([1, 4, 2, 5])]
    """

    def read(foreign: Tensors) -> Tensors:
        query, key, value = (part.flatten(0, 1) for part in foreign[0].unflatten(0, (heads, 3, -1)).unbind(1))
        return [query.contiguous(), torch.cat((key, value))]

    def write(native: Tensors) -> Tensors:
        parts = [part.unflatten(0, (heads, -1)) for part in (native[0], *native[1].chunk(2))]
        return [torch.stack(parts, dim=1).flatten(0, 2)]

    return Conversion(read, write)


def token_sequence(count: int) -> Conversion:
    """Conversion of `count` foreign tensors (1, n, E) to one tensor (rows, E); all but the last have one row.

    >>> conversion = token_sequence(2)
    >>> native = conversion.read([torch.ones(1, 1, 3), torch.zeros(1, 4, 3)])
    >>> native[0].shape, [tensor.shape for tensor in conversion.write(native)]
    (torch.Size([5, 3]), [torch.Size([1, 1, 3]), torch.Size([1, 4, 3])])
    """
    return Conversion(
        lambda foreign: [torch.cat(foreign, dim=1).squeeze(0)],
        lambda native: [part.contiguous() for part in native[0][None].tensor_split(list(range(1, count)), dim=1)],
    )


class MappingRow(NamedTuple):
    """Names of Regard's tensors, names of the foreign tensors, and the conversion between them."""

    names: str | tuple[str, ...]
    foreign_names: str | tuple[str, ...]
    conversion: Conversion = IDENTITY


def weight_and_bias(
    name: str, foreign_name: str | tuple[str, ...], conversion: Conversion = IDENTITY
) -> list[MappingRow]:
    """The rows of the weight and the bias of a layer.

    >>> weight_and_bias("output", "lm_head")[1][:2]
    ('output.bias', 'lm_head.bias')
    """
    return [
        MappingRow(f"{name}.{part}", tuple(f"{foreign}.{part}" for foreign in foreign_name), conversion)
        if isinstance(foreign_name, tuple)
        else MappingRow(f"{name}.{part}", f"{foreign_name}.{part}", conversion)
        for part in ("weight", "bias")
    ]


def attention_rows(name: str, foreign_name: str, projections: Sequence[str]) -> list[MappingRow]:
    """The rows of an attention layer.

    `projections` are the foreign names of the query, key, value and output projections, or of a fused query-key-value
    projection and the output projection.

    >>> attention_rows("attention", "attn", ["qkv", "proj"])[0][:2]
    (('attention.query.weight', 'attention.key_value.weight'), 'attn.qkv.weight')
    """
    *inputs, out = (f"{foreign_name}.{projection}" for projection in projections)
    if len(inputs) == 1:
        rows = [
            MappingRow((f"{name}.query.{part}", f"{name}.key_value.{part}"), f"{inputs[0]}.{part}", FUSED_QKV)
            for part in ("weight", "bias")
        ]
    else:
        query, key, value = inputs
        rows = [
            *weight_and_bias(f"{name}.query", query),
            *weight_and_bias(f"{name}.key_value", (key, value), CONCATENATED),
        ]
    return [*rows, *weight_and_bias(f"{name}.out", out)]


def block_rows(
    foreign_block: str,
    *,
    attention: Sequence[str],
    feedforward: tuple[str | tuple[str, str], str],
    norms: Sequence[str],
    cross: Sequence[str] = (),
    block: str = "blocks.{i}",
) -> list[MappingRow]:
    """The rows of a Transformer block; all other foreign names are relative to `foreign_block`.

    `attention` and `cross` are as in `attention_rows`. `feedforward` are the inner and the outer projection; the inner
    one is a pair (value, gate) in gated layers. `norms` are in the order of the sublayers. Rows of parameters that a
    model does not have, such as biases, are skipped.

    >>> names = dict(attention=["q", "k", "v", "o"], feedforward=("fc1", "fc2"), norms=["norm1", "norm2"])
    >>> block_rows("layers.{i}", **names)[-1][:2]
    ('blocks.{i}.feedforward_norm.bias', 'layers.{i}.norm2.bias')
    """
    inner, outer = feedforward
    sublayers = ("attention", "cross", "feedforward") if cross else ("attention", "feedforward")
    is_gated = not isinstance(inner, str)
    foreign_inner = tuple(f"{foreign_block}.{name}" for name in inner) if is_gated else f"{foreign_block}.{inner}"
    return [
        *attention_rows(f"{block}.attention", foreign_block, attention),
        *(attention_rows(f"{block}.cross", foreign_block, cross) if cross else []),
        *weight_and_bias(f"{block}.feedforward.fc1", foreign_inner, CONCATENATED if is_gated else IDENTITY),
        *weight_and_bias(f"{block}.feedforward.fc2", f"{foreign_block}.{outer}"),
        *(
            row
            for sublayer, norm in zip(sublayers, norms)
            for row in weight_and_bias(f"{block}.{sublayer}_norm", f"{foreign_block}.{norm}")
        ),
    ]


class MappingTable(NamedTuple):
    """The rows of a model class; those of `layers`, by the name of a stack, are repeated for each of its layers.

    `ignored` are patterns (with * and ?) of foreign tensors without information, such as position indices.
    `unused` are patterns of tensors that belong to other classes of the family, such as another head: they are left out
    with a warning. `copies` are pairs of a foreign tensor and the tensor that it duplicates. `prefix` precedes the
    foreign names in some files and not in others.
    """

    rows: Sequence[MappingRow]
    layers: Mapping[str, Sequence[MappingRow]]
    ignored: Sequence[str] = ()
    unused: Sequence[str] = ()
    copies: Sequence[tuple[str, str]] = ()
    prefix: str = ""

    def with_head(self, *rows: MappingRow, copies: Sequence[tuple[str, str]] = ()) -> "MappingTable":
        """Add the prefix to all foreign names, and the rows of a head, which have no prefix."""
        return self._replace(
            rows=[*self._add_prefix(self.rows), *rows],
            layers={stack: self._add_prefix(rows) for stack, rows in self.layers.items()},
            copies=copies,
        )

    def _add_prefix(self, rows: Sequence[MappingRow]) -> list[MappingRow]:
        return [
            row._replace(foreign_names=tuple(self.prefix + name for name in _as_tuple(row.foreign_names)))
            for row in rows
        ]

    def expand(self, counts: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Conversion]]:
        """All rows with layer indices filled in; `counts` are the numbers of layers of the stacks."""
        for row in self.rows:
            yield _as_tuple(row.names), _as_tuple(row.foreign_names), row.conversion
        for stack, rows in self.layers.items():
            for i in range(counts[stack]):
                for row in rows:
                    names, foreign_names = (
                        tuple(name.replace("{i}", str(i)) for name in _as_tuple(column)) for column in row[:2]
                    )
                    yield names, foreign_names, row.conversion


def parameter_shapes(config: Any) -> dict[str, torch.Size]:
    """The shapes of the parameters of a model, without allocating them.

    >>> from regard.models import GPTConfig
    >>> parameter_shapes(GPTConfig(width=10**9, vocab=7))["embedding.tokens.weight"]
    torch.Size([7, 1000000000])
    """
    with shapes_only(config):
        return {name: parameter.shape for name, parameter in make_model(config).named_parameters()}


def read_model_weights(
    config: Any, table: MappingTable, counts: Mapping[str, int], tensors: Mapping[str, Tensor], origin: str
) -> dict[str, Tensor]:
    """Convert foreign tensors to the weights of a model of this config; see `read_weights`."""
    if sum(counts.values()) > len(tensors):
        raise RegardError(
            f"{origin}: {sum(counts.values())} layers, but only {len(tensors)} tensors.",
            "Check that the files are complete.",
        )
    try:
        shapes = parameter_shapes(config)
    except (RuntimeError, OverflowError) as error:  # sizes beyond the limits of a tensor
        raise RegardError(f"{origin}: invalid sizes ({error}).", "Fix the file.") from None
    return read_weights(table, counts, tensors, origin, shapes)


def read_weights(
    table: MappingTable,
    counts: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    origin: str,
    shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, Tensor]:
    """Convert foreign tensors to Regard's names. An error lists missing and unknown tensors; none is skipped silently.

    If the `shapes` of the model's parameters are passed, rows of parameters that it does not have are skipped (a bias,
    another head), and tensors of another shape are listed too.

    >>> table = MappingTable([MappingRow("output.weight", "lm_head.weight")], {})
    >>> read_weights(table, {}, {"lm_head.weight": torch.ones(2, 3)}, "x")["output.weight"].shape
    torch.Size([2, 3])
    """
    rows = [row for row in table.expand(counts) if shapes is None or any(name in shapes for name in row[0])]
    expected = {name for _, foreign_names, _ in rows for name in foreign_names}
    tensors = _normalize_names(table.prefix, tensors, expected)
    differing = _drop_copies(table.copies, tensors, expected)
    missing = sorted(expected - tensors.keys())
    others = [name for name in tensors.keys() - expected if not _matches_any(table.ignored, name)]
    unused = sorted(name for name in others if _matches_any(table.unused, name))
    unknown = sorted(set(others) - set(unused))
    integers = sorted(name for name in expected & tensors.keys() if not tensors[name].is_floating_point())
    problems = {
        "missing": missing,
        "unknown": unknown,
        "not floating point": integers,
        "not equal to the tensor that they should be a copy of": differing,
    }
    _raise_problems(origin, problems)
    weights: dict[str, Tensor] = {}
    misshapen: list[str] = []
    for names, foreign_names, conversion in rows:
        try:
            converted = dict(zip(names, conversion.read([tensors[name] for name in foreign_names]), strict=True))
        except (RuntimeError, ValueError, IndexError):  # raised for tensors of another shape
            misshapen += foreign_names
            continue
        if shapes is not None and any(tensor.shape != shapes[name] for name, tensor in converted.items()):
            misshapen += foreign_names
        weights |= converted
    _raise_problems(origin, {"wrong shape": [f"{name} {tuple(tensors[name].shape)}" for name in misshapen]})
    if unused:
        logger.warning("%s: left out, unused by a model of this class: %s", origin, ", ".join(unused))
    return weights


def write_weights(table: MappingTable, counts: Mapping[str, int], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to foreign tensors. Rows of parameters that the model does not have are skipped."""
    tensors: dict[str, Tensor] = {}
    for names, foreign_names, conversion in table.expand(counts):
        if any(name in weights for name in names):
            converted = conversion.write([weights[name] for name in names])
            tensors |= dict(zip(foreign_names, converted, strict=True))
    return tensors


def _normalize_names(prefix: str, tensors: Mapping[str, Tensor], expected: set[str]) -> dict[str, Tensor]:
    """The tensors under the names of the table.

    Early BERT files have gamma and beta for weight and bias; many files lack the prefix, or have it although their
    class does not.
    """
    renamed = {}
    for name, tensor in tensors.items():
        newer = name
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if name.endswith(old):
                newer = name.removesuffix(old) + new
        candidates = (name, newer, prefix + newer, newer.removeprefix(prefix))
        usable = (key for key in candidates if key in expected and (key == name or key not in tensors))
        renamed[next(usable, name)] = tensor
    return renamed


def _drop_copies(copies: Sequence[tuple[str, str]], tensors: dict[str, Tensor], expected: set[str]) -> list[str]:
    """Remove duplicates from `tensors`; return the names of those that differ from their original."""
    differing = []
    for copy, original in copies:
        if copy in tensors and copy not in expected:
            tensor = tensors.pop(copy)
            if not torch.equal(tensors.setdefault(original, tensor), tensor):
                differing.append(copy)
    return differing


def _raise_problems(origin: str, problems: Mapping[str, Sequence[str]]) -> None:
    lists = [f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names]
    if lists:
        raise RegardError(
            f"{origin}: the tensors do not match the config ({'; '.join(lists)}).", "Check that the files are complete."
        )


def _matches_any(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
