"""The steps of embeddings and of the residual stream in a program, by which engines explain an output."""

import re
from dataclasses import dataclass
from itertools import takewhile

from regard.program.program_steps import Program, Step

# The last module of a block: the norm of a post-norm block, the residual connection of a pre-norm block.
_LAST_NORM, _LAST_RESIDUAL = "feedforward_norm", "feedforward_residual"


@dataclass(frozen=True)
class StreamSteps:
    """Names of steps, first to last."""

    embeddings: list[str]
    """embeddings of the input tokens (without positions) per text, or of the patches"""
    streams: list[str]
    """the input of the first block and the output of each block before the output layer; empty for recurrent models"""


def find_streams(program: Program) -> StreamSteps:
    """Find the embeddings and the residual stream of a model in its program.

    >>> from regard.models.gpt import GPT, GPTConfig
    >>> from regard.program.entries import forward_program
    >>> model = GPT(GPTConfig(width=8, heads=2, layers=3, feedforward=16, vocab=11))
    >>> found = find_streams(forward_program(model))
    >>> len(found.embeddings), len(found.streams)
    (1, 4)
    """
    texts = [step.name for step in program.steps if step.op == "embedding" and step.inputs[1] in _TEXT_INPUTS]
    patches = [step.name for step in program.steps if f"{step.module}.".startswith("embedding.patches.")]
    # The blocks whose output the output layer reads: those of the decoder, if there is one.
    blocks = "decoder" if any(step.module.startswith("decoder.0.") for step in program.steps) else "blocks"
    inside = [step for step in program.steps if re.match(rf"{blocks}\.\d+\.", step.module)]
    first = next((step for step in inside if _is_sum(step, "attention_residual")), None)
    if first is None:
        return StreamSteps(texts or patches[-1:], [])
    streams = [str(first.inputs[0])]
    for i, step in enumerate(inside):
        if _is_sum(step, _LAST_RESIDUAL):
            norm = list(takewhile(lambda one: one.module.rpartition(".")[2] == _LAST_NORM, inside[i + 1 :]))
            streams.append((norm or [step])[-1].name)
    return StreamSteps(texts or patches[-1:], streams)


_TEXT_INPUTS = ("source", "target", "text")


def _is_sum(step: Step, module: str) -> bool:
    return step.op == "add" and step.module.rpartition(".")[2] == module
