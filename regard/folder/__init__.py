"""Pipelines: models with their tokenizers, ready to use, and the model folders that store them."""

from regard.folder.bundle import Pipeline as Bundle
from regard.folder.encoder import TextEncoder
from regard.folder.files import (
    FORMAT,
    OPENED,
    Device,
    bundle_of,
    check_kind,
    fill_weights,
    find_device,
    load,
    model_of,
    read_config,
    read_languages,
    read_tokenizers,
    save,
    vocabularies,
    write_config,
    write_tokenizers,
)
from regard.folder.language import Continuation, LanguageModel, TextLoss
from regard.folder.pictures import ImageModel
from regard.folder.scoring import Classification, SequenceScore
from regard.folder.translator import Translation, Translator

__all__ = [
    "FORMAT",
    "OPENED",
    "Bundle",
    "Classification",
    "Continuation",
    "Device",
    "ImageModel",
    "LanguageModel",
    "SequenceScore",
    "TextEncoder",
    "TextLoss",
    "Translation",
    "Translator",
    "bundle_of",
    "check_kind",
    "fill_weights",
    "find_device",
    "load",
    "model_of",
    "read_config",
    "read_languages",
    "read_tokenizers",
    "save",
    "vocabularies",
    "write_config",
    "write_tokenizers",
]
