"""Data: readers, cleaning, tokenizers, word vectors, images and augmentation, packed batches for each task."""

from regard.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
