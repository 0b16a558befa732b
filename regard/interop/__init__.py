"""Import and export of model formats.

Imports Hugging Face and timm folders, GGUF files and llama2.c checkpoints; exports to Hugging Face, CTranslate2, ONNX
and Argos Translate.
"""

from regard.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
