"""Model folders: a model, with its tokenisers if it reads text, ready to use, on disk and in memory."""

from regard.folder.encoder import TextEncoder
from regard.folder.files import (
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
from regard.folder.scoring import Classified, PairScore
from regard.folder.translator import Translation, Translator

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
    "read_config",
    "read_languages",
    "read_tokenizers",
    "save",
    "vocabularies",
    "write_config",
    "write_tokenizers",
]
