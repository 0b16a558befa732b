"""Recurrent layers over packed sequences, and attention over an encoder's states."""

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
from regard.layers.kv_cache import MemoryCache

CellKind = Literal["rnn", "gru", "lstm"]

# Vectors per state (h; h and c), and linear maps per step: the gates and the candidate state.
PARTS: dict[CellKind, int] = {"rnn": 1, "gru": 1, "lstm": 2}
GATES: dict[CellKind, int] = {"rnn": 1, "gru": 3, "lstm": 4}
_MODULES: dict[CellKind, type[nn.RNN | nn.GRU | nn.LSTM]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True, eq=False)
class Steps:
    """The order in which a recurrent layer reads a packed run: all first tokens, all second tokens, and so on.

    Read backward, each sequence is turned round within its own length. Either way the cells that hold no token come
    after those that do, so what stands in them reaches no state that anybody reads.

    >>> steps = Steps.of(Offsets.of(torch.tensor([0, 2, 5])), backward=True)
    >>> steps.spread(torch.arange(5.0)[:, None])[0, :, 0]  # the last row of each sequence is read first
    tensor([1., 4.])
    """

    rows: Int[Tensor, "M B"]  # the packed row read at each step
    cells: Int[Tensor, "N"]  # where in the flattened rows each packed row is read: the way back

    @staticmethod
    def of(offsets: Offsets | Lengths, backward: bool = False) -> "Steps | PaddedSteps":
        if isinstance(offsets, Lengths):
            return PaddedSteps(offsets, backward)
        longest, batch = offsets.max_len, len(offsets.starts) - 1
        rows, step, sequence = offsets.rows, offsets.cells % longest, offsets.cells // longest
        if backward:
            last = offsets.starts[1:].long() - 1
            rows = (last[:, None] - torch.arange(longest, device=last.device)).clamp(min=0)
            step = offsets.lengths[sequence] - 1 - step
        return Steps(rows.T, step * batch + sequence)

    def spread(self, x: Float[Tensor, "N E"]) -> Float[Tensor, "M B E"]:
        return x.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def collect(self, x: Float[Tensor, "M B E"]) -> Float[Tensor, "N E"]:
        return x.flatten(0, 1).index_select(0, self.cells)


