"""Recurrent layers on packed sequences against torch.nn, one sequence at a time."""

import pytest
import torch

from regard.attention.offsets import Offsets
from regard.layers.recurrent import Bidirectional, Recurrent, StateAttention, TimeMajorLayout, Unidirectional

# Empty sequences at the start, in the middle and at the end.
STARTS = torch.tensor([0, 0, 3, 4, 4, 9, 9], dtype=torch.int32)
OFFSETS = Offsets(STARTS, total=9, max_len=6)
CELLS = ["rnn", "gru", "lstm"]


def sequences(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[a:b] for a, b in zip(STARTS[:-1].tolist(), STARTS[1:].tolist())]


@pytest.mark.parametrize("backward", [False, True])
def test_time_major_layout_round_trip(backward):
    layout = TimeMajorLayout.from_offsets(OFFSETS, backward)
    x = torch.arange(9.0)[:, None]
    time_major = layout.to_time_major(x)
    assert time_major.shape == (6, 6, 1)
    for b, sequence in enumerate(sequences(x)):
        expected = sequence.flip(0) if backward else sequence
        assert torch.equal(time_major[: len(sequence), b], expected)
    assert torch.equal(layout.from_time_major(time_major), x)


@pytest.mark.parametrize("cell", CELLS)
def test_packed_sequences_match_single_sequences(cell):
    torch.manual_seed(0)
    layer = Recurrent(cell, 4, 8)
    x, state = torch.randn(9, 4), torch.randn(6, layer.parts, 8)
    out = layer(x, TimeMajorLayout.from_offsets(OFFSETS), state)
    for b, (inputs, outputs) in enumerate(zip(sequences(x), sequences(out))):
        if len(inputs):
            parts = tuple(state[b, :, None].unbind(0))
            expected, _ = layer.rnn(inputs, parts if cell == "lstm" else parts[0])
            torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_single_steps_match_the_full_sequence(cell):
    torch.manual_seed(0)
    layer = Recurrent(cell, 4, 8)
    x, state = torch.randn(5, 4), torch.randn(1, layer.parts, 8)
    full = layer(x, TimeMajorLayout.from_offsets(Offsets.from_starts(torch.tensor([0, 5]))), state)
    for inputs, expected in zip(layer.inputs(x), full):
        state = layer.step(inputs[None], state)
        torch.testing.assert_close(state[0, 0], expected)


@pytest.mark.parametrize("cell", CELLS)
def test_bidirectional_outputs_and_final_states(cell):
    torch.manual_seed(0)
    layer = Bidirectional(cell, 4, 8)
    x = torch.randn(9, 4)
    rows = layer(x, TimeMajorLayout.from_offsets(OFFSETS), TimeMajorLayout.from_offsets(OFFSETS, backward=True))
    final = layer.final_state(rows, OFFSETS)
    assert final.shape == (6, 16)
    for inputs, outputs, state in zip(sequences(x), sequences(rows), final):
        if not len(inputs):
            assert not state.any()
            continue
        forward, _ = layer.forward_layer.rnn(inputs)
        backward = layer.backward_layer.rnn(inputs.flip(0))[0].flip(0)
        torch.testing.assert_close(outputs, torch.cat((forward, backward), -1))
        torch.testing.assert_close(state, torch.cat((forward[-1], backward[0])))


def test_gradient_does_not_cross_sequences():
    """The gradient of a sequence's outputs reaches no row of another sequence."""
    torch.manual_seed(0)
    layer = Bidirectional("gru", 4, 8)
    x = torch.randn(9, 4, requires_grad=True)
    rows = layer(x, TimeMajorLayout.from_offsets(OFFSETS), TimeMajorLayout.from_offsets(OFFSETS, backward=True))
    (grad,) = torch.autograd.grad(rows[3].sum(), x)  # the sequence of one token
    assert grad[3].any()
    assert not grad[:3].any()
    assert not grad[4:].any()


def test_initial_weights():
    layer = Recurrent("lstm", 4, 8)
    bias = layer.rnn.bias_ih_l0 + layer.rnn.bias_hh_l0
    assert bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
    for gate in layer.rnn.weight_hh_l0.split(8):
        torch.testing.assert_close(gate @ gate.T, torch.eye(8))


def test_state_keeps_its_precision_under_autocast():
    layer = Recurrent("gru", 4, 8)
    x, layout = torch.randn(9, 4), TimeMajorLayout.from_offsets(OFFSETS)
    expected = layer(x, layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x, layout), expected)


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "general", "concat", "location"])
def test_context_is_the_weighted_sum(score):
    torch.manual_seed(0)
    attention = StateAttention(8, score, hidden=5, max_keys=10)
    states, memory = torch.randn(4, 8), torch.randn(7, 8)
    q_offsets, k_offsets = Offsets.from_starts(torch.tensor([0, 3, 4])), Offsets.from_starts(torch.tensor([0, 2, 7]))
    context = attention(states, memory, q_offsets, k_offsets)
    for queries, keys, expected in zip(states.split([3, 1]), memory.split([2, 5]), context.split([3, 1])):
        weights = attention.score(queries, keys).softmax(-1)
        torch.testing.assert_close(weights @ keys, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_unidirectional_outputs_and_final_states(cell):
    torch.manual_seed(0)
    offsets = Offsets.from_starts(torch.tensor([0, 2, 2, 5]))
    layer, x = Unidirectional(cell, 4, 8), torch.randn(5, 4)
    rows = layer(x, TimeMajorLayout.from_offsets(offsets))
    torch.testing.assert_close(rows, layer.forward_layer(x, TimeMajorLayout.from_offsets(offsets)))
    final = layer.final_state(rows, offsets)
    torch.testing.assert_close(final, torch.stack((rows[1], torch.zeros(8), rows[4])))


def test_rnn_cell_matches_its_formula():
    torch.manual_seed(0)
    layer = Recurrent("rnn", 4, 8)
    x, h = torch.randn(3, 4), torch.randn(3, 1, 8)
    weight_x, weight_h, bias_x, bias_h = layer.rnn.all_weights[0]
    expected = torch.tanh(x @ weight_x.T + bias_x + h[:, 0] @ weight_h.T + bias_h)
    torch.testing.assert_close(layer.step(layer.inputs(x), h)[:, 0], expected)
