"""Decoding: greedy search, beam search and sampling, for any model that implements the `Decodable` protocol."""

from regard.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
