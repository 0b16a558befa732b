"""Data: readers, cleaning, tokenizers, word vectors, images and augmentation, packed batches for each task."""

from regard.data.batching.image_batches import ImageBatch, ImageBatches, pixels_to_float
from regard.data.batching.masked_batches import MaskedBatches
from regard.data.batching.pair_batches import IGNORE_INDEX, Batch, PairBatches, encode_pairs, prefetch
from regard.data.batching.ragged_batches import RaggedImageBatch, RaggedImageBatches
from regard.data.batching.sequences import Sequences
from regard.data.batching.text_batches import EncodedTexts, LengthGroupedBatches, encode_texts
from regard.data.batching.token_streams import TokenStreamBatches, sliding_window_batches
from regard.data.images.augmentation import AugmentConfig, AugmentedBatch, augment, one_hot_targets
from regard.data.images.image_decoding import read_image
from regard.data.images.image_set import ImageSet, RaggedImages, read_images, read_ragged_images
from regard.data.phrasebook import phrasebook_pairs
from regard.data.text.bpe_dropout import BpeDropout
from regard.data.text.cleaning import CleaningCounts, clean, split_validation
from regard.data.text.documents import encode_documents, read_documents, split_documents
from regard.data.text.labeled_texts import LabeledText, LabeledTextBatches, label_ids, label_names, read_labeled_texts
from regard.data.text.questions import AnswerBatches, Question, QuestionWindows, read_squad
from regard.data.text.readers import TextPair, read_lines, read_pairs
from regard.data.text.special_tokens import EOS, PAD, SOS, SPECIAL_TOKEN_NAMES, UNK, SpecialTokens
from regard.data.text.tokenizer import TOKENIZER_KINDS, Tokenizer
from regard.data.text.word_vectors import read_word_vectors

__all__ = [
    "EOS",
    "IGNORE_INDEX",
    "PAD",
    "SOS",
    "SPECIAL_TOKEN_NAMES",
    "TOKENIZER_KINDS",
    "UNK",
    "AnswerBatches",
    "AugmentConfig",
    "AugmentedBatch",
    "Batch",
    "BpeDropout",
    "CleaningCounts",
    "EncodedTexts",
    "ImageBatch",
    "ImageBatches",
    "ImageSet",
    "LabeledText",
    "LabeledTextBatches",
    "LengthGroupedBatches",
    "MaskedBatches",
    "PairBatches",
    "Question",
    "QuestionWindows",
    "RaggedImageBatch",
    "RaggedImageBatches",
    "RaggedImages",
    "Sequences",
    "SpecialTokens",
    "TextPair",
    "TokenStreamBatches",
    "Tokenizer",
    "augment",
    "clean",
    "encode_documents",
    "encode_pairs",
    "encode_texts",
    "label_ids",
    "label_names",
    "one_hot_targets",
    "phrasebook_pairs",
    "pixels_to_float",
    "prefetch",
    "read_documents",
    "read_image",
    "read_images",
    "read_labeled_texts",
    "read_lines",
    "read_pairs",
    "read_ragged_images",
    "read_squad",
    "read_word_vectors",
    "sliding_window_batches",
    "split_documents",
    "split_validation",
]
