"""Pipelines: models with their tokenizers, ready to use, and the model folders that store them."""

from regard.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