@dataclass(frozen=True, eq=False)
class PaddedSteps:
    """The same order for a rectangle (B, T, E). Read backward, each row is reversed within its length.

    >>> steps = PaddedSteps(Lengths(torch.tensor([2, 3])), backward=True)
    >>> steps.spread(torch.arange(6.0).view(2, 3, 1))[0, :, 0]
    tensor([1., 5.])
    """

    offsets: Lengths
    backward: bool = False

    def spread(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "T B E"]:
        return self._ordered(x).transpose(0, 1)

    def collect(self, x: Float[Tensor, "T B E"]) -> Float[Tensor, "B T E"]:
        return self._ordered(x.transpose(0, 1))

    def _ordered(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
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
    """The outputs y_t of state_t, y_t = step(state_{t-1}, x_t, *shared), one after another.

    An exported program has one loop for any length, to which the parameters of `module` are passed; elsewhere it is a
    plain loop.

    >>> scan(nn.Module(), lambda total, x: (total + x, total + x), torch.tensor(0.0), torch.arange(4.0))
    tensor([0., 1., 3., 6.])
    """
    if torch.compiler.is_exporting():
        # The operator itself, not its front end, whose compiler would forget which module each operation is of.
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
    """Full precision: rounding would add up from step to step. A program that is exported has no autocast to leave."""
    return nullcontext() if torch.compiler.is_exporting() else torch.autocast(device.type, enabled=False)


class Recurrent(nn.Module):
    """One layer of tanh, GRU or LSTM cells: whole sequences by the fused kernel, or single steps with the same weights.

    A state is (P, E) numbers: h alone (tanh and GRU, P = 1) or h and c (LSTM, P = 2); h is the output. States are kept
    in the parameters' precision, under autocast too: rounding would add up from step to step.

    >>> layer = Recurrent("gru", 8, 16)
    >>> layer(torch.randn(5, 8), Steps.of(Offsets.of(torch.tensor([0, 2, 5])))).shape
    torch.Size([5, 16])
    """

    def __init__(self, cell: CellKind, dim_in: int, width: int) -> None:
        super().__init__()
        self.cell, self.parts = cell, PARTS[cell]
        self.rnn = _MODULES[cell](dim_in, width)
        weight_x, weight_h, bias_x, bias_h = self.rnn.all_weights[0]
        with torch.no_grad():
            # Gate by gate: xavier for the input, and for the state orthogonal, under which it neither fades nor grows.
            for gate_x, gate_h in zip(weight_x.split(width), weight_h.split(width)):
                nn.init.xavier_uniform_(gate_x)
                nn.init.orthogonal_(gate_h)
            nn.init.zeros_(bias_x)
            nn.init.zeros_(bias_h)
            if cell == "lstm":
                # It begins by remembering: the forget gate is the second of four.
                bias_x[width : 2 * width] = 1.0

    def forward(
        self, x: Float[Tensor, "*n I"], steps: Steps | PaddedSteps, state: Float[Tensor, "B P E"] | None = None
    ) -> Float[Tensor, "*n E"]:
        """The output at each packed row, from a first state for each sequence (zeros without)."""
        dtype = self.rnn.all_weights[0][0].dtype
        if torch.compiler.is_exporting():
            inputs = self.inputs(steps.spread(x))
            if state is None:
                state = inputs.new_zeros(inputs.shape[1], self.parts, self.rnn.hidden_size)
            return steps.collect(scan(self, self._state_and_output, state, inputs))
        with _without_autocast(x.device):
            first = None
            if state is not None:
                parts = state.to(dtype).transpose(0, 1).contiguous()
                first = parts if self.parts == 1 else (parts[:1], parts[1:])
            outputs, _ = self.rnn(steps.spread(x.to(dtype)), first)
            return steps.collect(outputs)

    def inputs(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n G"]:
        """What the input adds to the gates, W x + b: it waits for no state, so many steps can be had at once."""
        weight, _, bias, _ = self.rnn.all_weights[0]
        return linear(x, weight, bias)

    def _state_and_output(self, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        state = self.step(inputs, state)
        return state, state[..., 0, :].clone()  # a loop's outputs may not share memory

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
                # Cho et al. 2014, with the reset gate after the matrix, as the fused kernels have it.
                (reset_x, update_x, new_x), (reset_h, update_h, new_h) = inputs.chunk(3, -1), hidden.chunk(3, -1)
                new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
                return torch.lerp(new, h, torch.sigmoid(update_x + update_h)).unsqueeze(-2)
            write, forget, new, show = (inputs + hidden).chunk(4, -1)
            c = torch.sigmoid(forget) * state[..., 1, :] + torch.sigmoid(write) * torch.tanh(new)
            return torch.stack((torch.sigmoid(show) * torch.tanh(c), c), dim=-2)


class Bidirectional(nn.Module):
    """Two layers read the same sequences from both ends; a token's row is both states, [forward; backward], C = 2E.

    >>> offsets = Offsets.of(torch.tensor([0, 2, 5]))
    >>> layer = Bidirectional("lstm", 8, 16)
    >>> rows = layer(torch.randn(5, 8), Steps.of(offsets), Steps.of(offsets, backward=True))
    >>> rows.shape, layer.final(rows, offsets).shape
    (torch.Size([5, 32]), torch.Size([2, 32]))
    """

    def __init__(self, cell: CellKind, dim_in: int, width: int) -> None:
        super().__init__()
        self.forward_layer = Recurrent(cell, dim_in, width)
        self.backward_layer = Recurrent(cell, dim_in, width)

    def forward(
        self, x: Float[Tensor, "*n I"], forward: Steps | PaddedSteps, backward: Steps | PaddedSteps
    ) -> Float[Tensor, "*n C"]:
        return torch.cat((self.forward_layer(x, forward), self.backward_layer(x, backward)), dim=-1)

    @staticmethod
    def final(rows: Float[Tensor, "*n C"], offsets: Offsets | Lengths) -> Float[Tensor, "B C"]:
        """Each direction's state once it has read all: at the last token, and at the first. Nothing read: zeros."""
        ahead, behind = rows.chunk(2, dim=-1)
        if isinstance(offsets, Lengths):
            return torch.cat((last_valid(ahead, offsets), behind[:, 0]), dim=-1)
        last = (offsets.starts[1:].long() - 1).clamp(min=0)
        first = offsets.starts[:-1].long().clamp(max=max(offsets.total - 1, 0))
        states = torch.cat((ahead.index_select(0, last), behind.index_select(0, first)), dim=-1)
        return states * (offsets.lengths > 0)[:, None]


def last_valid(x: Float[Tensor, "B T E"], offsets: Lengths) -> Float[Tensor, "B E"]:
    """The last row of each sequence of a rectangle.

    >>> last_valid(torch.arange(6.0).view(2, 3, 1), Lengths(torch.tensor([2, 3])))[:, 0]
    tensor([1., 5.])
    """
    if offsets.lengths is None:
        return x[:, -1]
    return x.gather(1, (offsets.lengths - 1)[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


class Unidirectional(nn.Module):
    """One layer that reads from the first token to the last; a token's row is its state, C = E.

    The same interface as `Bidirectional`: the steps of the other direction are not used.

    >>> offsets = Offsets.of(torch.tensor([0, 2, 5]))
    >>> layer = Unidirectional("rnn", 8, 16)
    >>> rows = layer(torch.randn(5, 8), Steps.of(offsets))
    >>> torch.equal(layer.final(rows, offsets), rows[[1, 4]])
    True
    """

    def __init__(self, cell: CellKind, dim_in: int, width: int) -> None:
        super().__init__()
        self.forward_layer = Recurrent(cell, dim_in, width)

    def forward(
        self, x: Float[Tensor, "*n I"], forward: Steps | PaddedSteps, backward: Steps | PaddedSteps | None = None
    ) -> Float[Tensor, "*n C"]:
        return self.forward_layer(x, forward)

    @staticmethod
    def final(rows: Float[Tensor, "*n C"], offsets: Offsets | Lengths) -> Float[Tensor, "B C"]:
        """The state at the last token of each sequence; zeros for an empty one."""
        if isinstance(offsets, Lengths):
            return last_valid(rows, offsets)
        last = (offsets.starts[1:].long() - 1).clamp(min=0)
        return rows.index_select(0, last) * (offsets.lengths > 0)[:, None]


class StateAttention(nn.Module):
    """A decoder's state looks at an encoder's: c_t = Σ_i a_ti h_i, one head; the values are the keys themselves.

    >>> attention = StateAttention(16, score="dot")
    >>> states, offsets = torch.randn(5, 16), Offsets.of(torch.tensor([0, 2, 5]))
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
        memory: Float[Tensor, "*m E"] | MemoryCache,
        offsets: Offsets | Lengths | None = None,
        memory_offsets: Offsets | Lengths | None = None,
    ) -> Float[Tensor, "*n E"]:
        """All steps of a packed run (N, E) in one call; or, with a cache, one step for each (B, K) hypothesis."""
        # Under autocast the memory comes from a matrix product and is narrow; states are not.
        if isinstance(memory, MemoryCache):
            queries = states[:, None].to(memory.k.dtype)
            return attend(queries, memory.k, memory.v, score=self.score, mask=memory.mask).squeeze(1)
        queries, keys = states[:, None].to(memory.dtype), memory[:, None]
        if isinstance(memory_offsets, Lengths):
            mask = None if memory_offsets.lengths is None else padding(memory_offsets.lengths)
            return attend(queries, keys, keys, score=self.score, mask=mask).squeeze(1)
        assert not isinstance(offsets, Lengths)
        regarded = attend(queries, keys, keys, score=self.score, q_offsets=offsets, k_offsets=memory_offsets)
        return regarded.squeeze(1)
