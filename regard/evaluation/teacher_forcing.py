"""Watching a model while it is given both the source and the target."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from regard.attention import Recording, record
from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.evaluation.attention_measures import entropy
from regard.pipelines import Bundle, Translator

Ids = list[int]


def attentions(translator: Bundle, kind: str | None = None) -> list[str]:
    """The names of the model's attentions, in its order, or of those of one kind (self, masked, cross).

    >>> attentions(translator, "cross")  # doctest: +SKIP
    ['decoder.0.cross', 'decoder.1.cross']
    """
    kinds = KINDS if kind is None else (kind,)
    return [name for name, module in translator.model.named_modules() if getattr(module, "kind", None) in kinds]


def need_attention(translator: Translator) -> None:
    """An error for a model that has none."""
    if not attentions(translator):
        raise RegardError(
            "This model has no attention: there is nothing to look at.",
            "Train one that has it, such as model.attention = luong.",
        )


@torch.inference_mode()
def force(
    translator: Translator, pairs: Sequence[tuple[Ids, Ids]], layers: str | Sequence[str] | None = None
) -> Recording:
    """One packed forward in which the target is given (teacher forcing), and what each attention did in it.

    Pairs are ids as from `translator.source_ids` and `translator.target_ids`. The decoder reads `<sos>` and the target;
    its row t is the state that predicts token t of the target, or `<eos>` in the end.

    >>> force(translator, [([5, 6, 3], [7])])["decoder.0.cross"].weights().shape  # doctest: +SKIP
    torch.Size([1, 4, 2, 3])
    """
    need_attention(translator)
    translator.model.eval()
    with record(translator.model, layers) as recording:
        translator.model(*translator.teacher_forced(pairs))
    return recording


def information(weights: Float[np.ndarray, "T S"]) -> float:
    """How much the rows tell about where they look, in bits: the mutual information of row and column.

    It is the entropy of the mean row less the mean entropy of the rows, so it is 0 if every row is the same, be it as
    sharp as it may (all look at `<eos>`), and greatest if each row looks at a place of its own.

    >>> information(np.eye(4)), information(np.eye(4)[[0, 0, 0, 0]])
    (2.0, 0.0)
    """
    return float(entropy(weights.mean(0)) - entropy(weights).mean())
