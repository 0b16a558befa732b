"""The parts of models as steps of a walk: embeddings, norms, attention with any of the scores, feed-forward, output."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import Concat, Cosine, Dot, General, Location, ScaledDot, Score, record
from regard.attention.exact import weights as exact_weights
from regard.attention.masks import Causal
from regard.attention.reference import reference, softmax
from regard.errors import RegardError
from regard.folder.scoring import logprobs
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import _GATES, FeedForward, activate
from regard.layers.multihead import MultiHead
from regard.layers.positions import Learned, RelativeBias, Rotary, apply_rotary
from regard.layers.residual import Residual
from regard.viewer.tape import Param, Tape, Value
from regard.viewer.walk_words import ACTIVATION, WORDS

# Bytes up to which the whole of an output layer is carried.
WHOLE_OUTPUT = 4 << 20
# So many tokens that may come next have names.
NAMED = 10


class Own:
    """What the model itself computes of a text: each module's outputs, and the weights of each attention."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any], forward: Callable[..., Any] | None = None) -> None:
        """`forward` is another way through the model than its own."""
        self.outputs: dict[nn.Module, list[Any]] = {}

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            self.outputs.setdefault(module, []).append(output[0] if isinstance(output, tuple) else output)

        hooks = [module.register_forward_hook(keep) for module in model.modules()]
        try:
            with torch.inference_mode(), record(model) as self.recording:
                (forward or model)(*inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def output(self, module: nn.Module, call: int | None = 0) -> Float[np.ndarray, "..."]:
        """Of one call; or of all, one after the other."""
        calls = self.outputs[module]
        return numbers(torch.cat(calls) if call is None else calls[call])

    def weights(self, name: str, call: int | None = 0) -> Float[np.ndarray, "H T S"]:
        calls = self.recording[name].calls
        with torch.inference_mode():
            found = [numbers(exact_weights(one)[0]) for one in (calls if call is None else [calls[call]])]
        return np.concatenate(found, axis=1)


class Parts:
    """Writes the parts of a model on a tape, under the names of its modules."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any], forward: Callable[..., Any] | None = None) -> None:
        self.own, self.tape = Own(model, inputs, forward), Tape()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.paths = {module: name for name, module in model.named_modules()}
        self.path = ""
        """of the module whose steps are being written"""
        self.call = 0
        """how many times it was called before: more than once where layers share their weights"""
        self.state = "h"
        """the letter of the states of the recurrent layer at hand"""
        self.ends: dict[int, str] = {}
        """the names of the columns of the last step"""
        self.turns: tuple[Tensor, list[list[int]]] | None = None
        """of tokens that stand in a grid: the rates at which q and k turn, and each token's row and column"""

    def words(self, name: str) -> tuple[str, str]:
        """What a step is called, and its formula."""
        return WORDS[name]

    def named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def do(
        self,
        op: str,
        name: str,
        where: Callable[..., Any],
        inputs: Sequence[Value] = (),
        params: Sequence[Param] = (),
        *,
        says: str = "",
        axes: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Value:
        """A step, with its words; `says` is whose, where they are not those of its name."""
        title, formula = self.words(says or name)
        formula = re.sub("h(?=[ₜ₀₁])", self.state, formula)
        return self.tape.do(op, self.named(name), title, formula, where, inputs, params, axes=axes, **options)

    def activate(self, name: str, where: Callable[..., Any], x: Value, function: str, formula: str) -> Value:
        return self.tape.do("activate", self.named(name), ACTIVATION, formula, where, [x], function=function)

    def param(self, sign: str, tensor: Tensor, part: slice | None = None) -> Param:
        name, x = self.names.get(id(tensor), ""), numbers(tensor)
        if part is None:
            return Param(sign, x, name)
        return Param(sign, x[part], f"{name}[{part.start or 0}:{part.stop or len(x)}]")

    def linear(
        self,
        x: Value,
        module: nn.Linear,
        name: str,
        where: Callable[..., Any],
        *,
        says: str = "",
        part: slice | None = None,
        call: int | None = None,
        axes: tuple[str, ...] | None = None,
    ) -> Value:
        """y = x W + b, or a part of its outputs. The signs are those of the formula, which loses a bias that is not
        there."""
        title, formula = self.words(says or name)
        weight, bias = re.findall(r"(\S+) \+ (\S+)$", formula)[0]
        params = [self.param(weight, module.weight, part)]
        if module.bias is not None:
            params.append(self.param(bias, module.bias, part))
        else:
            formula = formula.removesuffix(f" + {bias}")
        y = self.tape.do("linear", self.named(name), title, formula, where, [x], params, axes=axes)
        own = self.own.output(module, self.call if call is None else call)
        return self.tape.compare(y, own if part is None else own[..., part])

    def norm(self, x: Value, module: nn.Module, name: str, where: Callable[..., Any], call: int | None = None) -> Value:
        """Nothing, where the module is the identity."""
        if isinstance(module, nn.Identity):
            return x
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        gain, bias = module.weight, getattr(module, "bias", None)
        params = [self.param(sign, p) for sign, p in (("γ", gain), ("β", bias)) if p is not None]
        title, formula = self.words(kind)
        formula += "".join(f" {'·' if one.sign == 'γ' else '+'} {one.sign}" for one in params)
        eps = float(torch.finfo(torch.float32).eps if module.eps is None else module.eps)
        y = self.tape.do("norm", self.named(name), title, formula, where, [x], params, kind=kind, eps=eps)
        return self.tape.compare(y, self.own.output(module, self.call if call is None else call))

    def embed(self, module: Embedding, ids: Sequence[int], side: str, title: str) -> Value:
        """A vector for each token, and where it stands."""
        self.path = self.paths[module]
        self.tape.section(title, side=side, part="embedding")
        where, axes = Embedding.forward, (side, "channels")
        x = self.rows(module.tokens.weight, ids, "E", "x", where, axes)
        if module.scale != 1.0:
            x = self.do("scale", "scaled", where, [x], by=module.scale)
        if module.segments is not None:
            segment = self.rows(module.segments.weight, [0] * len(ids), "S", "segment", where, axes)
            x = self.do("add", "with_segment", where, [x, segment])
        if module.positions is not None:
            module.positions.reserve(len(ids))
            rows, code = list(range(len(ids))), type(module.positions).forward
            if isinstance(module.positions, Learned):
                rows = [row + module.positions.offset for row in rows]
                p = self.rows(module.positions.weight, rows, "P", "position", code, axes)
            else:
                p = self.rows(module.positions.table, rows, "P", "position", code, axes, says="sinusoidal")
            x = self.do("add", "with_position", where, [x, p])
        x = self.norm(x, module.norm, "norm", where, 0)
        return self.tape.compare(x, self.own.output(module))

    def rows(
        self,
        table: Tensor,
        ids: Sequence[int],
        sign: str,
        name: str,
        where: Callable[..., Any],
        axes: tuple[str, ...],
        says: str = "",
    ) -> Value:
        """Rows of a table, of which only those that are needed are carried."""
        used = sorted(set(ids))
        param = Param(sign, numbers(table[torch.tensor(used, device=table.device)]), self.names.get(id(table), ""))
        rows = [used.index(i) for i in ids]
        return self.do("take", name, where, params=[param], says=says, axes=axes, rows=rows)

    def attention(self, module: MultiHead, x: Value, memory: Value | None = None, bias: Value | None = None) -> Value:
        """Queries, keys and values; scores; weights; what is regarded; heads joined."""
        side, given, suffix = x.axes[0], x if memory is None else memory, "" if memory is None else "_memory"
        into, group, size = MultiHead.keys_values, module.kv_heads, module.kv_heads * module.head_width
        q = self.linear(x, module.query, "q", MultiHead.queries)
        k = self.linear(given, module.key_value, "k", into, says=f"k{suffix}", part=slice(size))
        v = self.linear(given, module.key_value, "v", into, says=f"v{suffix}", part=slice(size, None))
        apart = ("heads", "channels")
        q = self.do("split", "q_heads", MultiHead.queries, [q], axes=(side, *apart), heads=module.heads)
        k = self.do("split", "k_heads", into, [k], axes=(given.axes[0], *apart), heads=group)
        v = self.do("split", "v_heads", into, [v], axes=(given.axes[0], *apart), heads=group)
        q = self.norm(q, module.query_norm, "q_norm", MultiHead.queries)
        k = self.norm(k, module.key_norm, "k_norm", into)
        if module.rotary is not None:
            rates = [Param("θ", numbers(module.rotary.rates), f"{self.path}.rotary.rates")]
            places = [list(range(len(one.x))) for one in (q, k)]
            q = self.do("rotate", "q_turned", Rotary.forward, [q], rates, positions=places[0])
            k = self.do("rotate", "k_turned", Rotary.forward, [k], rates, positions=places[1])
        if self.turns is not None and memory is None:
            rates = [Param("θ", numbers(self.turns[0]), "embedding.rotary.rates")]
            q = self.do("rotate", "q_turned", apply_rotary, [q], rates, positions=self.turns[1])
            k = self.do("rotate", "k_turned", apply_rotary, [k], rates, positions=self.turns[1])
        a = self.weights(module.score, q, k, bias, module.mask is not None)
        self.tape.compare(a, self.own.weights(self.paths[module], self.call))
        z = self.do("weigh", "z", reference, [a, v], axes=(side, *apart))
        z = self.do("join", "joined", MultiHead.forward, [z], axes=(side, "channels"))
        return self.linear(z, module.out, "o", MultiHead.forward)

    def weights(self, score: Score, q: Value, k: Value, bias: Value | None = None, masked: bool = False) -> Value:
        """From queries and keys to weights, by any of the six scores."""
        axes = ("heads", q.axes[0], k.axes[0])
        match score:
            case Dot():
                e = self.do("dot", "e", Dot.pair, [q, k], says="dot", axes=axes)
            case ScaledDot():
                e = self.do("dot", "qk", ScaledDot.pair, [q, k], axes=axes)
                e = self.do("scale", "e", ScaledDot.fold, [e], says="scaled_dot", by=q.x.shape[-1] ** -0.5)
            case Cosine():
                q = self.do("normalise", "q_length", Cosine.fold, [q], eps=1e-6)
                k = self.do("normalise", "k_length", Cosine.fold, [k], eps=1e-6)
                e = self.do("dot", "cos", Cosine.pair, [q, k], axes=axes)
                if score.log_scale is None:
                    e = self.do("scale", "e", Cosine.fold, [e], says="cosine", by=float(score.scale))
                else:
                    scale = self.param("log_scale", score.log_scale)
                    scale = scale._replace(x=scale.x.reshape(-1))
                    e = self.do("scale_heads", "e", Cosine.fold, [e], [scale], says="cosine_heads")
            case General():
                q = self._by_heads(q, "W_a", score.weight, "q_score", General.fold, "general_q")
                e = self.do("dot", "e", General.pair, [q, k], says="general", axes=axes)
            case Concat():
                if score.joint:
                    of_q, of_k = score.weight[..., : score.dim_q, :], score.weight[..., score.dim_q :, :]
                else:
                    of_q, of_k = score.weight_q, score.weight_k
                q = self._by_heads(q, "W_b", of_q, "q_score", Concat.fold)
                k = self._by_heads(k, "W_c", of_k, "k_score", Concat.fold)
                w = self.param("w_a", score.weight_a)
                w = w._replace(x=np.broadcast_to(w.x[..., 0], (q.x.shape[1], w.x.shape[-2])))
                e = self.do("concat", "e", Concat.pair, [q, k], [w], says="concat", axes=axes)
            case Location():
                table = self.param("W_a", score.weight)
                rows = table.x if table.x.ndim == 3 else table.x[None]
                table = table._replace(x=rows[:, : len(k.x)].transpose(1, 0, 2))
                places, of_place = list(range(len(k.x))), (k.axes[0], "heads", "channels")
                k = self.do("take", "places", Location.fold, params=[table], axes=of_place, rows=places)
                e = self.do("dot", "e", Location.pair, [q, k], says="location", axes=axes)
            case _:
                called = type(score).__name__
                raise RegardError(f"A walk cannot compute the score {called}.", "Look at the model's heads.")
        if bias is not None:
            e = self.do("add", "e_bias", reference, [e, bias])
        if masked:
            e = self.do("mask", "e_masked", Causal.block, [e])
        return self.do("softmax", "a", softmax, [e])

    def _by_heads(
        self, x: Value, sign: str, weight: Tensor, name: str, where: Callable[..., Any], says: str = ""
    ) -> Value:
        param = self.param(sign, weight)
        param = param._replace(x=param.x if param.x.ndim == 3 else param.x[None])
        return self.do("linear_heads", name, where, [x], [param], says=says)

    def relative(self, module: RelativeBias | None, length: int, side: str) -> Value | None:
        """T5's numbers for distances, which all layers of a stack share."""
        if module is None:
            return None
        self.path = self.paths[module]
        self.tape.section("A number for each distance", side=side, part="bias")
        table, axes = module.table.weight, ("heads", side, side)
        gaps = torch.arange(1 - length, length, device=table.device)
        buckets = module.buckets(torch.zeros(1, dtype=torch.long, device=table.device), gaps)[0].tolist()
        params = [self.param("B", table)]
        where = RelativeBias.forward
        return self.do("relative", "b", where, params=params, axes=axes, buckets=buckets, rows=length)

    def feed_forward(self, module: FeedForward, x: Value) -> Value:
        where, gate, half = FeedForward.forward, _GATES.get(module.activation), len(module.inner.weight) // 2
        u = self.linear(x, module.inner, "u", where, part=slice(half) if gate else None)
        if gate:
            g = self.linear(x, module.inner, "g", where, part=slice(half, None))
            g = self.activate("gate", activate, g, gate, f"h = {gate}(g)")
            h = self.do("multiply", "h", where, [u, g], says="gated")
        else:
            h = self.activate("h", activate, u, module.activation, f"h = {module.activation}(u)")
        return self.linear(h, module.outer, "f", where)

    def residual(self, block: Any, x: Value, sublayer: Callable[[Value], Value], name: str) -> Value:
        path, where = self.path, Residual.forward
        module, norm = getattr(block, f"{name}_residual"), getattr(block, f"{name}_norm")
        given = self.norm(x, norm, f"{name}_norm", where) if block.norm_first else x
        self.path = f"{path}.{name}"
        added = sublayer(given)
        self.path = path
        if module.layer_scale is not None:
            scale = self.param("λ", module.layer_scale)
            added = self.do("multiply", f"{name}_scaled", where, [added], [scale], says="scale_added")
        x = self.do("add", f"{name}_sum", where, [x, added])
        x = x if block.norm_first else self.norm(x, norm, f"{name}_norm", where)
        return self.tape.compare(x, self.own.output(module if block.norm_first else norm, self.call))

    def output(
        self, x: Value, module: nn.Linear, where: Callable[..., Any], name: Callable[[int], str], says: str = "l"
    ) -> Value:
        """The last map, and the probabilities of what it speaks of, whose names are asked for."""
        self.path, axes, own = "output", (x.axes[0], "vocabulary"), self.own.output(module)
        likely = torch.from_numpy(own).double().softmax(-1).numpy()
        weight, bias = (None if p is None else numbers(p).astype(float) for p in (module.weight, module.bias))
        assert weight is not None
        scores = x.x @ weight.T + (0.0 if bias is None else bias)
        some = sorted(set(np.argsort(-scores, axis=-1, kind="stable")[:, :NAMED].flatten().tolist()))
        if 4 * (weight.size + 2 * scores.size) <= WHOLE_OUTPUT:
            self.ends = {i: name(i) for i in some}
            logits = self.linear(x, module, "l", where, says=says, axes=axes)
            return self.tape.compare(self.do("softmax", "p", logprobs, [logits]), likely)
        # Of a large vocabulary the likeliest alone, and what all others add to the sum.
        self.ends = {column: name(i) for column, i in enumerate(some)}
        params = [Param("W", weight[some], f"{self.names[id(module.weight)]}[{len(some)} rows]")]
        if bias is not None:
            params.append(Param("b", bias[some], f"{self.names[id(module.bias)]}[{len(some)} numbers]"))
        title = f"A score for each of {len(some)} tokens, of {len(weight)}"
        formula = "l = x W" + ("" if bias is None else " + b")
        logits = self.tape.do("linear", "output.l", title, formula, where, [x], params, axes=axes)
        self.tape.compare(logits, own[..., some])
        scores[:, some] = -np.inf
        others = Value(None, np.logaddexp.reduce(scores, axis=-1, keepdims=True), (x.axes[0], "channels"))
        title = f"What the other {len(weight) - len(some)} tokens add to the sum, given as a logarithm"
        rest = self.tape.give(others, "output.rest", title, logprobs)
        return self.tape.compare(self.do("softmax", "p", logprobs, [logits, rest]), likely[..., some])


def numbers(x: Tensor) -> Float[np.ndarray, "..."]:
    return x.detach().float().cpu().numpy()
