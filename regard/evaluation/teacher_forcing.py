"""Teacher forcing with recorded attention; entropy and mutual information of attention maps."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from regard.attention import Recording, record
from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.pipelines import Pipeline, Translator

Ids = list[int]


def attention_names(pipeline: Pipeline, kind: str | None = None) -> list[str]:
    """Names of the model's attention modules in model order, optionally of one kind (self, masked, cross).

    >>> attention_names(translator, "cross")  # doctest: +SKIP
    ['decoder.0.cross', 'decoder.1.cross']
    """
    kinds = KINDS if kind is None else (kind,)
    return [name for name, module in pipeline.model.named_modules() if getattr(module, "kind", None) in kinds]


def require_attention(translator: Translator) -> None:
    """Raise an error if the model has no attention."""
    if not attention_names(translator):
        raise RegardError(
            "This model has no attention.",
            "Train a model with attention, for example model.attention = luong.",
        )


@torch.inference_mode()
def record_teacher_forced(
    translator: Translator, pairs: Sequence[tuple[Ids, Ids]], layers: str | Sequence[str] | None = None
) -> Recording:
    """Run one packed forward pass with teacher forcing and record the attention calls.

    Pairs are ids from `translator.encode_source` and `encode_target`. The decoder reads `<sos>` and the target;
    its row t is the state that predicts token t of the target, the last row the one that predicts `<eos>`.

    >>> record_teacher_forced(translator, [([5, 6, 3], [7])])["decoder.0.cross"].weights().shape  # doctest: +SKIP
    torch.Size([1, 4, 2, 3])
    """
    require_attention(translator)
    translator.model.eval()
    with record(translator.model, layers) as recording:
        translator.model(*translator.teacher_forced(pairs))
    return recording


def entropy(rows: Float[np.ndarray, "*n S"]) -> Float[np.ndarray, "*n"]:
    """Entropy of each row in bits: 0 for one key, log2 n for n keys with equal weights. A row of zeros has 0.

    >>> entropy(np.array([[1.0, 0.0], [0.5, 0.5]]))
    array([0., 1.])
    """
    return (rows * -np.log2(rows, out=np.zeros_like(rows), where=rows > 0)).sum(-1)


def mutual_information(weights: Float[np.ndarray, "T S"]) -> float:
    """Mutual information of row and column, in bits: the entropy of the mean row minus the mean entropy of the rows.

    It is 0 if all rows are equal, however sharp they are (all attend to `<eos>`), and largest if each row attends to a
    different column.

    >>> mutual_information(np.eye(4)), mutual_information(np.eye(4)[[0, 0, 0, 0]])
    (2.0, 0.0)
    """
    return float(entropy(weights.mean(0)) - entropy(weights).mean())
