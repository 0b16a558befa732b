"""Readers, tokenisers, packed batches."""

from regard.data.batches import Batch, Batches, encode_pairs, prefetch
from regard.data.dropout import BpeDropout
from regard.data.sequences import Sequences
from regard.data.tokenizer import EOS, KINDS, PAD, SOS, SPECIALS, UNK, Tokenizer

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
    "Sequences",
    "Tokenizer",
    "encode_pairs",
    "prefetch",
]
