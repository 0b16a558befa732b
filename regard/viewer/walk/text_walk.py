"""The walk of a text, or of a sentence and its translation."""

from typing import Any

import numpy as np
import torch

from regard.errors import RegardError
from regard.evaluation.attention_measures import entropy
from regard.evaluation.teacher_forcing import information
from regard.layers.packed import pack
from regard.models import Bert, Seq2Seq
from regard.pipelines import Translator
from regard.program import forward_program
from regard.viewer.text_look import Look, Side
from regard.viewer.walk import limits
from regard.viewer.walk.computation import Computation
from regard.viewer.walk.module_outputs import ModuleOutputs
from regard.viewer.walk.trace import Extent, Trace
from regard.viewer.walk.walkthrough import Walk, block_of, bytes_inside, large_note
from regard.viewer.walk.wording import PROBABILITIES, Words


class TextWalk:
    """The walk of a text, or of a sentence and its translation."""

    def __init__(self, look: Look) -> None:
        if look.bundle is None:
            raise RegardError("This look has no model: there is no walk.", "Make it with regard.look.")
        if (longest := max(map(len, look.ids))) > limits.LONGEST:
            raise RegardError(
                f"The text has {longest} tokens: a walk takes at most {limits.LONGEST}.", "Shorten the text."
            )
        self.look, self.bundle, self.model = look, look.bundle, look.bundle.model.eval()
        given: list[Any] = [pack([ids]).to(self.bundle.device) for ids in look.ids]
        if look.segments is not None:
            given.append(torch.tensor(look.segments, device=self.bundle.device))
        self.own = ModuleOutputs(self.model, given)
        program = forward_program(self.model)
        # A single text is one segment.
        inputs = {name: np.array([look.segments or [0] * len(look.ids[0])]) for name in program.inputs}
        inputs |= {name: np.array([ids]) for name, ids in zip(program.inputs, look.ids)}
        self.made = Computation(self.model, program, inputs)
        self.side = "target" if "target" in inputs else "text"
        self.names: dict[int, str] = {}

    def walk(self) -> Walk:
        title = self.end()
        block = None if bytes_inside(self.model) <= limits.WHOLE else self.chosen_block()
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
