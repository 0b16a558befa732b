"""Pipelines: models with their tokenizers, ready to use, and the model folders that store them."""

from regard.pipelines.folder.model_folder import (
    FORMAT,
    PIPELINES,
    check_kind,
    check_storable,
    load,
    load_weights,
    make_pipeline,
    model_from_weights,
    pipeline_kind,
    read_config,
    read_pipeline_settings,
    read_tokenizers,
    save,
    vocab_sizes,
    write_config,
    write_tokenizers,
)
from regard.pipelines.image_model import ImageModel
from regard.pipelines.pipeline import Pipeline
from regard.pipelines.scoring import Classification, SequenceScore, TaggedWord
from regard.pipelines.text_encoder import TextEncoder
from regard.pipelines.text_generator import Continuation, TextGenerator, TextLoss
from regard.pipelines.translation import Translation
from regard.pipelines.translator import Translator

__all__ = [
    "FORMAT",
    "PIPELINES",
    "Classification",
    "Continuation",
    "ImageModel",
    "Pipeline",
    "SequenceScore",
    "TaggedWord",
    "TextEncoder",
    "TextGenerator",
    "TextLoss",
    "Translation",
    "Translator",
    "check_kind",
    "check_storable",
    "load",
    "load_weights",
    "make_pipeline",
    "model_from_weights",
    "pipeline_kind",
    "read_config",
    "read_pipeline_settings",
    "read_tokenizers",
    "save",
    "vocab_sizes",
    "write_config",
    "write_tokenizers",
]
