"""The walk: every number between a text and what the model makes of it, written on a tape, step by step.

A tape computes by itself from the model's parameters. What the model computed is only put beside it, to be compared:
each step says how far the two are apart.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
from regard.folder import TextEncoder, Translator
from regard.folder.scoring import logprobs
from regard.layers.blocks import DecoderBlock, EncoderBlock, Residual
from regard.layers.embeddings import Embedding
from regard.layers.feedforward import _GATES, FeedForward, activate
from regard.layers.multihead import MultiHead
from regard.layers.packed import pack
from regard.layers.positions import Learned, RelativeBias, Rotary
from regard.layers.recurrent import Bidirectional, Recurrent, StateAttention
from regard.models import GPT, Bert, Seq2Seq, Transformer
from regard.models.bert import MaskHead
from regard.models.seq2seq import Decoder, Encoder
from regard.viewer.forcing import information
from regard.viewer.looking import Look, Side
from regard.viewer.measures import entropy
from regard.viewer.tape import Param, Tape, Value

# Bytes of parameters up to which a walk carries all of them, and of an output layer up to which it carries all of that.
WHOLE, WHOLE_OUTPUT = 8 << 20, 4 << 20
# Bytes and tokens up to which a page has a walk without being asked.
SMALL, SHORT = 12 << 20, 64
# Tokens beyond which a walk would be longer than anybody's patience.
LONGEST = 512
NAMED = 10


@dataclass(frozen=True, eq=False)
class Walk:
    """A tape, and what it is about: the tokens, those that are looked at first, and the names of what may come next."""

    tape: Tape
    sides: dict[str, Side]
    focus: dict[str, Any]
    names: dict[int, str]
    """of the columns of the last step that matter to somebody: the ten likeliest of each row"""
    note: str | None
    """what is given and not computed, where that is so"""


def walk_of(look: Look) -> Walk:
    """The walk of a look: each step from its text to the output.

    >>> walk = walk_of(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> walk.tape["decoder.0.cross.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (4, 5, 6)
    """
    if look.bundle is None:
        raise RegardError("This look does not know its model: there is no walk.", "Make it with regard.look.")
    if max(map(len, look.ids)) > LONGEST:
        raise RegardError(
            f"The text has {max(map(len, look.ids))} tokens: a walk takes at most {LONGEST}.", "Shorten the text."
        )
    return _Walker(look).walk()


def header_of(walk: Walk, blobs: list[bytes]) -> dict[str, Any]:
    """What a scene's header says of a walk; its numbers go to the blobs."""
    tape = walk.tape
    places = {}
    for name, raw in (("params", tape.params), ("outputs", tape.outputs)):
        blobs.append(raw)
        places[name] = {"at": len(blobs) - 1, "shape": [len(raw) // 4], "type": "float32"}
    return {
        "sides": {name: {"tokens": side.tokens, "words": side.words} for name, side in walk.sides.items()},
        "focus": walk.focus,
        "names": {str(column): name for column, name in walk.names.items()},
        "note": walk.note,
        "sections": tape.sections,
        "steps": tape.steps,
        **places,
    }


def walk_for(look: Look, wanted: bool | None = None) -> Walk | None:
    """A page's walk: if it is wanted, or if nobody said and model and text are small enough that it costs little."""
    if wanted is not None:
        return walk_of(look) if wanted else None
    if look.bundle is None or max(map(len, look.ids)) > SHORT or _bytes_inside(look.bundle.model) > WHOLE:
        return None
    try:
        walk = walk_of(look)
    except RegardError:  # a score of somebody's own
        return None
    return walk if walk.tape.size <= SMALL else None


def _bytes_inside(model: nn.Module) -> int:
    """Of the parameters between embeddings and output layer, of whose rows only a few may be needed."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    output = getattr(model, "output", None)
    tables |= {id(output.weight)} if isinstance(output, nn.Linear) else set()
    return sum(4 * p.numel() for p in model.parameters() if id(p) not in tables)


class _Own:
    """What the model itself computes of a text: each module's outputs, and the weights of each attention."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        self.outputs: dict[nn.Module, list[Any]] = {}

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            self.outputs.setdefault(module, []).append(output[0] if isinstance(output, tuple) else output)

        hooks = [module.register_forward_hook(keep) for module in model.modules()]
        try:
            with torch.inference_mode(), record(model) as self.recording:
                self.logits = _numpy(model(*inputs))
        finally:
            for hook in hooks:
                hook.remove()

    def output(self, module: nn.Module, call: int | None = 0) -> Float[np.ndarray, "..."]:
        """Of one call; or of all, one after the other."""
        calls = self.outputs[module]
        return _numpy(torch.cat(calls) if call is None else calls[call])

    def weights(self, name: str, call: int | None = 0) -> Float[np.ndarray, "H T S"]:
        calls = self.recording[name].calls
        with torch.inference_mode():
            found = [_numpy(exact_weights(one)[0]) for one in (calls if call is None else [calls[call]])]
        return np.concatenate(found, axis=1)


class _Walker:
    """Writes the tape of one forward."""

    def __init__(self, look: Look) -> None:
        bundle = look.bundle
        self.look, self.bundle, self.model = look, bundle, bundle.model.eval()
        inputs = [pack([ids]).to(bundle.device) for ids in look.ids]
        self.own = _Own(self.model, inputs)
        self.tape = Tape()
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        self.paths = {module: name for name, module in self.model.named_modules()}
        self.path = ""
        self.call = 0
        """how many times the module at hand was called before: more than once where layers share their weights"""
        self.whole = _bytes_inside(self.model) <= WHOLE
        self.chosen = look.alignment
        self.ends: dict[int, str] = {}
        self.note: str | None = None

    def walk(self) -> Walk:
        match self.model:
            case Transformer():
                self.transformer(self.model)
            case Seq2Seq():
                self.seq2seq(self.model)
            case GPT():
                self.gpt(self.model)
            case Bert():
                self.bert(self.model)
            case other:
                raise RegardError(f"There is no walk through a {type(other).__name__}.", "Look at its heads.")
        return Walk(self.tape, self.sides(), self.focus(), self.ends, self.note)

    # What is looked at

    def sides(self) -> dict[str, Side]:
        """The tokens of each axis. What is written stands under what is read: row t of the target predicts the next."""
        look = self.look
        if not isinstance(self.bundle, Translator):
            (text,) = look.ids
            side = next(iter(look.maps.values())).queries
            return {"text": side._replace(name="text", tokens=side.tokens[: len(text)])}
        found = {side.name: side for one in look.maps.values() for side in (one.queries, one.keys)}
        predicted = found.get("predicted")
        begun = [self.bundle.target_tokenizer.vocabulary[i] for i in self.bundle.special.begun([])]
        if "target" not in found and predicted is not None:
            tokens = [*begun, *predicted.tokens[len(begun) - 1 : -1]]
            found["target"] = Side("target", tokens, [-1] * len(begun) + predicted.words[len(begun) - 1 : -1])
        sides = {}
        for name, ids in zip(("source", "target"), look.ids):
            tokenizer = self.bundle.source_tokenizer if name == "source" else self.bundle.target_tokenizer
            plain = Side(name, [tokenizer.vocabulary[i] for i in ids], [-1] * len(ids))
            sides[name] = found.get(name, plain)
        return sides

    def focus(self) -> dict[str, Any]:
        """Where a walk begins: at the token of the clearest attention whose look is clearest."""
        one = self.chosen
        head = max(range(one.heads), key=lambda i: information(one.of(i)))
        weights = one.of(head)
        open_ = np.maximum((weights > 0).sum(1), 1)
        clear = np.log2(open_) - entropy(weights)
        words = np.array(one.queries.words) >= 0
        row = int(np.argmax(np.where(words | ~words.any(), clear, -1.0)))
        rows = "target" if one.kind == "cross" else one.queries.name
        return {
            "attention": one.name,
            "head": head,
            rows: row,
            **({one.keys.name: int(np.argmax(weights[row]))} if one.kind == "cross" else {}),
        }

    def carries(self, path: str) -> bool:
        """Whether the steps of this layer are carried, and not its output alone."""
        return self.whole or self.chosen.name.startswith(f"{path}.")

    # The parts of models

    def param(self, sign: str, tensor: Tensor, part: slice | None = None) -> Param:
        name = self.names.get(id(tensor), "")
        x = _numpy(tensor)
        if part is None:
            return Param(sign, x, name)
        return Param(sign, x[part], f"{name}[{part.start or 0}:{part.stop or len(x)}]")

    def linear(
        self,
        x: Value,
        module: nn.Linear,
        name: str,
        title: str,
        where: Any,
        *,
        signs: str = "y x W b",
        part: slice | None = None,
        call: int | None = None,
    ) -> Value:
        """y = x W + b, or a part of its outputs."""
        y, given, weight, bias = signs.split()
        params = [self.param(weight, module.weight, part)]
        formula = f"{y} = {given} {weight}"
        if module.bias is not None:
            params.append(self.param(bias, module.bias, part))
            formula += f" + {bias}"
        value = self.tape.do("linear", self.named(name), title, formula, where, [x], params)
        own = self.own.output(module, self.call if call is None else call)
        return self.tape.compare(value, own[..., part] if part is not None else own)

    def named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def norm(self, x: Value, module: nn.Module, name: str, where: Any, call: int | None = None) -> Value:
        """Nothing, where the module is the identity."""
        if isinstance(module, nn.Identity):
            return x
        gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        params = [self.param(sign, p) for sign, p in (("γ", gain), ("β", bias)) if p is not None]
        kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        if kind == "layer":
            title, formula = "Norm: mean 0 and variance 1", "n = (x − mean(x)) / √(var(x) + ε)"
        else:
            title, formula = "Norm: mean square 1", "n = x / √(mean(x²) + ε)"
        formula += "".join(f" {'·' if p.sign == 'γ' else '+'} {p.sign}" for p in params)
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        eps = float(torch.finfo(torch.float32).eps if module.eps is None else module.eps)
        value = self.tape.do("norm", self.named(name), title, formula, where, [x], params, kind=kind, eps=eps)
        return self.tape.compare(value, self.own.output(module, self.call if call is None else call))

    def embed(self, module: Embedding, ids: Sequence[int], side: str, title: str) -> Value:
        """A vector for each token, and where it stands."""
        self.path = self.paths[module]
        self.tape.section(title, side=side, part="embedding")
        do, where, axes = self.tape.do, Embedding.forward, (side, "channels")
        x = self.rows(module.tokens.weight, ids, "E", "x", "Each token has a vector", "x = E[token]", where, axes)
        if module.scale != 1.0:
            formula = "x ← x · √d"
            x = do("scale", self.named("scaled"), "Times the root of the width", formula, where, [x], by=module.scale)
        if module.segments is not None:
            rows = [0] * len(ids)
            s = self.rows(
                module.segments.weight, rows, "S", "segment", "The vector of the first text", "s = S[0]", where, axes
            )
            x = do("add", self.named("with_segment"), "Plus that of its text", "x ← x + s", where, [x, s])
        if module.positions is not None:
            places = list(range(len(ids)))
            module.positions.reserve(len(ids))
            if isinstance(module.positions, Learned):
                table, rows = module.positions.weight, [place + module.positions.offset for place in places]
                title, formula = "Each position has a learned vector", "p = P[position]"
            else:
                table, rows = module.positions.table, places
                title = "Each position has a code of sines and cosines"
                formula = "p = sin and cos of position / 10000^(2i/d)"
            p = self.rows(table, rows, "P", "position", title, formula, type(module.positions).forward, axes)
            x = do("add", self.named("with_position"), "Plus that of its position", "x ← x + p", where, [x, p])
        x = self.norm(x, module.norm, "norm", where, 0)
        return self.tape.compare(x, self.own.output(module))

    def rows(
        self,
        table: Tensor,
        ids: Sequence[int],
        sign: str,
        name: str,
        title: str,
        formula: str,
        where: Any,
        axes: tuple[str, ...],
    ) -> Value:
        """Rows of a table, of which only those that are needed are carried."""
        used = sorted(set(ids))
        param = Param(sign, _numpy(table[torch.tensor(used, device=table.device)]), self.names.get(id(table), ""))
        rows = [used.index(i) for i in ids]
        return self.tape.do("take", self.named(name), title, formula, where, params=[param], axes=axes, rows=rows)

    def attention(self, module: MultiHead, x: Value, memory: Value | None = None, bias: Value | None = None) -> Value:
        """Queries, keys and values; scores; weights; what is regarded; heads joined."""
        do, side = self.tape.do, x.axes[0]
        given = x if memory is None else memory
        heads, group, width = module.heads, module.kv_heads, module.head_width
        from_ = "x" if memory is None else "m"
        q = self.linear(x, module.query, "q", "What each token asks: queries", MultiHead.queries, signs="q x W_q b_q")
        k_rows, v_rows = slice(group * width), slice(group * width, None)
        signs = f"{from_} W_k b_k", f"{from_} W_v b_v"
        k = self.linear(
            given,
            module.key_value,
            "k",
            "What each token offers: keys",
            MultiHead.keys_values,
            signs=f"k {signs[0]}",
            part=k_rows,
        )
        v = self.linear(
            given,
            module.key_value,
            "v",
            "What each token tells: values",
            MultiHead.keys_values,
            signs=f"v {signs[1]}",
            part=v_rows,
        )
        q, k, v = (
            do(
                "split",
                self.named(f"{name}_heads"),
                f"The {what} of each head",
                f"{name}ₕ = {name}[h·D … (h+1)·D]",
                where,
                [one],
                axes=(one.axes[0], "heads", "channels"),
                heads=count,
            )
            for name, what, one, count, where in (
                ("q", "queries", q, heads, MultiHead.queries),
                ("k", "keys", k, group, MultiHead.keys_values),
                ("v", "values", v, group, MultiHead.keys_values),
            )
        )
        q = self.norm(q, module.query_norm, "q_norm", MultiHead.queries)
        k = self.norm(k, module.key_norm, "k_norm", MultiHead.keys_values)
        if module.rotary is not None:
            rates = Param("θ", _numpy(module.rotary.rates), f"{self.path}.rotary.rates")
            q, k = (
                do(
                    "rotate",
                    self.named(f"{name}_turned"),
                    f"The {what} turned by their positions",
                    f"({name}ᵢ, {name}ᵢ₊D/2) turned by position · θᵢ",
                    Rotary.forward,
                    [one],
                    [rates],
                    positions=list(range(len(one.x))),
                )
                for name, what, one in (("q", "queries", q), ("k", "keys", k))
            )
        a = self.weights(module.score, q, k, bias, module.mask is not None)
        self.tape.compare(a, self.own.weights(self.paths[module], self.call))
        z = do(
            "weigh",
            self.named("z"),
            "What each head regards: the values, weighted",
            "zₜ = Σₛ aₜₛ vₛ",
            reference,
            [a, v],
            axes=(side, "heads", "channels"),
        )
        z = do(
            "join",
            self.named("joined"),
            "The heads side by side",
            "z = [z₀; z₁; …]",
            MultiHead.forward,
            [z],
            axes=(side, "channels"),
        )
        return self.linear(z, module.out, "o", "The heads mixed", MultiHead.forward, signs="o z W_o b_o")

    def weights(self, score: Score, q: Value, k: Value, bias: Value | None = None, masked: bool = False) -> Value:
        """From queries and keys to weights, by any of the six scores."""
        do, kind = self.tape.do, type(score)
        heads, axes = q.x.shape[1], ("heads", q.axes[0], k.axes[0])
        dot = "How well each query and key agree", "eₜₛ = qₜ · kₛ"

        def matrix(one: Value, sign: str, weight: Tensor, name: str, title: str, formula: str) -> Value:
            param = self.param(sign, weight)
            x = param.x if param.x.ndim == 3 else param.x[None]
            return do("linear_heads", self.named(name), title, formula, kind.fold, [one], [param._replace(x=x)])

        match score:
            case Concat():
                wq, wk = (
                    (score.weight[..., : score.dim_q, :], score.weight[..., score.dim_q :, :])
                    if score.joint
                    else (score.weight_q, score.weight_k)
                )
                q = matrix(q, "W_b", wq, "q_score", "Queries, for the score", "q′ = q W_b")
                k = matrix(k, "W_c", wk, "k_score", "Keys, for the score", "k′ = k W_c")
                last = self.param("w_a", score.weight_a)
                last = last._replace(x=np.broadcast_to(last.x[..., 0], (heads, last.x.shape[-2])))
                e = do(
                    "concat",
                    self.named("e"),
                    "How well each query and key agree",
                    "eₜₛ = w_a · tanh(q′ₜ + k′ₛ)",
                    Concat.pair,
                    [q, k],
                    [last],
                    axes=axes,
                )
            case Dot():
                e = do("dot", self.named("e"), *dot, Dot.pair, [q, k], axes=axes)
            case ScaledDot():
                e = do("dot", self.named("qk"), *dot, ScaledDot.pair, [q, k], axes=axes)
                by = q.x.shape[-1] ** -0.5
                e = do(
                    "scale",
                    self.named("e"),
                    "Divided by the root of the heads' width",
                    "e ← e / √D",
                    ScaledDot.fold,
                    [e],
                    by=by,
                )
            case Cosine():
                q, k = (
                    do(
                        "normalise",
                        self.named(f"{name}_length"),
                        f"The {what} with length 1",
                        f"{name}′ = {name} / |{name}|",
                        Cosine.fold,
                        [one],
                        eps=1e-6,
                    )
                    for name, what, one in (("q", "queries", q), ("k", "keys", k))
                )
                e = do(
                    "dot",
                    self.named("cos"),
                    "The cosine between each query and key",
                    "cosₜₛ = q′ₜ · k′ₛ",
                    Cosine.pair,
                    [q, k],
                    axes=axes,
                )
                if score.log_scale is None:
                    e = do(
                        "scale",
                        self.named("e"),
                        "Times the scale",
                        "e = scale · cos",
                        Cosine.fold,
                        [e],
                        by=float(score.scale),
                    )
                else:
                    learned = self.param("log_scale", score.log_scale)
                    learned = learned._replace(x=learned.x.reshape(-1))
                    e = do(
                        "scale_heads",
                        self.named("e"),
                        "Times each head's learned scale",
                        "e = exp(log_scale) · cos",
                        Cosine.fold,
                        [e],
                        [learned],
                    )
            case General():
                q = matrix(q, "W_a", score.weight, "q_score", "Queries, for the score", "q′ = q W_a")
                e = do("dot", self.named("e"), dot[0], "eₜₛ = q′ₜ · kₛ", General.pair, [q, k], axes=axes)
            case Location():
                table = self.param("W_a", score.weight)
                rows = table.x[None] if table.x.ndim == 2 else table.x
                keys = len(k.x)
                table = table._replace(x=np.ascontiguousarray(rows[:, :keys].transpose(1, 0, 2)))
                w = do(
                    "take",
                    self.named("places"),
                    "A vector for each place, whatever stands there",
                    "wₛ = W_a[s]",
                    Location.fold,
                    params=[table],
                    axes=(k.axes[0], "heads", "channels"),
                    rows=list(range(keys)),
                )
                e = do(
                    "dot",
                    self.named("e"),
                    "How well each query and place agree",
                    "eₜₛ = qₜ · wₛ",
                    Location.pair,
                    [q, w],
                    axes=axes,
                )
            case _:
                raise RegardError(f"A walk cannot compute the score {kind.__name__}.", "Look at the model's heads.")
        if bias is not None:
            e = do("add", self.named("e_bias"), "Plus a number for the distance", "e ← e + b", reference, [e, bias])
        if masked:
            e = do(
                "mask", self.named("e_masked"), "What comes later is hidden", "eₜₛ ← −∞ for s > t", Causal.block, [e]
            )
        return do(
            "softmax",
            self.named("a"),
            "Weights: positive, and 1 together",
            "aₜₛ = exp(eₜₛ) / Σᵢ exp(eₜᵢ)",
            softmax,
            [e],
        )

    def relative(self, module: RelativeBias | None, length: int, side: str) -> Value | None:
        """T5's numbers for distances, which all layers of a stack share."""
        if module is None:
            return None
        self.path = self.paths[module]
        self.tape.section("A number for each distance", side=side, part="bias")
        device = module.table.weight.device
        at = torch.zeros(1, dtype=torch.long, device=device)
        buckets = module.buckets(at, torch.arange(1 - length, length, device=device))[0].tolist()
        return self.tape.do(
            "relative",
            self.named("b"),
            "Each distance has a number, in every head",
            "bₜₛ = B[bucket(s − t)]",
            RelativeBias.forward,
            params=[self.param("B", module.table.weight)],
            axes=("heads", side, side),
            buckets=buckets,
            rows=length,
        )

    def feed_forward(self, module: FeedForward, x: Value) -> Value:
        do, where = self.tape.do, FeedForward.forward
        gate = _GATES.get(module.activation)
        function = gate or module.activation
        formula = f"h = {function}({'g' if gate else 'u'})"
        half = len(module.inner.weight) // 2
        part = slice(half) if gate else None
        u = self.linear(x, module.inner, "u", "A wider layer", where, signs="u x W₁ b₁", part=part)
        if not gate:
            h = do("activate", self.named("h"), "Its activation", formula, activate, [u], function=function)
        else:
            g = self.linear(
                x, module.inner, "g", "Another, as a gate", where, signs="g x W₃ b₃", part=slice(half, None)
            )
            g = do("activate", self.named("gate"), "The gate's activation", formula, activate, [g], function=function)
            h = do("multiply", self.named("h"), "What the gate lets through", "h ← h · u", where, [u, g])
        return self.linear(h, module.outer, "f", "Back to the model's width", where, signs="f h W₂ b₂")

    def residual(self, module: Residual, x: Value, sublayer: Any, name: str) -> Value:
        path = self.path
        given = self.norm(x, module.norm, f"{name}_norm", Residual.forward) if module.place == "pre" else x
        self.path = f"{path}.{name}"
        added = sublayer(given)
        self.path = path
        if module.scale is not None:
            params = [self.param("λ", module.scale)]
            added = self.tape.do(
                "multiply",
                self.named(f"{name}_scaled"),
                "Each channel scaled",
                "y ← y · λ",
                Residual.forward,
                [added],
                params,
            )
        title = "Added to what was there: the residual"
        sign = "f" if name == "feedforward" else "o"
        x = self.tape.do("add", self.named(f"{name}_sum"), title, f"x ← x + {sign}", Residual.forward, [x, added])
        x = self.norm(x, module.norm, f"{name}_norm", Residual.forward) if module.place == "post" else x
        return self.tape.compare(x, self.own.output(module, self.call))

    def block(
        self, module: Any, x: Value, called: str, layer: int, bias: Value | None = None, memory: Value | None = None
    ) -> Value:
        """One layer: its attentions and its feed-forward network; or, where it is not carried, what comes out of it."""
        path, side = self.paths[module], x.axes[0]
        says = {"side": side, "layer": layer, "stack": called}
        carried = self.carries(path)
        title = f"{called}, layer {layer}"
        if not carried:
            self.tape.section(title, part="given", **says)
        with self.tape.silent(not carried):
            self.path = path
            kind = {"self": "self-attention", "masked": "masked self-attention"}[module.attention.kind]
            self.tape.section(
                f"{title}: {kind}",
                part="attention",
                attention=self.seen(f"{path}.attention"),
                heads=module.attention.heads,
                **says,
            )
            x = self.residual(
                module.residuals[0], x, lambda y: self.attention(module.attention, y, bias=bias), "attention"
            )
            if memory is not None:
                self.tape.section(
                    f"{title}: cross-attention",
                    part="attention",
                    attention=self.seen(f"{path}.cross"),
                    heads=module.cross.heads,
                    keys=memory.axes[0],
                    **says,
                )
                x = self.residual(module.residuals[1], x, lambda y: self.attention(module.cross, y, memory), "cross")
            self.tape.section(f"{title}: feed-forward", part="feedforward", **says)
            x = self.residual(
                module.residuals[-1], x, lambda y: self.feed_forward(module.feedforward, y), "feedforward"
            )
        self.path = path
        if not carried:
            where = DecoderBlock.forward if memory is not None else EncoderBlock.forward
            x = self.tape.give(x, self.named("out"), "What comes out of this layer, given", where)
            layer_of = re.sub(r"\.(attention|cross)(\.\d+)?$", "", self.chosen.name)
            self.note = (
                f"The model is large: the walk carries {layer_of} alone. The output of its other layers is given."
            )
        return self.tape.compare(x, self.own.output(module, self.call))

    def seen(self, name: str) -> str:
        """What the page calls an attention: calls of shared layers are numbered."""
        return name if len(self.own.recording[name].calls) == 1 else f"{name}.{self.call}"

    def last_norm(self, x: Value, module: nn.Module, called: str, where: Any) -> Value:
        if isinstance(module, nn.Identity):
            return x
        self.path = self.paths[module]
        self.tape.section(called, side=x.axes[0], part="norm")
        self.call = 0
        return self.norm(x, module, "n", where)

    def output(self, x: Value, module: nn.Linear, where: Any, labels: Sequence[str] | None = None) -> Value:
        """The last map, and the probabilities of what it speaks of."""
        self.path, tape, axes = "output", self.tape, (x.axes[0], "vocabulary")
        weight, bias = (
            _numpy(module.weight).astype(float),
            None if module.bias is None else _numpy(module.bias).astype(float),
        )
        scores = x.x @ weight.T + (0.0 if bias is None else bias)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, :NAMED]
        some = sorted(set(best.flatten().tolist()))
        count = len(weight)
        name = (lambda i: labels[i]) if labels is not None else self.token
        formula = "l = x W" + ("" if bias is None else " + b")
        title = "A score for each token of the vocabulary" if labels is None else "A score for each label"
        inputs: list[Value] = []
        if weight.size * 4 + 2 * scores.size * 4 <= WHOLE_OUTPUT:
            params = [self.param(sign, p) for sign, p in (("W", module.weight), ("b", module.bias)) if p is not None]
            logits = tape.do("linear", "output.l", title, formula, where, [x], params, axes=axes)
            tape.compare(logits, self.own.output(module))
            self.ends = {i: name(i) for i in some}
        else:
            others = scores.copy()
            others[:, some] = -np.inf
            rest = np.logaddexp.reduce(others, axis=-1, keepdims=True)
            params = [Param("W", _numpy(module.weight)[some], f"{self.names[id(module.weight)]}[{len(some)} rows]")]
            if bias is not None:
                params.append(Param("b", bias[some], f"{self.names[id(module.bias)]}[{len(some)} numbers]"))
            title = f"A score for each of {len(some)} tokens, of {count}"
            logits = tape.do("linear", "output.l", title, formula, where, [x], params, axes=axes)
            tape.compare(logits, self.own.output(module)[..., some])
            inputs.append(
                tape.give(
                    Value(None, rest, (x.axes[0], "channels")),
                    "output.rest",
                    f"What the other {count - len(some)} tokens add to the sum, given as a logarithm",
                    logprobs,
                )
            )
            self.ends = {column: name(i) for column, i in enumerate(some)}
        p = tape.do(
            "softmax", "output.p", "Probabilities", "p = exp(l) / Σ exp(l)", logprobs, [logits, *inputs], axes=axes
        )
        own = torch.from_numpy(self.own.output(module)).double().softmax(-1).numpy()
        return tape.compare(p, own if not inputs else own[..., some])

    def token(self, number: int) -> str:
        tokenizer = self.bundle.target_tokenizer if isinstance(self.bundle, Translator) else self.bundle.tokenizer
        return tokenizer.decode([number]).strip() or tokenizer.vocabulary[number]

    # The families

    def transformer(self, model: Transformer) -> None:
        source, target = self.look.ids
        x = self.embed(model.source_embedding, source, "source", "The source's tokens become vectors")
        bias = self.relative(model.encoder_bias, len(source), "source")
        for layer, block in enumerate(model.encoder):
            x = self.block(block, x, "Encoder", layer, bias)
        memory = self.last_norm(x, model.encoder_norm, "The encoder's last norm", Transformer.encode)
        x = self.embed(model.target_embedding, target, "target", "The translation's tokens become vectors")
        bias = self.relative(model.decoder_bias, len(target), "target")
        for layer, above in enumerate(model.decoder):
            x = self.block(above, x, "Decoder", layer, bias, memory)
        x = self.last_norm(x, model.decoder_norm, "The decoder's last norm", Transformer._finished)
        self.tape.section("The next token", side="target", part="output")
        if model.config.output_scale:
            x = self.tape.do(
                "scale",
                "output.scaled",
                "Divided by the root of the width",
                "x ← x / √d",
                Transformer._finished,
                [x],
                by=float(model.output_factor),
            )
        self.output(x, model.output, Transformer.forward)

    def gpt(self, model: GPT) -> None:
        (ids,) = self.look.ids
        x = self.embed(model.embedding, ids, "text", "Tokens become vectors")
        for layer, block in enumerate(model.blocks):
            x = self.block(block, x, "Decoder", layer)
        x = self.last_norm(x, model.norm, "The last norm", GPT._features)
        self.tape.section("The next token", side="text", part="output")
        self.output(x, model.output, GPT.forward)

    def bert(self, model: Bert) -> None:
        (ids,) = self.look.ids
        do = self.tape.do
        x = self.embed(model.embedding, ids, "text", "Tokens become vectors")
        if isinstance(model.widen, nn.Linear):
            x = self.linear(x, model.widen, "widened", "In the model's width", Bert.encode)
        count = len(model.blocks)
        for layer in range(model.config.layers):
            group = layer * count // model.config.layers
            self.call = layer - -(-group * model.config.layers // count)
            x = self.block(model.blocks[group], x, "Encoder", layer)
        self.call = 0
        x = self.last_norm(x, model.norm, "The last norm", Bert.encode)
        self.path = "head"
        if model.config.head in ("mask", "answer") or model.output is None:
            self.tape.section(
                "What the text says" if model.output is None else "What stands where", side="text", part="output"
            )
        else:
            self.tape.section("The label", side="text", part="output")
        if model.mask_head is not None and model.output is not None:
            head = model.mask_head
            x = self.linear(x, head.dense, "dense", "A map before the output", MaskHead.forward)
            x = do(
                "activate",
                self.named("activated"),
                "Its activation",
                f"y = {head.activation}(x)",
                MaskHead.forward,
                [x],
                function=head.activation,
            )
            x = self.norm(x, head.norm, "norm", MaskHead.forward)
            self.output(x, model.output, Bert.forward)
        elif model.config.head == "classify" and model.pooler is not None and model.output is not None:
            x = do(
                "take",
                self.named("first"),
                "The first token stands for the text",
                "x = x[0]",
                Bert.pooled,
                [x],
                rows=[0],
                axes=("one", "channels"),
            )
            x = self.linear(x, model.pooler, "pooled", "The pooler", Bert.pooled)
            function = model.config.pooler
            x = do(
                "activate",
                self.named("activated"),
                "Its activation",
                f"y = {function}(x)",
                Bert.pooled,
                [x],
                function=function,
            )
            self.output(x, model.output, Bert.forward, model.config.labels)
        elif model.config.head == "answer" and model.output is not None:
            logits = self.linear(
                x,
                model.output,
                "l",
                "Two scores for each token: where the answer begins and ends",
                Bert.forward,
                signs="l x W b",
            )
            logits = do(
                "turn",
                self.named("turned"),
                "The two as rows",
                "lᵀ",
                TextEncoder.answer,
                [logits],
                axes=("ends", "text"),
            )
            do(
                "softmax",
                self.named("p"),
                "Probabilities over the tokens",
                "p = exp(l) / Σ exp(l)",
                TextEncoder.answer,
                [logits],
            )
        else:
            x = do(
                "mean",
                self.named("mean"),
                "The mean of all tokens",
                "m = (x₀ + x₁ + …) / T",
                TextEncoder.embed,
                [x],
                axes=("one", "channels"),
            )
            do(
                "normalise",
                self.named("vector"),
                "With length 1: the text's vector",
                "y = m / |m|",
                TextEncoder.embed,
                [x],
                eps=1e-12,
            )

    # Recurrent models

    def seq2seq(self, model: Seq2Seq) -> None:
        source, target = self.look.ids
        x = self.embed(model.source_embedding, source, "source", "The source's tokens become vectors")
        encoded, states = self.encoder(model.encoder, x)
        y = self.embed(model.target_embedding, target, "target", "The translation's tokens become vectors")
        decoder = model.decoder
        self.path, where = "decoder", Decoder._attentional
        self.tape.section("What the decoder looks at", side="source", part="memory")
        memory = self.linear(
            encoded,
            decoder.memory,
            "memory",
            "The encoder's states in the decoder's width",
            Decoder.remember,
            signs="h h W b",
        )
        k = self.tape.do(
            "split",
            self.named("keys"),
            "They are keys and values, of one head",
            "k = v = h",
            StateAttention.forward,
            [memory],
            axes=("source", "heads", "channels"),
            heads=1,
        )
        rows = self.luong(decoder, y, states, k) if decoder.place == "luong" else self.bahdanau(decoder, y, states, k)
        self.path = "decoder"
        self.tape.section("The attentional state", side="target", part="combine")
        s = self.linear(
            rows, decoder.combine, "combined", "What was regarded and what was known, mixed", where, signs="u [c;s] W b"
        )
        s = self.tape.do(
            "activate",
            self.named("attentional"),
            "Attentional states",
            "s̃ₜ = tanh(W [cₜ; sₜ])",
            where,
            [s],
            function="tanh",
        )
        self.tape.compare(s, self.own.output(decoder))
        self.tape.section("The next token", side="target", part="output")
        self.output(s, model.output, Seq2Seq.forward)

    def encoder(self, module: Encoder, x: Value) -> tuple[Value, list[list[Value]]]:
        """The states of both directions, and for each layer of the decoder its first state (h, or h and c)."""
        first: list[list[Value]] = []
        for number, (layer, bridge) in enumerate(zip(module.layers, module.bridges)):
            both = []
            with self.tape.silent(not self.whole):
                for backward, one in enumerate((layer.forward_layer, layer.backward_layer)):
                    way = "backward" if backward else "forward"
                    called = f"Encoder, layer {number}, {way}"
                    both.append(self.recurrence(one, x, called, "h", [None] * one.parts, bool(backward)))
                self.path = f"encoder.layers.{number}"
                self.tape.section(
                    f"Encoder, layer {number}: both directions", side="source", part="recurrent", layer=number
                )
                x = self.tape.do(
                    "beside",
                    self.named("h"),
                    "Both states, side by side",
                    "hₛ = [forward; backward]",
                    Bidirectional.forward,
                    both,
                )
            if not self.whole:
                self.tape.section(f"Encoder, layer {number}", side="source", part="given", layer=number)
                x = self.tape.give(x, self.named("h"), "The states of both directions, given", Bidirectional.forward)
                self.note = (
                    "The model is large: the walk carries its attention and its output. "
                    "The states of its recurrent layers are given."
                )
            self.tape.compare(x, self.own.output(layer))
            width, length = module.width, len(x.x)
            with self.tape.silent(not self.whole):
                do, where = self.tape.do, Encoder.forward
                ends = [
                    do(
                        "take",
                        self.named(f"row_{row}"),
                        "At the end of its way",
                        f"h[{row}]",
                        Bidirectional.final,
                        [x],
                        rows=[row],
                        axes=("one", "channels"),
                    )
                    for row in (length - 1, 0)
                ]
                ahead = do(
                    "part",
                    self.named("ahead"),
                    "What was read forward",
                    "h→ at the last token",
                    Bidirectional.final,
                    [ends[0]],
                    start=0,
                    end=width,
                )
                behind = do(
                    "part",
                    self.named("behind"),
                    "What was read backward",
                    "h← at the first token",
                    Bidirectional.final,
                    [ends[1]],
                    start=width,
                    end=2 * width,
                )
                joined = do("beside", self.named("final"), "Both", "[h→; h←]", Bidirectional.final, [ahead, behind])
                b = self.linear(joined, bridge, "bridge", "A bridge to the decoder", where, signs="u [h→;h←] W b")  # type: ignore[arg-type]
                b = do(
                    "activate",
                    self.named("first"),
                    "The decoder's first state",
                    "s₀ = tanh(u)",
                    where,
                    [b],
                    function="tanh",
                )
                parts = len(b.x[0]) // width
                first.append(
                    [b]
                    if parts == 1
                    else [
                        do(
                            "part",
                            self.named(f"first_{'hc'[i]}"),
                            "Its part " + "hc"[i],
                            "hc"[i],
                            where,
                            [b],
                            start=i * width,
                            end=(i + 1) * width,
                        )
                        for i in range(parts)
                    ]
                )
        return x, first

    def recurrence(
        self, layer: Recurrent, x: Value, called: str, sign: str, state: Sequence[Value | None], backward: bool = False
    ) -> Value:
        """All states of a layer that reads a sequence, one section a token; without a first state it is 0."""
        side, path = x.axes[0], self.paths[layer]
        self.path = path
        self.tape.section(f"{called}: the inputs", side=side, part="recurrent")
        inputs = self.gates_of_inputs(layer, x)
        now = [one if one is not None else self.zeros(layer) for one in state]
        states: dict[int, Value] = {}
        order = range(len(x.x))
        for t in reversed(order) if backward else order:
            self.tape.section(f"{called}: one step", side=side, token=t, part="recurrent")
            now = self.cell(layer, inputs, t, now, sign)
            states[t] = now[0]
        self.path = path
        self.tape.section(f"{called}: all steps", side=side, part="recurrent")
        rows = self.tape.do(
            "stack",
            self.named(sign),
            "The states of all tokens",
            f"{sign} = [{sign}₀, {sign}₁, …]",
            Recurrent.forward,
            [states[t] for t in order],
            axes=(side, "channels"),
        )
        own = self.own.output(layer)
        return self.tape.compare(rows, own)

    def zeros(self, layer: Recurrent) -> Value:
        width = layer.rnn.hidden_size
        return self.tape.do(
            "given",
            self.named("zero"),
            "The first state",
            "0",
            Recurrent.forward,
            params=[Param("", np.zeros((1, width)), "")],
            axes=("one", "channels"),
        )

    def gates_of_inputs(self, layer: Recurrent, x: Value) -> Value:
        weight, _, bias, _ = layer.rnn.all_weights[0]
        params = [self.param("W_x", weight), self.param("b_x", bias)]
        return self.tape.do(
            "linear",
            self.named("inputs"),
            "What each token adds to the gates",
            "u = x W_x + b_x",
            Recurrent.inputs,
            [x],
            params,
        )

    def cell(
        self, layer: Recurrent, inputs: Value, t: int, state: Sequence[Value], sign: str, context: Value | None = None
    ) -> list[Value]:
        """The next state of a GRU (h) or an LSTM (h and c), gate by gate."""
        do, where, path = self.tape.do, Recurrent.step, self.path
        self.path = f"{path}.{t}"
        _, weight, _, bias = layer.rnn.all_weights[0]
        x = do(
            "take",
            self.named("x"),
            "What this token adds to the gates",
            f"u[{t}]",
            Recurrent.inputs,
            [inputs],
            rows=[t],
            axes=("one", "channels"),
        )
        if context is not None:
            x = do(
                "add",
                self.named("x_context"),
                "Plus what was regarded",
                "u ← u + c W_c",
                Decoder._bahdanau,
                [x, context],
            )
        h = do(
            "linear",
            self.named("w"),
            "What the last state adds",
            f"w = {sign}ₜ₋₁ W_h + b_h",
            where,
            [state[0]],
            [self.param("W_h", weight), self.param("b_h", bias)],
        )

        def gate(name: str, title: str, function: str, part: int, parts: int, formula: str, *more: Value) -> Value:
            # The channels of a gate are a third, or a quarter, of those of its inputs.
            return do(
                "gate",
                self.named(name),
                title,
                formula,
                where,
                [x, h, *more],
                function=function,
                part=part,
                parts=parts,
                reset=bool(more),
                axes=("one", "channels"),
            )

        if layer.parts == 1:
            r = gate("r", "Reset gate: how much of the last state is heard", "sigmoid", 0, 3, "r = σ(u_r + w_r)")
            z = gate("z", "Update gate: how much of it is kept", "sigmoid", 1, 3, "z = σ(u_z + w_z)")
            n = gate("n", "What is new", "tanh", 2, 3, "n = tanh(u_n + r · w_n)", r)
            new = [
                do(
                    "between",
                    self.named(sign),
                    "The next state",
                    f"{sign}ₜ = (1 − z) · n + z · {sign}ₜ₋₁",
                    where,
                    [n, state[0], z],
                )
            ]
        else:
            i = gate("i", "Input gate: how much is written", "sigmoid", 0, 4, "i = σ(u_i + w_i)")
            f = gate("f", "Forget gate: how much is kept", "sigmoid", 1, 4, "f = σ(u_f + w_f)")
            g = gate("g", "What is new", "tanh", 2, 4, "g = tanh(u_g + w_g)")
            o = gate("o", "Output gate: how much is shown", "sigmoid", 3, 4, "o = σ(u_o + w_o)")
            kept = do("multiply", self.named("kept"), "What is kept", "f · cₜ₋₁", where, [f, state[1]])
            written = do("multiply", self.named("written"), "What is written", "i · g", where, [i, g])
            c = do("add", self.named("c"), "The cell", "cₜ = f · cₜ₋₁ + i · g", where, [kept, written])
            squashed = do(
                "activate", self.named("tanh_c"), "The cell, bounded", "tanh(cₜ)", where, [c], function="tanh"
            )
            new = [
                do("multiply", self.named(sign), "The next state", f"{sign}ₜ = o · tanh(cₜ)", where, [o, squashed]),
                c,
            ]
        self.path = path
        return new

    def state_attention(
        self, module: StateAttention, s: Value, k: Value, call: int | None = 0, sign: str = "sₜ"
    ) -> Value:
        """eₜ, aₜ and the context: what states of the decoder regard of the encoder's."""
        do, side = self.tape.do, s.axes[0]
        q = do(
            "split",
            self.named("q"),
            "The query is the state",
            f"qₜ = {sign}",
            StateAttention.forward,
            [s],
            axes=(side, "heads", "channels"),
            heads=1,
        )
        a = self.weights(module.score, q, k)
        self.tape.compare(a, self.own.weights("decoder.attention", call))
        c = do(
            "weigh",
            self.named("z"),
            "The encoder's states, weighted",
            "cₜ = Σₛ aₜₛ hₛ",
            reference,
            [a, k],
            axes=(side, "heads", "channels"),
        )
        c = do("join", self.named("c"), "The context", "cₜ", StateAttention.forward, [c], axes=(side, "channels"))
        return self.tape.compare(c, self.own.output(module, call))

    def luong(self, decoder: Decoder, y: Value, states: list[list[Value]], k: Value) -> Value:
        """States first, then one attention of all steps."""
        with self.tape.silent(not self.whole):
            for number, layer in enumerate(decoder.layers):
                y = self.recurrence(layer, y, f"Decoder, layer {number}", "s", states[number])
        if not self.whole:
            self.path = "decoder"
            self.tape.section("The decoder's states", side="target", part="given")
            y = self.tape.compare(
                self.tape.give(y, "decoder.s", "The decoder's states, given", Recurrent.forward),
                self.own.output(decoder.layers[-1]),
            )
        self.path = "decoder.attention"
        self.tape.section(
            "Attention", side="target", part="attention", attention="decoder.attention", heads=1, keys="source"
        )
        c = self.state_attention(decoder.attention, y, k)
        return self.tape.do("beside", self.named("cs"), "Context and state", "[cₜ; sₜ]", Decoder.forward, [c, y])

    def bahdanau(self, decoder: Decoder, y: Value, states: list[list[Value]], k: Value) -> Value:
        """Each step looks with the last state, and goes on with what it regarded."""
        tape, first = self.tape, decoder.layers[0]
        self.path = self.paths[first]
        with tape.silent(not self.whole):
            tape.section("Decoder: the inputs", side="target", part="recurrent")
            inputs = self.gates_of_inputs(first, y)
            rows, before, now = [], [], list(states)
            for t in range(len(y.x)):
                self.path = f"decoder.attention.{t}"
                tape.section(
                    "Decoder, one step: attention with the state before it",
                    side="target",
                    token=t,
                    part="attention",
                    attention="decoder.attention",
                    heads=1,
                    keys="source",
                )
                before.append(now[-1][0])
                c = self.state_attention(decoder.attention, now[-1][0], k, t, "sₜ₋₁")
                tape.section("Decoder, one step: the next state", side="target", token=t, part="recurrent")
                mapped = self.linear(
                    c,
                    decoder.context,
                    "context",
                    "The context's share of the gates",
                    Decoder._bahdanau,
                    signs="u c W_c b",
                    call=t,
                )
                below: Value | None = None
                after = []
                for number, layer in enumerate(decoder.layers):
                    self.path = self.paths[layer]
                    if below is None:
                        after.append(self.cell(layer, inputs, t, now[number], "s", mapped))
                    else:
                        self.path += f".{t}"
                        inside = self.gates_of_inputs(layer, below)
                        after.append(self.cell(layer, inside, 0, now[number], "s"))
                    below = after[-1][0]
                now = after
                self.path = f"decoder.{t}"
                assert below is not None
                rows.append(
                    tape.do("beside", self.named("cs"), "Context and state", "[cₜ; sₜ]", Decoder._bahdanau, [c, below])
                )
            if self.whole:
                self.path = "decoder"
                tape.section("Decoder: all steps", side="target", part="recurrent")
                return tape.do(
                    "stack",
                    self.named("cs"),
                    "Context and state of all steps",
                    "[cₜ; sₜ]",
                    Decoder.forward,
                    rows,
                    axes=("target", "channels"),
                )
        self.path = "decoder.attention"
        tape.section("The decoder's states", side="target", part="given")
        width = before[0].x.shape[-1]
        last = Value(None, np.concatenate([one.x for one in before]), ("target", "channels"))
        s = tape.give(
            Value(None, np.concatenate([one.x[:, width:] for one in rows]), last.axes),
            "decoder.s",
            "The decoder's states, given",
            Recurrent.step,
        )
        last = tape.give(last, "decoder.s_before", "Those before each step, given", Recurrent.step)
        tape.section(
            "Attention", side="target", part="attention", attention="decoder.attention", heads=1, keys="source"
        )
        c = self.state_attention(decoder.attention, last, k, None, "sₜ₋₁")
        return tape.do("beside", "decoder.cs", "Context and state", "[cₜ; sₜ]", Decoder.forward, [c, s])


def _numpy(x: Tensor) -> Float[np.ndarray, "..."]:
    return x.detach().float().cpu().numpy()
