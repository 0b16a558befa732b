"""Packed sequences on backends that support only padded batches: pad, run, and pack again.

If lengths are similar, as in training, there is one padded batch; otherwise one for each range of lengths, so
that there are never more than twice as many cells (padded positions) as tokens. On a GPU or in compiled code, where
reading lengths would synchronize or specialize, there is always a single batch.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.backends.call import Call
from regard.attention.masks import MaskParts
from regard.attention.offsets import Offsets, outside_inference_mode


def run(call: Call, run_padded: Callable[[Call], Tensor]) -> Float[Tensor, "N H Dv"]:
    """Pad the sequences, call `run_padded` for each padded batch, and pack the outputs."""
    assert call.q_offsets is not None
    assert call.k_offsets is not None
    if call.q_offsets.is_rectangular and call.k_offsets.is_rectangular:
        B = len(call.q_offsets.starts) - 1
        q, k, v = (x.unflatten(0, (B, -1)).transpose(1, 2) for x in (call.q, call.k, call.v))
        out = run_padded(Call(q, k, v, call.score, call.mask_parts, call.bias, is_padded=True))
        return out.transpose(1, 2).flatten(0, 1)
    layout = _layout(call.q_offsets, call.k_offsets)
    padded = zip(layout.q.pad(call.q), layout.k.pad(call.k), layout.k.pad(call.v))
    outputs = []
    for i, (q, k, v) in enumerate(padded):
        parts = call.mask_parts if layout.sequences is None else call.mask_parts.select_sequences(layout.sequences[i])
        lengths = layout.lengths[i]
        # Causal queries do not attend to padding: it comes after the last query of the sequence.
        if lengths is not None and not parts.causal and parts.window is None:
            parts = parts.intersect(MaskParts(lengths=lengths))
        outputs.append(run_padded(Call(q, k, v, call.score, parts, call.bias, is_padded=True)))
    return layout.q.pack(outputs)


@dataclass(frozen=True, eq=False)
class PaddedLayout:
    """The layout of packed rows, of queries or of keys, in padded batches.

    The batches follow one another in one flat tensor. With one head, row n goes to cell origins[n] + positions[n]; with
    H heads, its head h goes to origins[n] * H + h * widths[n] + positions[n].
    """

    shapes: list[tuple[int, int]]  # of each batch: number of sequences, padded length
    origins: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]
    widths: Int[Tensor, "N"] | int
    index_cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether there is one batch without padding: no data needs to move."""
        return len(self.shapes) == 1 and len(self.origins) == self.shapes[0][0] * self.shapes[0][1]

    def pad(self, x: Float[Tensor, "N H D"]) -> list[Float[Tensor, "_ H _ D"]]:
        _, H, D = x.shape
        if self.is_full:
            return [x.reshape(*self.shapes[0], H, D).transpose(1, 2)]
        flat = _Pad.apply(x.flatten(0, 1), *self._indices(H))
        parts = flat.split([b * m * H for b, m in self.shapes]) if len(self.shapes) > 1 else [flat]
        return [part.view(b, H, m, D) for part, (b, m) in zip(parts, self.shapes)]

    def pack(self, parts: list[Float[Tensor, "_ H _ D"]]) -> Float[Tensor, "N H D"]:
        H, D = parts[0].shape[1], parts[0].shape[3]
        if self.is_full:
            return parts[0].transpose(1, 2).reshape(-1, H, D)
        flat = torch.cat([part.reshape(-1, D) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1, D)
        return _Pack.apply(flat, self._indices(H)[1]).view(-1, H, D)

    def _indices(self, H: int) -> tuple[Int[Tensor, "RH"], Int[Tensor, "NH"]]:
        """For each cell its packed row, and for each packed row its cell; each head counts as a row."""

        def compute() -> tuple[Tensor, Tensor]:
            heads = torch.arange(H, device=self.origins.device)
            widths = self.widths if isinstance(self.widths, int) else self.widths[:, None]
            cells = ((self.origins * H + self.positions)[:, None] + heads * widths).flatten()
            # Padding refers to row 0: its value is masked, and its gradient dropped.
            rows = torch.zeros(H * sum(b * m for b, m in self.shapes), dtype=torch.long, device=cells.device)
            rows[cells] = torch.arange(len(cells), device=cells.device)
            return rows, cells

        if torch.compiler.is_compiling():
            return compute()
        if H not in self.index_cache:
            self.index_cache[H] = outside_inference_mode(compute)
        return self.index_cache[H]


class BatchLayouts(NamedTuple):
    """Layouts of queries and keys in padded batches."""

    q: PaddedLayout
    k: PaddedLayout
    sequences: list[Int[Tensor, "b"]] | None
    """of each batch: the indices of its sequences; None: one batch of all sequences"""
    lengths: list[Int[Tensor, "b"] | None]
    """of each batch: the lengths of its keys; None: no padding"""


def _layout(q_offsets: Offsets, k_offsets: Offsets) -> BatchLayouts:
    if torch.compiler.is_compiling() or q_offsets.starts.device.type != "cpu":
        B = len(q_offsets.starts) - 1
        q_layout, k_layout = (
            PaddedLayout(
                [(B, offsets.max_len)], offsets.sequences * offsets.max_len, offsets.positions, offsets.max_len
            )
            for offsets in (q_offsets, k_offsets)
        )
        return BatchLayouts(q_layout, k_layout, None, [k_offsets.lengths])
    if k_offsets not in q_offsets.layouts:
        q_offsets.layouts[k_offsets] = outside_inference_mode(lambda: _grouped_layout(q_offsets, k_offsets))
    return q_offsets.layouts[k_offsets]


def _grouped_layout(q_offsets: Offsets, k_offsets: Offsets) -> BatchLayouts:
    """One padded batch, or several by length if more than half of one would be padding."""
    q_lengths, k_lengths = q_offsets.lengths.tolist(), k_offsets.lengths.tolist()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    B = len(q_lengths)
    if all(B * max(lengths, default=0) <= 2 * sum(lengths) for lengths in (q_lengths, k_lengths)):
        groups[0, 0] = list(range(B))
    else:
        for b, (t, s) in enumerate(zip(q_lengths, k_lengths)):
            if t or s:
                # Lengths from 2^(i-1) + 1 to 2^i share a batch: at most half of it is padding.
                groups[(t - 1).bit_length(), (s - 1).bit_length()].append(b)
    sequences = [torch.tensor(group) for group in groups.values()]
    q_layout, k_layout = (
        _padded_layout(offsets, lengths, list(groups.values()))
        for offsets, lengths in ((q_offsets, q_lengths), (k_offsets, k_lengths))
    )
    batch_lengths = [
        None if all(k_lengths[b] == padded_len for b in group) else k_offsets.lengths[indices]
        for group, indices, (_, padded_len) in zip(groups.values(), sequences, k_layout.shapes)
    ]
    is_one_batch = len(sequences) == 1 and len(sequences[0]) == B
    return BatchLayouts(q_layout, k_layout, None if is_one_batch else sequences, batch_lengths)


def _padded_layout(offsets: Offsets, lengths: list[int], groups: list[list[int]]) -> PaddedLayout:
    # An empty sequence gets one cell, so that every batch has at least one row and one column.
    shapes = [(len(group), max(1, *(lengths[b] for b in group))) for group in groups]
    origins, widths = [0] * len(lengths), [0] * len(lengths)
    start = 0
    for group, (_, padded_len) in zip(groups, shapes):
        for b in group:
            origins[b], widths[b] = start, padded_len
            start += padded_len
    sequences = offsets.sequences
    return PaddedLayout(shapes, torch.tensor(origins)[sequences], offsets.positions, torch.tensor(widths)[sequences])


class _Pad(torch.autograd.Function):
    """x[rows]; each packed row has exactly one cell, so the gradient is grad[cells] instead of a sum over cells."""

    @staticmethod
    def forward(ctx, x, rows, cells):  # type: ignore[override]
        ctx.save_for_backward(cells)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Pack(torch.autograd.Function):
    """x[cells]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx, x, cells):  # type: ignore[override]
        ctx.save_for_backward(cells)
        ctx.cell_count = len(x)
        return x.index_select(0, cells)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.cell_count, grad.shape[1]).index_copy_(0, ctx.saved_tensors[0], grad), None
