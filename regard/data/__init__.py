"""Readers, cleaning, tokenisers, packed batches for each task, word vectors; pictures and their augmentation."""

from regard.data.batching.image_batches import ImageBatch, ImageBatches, as_numbers
from regard.data.batching.masked_batches import MaskedBatches
from regard.data.batching.pair_batches import IGNORED, Batch, Batches, encode_pairs, prefetch
from regard.data.batching.ragged_batches import RaggedBatch, RaggedBatches
from regard.data.batching.sequences import Sequences
from regard.data.batching.text_batches import ByLength, Texts, encode_texts
from regard.data.batching.token_streams import TextBatches, whole_text
from regard.data.images.augmentation import AugmentConfig, Augmented, augment, soft_targets
from regard.data.images.image_decoding import read_image
from regard.data.images.image_set import ImageSet, RaggedImages, read_images, read_ragged
from regard.data.phrasebook import phrasebook_pairs
from regard.data.text.bpe_dropout import BpeDropout
from regard.data.text.cleaning import Counts, clean, split_validation
from regard.data.text.documents import encode_documents, read_documents, split_documents
from regard.data.text.labeled_texts import Labelled, LabelledBatches, label_ids, label_names, read_labelled
from regard.data.text.questions import AnswerBatches, Question, QuestionPieces, read_squad
from regard.data.text.readers import Pair, read_lines, read_pairs
from regard.data.text.special_tokens import EOS, PAD, SOS, SPECIALS, UNK, Special
from regard.data.text.tokenizer import KINDS, Tokenizer
from regard.data.text.word_vectors import read_vectors

__all__ = [
    "EOS",
    "IGNORED",
    "KINDS",
    "PAD",
    "SOS",
    "SPECIALS",
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
    "Pair",
    "Question",
    "QuestionPieces",
    "RaggedBatch",
    "RaggedBatches",
    "RaggedImages",
    "Sequences",
    "Special",
    "TextBatches",
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
