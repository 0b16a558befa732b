"""Parameter names of earlier versions, renamed when weights are loaded."""

import re
from collections.abc import Mapping

from torch import Tensor

# Patterns of old names and their replacements; the first match applies.
RENAMED = (
    (r"\bdecoder\.(\d+)\.residuals\.1\.norm\.", r"decoder.\1.cross_norm."),
    (r"\bdecoder\.(\d+)\.residuals\.2\.norm\.", r"decoder.\1.feedforward_norm."),
    (r"\.residuals\.0\.norm\.", ".attention_norm."),
    (r"\.residuals\.1\.norm\.", ".feedforward_norm."),
    (r"\.residuals\.0\.scale$", ".attention_residual.layer_scale"),
    (r"\.residuals\.1\.scale$", ".feedforward_residual.layer_scale"),
)


def migrate_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under their current names.

    >>> list(migrate_names({"model.decoder.3.residuals.1.norm.weight": Tensor()}))
    ['model.decoder.3.cross_norm.weight']
    """
    return {_current_name(name): tensor for name, tensor in tensors.items()}


def _current_name(name: str) -> str:
    for pattern, replacement in RENAMED:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name
