"""Model folders: a model, with its tokenisers if it reads text, ready to use, on disk and in memory."""

from regard.pipelines.image_model import ImageModel
from regard.pipelines.model_folder import (
    FORMAT,
    OPENED,
    Bundle,
    Device,
    bundle_of,
    check_kind,
    fill_weights,
    find_device,
    load,
    model_of,
    pipeline_kind,
    read_config,
    read_languages,
    read_tokenizers,
    save,
    vocabularies,
    write_config,
    write_tokenizers,
)
from regard.pipelines.scoring import Classified, PairScore
from regard.pipelines.text_encoder import TextEncoder
from regard.pipelines.text_generator import Continuation, LanguageModel, TextLoss
from regard.pipelines.translator import Translation, Translator

__all__ = [
    "FORMAT",
    "OPENED",
    "Bundle",
    "Classified",
    "Continuation",
    "Device",
    "ImageModel",
    "LanguageModel",
    "PairScore",
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
    "pipeline_kind",
    "read_config",
    "read_languages",
    "read_tokenizers",
    "save",
    "vocabularies",
    "write_config",
    "write_tokenizers",
]
