"""Recurrent layers (RNN, GRU, LSTM) over packed sequences, and attention over encoder states."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.stateless import _reparametrize_module

from regard.attention import attend, make_score, padding
from regard.attention.offsets import Lengths, Offsets
from regard.kernels.derivatives import is_exporting
from regard.layers.kv_cache import CrossAttentionCache

CellKind = Literal["rnn", "gru", "lstm"]

# Vectors per state (h; h and c), and linear maps per step: the gates and the candidate state.
PARTS: dict[CellKind, int] = {"rnn": 1, "gru": 1, "lstm": 2}
GATES: dict[CellKind, int] = {"rnn": 1, "gru": 3, "lstm": 4}
_MODULES: dict[CellKind, type[nn.RNN | nn.GRU | nn.LSTM]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True, eq=False)
class TimeMajorLayout:
    """Conversion between packed rows (N, E) and the time-major padded layout (M, B, E) of recurrent layers.

    With `backward` each sequence is reversed within its length. In both directions padding comes after the tokens, so
    that it affects no state that is used.

    >>> layout = TimeMajorLayout.from_offsets(Offsets.from_starts(torch.tensor([0, 2, 5])), backward=True)
    >>> layout.to_time_major(torch.arange(5.0)[:, None])[0, :, 0]  # the last row of each sequence comes first
    tensor([1., 4.])
    """

    rows: Int[Tensor, "M B"]
    """packed row at each step of each sequence"""
    cells: Int[Tensor, "N"]
    """index of each packed row in the flattened time-major layout"""

    @staticmethod
    def from_offsets(offsets: Offsets | Lengths, backward: bool = False) -> "TimeMajorLayout | PaddedTimeMajorLayout":
        if isinstance(offsets, Lengths):
            return PaddedTimeMajorLayout(offsets, backward)
        max_len, batch = offsets.max_len, len(offsets.starts) - 1
        rows, step, sequence = offsets.rows, offsets.cells % max_len, offsets.cells // max_len
        if backward:
            last = offsets.starts[1:].long() - 1
            rows = (last[:, None] - torch.arange(max_len, device=last.device)).clamp(min=0)
            step = offsets.lengths[sequence] - 1 - step
        return TimeMajorLayout(rows.T, step * batch + sequence)

    def to_time_major(self, x: Float[Tensor, "N E"]) -> Float[Tensor, "M B E"]:
        return x.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def from_time_major(self, x: Float[Tensor, "M B E"]) -> Float[Tensor, "N E"]:
        return x.flatten(0, 1).index_select(0, self.cells)


@dataclass(frozen=True, eq=False)
class PaddedTimeMajorLayout:
    """`TimeMajorLayout` for padded sequences (B, T, E).

    >>> layout = PaddedTimeMajorLayout(Lengths(torch.tensor([2, 3])), backward=True)
    >>> layout.to_time_major(torch.arange(6.0).view(2, 3, 1))[0, :, 0]
    tensor([1., 5.])
    """

    offsets: Lengths
    backward: bool = False

    def to_time_major(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "T B E"]:
        return self._reverse(x).transpose(0, 1)

    def from_time_major(self, x: Float[Tensor, "T B E"]) -> Float[Tensor, "B T E"]:
        return self._reverse(x.transpose(0, 1))

    def _reverse(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        lengths = self.offsets.lengths
        if not self.backward:
            return x
        if lengths is None:
            return x.flip(1)
        rows = (lengths[:, None] - 1 - torch.arange(x.shape[1], device=x.device)).clamp(min=0)
        return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))


def scan(
    module: nn.Module,
    step: Callable[..., tuple[Tensor, Tensor]],
    state: Tensor,
    xs: Float[Tensor, "T *x"],
    *shared: Tensor,
) -> Float[Tensor, "T *y"]:
    """The outputs y_t of the recurrence state_t, y_t = step(state_{t-1}, x_t, *shared).

    A Python loop; in export one scan operator for any length, which receives the parameters of `module` as inputs.

    >>> scan(nn.Module(), lambda total, x: (total + x, total + x), torch.tensor(0.0), torch.arange(4.0))
    tensor([0., 1., 3., 6.])
    """
    if is_exporting():
        # The operator itself: its front end compiles the body and loses the module path of each operation.
        from torch._higher_order_ops.scan import scan_op

        parameters = dict(module.named_parameters())

        def body(state: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            with _reparametrize_module(module, dict(zip(parameters, rest[len(shared) :]))):
                return step(state, x, *rest[: len(shared)])

        return scan_op(
            body, [state.clone(memory_format=torch.contiguous_format)], [xs], (*shared, *parameters.values())
        )[1]
    outputs = []
    for x in xs:
        state, output = step(state, x, *shared)
        outputs.append(output)
    return torch.stack(outputs)


def _without_autocast(device: torch.device) -> AbstractContextManager:
    """Disable autocast: rounding errors would accumulate over the steps. Export runs without autocast anyway."""
    return nullcontext() if is_exporting() else torch.autocast(device.type, enabled=False)


class Recurrent(nn.Module):
    """One layer of tanh, GRU or LSTM cells: full sequences by the fused kernel, or single steps with the same weights.

    A state has shape (P, E): h alone (tanh and GRU, P = 1) or h and c (LSTM, P = 2); h is the output. States have the
    dtype of the parameters, also under autocast: rounding errors would accumulate over the steps.

    >>> layer = Recurrent("gru", 8, 16)
    >>> layer(torch.randn(5, 8), TimeMajorLayout.from_offsets(Offsets.from_starts(torch.tensor([0, 2, 5])))).shape
    torch.Size([5, 16])
    """

    def __init__(self, cell: CellKind, dim_in: int, width: int) -> None:
        super().__init__()
        self.cell, self.parts = cell, PARTS[cell]
        self.rnn = _MODULES[cell](dim_in, width)
        weight_x, weight_h, bias_x, bias_h = self.rnn.all_weights[0]
        with torch.no_grad():
            # Each gate: Xavier for the input, orthogonal for the state, so that its norm neither vanishes nor explodes.
            for gate_x, gate_h in zip(weight_x.split(width), weight_h.split(width)):
                nn.init.xavier_uniform_(gate_x)
                nn.init.orthogonal_(gate_h)
            nn.init.zeros_(bias_x)
            nn.init.zeros_(bias_h)
            if cell == "lstm":
                # Forget gates (the second of four) start open (Jozefowicz et al. 2015).
                bias_x[width : 2 * width] = 1.0

    def forward(
        self,
        x: Float[Tensor, "*n I"],
        layout: TimeMajorLayout | PaddedTimeMajorLayout,
        state: Float[Tensor, "B P E"] | None = None,
    ) -> Float[Tensor, "*n E"]:
        """The output at each token, starting from `state` (default: zeros)."""
        dtype = self.rnn.all_weights[0][0].dtype
        if is_exporting():
            inputs = self.inputs(layout.to_time_major(x))
            if state is None:
                state = inputs.new_zeros(inputs.shape[1], self.parts, self.rnn.hidden_size)
            return layout.from_time_major(scan(self, self._state_and_output, state, inputs))
        with _without_autocast(x.device):
            initial = None
            if state is not None:
                parts = state.to(dtype).transpose(0, 1).contiguous()
                initial = parts if self.parts == 1 else (parts[:1], parts[1:])
            outputs, _ = self.rnn(layout.to_time_major(x.to(dtype)), initial)
            return layout.from_time_major(outputs)

    def inputs(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n G"]:
        """The input part of the gates, W x + b: independent of the state, so computed for all steps at once."""
        weight, _, bias, _ = self.rnn.all_weights[0]
        return linear(x, weight, bias)

    def _state_and_output(self, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        state = self.step(inputs, state)
        return state, state[..., 0, :].clone()  # the outputs of a scan may not alias the state

    def step(self, inputs: Float[Tensor, "*n G"], state: Float[Tensor, "*n P E"]) -> Float[Tensor, "*n P E"]:
        """The next state."""
        _, weight, _, bias = self.rnn.all_weights[0]
        with _without_autocast(state.device):
            inputs, state = inputs.to(weight.dtype), state.to(weight.dtype)
            h = state[..., 0, :]
            hidden = linear(h, weight, bias)
            if self.cell == "rnn":
                return torch.tanh(inputs + hidden).unsqueeze(-2)  # Elman 1990
            if self.cell == "gru":
                # Cho et al. 2014, with the reset gate after the matrix product, as in cuDNN.
                (reset_x, update_x, new_x), (reset_h, update_h, new_h) = inputs.chunk(3, -1), hidden.chunk(3, -1)
                new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
                return torch.lerp(new, h, torch.sigmoid(update_x + update_h)).unsqueeze(-2)
            input_gate, forget_gate, new, output_gate = (inputs + hidden).chunk(4, -1)
            c = torch.sigmoid(forget_gate) * state[..., 1, :] + torch.sigmoid(input_gate) * torch.tanh(new)
            return torch.stack((torch.sigmoid(output_gate) * torch.tanh(c), c), dim=-2)


class Bidirectional(nn.Module):
    """A forward and a backward layer; the output at a token is [forward state; backward state], C = 2E.

    >>> offsets = Offsets.from_starts(torch.tensor([0, 2, 5]))
    >>> layer = Bidirectional("lstm", 8, 16)
    >>> forward, backward = (TimeMajorLayout.from_offsets(offsets, backward) for backward in (False, True))
    >>> rows = layer(torch.randn(5, 8), forward, backward)
    >>> rows.shape, layer.final_state(rows, offsets).shape
    (torch.Size([5, 32]), torch.Size([2, 32]))
    """

    def __init__(self, cell: CellKind, dim_in: int, width: int) -> None:
        super().__init__()
        self.forward_layer = Recurrent(cell, dim_in, width)
        self.backward_layer = Recurrent(cell, dim_in, width)

    def forward(
        self,
        x: Float[Tensor, "*n I"],
        forward: TimeMajorLayout | PaddedTimeMajorLayout,
        backward: TimeMajorLayout | PaddedTimeMajorLayout,
    ) -> Float[Tensor, "*n C"]:
        return torch.cat((self.forward_layer(x, forward), self.backward_layer(x, backward)), dim=-1)

    @staticmethod
    def final_state(rows: Float[Tensor, "*n C"], offsets: Offsets | Lengths) -> Float[Tensor, "B C"]:
        """The final state of each direction: forward at the last token, backward at the first. Zeros if empty."""
        forward, backward = rows.chunk(2, dim=-1)
        if isinstance(offsets, Lengths):
            return torch.cat((last_valid(forward, offsets), backward[:, 0]), dim=-1)
        last = (offsets.starts[1:].long() - 1).clamp(min=0)
        first = offsets.starts[:-1].long().clamp(max=max(offsets.total - 1, 0))
        states = torch.cat((forward.index_select(0, last), backward.index_select(0, first)), dim=-1)
        return states * (offsets.lengths > 0)[:, None]


def last_valid(x: Float[Tensor, "B T E"], offsets: Lengths) -> Float[Tensor, "B E"]:
    """The last valid row of each padded sequence.

    >>> last_valid(torch.arange(6.0).view(2, 3, 1), Lengths(torch.tensor([2, 3])))[:, 0]
    tensor([1., 5.])
    """
    if offsets.lengths is None:
        return x[:, -1]
    return x.gather(1, (offsets.lengths - 1)[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


class Unidirectional(nn.Module):
    """A forward layer; the output at a token is its state, C = E.

    The interface is that of `Bidirectional`; the backward layout is unused.

    >>> offsets = Offsets.from_starts(torch.tensor([0, 2, 5]))
    >>> layer = Unidirectional("rnn", 8, 16)
    >>> rows = layer(torch.randn(5, 8), TimeMajorLayout.from_offsets(offsets))
    >>> torch.equal(layer.final_state(rows, offsets), rows[[1, 4]])
    True
    """

    def __init__(self, cell: CellKind, dim_in: int, width: int) -> None:
        super().__init__()
        self.forward_layer = Recurrent(cell, dim_in, width)

    def forward(
        self,
        x: Float[Tensor, "*n I"],
        forward: TimeMajorLayout | PaddedTimeMajorLayout,
        backward: TimeMajorLayout | PaddedTimeMajorLayout | None = None,
    ) -> Float[Tensor, "*n C"]:
        return self.forward_layer(x, forward)

    @staticmethod
    def final_state(rows: Float[Tensor, "*n C"], offsets: Offsets | Lengths) -> Float[Tensor, "B C"]:
        """The state at the last token of each sequence; zeros if empty."""
        if isinstance(offsets, Lengths):
            return last_valid(rows, offsets)
        last = (offsets.starts[1:].long() - 1).clamp(min=0)
        return rows.index_select(0, last) * (offsets.lengths > 0)[:, None]


class StateAttention(nn.Module):
    """Single-head attention of decoder states over encoder states: c_t = Σ_i a_ti h_i; values are the keys.

    >>> attention = StateAttention(16, score="dot")
    >>> states, offsets = torch.randn(5, 16), Offsets.from_starts(torch.tensor([0, 2, 5]))
    >>> attention(states, states, offsets, offsets).shape
    torch.Size([5, 16])
    """

    kind = "cross"

    def __init__(self, width: int, score: str, hidden: int = 0, max_keys: int = 256) -> None:
        super().__init__()
        self.score = make_score(score, width, width, hidden=hidden or width, max_keys=max_keys)

    def forward(
        self,
        states: Float[Tensor, "*n E"],
        memory: Float[Tensor, "*m E"] | CrossAttentionCache,
        offsets: Offsets | Lengths | None = None,
        memory_offsets: Offsets | Lengths | None = None,
    ) -> Float[Tensor, "*n E"]:
        """All steps of packed states (N, E) in one call or, with a cache, one step for each (B, K) hypothesis."""
        # Under autocast the memory, a matrix product, has low precision; the states do not.
        if isinstance(memory, CrossAttentionCache):
            queries = states[:, None].to(memory.k.dtype)
            return attend(queries, memory.k, memory.v, score=self.score, mask=memory.mask).squeeze(1)
        queries, keys = states[:, None].to(memory.dtype), memory[:, None]
        if isinstance(memory_offsets, Lengths):
            mask = None if memory_offsets.lengths is None else padding(memory_offsets.lengths)
            return attend(queries, keys, keys, score=self.score, mask=mask).squeeze(1)
        assert not isinstance(offsets, Lengths)
        context = attend(queries, keys, keys, score=self.score, q_offsets=offsets, k_offsets=memory_offsets)
        return context.squeeze(1)
