"""Export targets: which model configs each can compute."""

import dataclasses
from typing import Any, Literal, get_args

from regard.errors import RegardError
from regard.interop import ctranslate2_export
from regard.interop.foreign_config import in_words, misfits
from regard.interop.huggingface.encoder_decoder_models import KINDS, nearest_class
from regard.interop.joint_vocabulary import join_config
from regard.models import family_of
from regard.models.transformer import TransformerConfig

Target = Literal["huggingface", "ctranslate2", "onnx"]
TARGETS: tuple[str, ...] = get_args(Target)


def exportable(config: Any, target: Target) -> Any:
    """The config with the fewest changes that exports to `target`; its sizes stay.

    >>> form = TransformerConfig(positions="rotary", qk_norm=True)
    >>> changed = exportable(form, "ctranslate2")
    >>> changed.positions, changed.qk_norm
    ('rotary', False)
    >>> changed = exportable(form, "huggingface")
    >>> changed.positions, changed.qk_norm
    ('sinusoidal', False)
    """
    found = unsupported(config, target)
    return dataclasses.replace(config, **{field: values[0] for field, values in found.items()})


def check_exportable(config: Any, target: Target) -> None:
    """Raises an error that names the fields of a config that do not export to `target`.

    >>> check_exportable(TransformerConfig(positions="rotary"), "ctranslate2")
    """
    found = unsupported(config, target)
    if found:
        raise RegardError(
            f"--for {target} does not support {in_words(config, found)}.", "Remove these settings, or leave out --for."
        )


def unsupported(config: Any, target: Target) -> dict[str, tuple]:
    """The fields of a config that `target` does not support, and for each the values that it supports.

    >>> unsupported(TransformerConfig(qk_norm=True), "ctranslate2")
    {'qk_norm': (False,)}
    """
    if not isinstance(config, TransformerConfig):
        raise RegardError(
            f"--for {target} applies to the family transformer, not to {family_of(config)}.",
            "Leave out --for, or train with --model.family transformer.",
        )
    if target == "huggingface":
        if config.shared_vocab:
            return nearest_class(config)[1]
        return nearest_class(join_config(config), [*KINDS])[1]  # T5 has no output bias to exclude source tokens with
    return misfits(config, ctranslate2_export.CHOICES) if target == "ctranslate2" else {}
