"""Packed sequences for kernels that know only rectangles: unpacked here, and nowhere else.

One rectangle holds the batch when lengths are alike, as in training; otherwise sequences of about the same length share
one, so that cells are never more than twice the tokens. Where lengths cannot be read (a GPU would have to be waited
for, a compiler would have to guess) it is always one.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.kernels import Call
from regard.attention.masks import Form
from regard.attention.offsets import Offsets, to_keep


def run(call: Call, padded: Callable[[Call], Tensor]) -> Float[Tensor, "N H Dv"]:
    """Unpacks, lets `padded` compute each rectangle, packs again."""
    assert call.q_offsets is not None
    assert call.k_offsets is not None
    if call.q_offsets.even and call.k_offsets.even:
        B = len(call.q_offsets.starts) - 1
        q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (call.q, call.k, call.v))
        out = padded(Call(q, k, v, call.score, call.form, call.bias, unpacked=True))
        return out.transpose(1, 2).flatten(0, 1)
    q_side, k_side, chosen, lengths = _layout(call.q_offsets, call.k_offsets)
    parts = []
    for i, (q, k, v) in enumerate(zip(q_side.unpack(call.q), k_side.unpack(call.k), k_side.unpack(call.v))):
        form = call.form if chosen is None else call.form.of_batch(chosen[i])
        # Where no query looks ahead none sees the padded end: it comes after the sequence's own queries.
        if lengths[i] is not None and not form.causal and form.window is None:
            form = form.both(Form(lengths=lengths[i]))
        parts.append(padded(Call(q, k, v, call.score, form, call.bias, unpacked=True)))
    return q_side.pack(parts)


@dataclass(frozen=True, eq=False)
class Side:
    """Queries or keys of the rectangles: where each packed row goes.

    The rectangles lie one after another in one flat tensor. With one head, row n goes to cell origins[n] + places[n];
    with H, head h of it to origins[n] * H + h * widths[n] + places[n], for a sequence's heads lie one after another.
    """

    shapes: list[tuple[int, int]]  # sequences, and cells of each, for each rectangle
    origins: Int[Tensor, "N"]
    places: Int[Tensor, "N"]
    widths: Int[Tensor, "N"] | int
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """One rectangle, full to the last cell: nothing needs to move."""
        return len(self.shapes) == 1 and len(self.origins) == self.shapes[0][0] * self.shapes[0][1]

    def unpack(self, x: Float[Tensor, "N H D"]) -> list[Float[Tensor, "_ H _ D"]]:
        _, H, D = x.shape
        if self.full:
            return [x.reshape(*self.shapes[0], H, D).transpose(1, 2)]
        flat = _Unpack.apply(x.flatten(0, 1), *self._rows_and_cells(H))
        parts = flat.split([b * m * H for b, m in self.shapes]) if len(self.shapes) > 1 else [flat]
        return [part.view(b, H, m, D) for part, (b, m) in zip(parts, self.shapes)]

    def pack(self, parts: list[Float[Tensor, "_ H _ D"]]) -> Float[Tensor, "N H D"]:
        H, D = parts[0].shape[1], parts[0].shape[3]
        if self.full:
            return parts[0].transpose(1, 2).reshape(-1, H, D)
        flat = torch.cat([part.reshape(-1, D) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1, D)
        return _Pack.apply(flat, self._rows_and_cells(H)[1]).view(-1, H, D)

    def _rows_and_cells(self, H: int) -> tuple[Int[Tensor, "RH"], Int[Tensor, "NH"]]:
        def both() -> tuple[Tensor, Tensor]:
            heads = torch.arange(H, device=self.origins.device)
            widths = self.widths if isinstance(self.widths, int) else self.widths[:, None]
            cells = ((self.origins * H + self.places)[:, None] + heads * widths).flatten()
            # An empty cell names row 0: whatever it holds is masked, or dropped on the way back.
            rows = torch.zeros(H * sum(b * m for b, m in self.shapes), dtype=torch.long, device=cells.device)
            rows[cells] = torch.arange(len(cells), device=cells.device)
            return rows, cells

        if torch.compiler.is_compiling():
            return both()
        if H not in self.kept:
            self.kept[H] = to_keep(both)
        return self.kept[H]


def _layout(
    q_offsets: Offsets, k_offsets: Offsets
) -> tuple[Side, Side, list[Int[Tensor, "b"]] | None, list[Int[Tensor, "b"] | None]]:
    """Both sides of the rectangles, and for each the sequences in it (None: all) and its lengths (None: all full)."""
    if torch.compiler.is_compiling() or q_offsets.starts.device.type != "cpu":
        B = len(q_offsets.starts) - 1
        q_side, k_side = (
            Side([(B, o.max_len)], o.sequences * o.max_len, o.places, o.max_len) for o in (q_offsets, k_offsets)
        )
        return q_side, k_side, None, [k_offsets.lengths]
    if k_offsets not in q_offsets.layouts:
        q_offsets.layouts[k_offsets] = to_keep(lambda: _read_layout(q_offsets, k_offsets))
    return q_offsets.layouts[k_offsets]


def _read_layout(q_offsets: Offsets, k_offsets: Offsets):
    q_lengths, k_lengths = q_offsets.lengths.tolist(), k_offsets.lengths.tolist()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    B = len(q_lengths)
    if all(B * max(ls, default=0) <= 2 * sum(ls) for ls in (q_lengths, k_lengths)):
        groups[0, 0] = list(range(B))
    else:
        for b, (t, s) in enumerate(zip(q_lengths, k_lengths)):
            if t or s:
                # Lengths from 2^(i-1) + 1 to 2^i share a rectangle: at least half of it is full.
                groups[(t - 1).bit_length(), (s - 1).bit_length()].append(b)
    chosen = [torch.tensor(group) for group in groups.values()]
    sides = [
        _side(offsets, ls, list(groups.values())) for offsets, ls in ((q_offsets, q_lengths), (k_offsets, k_lengths))
    ]
    lengths = [
        None if all(k_lengths[b] == m for b in group) else k_offsets.lengths[which]
        for group, which, (_, m) in zip(groups.values(), chosen, sides[1].shapes)
    ]
    everything = len(chosen) == 1 and len(chosen[0]) == B
    return *sides, None if everything else chosen, lengths


def _side(offsets: Offsets, lengths: list[int], groups: list[list[int]]) -> Side:
    # An empty sequence still gets a cell, so that no rectangle is without rows or columns.
    shapes = [(len(group), max(1, *(lengths[b] for b in group))) for group in groups]
    origins, widths = [0] * len(lengths), [0] * len(lengths)
    start = 0
    for group, (_, m) in zip(groups, shapes):
        for b in group:
            origins[b], widths[b] = start, m
            start += m
    sequences = offsets.sequences
    return Side(shapes, torch.tensor(origins)[sequences], offsets.places, torch.tensor(widths)[sequences])


class _Unpack(torch.autograd.Function):
    """x[rows]; each packed row has one cell of its own, so the gradient is g[cells] rather than a sum over cells."""

    @staticmethod
    def forward(ctx, x, rows, cells):  # type: ignore[override]
        ctx.save_for_backward(cells)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Pack(torch.autograd.Function):
    """x[cells]; the gradient of an empty cell is zero."""

    @staticmethod
    def forward(ctx, x, cells):  # type: ignore[override]
        ctx.save_for_backward(cells)
        ctx.cells = len(x)
        return x.index_select(0, cells)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.cells, grad.shape[1]).index_copy_(0, ctx.saved_tensors[0], grad), None
