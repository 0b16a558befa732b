"""Import and export of model formats.

Imports Hugging Face and timm folders, GGUF files and llama2.c checkpoints; exports to Hugging Face, CTranslate2, ONNX
and Argos Translate.
"""

from regard.interop.argos_export import export_argos
from regard.interop.ctranslate2_export import export_ctranslate2
from regard.interop.formats import export_model, import_model
from regard.interop.gguf.gguf_import import import_gguf
from regard.interop.huggingface.hf_folder import export_huggingface, import_huggingface
from regard.interop.llama2c import import_llama2c
from regard.interop.onnx.onnx_export import export_onnx
from regard.interop.onnx.onnx_runner import load_onnx
from regard.interop.sentencepiece_files import read_sentencepiece, write_sentencepiece

__all__ = [
    "export_argos",
    "export_ctranslate2",
    "export_huggingface",
    "export_model",
    "export_onnx",
    "import_gguf",
    "import_huggingface",
    "import_llama2c",
    "import_model",
    "load_onnx",
    "read_sentencepiece",
    "write_sentencepiece",
]
