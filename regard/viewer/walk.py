"""The walk: every number between a text or an image and the model's output, step by step.

The steps are those of the model's program (`regard.program`), computed in float64. Each says how far it is from what the
model's own forward gave.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from regard.errors import RegardError
from regard.folder import Translator
from regard.layers.packed import pack
from regard.models import Bert, Seq2Seq
from regard.program import Program, Step, forward_program
from regard.program.numpy_interpreter import Values, execute, tensors_of
from regard.viewer.forcing import information
from regard.viewer.looking import Look, Side
from regard.viewer.measures import entropy
from regard.viewer.module_outputs import ModuleOutputs
from regard.viewer.overlays import ImageLook
from regard.viewer.trace import Array, Extent, Node, Trace, evaluate, unroll
from regard.viewer.walk_wording import Words

# Bytes of parameters, embeddings and output layer aside, up to which a walk carries all of them.
WHOLE = 8 << 20
# Bytes and tokens up to which a page has a walk by default.
SMALL, SHORT = 12 << 20, 64
# Tokens that a walk has at most.
LONGEST = 512
# Bytes up to which the whole of an output layer is carried.
WHOLE_OUTPUT = 4 << 20
# Tokens per position that are named.
NAMED = 10
PROBABILITIES = Words("p", "Probabilities", "p = exp(l) / Σ exp(l)")


@dataclass(frozen=True, eq=False)
class Walk:
    """A trace, and what it is about: the tokens, those that are looked at first, and the names of the outputs."""

    trace: Trace
    sides: dict[str, Side]
    focus: dict[str, Any]
    names: dict[int, str]
    """of columns of the last step: the ten likeliest of each row"""
    note: str | None
    """what is given and not computed, where that is so"""
    linked: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """sides that follow another: which, and the row for each of its tokens"""


def walk_of(look: Look | ImageLook) -> Walk:
    """The walk of a look: each step from its text, or its image, to the output.

    >>> walk = walk_of(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> walk.trace["decoder.0.cross.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (4, 5, 6)
    """
    if isinstance(look, ImageLook):
        from regard.viewer.image_walk import walk_of_image  # which builds on what is here

        return walk_of_image(look)
    if look.bundle is None:
        raise RegardError("This look has no model: there is no walk.", "Make it with regard.look.")
    if (longest := max(map(len, look.ids))) > LONGEST:
        raise RegardError(f"The text has {longest} tokens: a walk takes at most {LONGEST}.", "Shorten the text.")
    return TextWalk(look).walk()


def walk_for(look: Look, wanted: bool | None = None) -> Walk | None:
    """A page's walk: if it is wanted, or by default if model and text are small."""
    if wanted is not None:
        return walk_of(look) if wanted else None
    if look.bundle is None or max(map(len, look.ids)) > SHORT or bytes_inside(look.bundle.model) > WHOLE:
        return None
    return small_walk(look)


def small_walk(look: Look | ImageLook) -> Walk | None:
    """The walk, if it is small, and if the model's program can be computed."""
    try:
        walk = walk_of(look)
    except RegardError:  # an operation that programs do not have
        return None
    return walk if walk.trace.size <= SMALL else None


def header_of(walk: Walk, blobs: list[bytes]) -> dict[str, Any]:
    """What a scene's header says of a walk; its numbers go to the blobs."""
    trace = walk.trace
    places = {}
    for name, raw in (("params", trace.params), ("outputs", trace.outputs)):
        blobs.append(raw)
        places[name] = {"at": len(blobs) - 1, "shape": [len(raw) // 4], "type": "float32"}
    return {
        "sides": {
            name: {"tokens": side.tokens, "words": side.words}
            | (dict(zip(("of", "rows"), walk.linked[name])) if name in walk.linked else {})
            for name, side in walk.sides.items()
        },
        "focus": walk.focus,
        "names": {str(column): name for column, name in walk.names.items()},
        "note": walk.note,
        "sections": trace.sections,
        "steps": trace.steps,
        **places,
    }


def bytes_inside(model: nn.Module) -> int:
    """Of the parameters between embeddings and output layer, of whose rows only a few may be needed."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    output = getattr(model, "output", None)
    tables |= {id(output.weight)} if isinstance(output, nn.Linear) else set()
    return sum(4 * p.numel() for p in model.parameters() if id(p) not in tables)


class Computation:
    """The unrolled program of one input with its values, to which steps can be added."""

    def __init__(self, model: nn.Module, program: Program, inputs: dict[str, Array]) -> None:
        self.model, self.inputs = model, inputs
        self.nodes = unroll(program, program.sizes(inputs))
        self.values: Values = evaluate(tensors_of(program, model), self.nodes, inputs)
        self.output = next(node for node in reversed(self.nodes) if node.name == program.outputs[0])
        self.words: dict[str, Words | None] = {}

    def add(
        self, name: str, op: str, inputs: Sequence[str], axes: tuple[str, ...], words: Words | None, **options: Any
    ) -> str:
        """Add a step after the program's own."""
        step = Step(name, op, tuple(inputs), options, (), "float", "", "")
        execute(step, self.values)
        shape = self.values[name].shape
        step = Step(name, op, tuple(inputs), options, shape, "float", "", "")
        self.nodes.append(Node(step, (None,) * len(shape), "", axes=axes))
        self.words[name] = words
        return name

    def give(self, name: str, x: Array, axes: tuple[str, ...], words: Words) -> str:
        """Add a value that is given."""
        self.values[name] = x
        self.nodes.append(Node(Step(name, "given", (), {}, x.shape, "float", "", ""), (None,) * x.ndim, "", axes=axes))
        self.words[name] = words
        return name

    def likeliest(self, x: Array) -> list[int]:
        """The columns that are among the ten largest of a row."""
        return sorted(set(np.argsort(-x, axis=-1, kind="stable")[..., :NAMED].flatten().tolist()))

    def end_with_probabilities(self, axes: tuple[str, ...], called: str = "token") -> list[int | None]:
        """Add the softmax over the columns; of a large output layer, with the likeliest columns alone and the sum of
        the others as a given logarithm. Returns the number of each column, None for the others together."""
        node, scores = self.output, self.values[self.output.name]
        weight = self.values[node.step.inputs[1]] if node.op == "linear" else None
        columns: list[int | None] = list(range(scores.shape[-1]))
        logits = node.name
        if weight is not None and 4 * (weight.size + 2 * scores.size) > WHOLE_OUTPUT:
            some = self.likeliest(scores)
            self._restrict(node, some)
            rest = np.delete(scores, some, axis=-1)
            others = np.logaddexp.reduce(rest, axis=-1, keepdims=True)
            title = f"Sum over the other {rest.shape[-1]} {called}s, given as a logarithm"
            given = self.give("rest", others, (*axes[:-1], "channels"), Words("rest", title, "log Σ exp(l)"))
            logits = self.add("logits", "cat", [node.name, given], (), None, dim=-1)
            columns = [*some, None]
        self.add("probabilities", "softmax", [logits], axes, PROBABILITIES, dim=-1)
        return columns

    def _restrict(self, node: Node, some: list[int]) -> None:
        """Leave some of a linear layer's outputs."""
        inputs = [node.step.inputs[0]]
        for name in node.step.inputs[1:]:
            assert name is not None
            inputs.append(f"{name}[{len(some)} rows]")
            self.values[str(inputs[-1])] = self.values[name][some]
        step = node.step
        shape = (*step.shape[:-1], len(some))
        node.step = Step(step.name, step.op, tuple(inputs), step.attributes, shape, *_rest(step))
        self.values[node.name] = self.values[node.name][..., some]


def _rest(step: Step) -> tuple[str, str, str]:
    return step.kind, step.module, step.source


class TextWalk:
    """The walk of a text, or of a sentence and its translation."""

    def __init__(self, look: Look) -> None:
        self.look, self.bundle, self.model = look, look.bundle, look.bundle.model.eval()
        self.own = ModuleOutputs(self.model, [pack([ids]).to(self.bundle.device) for ids in look.ids])
        program = forward_program(self.model)
        inputs = {name: np.array([ids]) for name, ids in zip(program.inputs, look.ids)}
        self.made = Computation(self.model, program, inputs)
        self.side = program.inputs[-1]
        self.names: dict[int, str] = {}

    def walk(self) -> Walk:
        title = self.end()
        block = None if bytes_inside(self.model) <= WHOLE else self.chosen_block()
        extent = Extent(block=block, words=self.made.words, output=title)
        trace = Trace(self.model, self.made.nodes, self.made.inputs, self.own, self.made.values, extent)
        return Walk(trace, self.sides(), self.focus(), self.names, self.note(block))

    def end(self) -> str:
        """Add what comes after the model's forward: probabilities, or the vector of the text. Returns a title."""
        model, made, side = self.model, self.made, self.side
        head = model.config.head if isinstance(model, Bert) else "mask"
        if head == "none":
            x, axes = made.output.name, ("channels",)
            if side in made.output.sizes:
                x = made.add("pooled", "mean", [x], axes, Words("mean", "Mean of all tokens", "m = Σ x / T"), dim=[1])
            length = made.add("length", "linalg_vector_norm", [x], axes, None, ord=2, dim=[-1], keepdim=True)
            length = made.add("clamped", "clamp_min", [length], axes, None, min=1e-12)
            made.add("vector", "div", [x, length], axes, Words("vector", "Vector of length 1", "y = m / |m|"))
            return "Vector of the text"
        if head == "answer":
            self.names = dict(enumerate(("start", "end")))
            for number, end in self.names.items():
                logits = made.add(f"{end}_logits", "select", [made.output.name], (), None, dim=2, index=number)
                words = Words(f"p_{end}", f"Probability of each token as {end} of the answer", PROBABILITIES.formula)
                made.add(f"{end}_probabilities", "softmax", [logits], (side,), words, dim=-1)
            return "Start and end of the answer"
        if head == "classify":
            columns = made.end_with_probabilities(("vocabulary",), "label")
            self.names = {i: model.config.labels[number] for i, number in enumerate(columns) if number is not None}
            return "Label"
        likely = made.likeliest(made.values[made.output.name])
        columns = made.end_with_probabilities((side, "vocabulary"))
        self.names = {i: self.token(number) for i, number in enumerate(columns) if number in likely}
        if None in columns:
            self.names[len(columns) - 1] = "all others"
        return "Token at each position" if isinstance(model, Bert) else "Next token"

    def token(self, number: int) -> str:
        tokenizer = self.bundle.tokenizers[-1]
        return tokenizer.decode([number]).strip() or tokenizer.vocabulary[number]

    def sides(self) -> dict[str, Side]:
        """The tokens of each axis; row t of the target predicts the next token."""
        found = {side.name: side for one in self.look.maps.values() for side in (one.queries, one.keys)}
        if not isinstance(self.bundle, Translator):
            return {"text": found["text"]}
        if "target" not in found and "predicted" in found:
            begun = [self.bundle.target_tokenizer.vocabulary[i] for i in self.bundle.special.begun([])]
            _, tokens, words = found["predicted"]
            inside = slice(len(begun) - 1, -1)
            found["target"] = Side("", tokens[inside], words[inside]).framed("target", begun)
        sides = {}
        for name, ids, tokenizer in zip(("source", "target"), self.look.ids, self.bundle.tokenizers):
            plain = Side(name, [tokenizer.vocabulary[i] for i in ids], [-1] * len(ids))
            sides[name] = found.get(name, plain)
        return sides

    def focus(self) -> dict[str, Any]:
        """Where a walk begins: in the clearest attention, at the token whose weights are clearest."""
        if not self.look.maps:
            return {"attention": None, "head": 0}
        one = self.look.alignment
        head = max(range(one.heads), key=lambda i: information(one.of(i)))
        weights = one.of(head)
        clear = np.log2(np.maximum((weights > 0).sum(1), 1)) - entropy(weights)
        words = np.array(one.queries.words) >= 0
        row = int(np.argmax(np.where(words | ~words.any(), clear, -1.0)))
        focus: dict[str, Any] = {"attention": one.name, "head": head}
        if one.kind == "cross":
            return focus | {"target": row, one.keys.name: int(np.argmax(weights[row]))}
        return focus | {one.queries.name: row}

    def chosen_block(self) -> str:
        """The block of the clearest attention."""
        return block_of(self.look.alignment.name) if self.look.maps else ""

    def note(self, block: str | None) -> str | None:
        if block is None:
            return None
        if isinstance(self.model, Seq2Seq):
            return "The model is large: the walk has its attention and its output. The states of its layers are given."
        return large_note(block)


def block_of(attention: str) -> str:
    """The block of an attention, by its name.

    >>> block_of("decoder.0.cross"), block_of("blocks.1.attention.3"), block_of("decoder.attention")
    ('decoder.0', 'blocks.1', '')
    """
    found = re.match(r"(.*\.\d+)\.(attention|cross)(\.\d+)?$", attention)
    return found[1] if found else ""


def large_note(block: str) -> str:
    return f"The model is large: the walk has the steps of {block} alone. The output of its other layers is given."
