"""Builds the walk of a text, or of a sentence and its translation."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from regard.errors import RegardError
from regard.evaluation.attention_measures import entropy
from regard.evaluation.teacher_forcing import mutual_information
from regard.graph import forward_graph
from regard.layers.packed import pack
from regard.models import Bert, Seq2Seq
from regard.pipelines import Translator
from regard.viewer.text_look import Look
from regard.viewer.token_axis import TokenAxis
from regard.viewer.walk import limits
from regard.viewer.walk.computation import Computation
from regard.viewer.walk.module_outputs import ModuleOutputs
from regard.viewer.walk.step_labels import PROBABILITIES, StepLabel
from regard.viewer.walk.trace import Trace, TraceOptions
from regard.viewer.walk.walkthrough import Walk, block_path, inner_bytes, large_model_note


class TextWalkBuilder:
    """Builds the walk of a text, or of a sentence and its translation."""

    def __init__(self, look: Look, tensors: Mapping[str, int] | None = None) -> None:
        if look.pipeline is None:
            raise RegardError(
                "This look has no model, which the step-by-step view needs.", "Create it with regard.look."
            )
        if (length := max(map(len, look.ids))) > limits.MAX_TOKENS:
            raise RegardError(
                f"The text has {length} tokens; the step-by-step view supports at most {limits.MAX_TOKENS}.",
                "Shorten the text.",
            )
        self.tensors = tensors
        self.look, self.pipeline, self.model = look, look.pipeline, look.pipeline.model.eval()
        model_inputs: list[Any] = [pack([ids]).to(self.pipeline.device) for ids in look.ids]
        if look.segments is not None:
            model_inputs.append(torch.tensor(look.segments, device=self.pipeline.device))
        self.reference = ModuleOutputs(self.model, model_inputs)
        graph = forward_graph(self.model)
        # A single text is one segment.
        inputs = {name: np.array([look.segments or [0] * len(look.ids[0])]) for name in graph.inputs}
        inputs |= {name: np.array([ids]) for name, ids in zip(graph.inputs, look.ids)}
        self.computation = Computation(self.model, graph, inputs)
        self.side = "target" if "target" in inputs else "text"
        self.names: dict[int, str] = {}

    def build(self) -> Walk:
        title = self.add_output_steps()
        block = None if inner_bytes(self.model) <= limits.MAX_MODEL_BYTES else self.sharpest_block()
        options = TraceOptions(block=block, labels=self.computation.labels, output=title, tensors=self.tensors)
        computation = self.computation
        trace = Trace(self.model, computation.nodes, computation.inputs, self.reference, computation.values, options)
        return Walk(trace, self.sides(), self.focus(), self.names, self.note(block))

    def add_output_steps(self) -> str:
        """Add the steps after the model's forward: probabilities or the embedding of the text. Returns their title."""
        model, computation, side = self.model, self.computation, self.side
        head = model.config.head if isinstance(model, Bert) else "mask"
        if head == "none":
            x, axes = computation.output.name, ("channels",)
            if side in computation.output.sizes:
                label = StepLabel("mean", "Mean of all tokens", "m = Σ x / T")
                x = computation.add("pooled", "mean", [x], axes, label, dim=[1])
            length = computation.add("length", "linalg_vector_norm", [x], axes, None, ord=2, dim=[-1], keepdim=True)
            length = computation.add("clamped", "clamp_min", [length], axes, None, min=1e-12)
            computation.add(
                "vector", "div", [x, length], axes, StepLabel("vector", "L2-normalized vector", "y = m / |m|")
            )
            return "Embedding of the text"
        if head == "answer":
            self.names = dict(enumerate(("start", "end")))
            for index, end in self.names.items():
                output = computation.output.name
                logits = computation.add(f"{end}_logits", "select", [output], (), None, dim=2, index=index)
                label = StepLabel(
                    f"p_{end}", f"Softmax: probability per token as {end} of the answer", PROBABILITIES.formula
                )
                computation.add(f"{end}_probabilities", "softmax", [logits], (side,), label, dim=-1)
            return "Start and end of the answer"
        if head == "classify":
            columns = computation.add_softmax(("vocabulary",), "label")
            self.names = {i: model.config.labels[column] for i, column in enumerate(columns) if column is not None}
            return "Label"
        if head == "tag":
            columns = computation.add_softmax((side, "vocabulary"), "tag")
            self.names = {i: model.config.labels[column] for i, column in enumerate(columns) if column is not None}
            return "Tag of each token"
        top = computation.top_columns(computation.values[computation.output.name])
        columns = computation.add_softmax((side, "vocabulary"))
        names = self.pipeline.tokenizers[-1].distinct_names(top, strip=True)
        self.names = {i: names[column] for i, column in enumerate(columns) if column in top}
        if None in columns:
            self.names[len(columns) - 1] = "all others"
        return "Token at each position" if isinstance(model, Bert) else "Next token"

    def sides(self) -> dict[str, TokenAxis]:
        """The tokens of each axis; row t of the target predicts the next token."""
        axes = {axis.name: axis for one in self.look.maps.values() for axis in (one.queries, one.keys)}
        if not isinstance(self.pipeline, Translator):
            return {"text": axes["text"]}
        if "target" not in axes and "predicted" in axes:
            forced = [self.pipeline.target_tokenizer.label(i) for i in self.pipeline.special.make_decoder_input([])]
            _, tokens, words, _ = axes["predicted"]
            inner = slice(len(forced) - 1, -1)
            axes["target"] = TokenAxis("", tokens[inner], words[inner]).add_special_tokens("target", forced)
        sides = {}
        for name, ids, tokenizer in zip(("source", "target"), self.look.ids, self.pipeline.tokenizers):
            default = TokenAxis(name, [tokenizer.label(i) for i in ids], [-1] * len(ids))
            sides[name] = axes.get(name, default)
        return sides

    def focus(self) -> dict[str, Any]:
        """The initial selection: the sharpest attention and head, and the token with the sharpest weights."""
        if not self.look.maps:
            return {"attention": None, "head": 0}
        one = self.look.alignment
        head = max(range(one.heads), key=lambda i: mutual_information(one.head_weights(i)))
        weights = one.head_weights(head)
        sharpness = np.log2(np.maximum((weights > 0).sum(1), 1)) - entropy(weights)
        words = np.array(one.queries.words) >= 0
        row = int(np.argmax(np.where(words | ~words.any(), sharpness, -1.0)))
        focus: dict[str, Any] = {"attention": one.name, "head": head}
        if one.kind == "cross":
            return focus | {"target": row, one.keys.name: int(np.argmax(weights[row]))}
        return focus | {one.queries.name: row}

    def sharpest_block(self) -> str:
        """The block of the sharpest attention."""
        return block_path(self.look.alignment.name) if self.look.maps else ""

    def note(self, block: str | None) -> str | None:
        if block is None:
            return None
        if isinstance(self.model, Seq2Seq):
            return (
                "The model is large: only its attention and output are shown. The states of its layers are precomputed."
            )
        return large_model_note(block)
