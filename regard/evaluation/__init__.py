"""Evaluation: metrics, word alignments, and `evaluate` for every kind of model."""

from regard.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
