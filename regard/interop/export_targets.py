"""Export targets, and the model configs that each supports."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

from regard.errors import RegardError
from regard.interop.ctranslate2 import CTRANSLATE2_VALUES, DECODER_VALUES, ENCODER_VALUES
from regard.interop.foreign_config import describe_unsupported, unsupported_fields
from regard.interop.huggingface.encoder_decoders import BART_VARIANTS, nearest_translator
from regard.interop.huggingface.gpt import GPT_CLASSES
from regard.interop.huggingface.single_stack import ForeignClass, nearest_class
from regard.interop.huggingface.text_encoders import WRITTEN_ENCODERS
from regard.interop.huggingface.vit import VIT_CLASSES, exported_config
from regard.interop.joint_vocabulary import join_config
from regard.models import BertConfig, GPTConfig, TransformerConfig, ViTConfig, family_name

ExportTarget = Literal["huggingface", "ctranslate2", "onnx"]
EXPORT_TARGETS: tuple[str, ...] = get_args(ExportTarget)


def check_exportable(config: Any, target: ExportTarget) -> None:
    """Raise an error that names the fields of a config that `target` does not support.

    >>> check_exportable(TransformerConfig(positions="rotary"), "ctranslate2")
    """
    fields = unsupported_settings(config, target)
    if "head" in fields:
        raise RegardError(
            f"--for {target} does not support models with the head {config.head}.",
            "Leave out --for, or use --for onnx.",
        )
    if fields:
        raise RegardError(
            f"--for {target} does not support {describe_unsupported(config, fields)}.",
            "Remove these settings, or leave out --for.",
        )


def unsupported_settings(config: Any, target: ExportTarget) -> dict[str, tuple]:
    """The fields of a config that `target` does not support, each with the values that it supports.

    The first ones of these values give the config with the fewest changes that exports to the target.

    >>> unsupported_settings(TransformerConfig(qk_norm=True), "ctranslate2")
    {'qk_norm': (False,)}
    >>> unsupported_settings(ViTConfig(patches="stem"), "huggingface")
    {'patches': ('linear', 'convolution')}
    """
    if target == "onnx":
        return {}
    if find := UNSUPPORTED.get((target, type(config))):
        return find(config)
    raise RegardError(
        f"--for {target} does not support models of the family {family_name(config)}.",
        "Leave out --for, or use --for onnx.",
    )


def _translator_fields(config: TransformerConfig) -> dict[str, tuple]:
    if config.shared_vocab:
        return nearest_translator(config)[1]
    # T5 is left out: it has no output bias that could exclude the source tokens.
    return nearest_translator(join_config(config), [*BART_VARIANTS])[1]


def _text_fields(config: Any, classes: Mapping[str, ForeignClass]) -> dict[str, tuple]:
    return nearest_class(classes, dataclasses.replace(config, vocab=config.vocab or 1))[1]


def _image_fields(config: ViTConfig) -> dict[str, tuple]:
    fields = nearest_class(VIT_CLASSES, exported_config(config))[1]
    return fields | ({"patches": ("linear", "convolution")} if "patches" in fields else {})


def _decoder_fields(config: GPTConfig) -> dict[str, tuple]:
    return unsupported_fields(config, DECODER_VALUES | ({"qk_norm": (False,)} if config.norm_kind == "layer" else {}))


# By target and class of config; a target supports no model of the others.
UNSUPPORTED: dict[tuple[str, type], Callable[[Any], dict[str, tuple]]] = {
    ("huggingface", TransformerConfig): _translator_fields,
    ("huggingface", GPTConfig): partial(_text_fields, classes=GPT_CLASSES),
    ("huggingface", BertConfig): partial(_text_fields, classes=WRITTEN_ENCODERS),
    ("huggingface", ViTConfig): _image_fields,
    ("ctranslate2", TransformerConfig): partial(unsupported_fields, supported=CTRANSLATE2_VALUES),
    ("ctranslate2", GPTConfig): _decoder_fields,
    ("ctranslate2", BertConfig): partial(unsupported_fields, supported=ENCODER_VALUES),
}
