"""The formats that a model is imported from and exported to, each in one call."""

from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NamedTuple, get_args

from regard.errors import RegardError
from regard.files import check_output_folder
from regard.pipelines.pipeline import Pipeline

ExportFormat = Literal["huggingface", "ctranslate2", "onnx", "argos", "int8"]


class _Exporter(NamedTuple):
    """The function that writes a format, imported when it is needed, and what it writes."""

    module: str
    function: str
    description: str


_EXPORTERS = {
    "huggingface": _Exporter("huggingface.folder", "export_huggingface", "a folder for transformers"),
    "ctranslate2": _Exporter("ctranslate2", "export_ctranslate2", "a CTranslate2 model with its tokenizer"),
    "onnx": _Exporter(
        *("onnx_export", "export_onnx"),
        "graphs for ONNX Runtime, which the commands that run a model accept; look and info do not",
    ),
    "argos": _Exporter("argos", "export_argos", "a package for argospm install"),
}


def import_model(path: str | Path, *, tokenizer: str | Path | None = None) -> Pipeline:
    """Import a model of another library: a folder of Hugging Face or timm, or a file of timm, GGUF or llama2.c.

    `tokenizer` is the tokenizer file of a llama2.c checkpoint. Nothing in the files is executed, and the network is not
    used.

    >>> writer = import_model("stories15M.bin", tokenizer="tokenizer.bin")  # doctest: +SKIP
    >>> writer("Once upon a time")  # doctest: +SKIP
    ', there was a little girl named Lily.'
    """
    path = Path(path)
    if not path.exists():
        raise RegardError(
            f"{path}: no such folder or file.",
            "regard import does not use the network: download the model first, for example with "
            "hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir all-MiniLM-L6-v2",
        )
    if path.suffix == ".gguf":
        return _function("gguf", "import_gguf")(path)
    if path.is_file() and path.suffix != ".safetensors":
        if tokenizer is None:
            raise RegardError(
                f"{path}: the format of the file is unknown (known: .safetensors, .gguf, checkpoints of llama2.c).",
                "For such a checkpoint, pass --tokenizer FILE.",
            )
        return _function("llama2c", "import_llama2c")(path, tokenizer)
    if (path / "config.json").exists() and (path / "model.bin").exists():
        raise RegardError(
            f"{path}: models of CTranslate2 cannot be imported.", "Import the model that this one was converted from."
        )
    if path.is_dir() and not (path / "config.json").exists():
        checkpoint = next((file for file in sorted(path.glob("*.bin")) if file.stem != "tokenizer"), None)
        if checkpoint is not None and not checkpoint.name.startswith("pytorch_model"):
            file = quote(str(checkpoint))
            raise RegardError(
                f"{path} has no config.json; {checkpoint.name} may be a llama2.c checkpoint.",
                f"Pass the file: regard import {file} --tokenizer {quote(str(path / 'tokenizer.bin'))} --out …",
            )
    return _function("huggingface.folder", "import_huggingface")(path)


def export_model(pipeline: Pipeline, to: ExportFormat, out: str | Path) -> str:
    """Write a model in another format to `out`, and return what was written. int8 is a model folder of Regard.

    A model that the format does not support is an error, and nothing is written.

    >>> export_model(regard.load("model"), "ctranslate2", "fast")  # doctest: +SKIP
    'a CTranslate2 model with its tokenizer'
    """
    if to not in get_args(ExportFormat):
        raise RegardError(f"Unknown format {to!r}.", f"Use one of: {', '.join(get_args(ExportFormat))}.")
    if to == "int8":
        check_output_folder(Path(out))
        pipeline.save(out, precision="int8")
        return "a model folder with int8 weights"
    exporter = _EXPORTERS[to]
    class_name = _function(exporter.module, exporter.function)(pipeline, out)
    return exporter.description if class_name is None else f"{exporter.description} ({class_name})"


def _function(module: str, name: str) -> Any:
    return getattr(import_module(f"regard.interop.{module}"), name)
