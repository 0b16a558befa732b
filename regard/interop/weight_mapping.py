"""Weights by other names: a family's table of rows, read in one direction and written in the other.

A row names some tensors of ours, some of theirs, and how the ones become the others. "{i}" stands for a layer's number.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.models import make_model

Tensors = list[Tensor]
logger = logging.getLogger("regard")


class Change(NamedTuple):
    """How their tensors become ours, and ours theirs: exact opposites, so that a round trip keeps every bit."""

    read: Callable[[Tensors], Tensors]
    write: Callable[[Tensors], Tensors]


def _halves(tensors: Tensors) -> Tensors:
    return [half.contiguous() for half in tensors[0].chunk(2)]


def _first_third(tensor: Tensor) -> Tensors:
    third = len(tensor) // 3
    return [tensor[:third].contiguous(), tensor[third:].contiguous()]


SAME = Change(lambda theirs: theirs, lambda ours: ours)
# Two of theirs, one above the other, are one of ours: keys and values, the two maps of a gated feed-forward network.
STACKED = Change(lambda theirs: [torch.cat(theirs)], _halves)
# Their weight is (in, out), as in GPT-2's Conv1D.
TRANSPOSED = Change(
    lambda theirs: [one.T.contiguous() for one in theirs], lambda ours: [one.T.contiguous() for one in ours]
)
# One of theirs holds queries, keys and values; ours are the queries, and keys and values together.
CUT = Change(lambda theirs: _first_third(theirs[0]), lambda ours: [torch.cat(ours)])
TRANSPOSED_CUT = Change(lambda theirs: _first_third(theirs[0].T), lambda ours: [torch.cat(ours).T.contiguous()])


def sequence(parts: int) -> Change:
    """Theirs are so many tensors of shape (1, n, E), ours is one of all their rows; each but the last has one row.

    >>> change = sequence(2)
    >>> ours = change.read([torch.ones(1, 1, 3), torch.zeros(1, 4, 3)])
    >>> ours[0].shape, [one.shape for one in change.write(ours)]
    (torch.Size([5, 3]), [torch.Size([1, 1, 3]), torch.Size([1, 4, 3])])
    """
    return Change(
        lambda theirs: [torch.cat(theirs, dim=1).squeeze(0)],
        lambda ours: [one.contiguous() for one in ours[0][None].tensor_split(list(range(1, parts)), dim=1)],
    )


class Row(NamedTuple):
    """Names of ours, names of theirs, and what lies between them."""

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    change: Change = SAME


def both(ours: str, theirs: str | tuple[str, ...], change: Change = SAME) -> list[Row]:
    """The rows of a layer's weight and of its bias.

    >>> both("output", "lm_head")[1][:2]
    ('output.bias', 'lm_head.bias')
    """
    return [
        Row(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), change)
        if isinstance(theirs, tuple)
        else Row(f"{ours}.{part}", f"{theirs}.{part}", change)
        for part in ("weight", "bias")
    ]


def attention_rows(ours: str, theirs: str, names: Sequence[str]) -> list[Row]:
    """The rows of an attention. `names` are theirs of the maps of queries, keys, values and outputs; or of a map that
    has queries, keys and values in one, and of outputs.

    >>> attention_rows("attention", "attn", ["qkv", "proj"])[0][:2]
    (('attention.query.weight', 'attention.key_value.weight'), 'attn.qkv.weight')
    """
    *maps, out = (f"{theirs}.{name}" for name in names)
    if len(maps) == 1:
        parts = ("weight", "bias")
        rows = [Row((f"{ours}.query.{one}", f"{ours}.key_value.{one}"), f"{maps[0]}.{one}", CUT) for one in parts]
    else:
        query, key, value = maps
        rows = [*both(f"{ours}.query", query), *both(f"{ours}.key_value", (key, value), STACKED)]
    return [*rows, *both(f"{ours}.out", out)]


def block_rows(
    theirs: str,
    *,
    attention: Sequence[str],
    feedforward: tuple[str | tuple[str, str], str],
    norms: Sequence[str],
    cross: Sequence[str] = (),
    ours: str = "blocks.{i}",
) -> list[Row]:
    """The rows of a Transformer block. Their names are relative to `theirs`, the name of the block.

    `attention` and `cross` are as in `attention_rows`; `feedforward` are the inner and the outer map, the inner one
    being two where one is the other's gate; `norms` are in the order of the sublayers. Rows of what a model does not
    have, such as biases, are passed over.

    >>> names = dict(attention=["q", "k", "v", "o"], feedforward=("fc1", "fc2"), norms=["norm1", "norm2"])
    >>> block_rows("layers.{i}", **names)[-1][:2]
    ('blocks.{i}.feedforward_norm.bias', 'layers.{i}.norm2.bias')
    """
    inner, outer = feedforward
    sublayers = ("attention", "cross", "feedforward") if cross else ("attention", "feedforward")
    gated = not isinstance(inner, str)
    whole = tuple(f"{theirs}.{name}" for name in inner) if gated else f"{theirs}.{inner}"
    return [
        *attention_rows(f"{ours}.attention", theirs, attention),
        *(attention_rows(f"{ours}.cross", theirs, cross) if cross else []),
        *both(f"{ours}.feedforward.inner", whole, STACKED if gated else SAME),
        *both(f"{ours}.feedforward.outer", f"{theirs}.{outer}"),
        *(row for name, norm in zip(sublayers, norms) for row in both(f"{ours}.{name}_norm", f"{theirs}.{norm}")),
    ]


class Table(NamedTuple):
    """The rows of a family; those of `layers` are repeated for each layer of a stack, under the stack's name.

    `beside` are names (with * and ?) of theirs that hold nothing that could be lost, such as the numbers 0, 1, 2, …
    `unused` are names of what belongs to other classes of the family, such as another head: files often have it, and
    it is left out with a warning. `twins` are names of theirs and of what they are a copy of. `prefix` is what their
    names have before them in some files and not in others.
    """

    rows: Sequence[Row]
    layers: Mapping[str, Sequence[Row]]
    beside: Sequence[str] = ()
    unused: Sequence[str] = ()
    twins: Sequence[tuple[str, str]] = ()
    prefix: str = ""

    def with_head(self, *rows: Row, twins: Sequence[tuple[str, str]] = ()) -> "Table":
        """The same with the prefix before their names, and beside it the rows of a head, which has no prefix."""
        return self._replace(
            rows=[*self._prefixed(self.rows), *rows],
            layers={stack: self._prefixed(rows) for stack, rows in self.layers.items()},
            twins=twins,
        )

    def _prefixed(self, rows: Sequence[Row]) -> list[Row]:
        return [row._replace(theirs=tuple(self.prefix + name for name in _names(row.theirs))) for row in rows]

    def expanded(self, counts: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Change]]:
        """Every row with its numbers filled in; `counts` are the layers of each stack."""
        for row in self.rows:
            yield _names(row.ours), _names(row.theirs), row.change
        for stack, rows in self.layers.items():
            for i in range(counts[stack]):
                for row in rows:
                    ours, theirs = ([name.replace("{i}", str(i)) for name in _names(x)] for x in row[:2])
                    yield tuple(ours), tuple(theirs), row.change


def shapes_of(config: Any) -> dict[str, torch.Size]:
    """The parameters of a model of this config, without making them.

    >>> from regard.models import GPTConfig
    >>> shapes_of(GPTConfig(width=10**9, vocab=7))["embedding.tokens.weight"]
    torch.Size([7, 1000000000])
    """
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in make_model(config).named_parameters()}


def read_model(
    config: Any, table: Table, counts: Mapping[str, int], theirs: Mapping[str, Tensor], origin: str
) -> dict[str, Tensor]:
    """The weights of a model of this config under our names, from their tensors; see `read_weights`."""
    if sum(counts.values()) > len(theirs):
        raise RegardError(
            f"{origin}: {sum(counts.values())} layers, but there are only {len(theirs)} tensors.", "Is it complete?"
        )
    try:
        shapes = shapes_of(config)
    except (RuntimeError, OverflowError) as error:  # numbers beyond what any tensor can be
        raise RegardError(f"{origin}: no model has such sizes ({error}).", "Fix the file.") from None
    return read_weights(table, counts, theirs, origin, shapes)


def read_weights(
    table: Table,
    counts: Mapping[str, int],
    theirs: Mapping[str, Tensor],
    origin: str,
    shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, Tensor]:
    """Their tensors under our names. What is missing, and what no row knows, is listed: nothing is skipped in silence.

    With `shapes`, those of the model's parameters, rows of parameters that it does not have are passed over (a bias,
    another head), and tensors of another shape are listed too.

    >>> table = Table([Row("output.weight", "lm_head.weight")], {})
    >>> read_weights(table, {}, {"lm_head.weight": torch.ones(2, 3)}, "x")["output.weight"].shape
    torch.Size([2, 3])
    """
    rows = [row for row in table.expanded(counts) if shapes is None or any(name in shapes for name in row[0])]
    wanted = {name for _, names, _ in rows for name in names}
    theirs = _as_named(table.prefix, theirs, wanted)
    differing = _merge_twins(table.twins, theirs, wanted)
    missing = sorted(wanted - theirs.keys())
    others = [name for name in theirs.keys() - wanted if not _any_of(table.beside, name)]
    unused = sorted(name for name in others if _any_of(table.unused, name))
    unknown = sorted(set(others) - set(unused))
    integers = sorted(name for name in wanted & theirs.keys() if not theirs[name].is_floating_point())
    problems = {
        "missing": missing,
        "unknown": unknown,
        "not of floating point": integers,
        "unlike what they should be a copy of": differing,
    }
    _refuse(origin, problems)
    found: dict[str, Tensor] = {}
    misshapen: list[str] = []
    for ours, names, change in rows:
        try:
            read = dict(zip(ours, change.read([theirs[name] for name in names]), strict=True))
        except (RuntimeError, ValueError, IndexError):  # which tensors of another shape lead to
            misshapen += names
            continue
        if shapes is not None and any(tensor.shape != shapes[name] for name, tensor in read.items()):
            misshapen += names
        found |= read
    _refuse(origin, {"of another shape": [f"{name} {tuple(theirs[name].shape)}" for name in misshapen]})
    if unused:
        logger.warning("%s: left out, for a model of this class has no use for it: %s", origin, ", ".join(unused))
    return found


def write_weights(table: Table, counts: Mapping[str, int], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under their names. Rows of which we have nothing are passed over."""
    found: dict[str, Tensor] = {}
    for names, theirs, change in table.expanded(counts):
        if any(name in ours for name in names):
            found |= dict(zip(theirs, change.write([ours[name] for name in names]), strict=True))
    return found


def _as_named(prefix: str, theirs: Mapping[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """The tensors by the names that the table has: files of BERT's first years say gamma and beta, and many lack the
    prefix, or have it where the class has none."""
    found = {}
    for name, tensor in theirs.items():
        newer = name
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if name.endswith(old):
                newer = name.removesuffix(old) + new
        spellings = (name, newer, prefix + newer, newer.removeprefix(prefix))
        found[next((one for one in spellings if one in wanted and (one == name or one not in theirs)), name)] = tensor
    return found


def _merge_twins(twins: Sequence[tuple[str, str]], theirs: dict[str, Tensor], wanted: set[str]) -> list[str]:
    """Takes copies away, out of a dictionary of its own; what remains are those that are none."""
    differing = []
    for copy, original in twins:
        if copy in theirs and copy not in wanted:
            tensor = theirs.pop(copy)
            if not torch.equal(theirs.setdefault(original, tensor), tensor):
                differing.append(copy)
    return differing


def _refuse(origin: str, problems: Mapping[str, Sequence[str]]) -> None:
    said = [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]
    if said:
        raise RegardError(
            f"{origin}: the tensors are not those of such a model ({'; '.join(said)}).", "Is it complete?"
        )


def _any_of(globs: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
