"""Data: readers, cleaning, tokenizers, word vectors, images and augmentation, packed batches for each task."""

from regard.data.augmentation import AugmentConfig, Augmented, augment, soft_targets
from regard.data.batches import IGNORED, Batch, Batches, encode_pairs, prefetch
from regard.data.cleaning import Counts, clean, split_validation
from regard.data.documents import encode_documents, read_documents, split_documents
from regard.data.dropout import BpeDropout
from regard.data.image_batches import ImageBatch, ImageBatches, as_numbers
from regard.data.image_decoding import read_image
from regard.data.images import ImageSet, RaggedImages, read_images, read_ragged
from regard.data.labelled import Labelled, LabelledBatches, label_ids, label_names, read_labelled
from regard.data.masking import MaskedBatches
from regard.data.phrasebook import phrasebook_pairs
from regard.data.questions import AnswerBatches, Question, QuestionPieces, read_squad
from regard.data.ragged_batches import RaggedBatch, RaggedBatches
from regard.data.readers import TextPair, read_lines, read_pairs
from regard.data.sequences import Sequences
from regard.data.special import EOS, PAD, SOS, SPECIALS, UNK, Special
from regard.data.streams import TextBatches, whole_text
from regard.data.texts import ByLength, Texts, encode_texts
from regard.data.tokenizer import TOKENIZER_KINDS, Tokenizer
from regard.data.vectors import read_vectors

__all__ = [
    "EOS",
    "IGNORED",
    "PAD",
    "SOS",
    "SPECIALS",
    "TOKENIZER_KINDS",
    "UNK",
    "AnswerBatches",
    "AugmentConfig",
    "Augmented",
    "Batch",
    "Batches",
    "BpeDropout",
    "ByLength",
    "Counts",
    "ImageBatch",
    "ImageBatches",
    "ImageSet",
    "Labelled",
    "LabelledBatches",
    "MaskedBatches",
    "Question",
    "QuestionPieces",
    "RaggedBatch",
    "RaggedBatches",
    "RaggedImages",
    "Sequences",
    "Special",
    "TextBatches",
    "TextPair",
    "Texts",
    "Tokenizer",
    "as_numbers",
    "augment",
    "clean",
    "encode_documents",
    "encode_pairs",
    "encode_texts",
    "label_ids",
    "label_names",
    "phrasebook_pairs",
    "prefetch",
    "read_documents",
    "read_image",
    "read_images",
    "read_labelled",
    "read_lines",
    "read_pairs",
    "read_ragged",
    "read_squad",
    "read_vectors",
    "soft_targets",
    "split_documents",
    "split_validation",
    "whole_text",
]
