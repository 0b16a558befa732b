"""Export targets, and the model configs that each supports."""

import dataclasses
from typing import Any, Literal, get_args

from regard.errors import RegardError
from regard.interop.ctranslate2_export import CTRANSLATE2_VALUES
from regard.interop.foreign_config import describe_unsupported, unsupported_fields
from regard.interop.huggingface.encoder_decoders.encoder_decoder_models import BART_VARIANTS, nearest_class
from regard.interop.joint_vocabulary import join_config
from regard.models import family_name
from regard.models.transformer import TransformerConfig

ExportTarget = Literal["huggingface", "ctranslate2", "onnx"]
EXPORT_TARGETS: tuple[str, ...] = get_args(ExportTarget)


def nearest_exportable(config: Any, target: ExportTarget) -> Any:
    """The config with the fewest changes that exports to `target`; sizes stay the same.

    >>> config = TransformerConfig(positions="rotary", qk_norm=True)
    >>> changed = nearest_exportable(config, "ctranslate2")
    >>> changed.positions, changed.qk_norm
    ('rotary', False)
    >>> changed = nearest_exportable(config, "huggingface")
    >>> changed.positions, changed.qk_norm
    ('sinusoidal', False)
    """
    fields = unsupported_settings(config, target)
    return dataclasses.replace(config, **{field: values[0] for field, values in fields.items()})


def check_exportable(config: Any, target: ExportTarget) -> None:
    """Raise an error that names the fields of a config that `target` does not support.

    >>> check_exportable(TransformerConfig(positions="rotary"), "ctranslate2")
    """
    fields = unsupported_settings(config, target)
    if fields:
        raise RegardError(
            f"--for {target} does not support {describe_unsupported(config, fields)}.",
            "Remove these settings, or leave out --for.",
        )


def unsupported_settings(config: Any, target: ExportTarget) -> dict[str, tuple]:
    """The fields of a config that `target` does not support, each with the values that it supports.

    >>> unsupported_settings(TransformerConfig(qk_norm=True), "ctranslate2")
    {'qk_norm': (False,)}
    """
    if not isinstance(config, TransformerConfig):
        raise RegardError(
            f"--for {target} applies to the family transformer, not to {family_name(config)}.",
            "Leave out --for, or train with --model.family transformer.",
        )
    if target == "huggingface":
        if config.shared_vocab:
            return nearest_class(config)[1]
        # T5 is left out: it has no output bias that could exclude the source tokens.
        return nearest_class(join_config(config), [*BART_VARIANTS])[1]
    return unsupported_fields(config, CTRANSLATE2_VALUES) if target == "ctranslate2" else {}
