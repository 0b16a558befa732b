"""Data: readers, cleaning, tokenizers, word vectors, images and augmentation, packed batches for each task."""

from regard.data.batching.pair_batches import PairBatches, encode_pairs
from regard.data.batching.text_batches import encode_texts
from regard.data.images.augmentation import AugmentConfig, augment, one_hot_targets
from regard.data.images.image_decoding import read_image
from regard.data.images.image_set import ImageSet, RaggedImages, read_images, read_ragged_images
from regard.data.text.cleaning import clean, split_validation
from regard.data.text.examples.documents import encode_documents, read_documents, split_documents
from regard.data.text.examples.labeled_texts import read_labeled_texts
from regard.data.text.examples.questions import Question, read_squad
from regard.data.text.readers import read_lines, read_pairs
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.data.text.word_vectors import read_word_vectors

__all__ = [
    "AugmentConfig",
    "ImageSet",
    "PairBatches",
    "Question",
    "RaggedImages",
    "SpecialTokens",
    "Tokenizer",
    "augment",
    "clean",
    "encode_documents",
    "encode_pairs",
    "encode_texts",
    "one_hot_targets",
    "read_documents",
    "read_image",
    "read_images",
    "read_labeled_texts",
    "read_lines",
    "read_pairs",
    "read_ragged_images",
    "read_squad",
    "read_word_vectors",
    "split_documents",
    "split_validation",
]
