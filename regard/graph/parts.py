"""The parts of a model in its graph, by which engines record, change and explain it.

Attentions, layers, positional encodings, embeddings and the residual stream.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import nn

from regard.attention import Concat, SoftCap
from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.graph.steps import Graph, Step, all_steps
from regard.layers.feedforward import FeedForward

# The last module of a post-norm block.
_LAST_NORM = "feedforward_norm"
_TEXT_INPUTS = ("source", "target", "text")


@dataclass(frozen=True)
class AttentionSteps:
    """The names of the steps of one attention call. All values have the axes (B, H, T, …)."""

    attention: str
    """path of the module"""
    q: str
    """queries after `Score.transform`"""
    k: str
    """keys after `Score.transform`"""
    scale: str | None
    """step that multiplies the scores by a constant"""
    bias: str | None
    """step that adds the relative bias to the scores"""
    bias_value: str | None
    """the bias (H, T, S)"""
    masks: tuple[str, ...]
    """steps that fill masked scores and weights"""
    weights: str
    context: str
    """weights times values"""
    output: str
    """output of the module"""


@dataclass(frozen=True)
class GraphParts:
    """Names of steps of a graph, first to last, that an engine can record or change."""

    attentions: list[AttentionSteps]
    """one entry per call, in order"""
    layers: dict[str, list[str]]
    """outputs of attentions and feed-forward networks, by module path"""
    positions: dict[str, str]
    """steps that apply positional encodings, and the value that each would have without them"""
    embeddings: list[str]
    """embeddings of the input tokens (without positions) per text, or of the patches"""
    streams: list[str]
    """the residual stream: the input of the first block and the output of each block before the output layer; empty for
    recurrent models"""


def find_parts(graph: Graph, model: nn.Module) -> GraphParts:
    """Find the attentions, layers, positional encodings, embeddings and the residual stream of a model in its graph.

    >>> from regard.models.gpt import GPT, GPTConfig
    >>> from regard.graph.entries import forward_graph
    >>> model = GPT(GPTConfig(width=8, heads=2, layers=1, feedforward=16, vocab=11))
    >>> parts = find_parts(forward_graph(model), model)
    >>> [calls.attention for calls in parts.attentions], list(parts.layers), len(parts.positions), len(parts.streams)
    (['blocks.0.attention'], ['blocks.0.attention', 'blocks.0.feedforward'], 2, 2)
    """
    return _PartFinder(graph, model).find()


class _PartFinder:
    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.graph, self.modules = graph, dict(model.named_modules(remove_duplicate=False))
        self.steps = {step.name: step for step in all_steps(graph)}
        self.readers: dict[str, list[Step]] = defaultdict(list)
        for step in self.steps.values():
            for name in step.inputs:
                if name is not None:
                    self.readers[name].append(step)
        self.outputs = {*graph.outputs, *(name for s in self.steps.values() if s.body for name in s.body.outputs)}

    def find(self) -> GraphParts:
        attentions = [
            self._attention(step)
            for step in self.steps.values()
            if step.op == "softmax" and getattr(self.modules.get(step.module), "kind", None) in KINDS
        ]
        layers: dict[str, list[str]] = {}
        for attention in attentions:
            layers.setdefault(attention.attention, []).append(attention.output)
        for path, module in self.modules.items():
            if isinstance(module, FeedForward) and (outputs := self._module_outputs(path)):
                layers[path] = outputs
        positions = {
            attention.bias: str(self.steps[attention.bias].inputs[0])
            for attention in attentions
            if attention.bias is not None
        }
        positions |= self._added_positions() | self._rotations()
        return GraphParts(attentions, layers, positions, self._embeddings(), self._streams())

    def _attention(self, softmax: Step) -> AttentionSteps:
        path, score = softmax.module, f"{softmax.module}.score"
        masks, scale, bias = [], None, None
        name = str(softmax.inputs[0])
        if self._op(name) == "masked_fill":
            masks.append(name)
            name = self._input(name)
        if self._op(name) == "add" and self.steps[name].module == path:
            bias, name = name, self._input(name)
        if isinstance(getattr(self.modules[path], "score", None), SoftCap):
            for _ in ("mul", "tanh", "div"):  # cap · tanh(score / cap); the scale is in the queries
                name = self._input(name)
        elif self._op(name) == "mul" and len(self.steps[name].inputs) == 1:
            scale, name = name, self._input(name)
        if isinstance(getattr(self.modules[path], "score", None), Concat):
            tanh = next(
                step
                for step in reversed(list(self.steps.values())[: list(self.steps).index(name)])
                if step.op == "tanh" and step.module == score
            )
            q, k = (self._input(str(side)) for side in self.steps[self._input(tanh.name)].inputs)
        elif self._op(name) == "matmul" and self._op(self.steps[name].inputs[1]) == "permute":
            q, k = str(self.steps[name].inputs[0]), self._input(str(self.steps[name].inputs[1]))
        else:
            raise RegardError(
                f"The queries and keys of {path} cannot be found in the model's graph.",
                "Use a score that is a dot product of transformed queries and keys, or concat.",
            )
        weights = softmax.name
        if (filled := self._reader(weights, "masked_fill")) is not None:
            masks.append(filled.name)
            weights = filled.name
        context = self._reader(weights, "matmul")
        assert context is not None
        bias_value = None if bias is None else self.steps[bias].inputs[1]
        output = self._leave(context)
        return AttentionSteps(path, q, k, scale, bias, bias_value, tuple(masks), weights, context.name, output)

    def _leave(self, step: Step) -> str:
        """The output of the attention whose context is computed by `step`."""
        path = step.module
        while not self._is_read_outside(step.name, path):
            step = next(reader for reader in self.readers[step.name] if reader.kind == "float")
        return step.name

    def _module_outputs(self, path: str) -> list[str]:
        inside = [step for step in self.steps.values() if _is_inside(step.module, path)]
        return [step.name for step in inside if step.kind == "float" and self._is_read_outside(step.name, path)]

    def _is_read_outside(self, name: str, path: str) -> bool:
        return name in self.outputs or any(not _is_inside(reader.module, path) for reader in self.readers[name])

    def _added_positions(self) -> dict[str, str]:
        """Sums of embeddings and positional encodings: of tokens, of patches and of the tokens before them."""
        found = {}
        for step in self.steps.values():
            if step.op == "add" and len(step.inputs) == 2 and hasattr(self.modules.get(step.module), "dropout"):
                path = f"{step.module}." if step.module else ""
                origins = [f"{path}{name}" for name in ("positions", "learned", "sinusoidal", "encodings")]
                if any(_is_inside(self._origin(str(step.inputs[1])), origin) for origin in origins):
                    found[step.name] = str(step.inputs[0])
        return found

    def _origin(self, name: str) -> str:
        """The module path, or the name of the parameter, of a value without layout operations."""
        while name in self.steps and self.steps[name].op in ("slice", "reshape", "expand", "cast"):
            if any(part in self.steps[name].module.split(".") for part in ("positions", "learned", "sinusoidal")):
                break
            name = self._input(name)
        return self.steps[name].module if name in self.steps else name

    def _rotations(self) -> dict[str, str]:
        """Rotary positions: cat(a cos − b sin, b cos + a sin), where a and b are the halves of the channels."""
        found = {}
        for step in self.steps.values():
            if step.op == "cat" and [self._op(value) for value in step.inputs] == ["sub", "add"]:
                product = self._input(str(step.inputs[0]))
                half = self._input(product) if self._op(product) == "mul" else ""
                if self._op(half) == "slice" and self.steps[self._input(half)].shape == step.shape:
                    found[step.name] = self._input(half)
        return found

    def _embeddings(self) -> list[str]:
        steps = self.graph.steps
        texts = [step.name for step in steps if step.op == "embedding" and step.inputs[1] in _TEXT_INPUTS]
        return texts or [step.name for step in steps if f"{step.module}.".startswith("embedding.patches.")][-1:]

    def _streams(self) -> list[str]:
        # The blocks whose output the output layer reads: those of the decoder, if there is one.
        blocks = "decoder" if any(step.module.startswith("decoder.0.") for step in self.graph.steps) else "blocks"
        inside = [step for step in self.graph.steps if re.match(rf"{blocks}\.\d+(\.|$)", step.module)]
        sums = [step for step in inside if step.op == "add" and step.module.count(".") == 1]
        if not sums:
            return []
        streams = [str(sums[0].inputs[0])]
        for i, step in enumerate(inside):
            if step in sums and self._is_feedforward(step.inputs[1]):  # the last sum of a block
                norm = list(takewhile(lambda later: later.module.rpartition(".")[2] == _LAST_NORM, inside[i + 1 :]))
                streams.append((norm or [step])[-1].name)
        return streams

    def _is_feedforward(self, name: Any) -> bool:
        """Whether a value in a block comes from its feed-forward network, its residual connection or norm."""
        return name in self.steps and self.steps[name].module.split(".")[2].startswith("feedforward")

    def _op(self, name: Any) -> str:
        return self.steps[name].op if name in self.steps else ""

    def _input(self, name: str) -> str:
        return str(self.steps[name].inputs[0])

    def _reader(self, name: str, op: str) -> Step | None:
        return next((step for step in self.readers[name] if step.op == op and step.inputs[0] == name), None)


def _is_inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")
