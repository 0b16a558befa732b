"""Recurrent models as steps of a walk: gates and states, token by token, and the attention between them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from regard.attention.reference import reference
from regard.layers.recurrent import Bidirectional, Recurrent, StateAttention
from regard.models.seq2seq import Decoder, Encoder
from regard.viewer.tape import Param, Value
from regard.viewer.walk_parts import Parts

ONE = ("one", "channels")
LOOKS = {"part": "attention", "attention": "decoder.attention", "heads": 1, "keys": "source"}


class RecurrentParts(Parts):
    """Adds what recurrent models have."""

    whole = True
    """whether the steps of the recurrent layers are carried; if not, their states are given"""

    def encoder(self, module: Encoder, x: Value) -> tuple[Value, list[list[Value]]]:
        """The states of both directions, and for each layer of the decoder its first state (h, or h and c)."""
        first: list[list[Value]] = []
        for number, (layer, bridge) in enumerate(zip(module.layers, module.bridges)):
            assert isinstance(layer, Bidirectional)  # the walk refuses others
            called, says = f"Encoder, layer {number}", {"side": "source", "layer": number}
            with self.tape.silent(not self.whole):
                ahead = self.recurrence(layer.forward_layer, x, f"{called}, forward", "h", [])
                behind = self.recurrence(layer.backward_layer, x, f"{called}, backward", "h", [], backward=True)
                self.path = f"encoder.layers.{number}"
                self.tape.section(f"{called}: both directions", part="recurrent", **says)
                x = self.do("beside", "h", Bidirectional.forward, [ahead, behind], says="both")
            if not self.whole:
                self.tape.section(called, part="given", **says)
                title = "The states of both directions, given"
                x = self.tape.give(x, self.named("h"), title, Bidirectional.forward)
            self.tape.compare(x, self.own.output(layer))
            with self.tape.silent(not self.whole):
                first.append(self.first_state(x, bridge, module.width))  # type: ignore[arg-type]
        return x, first

    def first_state(self, x: Value, bridge: nn.Linear, width: int) -> list[Value]:
        """What the decoder begins with, from what both directions know in the end."""
        final, where = Bidirectional.final, Encoder.forward
        last = self.do("take", "row_last", final, [x], rows=[len(x.x) - 1], axes=ONE)
        ahead = self.do("part", "ahead", final, [last], start=0, end=width)
        zeroth = self.do("take", "row_first", final, [x], rows=[0], axes=ONE)
        behind = self.do("part", "behind", final, [zeroth], start=width, end=2 * width)
        both = self.do("beside", "final", final, [ahead, behind])
        u = self.linear(both, bridge, "bridge", where)
        s = self.do("activate", "first", where, [u], says="first_state", function="tanh")
        if s.x.shape[-1] == width:
            return [s]
        ends = (("first_h", 0), ("first_c", width))
        return [self.do("part", name, where, [s], start=start, end=start + width) for name, start in ends]

    def recurrence(
        self, layer: Recurrent, x: Value, called: str, sign: str, state: Sequence[Value], backward: bool = False
    ) -> Value:
        """All states of a layer that reads a sequence, a section a token; without a first state, from 0."""
        side, path = x.axes[0], self.paths[layer]
        self.path = path
        self.tape.section(f"{called}: the inputs", side=side, part="recurrent")
        inputs = self.inputs(layer, x)
        zero = [Param("", np.zeros((1, layer.rnn.hidden_size)), "")]
        now = list(state) or [
            self.do("given", "zero", Recurrent.forward, params=zero, axes=ONE) for _ in range(layer.parts)
        ]
        states: dict[int, Value] = {}
        order = range(len(x.x))
        for t in reversed(order) if backward else order:
            self.tape.section(f"{called}: one step", side=side, token=t, part="recurrent")
            now = self.cell(layer, inputs, t, now, sign)
            states[t] = now[0]
        self.path = path
        self.tape.section(f"{called}: all steps", side=side, part="recurrent")
        rows = [states[t] for t in order]
        found = self.do("stack", sign, Recurrent.forward, rows, says="states", axes=(side, "channels"))
        return self.tape.compare(found, self.own.output(layer))

    def inputs(self, layer: Recurrent, x: Value) -> Value:
        weight, _, bias, _ = layer.rnn.all_weights[0]
        params = [self.param("W_x", weight), self.param("b_x", bias)]
        return self.do("linear", "inputs", Recurrent.inputs, [x], params)

    def cell(
        self,
        layer: Recurrent,
        inputs: Value,
        t: int,
        state: Sequence[Value],
        sign: str,
        context: Value | None = None,
    ) -> list[Value]:
        """The next state of a GRU (h) or an LSTM (h and c), gate by gate."""
        where, path = Recurrent.step, self.path
        self.path, self.state = f"{path}.{t}", sign
        _, weight, _, bias = layer.rnn.all_weights[0]
        x = self.do("take", "x", Recurrent.inputs, [inputs], says="cell_x", rows=[t], axes=ONE)
        if context is not None:
            x = self.do("add", "x_context", Decoder._bahdanau, [x, context])
        h = self.do("linear", "w", where, [state[0]], [self.param("W_h", weight), self.param("b_h", bias)])
        kind, parts = ("gru", 3) if layer.parts == 1 else ("lstm", 4)

        def gate(name: str, part: int, function: str = "sigmoid", reset: Value | None = None) -> Value:
            given = [x, h] if reset is None else [x, h, reset]
            how: dict[str, Any] = {"function": function, "part": part, "parts": parts, "reset": reset is not None}
            return self.do("gate", name, where, given, says=f"{kind}_{name}", axes=ONE, **how)

        if kind == "gru":
            r, z = gate("r", 0), gate("z", 1)
            n = gate("n", 2, "tanh", r)
            new = [self.do("between", sign, where, [n, state[0], z], says=kind)]
        else:
            i, f, g, o = gate("i", 0), gate("f", 1), gate("g", 2, "tanh"), gate("o", 3)
            kept = self.do("multiply", "kept", where, [f, state[1]])
            written = self.do("multiply", "written", where, [i, g])
            c = self.do("add", "c", where, [kept, written], says="lstm_c")
            bounded = self.do("activate", "tanh_c", where, [c], function="tanh")
            new = [self.do("multiply", sign, where, [o, bounded], says=kind), c]
        self.path, self.state = path, "h"
        return new

    def state_attention(
        self, module: StateAttention, s: Value, k: Value, *, before: bool, call: int | None = 0
    ) -> Value:
        """eₜ, aₜ and the context: what states of the decoder regard of the encoder's."""
        side, where = s.axes[0], StateAttention.forward
        axes, says = (side, "heads", "channels"), "q_before" if before else "q_state"
        q = self.do("split", "q", where, [s], says=says, axes=axes, heads=1)
        a = self.weights(module.score, q, k)
        self.tape.compare(a, self.own.weights("decoder.attention", call))
        z = self.do("weigh", "z", reference, [a, k], says="z_state", axes=axes)
        c = self.do("join", "c", where, [z], axes=(side, "channels"))
        return self.tape.compare(c, self.own.output(module, call))

    def luong(self, decoder: Decoder, y: Value, states: list[list[Value]], k: Value) -> Value:
        """States first, then one attention of all steps."""
        with self.tape.silent(not self.whole):
            for number, layer in enumerate(decoder.layers):
                y = self.recurrence(layer, y, f"Decoder, layer {number}", "s", states[number])
        if not self.whole:
            self.tape.section("The decoder's states", side="target", part="given")
            y = self.tape.give(y, "decoder.s", "The decoder's states, given", Recurrent.forward)
            self.tape.compare(y, self.own.output(decoder.layers[-1]))
        self.path = "decoder.attention"
        self.tape.section("Attention", side="target", **LOOKS)
        c = self.state_attention(decoder.attention, y, k, before=False)
        return self.do("beside", "cs", Decoder.forward, [c, y])

    def bahdanau(self, decoder: Decoder, y: Value, states: list[list[Value]], k: Value) -> Value:
        """Each step looks with the last state, and goes on with what it regarded."""
        before: list[Value] = []
        rows: list[Value] = []
        with self.tape.silent(not self.whole):
            self.path = self.paths[decoder.layers[0]]
            self.tape.section("Decoder: the inputs", side="target", part="recurrent")
            inputs = self.inputs(decoder.layers[0], y)
            for t in range(len(y.x)):
                before.append(states[-1][0])
                c, states = self._bahdanau_step(decoder, inputs, t, states, k)
                self.path = f"decoder.{t}"
                rows.append(self.do("beside", "cs", Decoder._bahdanau, [c, states[-1][0]]))
            if self.whole:
                self.path = "decoder"
                self.tape.section("Decoder: all steps", side="target", part="recurrent")
                return self.do("stack", "cs", Decoder.forward, rows, axes=("target", "channels"))
        self.tape.section("The decoder's states", side="target", part="given")
        width, axes = y.x.shape[-1], ("target", "channels")
        after = Value(None, np.concatenate([one.x[:, width:] for one in rows]), axes)
        last = Value(None, np.concatenate([one.x for one in before]), axes)
        s = self.tape.give(after, "decoder.s", "The decoder's states, given", Recurrent.step)
        last = self.tape.give(last, "decoder.s_before", "Those before each step, given", Recurrent.step)
        self.path = "decoder.attention"
        self.tape.section("Attention", side="target", **LOOKS)
        c = self.state_attention(decoder.attention, last, k, before=True, call=None)
        return self.do("beside", "cs", Decoder.forward, [c, s])

    def _bahdanau_step(
        self, decoder: Decoder, inputs: Value, t: int, states: list[list[Value]], k: Value
    ) -> tuple[Value, list[list[Value]]]:
        step = {"side": "target", "token": t}
        self.path = f"decoder.attention.{t}"
        self.tape.section("Decoder, one step: attention with the state before it", **step, **LOOKS)
        c = self.state_attention(decoder.attention, states[-1][0], k, before=True, call=t)
        self.tape.section("Decoder, one step: the next state", **step, part="recurrent")
        context: Value | None = self.linear(c, decoder.context, "context", Decoder._bahdanau, call=t)
        after: list[list[Value]] = []
        row = t
        for layer, state in zip(decoder.layers, states):
            self.path = self.paths[layer]
            if after:
                self.path += f".{t}"
                inputs, row, context = self.inputs(layer, after[-1][0]), 0, None
            after.append(self.cell(layer, inputs, row, state, "s", context))
        return c, after
