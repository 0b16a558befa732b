"""Readers, cleaning, tokenisers, packed batches, word vectors."""

from regard.data.batches import Batch, Batches, encode_pairs, prefetch
from regard.data.cleaning import Counts, clean, split_validation
from regard.data.dropout import BpeDropout
from regard.data.phrasebook import phrasebook_pairs
from regard.data.readers import Pair, read_lines, read_pairs
from regard.data.sequences import Sequences
from regard.data.tokenizer import EOS, KINDS, PAD, SOS, SPECIALS, UNK, Tokenizer
from regard.data.vectors import read_vectors

__all__ = [
    "EOS",
    "KINDS",
    "PAD",
    "SOS",
    "SPECIALS",
    "UNK",
    "Batch",
    "Batches",
    "BpeDropout",
    "Counts",
    "Pair",
    "Sequences",
    "Tokenizer",
    "clean",
    "encode_pairs",
    "phrasebook_pairs",
    "prefetch",
    "read_lines",
    "read_pairs",
    "read_vectors",
    "split_validation",
]
