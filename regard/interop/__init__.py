"""Models of other programs, in and out: Hugging Face folders, llama2.c checkpoints."""

from regard.interop.huggingface import export_folder, import_folder
from regard.interop.llama2c import import_llama2c

__all__ = ["export_folder", "import_folder", "import_llama2c"]
