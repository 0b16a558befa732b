"""Names of earlier versions, replaced when files are loaded: parameters, recipe keys, units in run states."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Patterns of old parameter names and their replacements; the first match applies.
RENAMED_PARAMETERS = (
    (r"\bdecoder\.(\d+)\.residuals\.1\.norm\.", r"decoder.\1.cross_norm."),
    (r"\bdecoder\.(\d+)\.residuals\.2\.norm\.", r"decoder.\1.feedforward_norm."),
    (r"\.residuals\.0\.norm\.", ".attention_norm."),
    (r"\.residuals\.1\.norm\.", ".feedforward_norm."),
    (r"\.residuals\.0\.scale$", ".attention_residual.layer_scale"),
    (r"\.residuals\.1\.scale$", ".feedforward_residual.layer_scale"),
)
# Recipe keys by section, and units of examples in the fingerprints of a dataset: old name to current name.
RENAMED_RECIPE_KEYS = {"augment": {"colour": "color"}}
RENAMED_UNITS = {"pictures": "images", "labelled texts": "labeled texts"}


def migrate_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under their current names.

    >>> list(migrate_names({"model.decoder.3.residuals.1.norm.weight": Tensor()}))
    ['model.decoder.3.cross_norm.weight']
    """
    return {_current_name(name): tensor for name, tensor in tensors.items()}


def _current_name(name: str) -> str:
    for pattern, replacement in RENAMED_PARAMETERS:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def migrate_recipe(table: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe table with current keys.

    >>> migrate_recipe({"task": "segment", "augment": {"colour": 0.4}})
    {'task': 'segment', 'augment': {'color': 0.4}}
    """
    return {
        section: _rename_keys(keys, RENAMED_RECIPE_KEYS.get(section, {})) if isinstance(keys, Mapping) else keys
        for section, keys in table.items()
    }


def migrate_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a run, as stored in checkpoints, with current recipe keys and units.

    >>> migrate_provenance({"recipe": {}, "data": {"training": {"pictures": 40}}})
    {'recipe': {}, 'data': {'training': {'images': 40}}}
    """
    migrated = dict(provenance)
    if "recipe" in provenance:
        migrated["recipe"] = migrate_recipe(provenance["recipe"])
    if "data" in provenance:
        migrated["data"] = {split: _rename_keys(facts, RENAMED_UNITS) for split, facts in provenance["data"].items()}
    return migrated


def _rename_keys(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in table.items()}
