"""Pipelines: models with their tokenizers, ready to use, and the model folders that store them."""

from regard.folder.bundle import Pipeline
from regard.folder.encoder import TextEncoder
from regard.folder.files import (
    FORMAT,
    PIPELINES,
    Device,
    check_kind,
    find_device,
    load,
    load_weights,
    make_pipeline,
    model_from_weights,
    read_config,
    read_languages,
    read_tokenizers,
    save,
    vocab_sizes,
    write_config,
    write_tokenizers,
)
from regard.folder.language import Continuation, TextGenerator, TextLoss
from regard.folder.pictures import ImageModel
from regard.folder.scoring import Classification, SequenceScore
from regard.folder.translator import Translation, Translator

__all__ = [
    "FORMAT",
    "PIPELINES",
    "Classification",
    "Continuation",
    "Device",
    "ImageModel",
    "Pipeline",
    "SequenceScore",
    "TextEncoder",
    "TextGenerator",
    "TextLoss",
    "Translation",
    "Translator",
    "check_kind",
    "find_device",
    "load",
    "load_weights",
    "make_pipeline",
    "model_from_weights",
    "read_config",
    "read_languages",
    "read_tokenizers",
    "save",
    "vocab_sizes",
    "write_config",
    "write_tokenizers",
]
