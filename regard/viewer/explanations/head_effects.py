"""Effects of heads: the change of the output's log-probability if one head is ablated."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import dispatch
from regard.attention.backends.call import Call
from regard.errors import RegardError
from regard.viewer.explanations.output import (
    ExplainedOutput,
    batch_size,
    explain_output,
    model_of,
    plain_logits,
    run_inputs,
    step_logprob,
)
from regard.viewer.image_look import ImageLook
from regard.viewer.interventions import AttentionInterceptor
from regard.viewer.text_look import Look


@dataclass(frozen=True, eq=False)
class HeadEffects:
    """Effects of all heads on an output: log p(output without the head) − log p(output).

    A negative number means that the head makes the output more likely.
    """

    tokens: list[str]
    """the predicted tokens, or the label"""
    logprobs: Float[np.ndarray, "steps"]
    """log-probability of each token without ablation"""
    by_attention: dict[str, Float[np.ndarray, "H steps"]]
    """effect of each head of an attention on each token"""

    @property
    def total(self) -> dict[str, Float[np.ndarray, "H"]]:
        """Effect of each head on the log-probability of the entire output."""
        return {name: effects.sum(1) for name, effects in self.by_attention.items()}

    @property
    def largest(self) -> tuple[str, int]:
        """Attention and head with the largest effect on the entire output."""
        total = self.total
        name = max(total, key=lambda one: float(np.abs(total[one]).max()))
        return name, int(np.abs(total[name]).argmax())


class _HeadOfSequence(AttentionInterceptor):
    """Ablates one head in each sequence of a batch."""

    def __init__(self, model: nn.Module, ablations: Sequence[tuple[str, int]]) -> None:
        super().__init__(model, ())
        self.ablations = ablations

    def after(self, call: Call, out: Tensor) -> Tensor:
        if not self.running:
            return out
        name, _ = self.running[-1]
        ablated = [(i, head) for i, (attention, head) in enumerate(self.ablations) if attention == name]
        if not ablated:
            return out
        out = out.clone()
        starts = None if call.q_offsets is None else call.q_offsets.starts.tolist()
        for i, head in ablated:
            if starts is None:
                out[i, head] = 0.0
            else:
                out[starts[i] : starts[i + 1], head] = 0.0
        return out


@torch.no_grad()
def compute_head_effects(
    look: Look | ImageLook, output: ExplainedOutput | None = None, attentions: Sequence[str] | None = None
) -> HeadEffects:
    """Ablate every head of a look's attentions, one at a time; several copies of the input form a batch.

    >>> compute_head_effects(look(translator, "The cat sleeps.")).largest  # doctest: +SKIP
    ('decoder.1.cross', 2)
    """
    output = output or explain_output(look)
    model = model_of(look)
    if attentions is None and not look.maps:
        raise RegardError("This model has no attention heads to ablate.", "Use a model with attention.")
    modules = {name: module_name(model, name) for name in (look.maps if attentions is None else attentions)}
    heads = {module: getattr(model.get_submodule(module), "heads", 1) for module in modules.values()}
    jobs = [
        (module, head, sequence)
        for module, count in heads.items()
        for head in range(count)
        for sequence in range(len(output.inputs))
    ]
    plain = _logprobs(look, output, [("", 0, i) for i in range(len(output.inputs))])
    logprobs = np.array([plain["", 0, i, step] for step, (i, _, _) in enumerate(output.steps)])
    ablated = _logprobs(look, output, jobs)
    effects = {
        module: np.array(
            [
                [ablated[module, head, one.sequence, step] for step, one in enumerate(output.steps)]
                for head in range(count)
            ]
        )
        - logprobs
        for module, count in heads.items()
    }
    return HeadEffects(output.tokens, logprobs, {name: effects[module] for name, module in modules.items()})


def _logprobs(
    look: Look | ImageLook, output: ExplainedOutput, jobs: Sequence[tuple[str, int, int]]
) -> dict[tuple[str, int, int, int], float]:
    """Log-probabilities by attention, head, input and step; the attention "" ablates nothing."""
    found = {}
    size = batch_size(look, output)
    model = model_of(look)
    for first in range(0, len(jobs), size):
        batch = jobs[first : first + size]
        inputs = [output.inputs[i] for _, _, i in batch]
        if any(attention for attention, _, _ in batch):
            interceptor = _HeadOfSequence(model, [(attention, head) for attention, head, _ in batch])
            with interceptor.installed(), dispatch.intercept(interceptor):
                logits = run_inputs(look, inputs)
        else:
            logits = plain_logits(look, inputs)
        for job, rows in zip(batch, logits):
            precise = rows.double()
            for step, one in enumerate(output.steps):
                if one.sequence == job[2]:
                    found[*job, step] = float(step_logprob(look, precise, one))
    return found


def module_name(model: nn.Module, name: str) -> str:
    """The module of a map: the calls of a module that layers share are separate maps, name.0, name.1, …"""
    modules = dict(model.named_modules())
    return name if hasattr(modules.get(name), "kind") else re.sub(r"\.\d+$", "", name)
