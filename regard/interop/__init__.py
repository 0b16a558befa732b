"""Models of other programs, in and out: Hugging Face folders, llama2.c checkpoints; CTranslate2 and ONNX out."""

from regard.interop.ctranslate2_export import export_ctranslate2
from regard.interop.huggingface.hf_folder import export_folder, import_folder
from regard.interop.llama2c import import_llama2c
from regard.interop.onnx.onnx_export import export_onnx
from regard.interop.onnx.onnx_runner import open_onnx
from regard.interop.sentencepiece_files import read_sentencepiece, write_sentencepiece

__all__ = [
    "export_ctranslate2",
    "export_folder",
    "export_onnx",
    "import_folder",
    "import_llama2c",
    "open_onnx",
    "read_sentencepiece",
    "write_sentencepiece",
]
