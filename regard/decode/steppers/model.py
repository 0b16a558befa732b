"""The stepper that runs the model itself: any `Decodable`, whatever is recorded, changed or hooked in it."""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.recording import mark_hypotheses
from regard.decode.coverage import with_attention
from regard.decode.protocol import Decodable, SourceBatch, continues_source
from regard.decode.steppers.static import StepPositions

# Removing finished sentences from a group copies the caches of the others, which costs about as much as one step. It is
# done once at most this share of the group is unfinished.
COMPACTION_SHARE = 0.75


@dataclass
class Group:
    """Sentences that were started together, with their state."""

    state: Any
    slots: list[int]
    """-1: the sentence is finished"""
    lengths: list[int]
    """lengths of the prompts that the outputs continue"""
    beams: int = 1
    """hypotheses per sentence in the state"""

    @property
    def used(self) -> list[int]:
        """The rows of sentences that are not finished."""
        return [row for row, slot in enumerate(self.slots) if slot >= 0]


class ModelStepper:
    """Steps of a model for B slots of K hypotheses.

    Sentences that arrive later form groups of their own, each with its own state: nothing is required of the model but
    `start`, `step` and `reorder`.
    """

    def __init__(
        self,
        model: Decodable,
        slots: int,
        hypotheses: int,
        pack: Callable[[list[list[int]]], SourceBatch],
        device: torch.device,
        *,
        attention_capacity: int = 0,
    ) -> None:
        """`attention_capacity`: the longest source if the cross-attention is needed."""
        self.model, self.slots, self.hypotheses, self.pack, self.device = model, slots, hypotheses, pack, device
        self.groups: list[Group] = []
        self.tokens: Int[Tensor, "U"] | None = None
        self.parents: Int[Tensor, "B K"] | None = None
        """parents of the hypotheses, which are selected before the next step, when finished sentences are known"""
        self.attention: list[Float[Tensor, "B K S"]] = []
        """the cross-attention of the last step, averaged over layers and heads, if it is needed"""
        if attention_capacity:
            self.attention = [torch.zeros((slots, hypotheses, attention_capacity), device=device)]

    def set_output_tokens(self, tokens: Int[Tensor, "U"]) -> None:
        """Return the logits of these tokens only."""
        self.tokens = tokens

    def load(self, slots: list[int], sources: list[list[int]]) -> None:
        """Start new sentences."""
        self._release({*slots})
        self._select_hypotheses()
        with run_model():
            state = self.model.start(self.pack(sources))
        lengths = [len(source) if continues_source(self.model) else 0 for source in sources]
        self.groups.append(Group(state, list(slots), lengths))

    def step(
        self, last: Int[Tensor, "B K"], at: StepPositions, ancestors: Int[Tensor, "B K S"] | None
    ) -> Float[Tensor, "B K V"]:
        """The logits of the token after the last token of each hypothesis."""
        self._release({slot for slot, is_used in enumerate(at.in_use) if not is_used})
        self._select_hypotheses()
        logits: Tensor | None = None
        for group in self.groups:
            rows = torch.tensor(group.slots, device=self.device)
            layers: list[Tensor] = []
            with run_model(), mark_hypotheses(group.beams):
                tokens = last[rows, : group.beams].clone()
                if self.attention:
                    step = partial(self.model.step, group.state, tokens)
                    (group_logits, group.state), layers = with_attention(self.model, step)
                else:
                    group_logits, group.state = self.model.step(group.state, tokens)
            if logits is None:
                logits = group_logits.new_zeros((self.slots, self.hypotheses, group_logits.shape[-1]))
            used = group.used
            logits[rows[used]] = group_logits[used]
            for mean in self.attention:
                attention = torch.stack(layers).mean(0)[used].float()
                mean[rows[used]] = 0.0
                mean[rows[used], :, : attention.shape[-1]] = attention
        assert logits is not None
        return logits if self.tokens is None else logits[..., self.tokens]

    def reorder(self, parents: Int[Tensor, "B K"]) -> None:
        """Hypothesis k of a slot continues hypothesis parents[slot, k]."""
        self.parents = parents

    def _release(self, slots: Set[int]) -> None:
        """The sentences in these slots are finished."""
        for group in self.groups:
            group.slots = [-1 if slot in slots else slot for slot in group.slots]

    def _select_hypotheses(self) -> None:
        """Keep the hypotheses that continue."""
        self.groups = [group for group in self.groups if group.used]
        for group in self.groups:
            used = group.used
            if self.parents is None and group.beams == self.hypotheses:
                # The model may have no positions beyond those of the longest sentence that is decoded.
                is_in_bounds = max(group.lengths) == max(group.lengths[row] for row in used)
                if len(used) > COMPACTION_SHARE * len(group.slots) and is_in_bounds:
                    continue
            group.slots, group.lengths = ([column[row] for row in used] for column in (group.slots, group.lengths))
            parents = torch.arange(self.hypotheses, device=self.device).expand(len(used), -1)
            if self.parents is not None:
                parents = self.parents[torch.tensor(group.slots, device=self.device)]
            # At first there is one hypothesis; in beam search the others have a probability of 0.
            rows = torch.tensor(used, device=self.device)[:, None]
            indices = rows * group.beams + parents.clamp(max=group.beams - 1)
            with run_model():
                group.state = self.model.reorder(group.state, indices.clone())
            group.beams = self.hypotheses
        self.parents = None

    def select_slots(self, slots: Int[Tensor, "B2"]) -> None:
        """Keep only these slots; those that occur again are free."""
        self._select_hypotheses()
        new: dict[int, int] = {}
        for index, slot in enumerate(slots.tolist()):
            new.setdefault(slot, index)
        for group in self.groups:
            group.slots = [new.get(slot, -1) for slot in group.slots]
        self.slots = len(slots)
        self.attention = [attention[slots] for attention in self.attention]


@contextmanager
def run_model() -> Iterator[None]:
    """Run a model without gradients. It may cache tensors that are used in training later: not in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
