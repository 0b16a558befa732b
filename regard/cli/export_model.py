"""`regard export`: convert a model folder to another format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from regard.cli.common import Model, Quiet, parse, print_note
from regard.cli.options import Arg
from regard.files import check_output_file, check_output_folder
from regard.interop.formats import ExportFormat, export_model
from regard.pipelines import Translator, load


@dataclass(frozen=True)
class Options:
    """Export a model to another format: regard export MODEL --to ctranslate2 --out folder

    onnx: graphs for ONNX Runtime, any model family. ctranslate2: translators, language models, and encoders without a
    task head. huggingface: a folder for transformers, as the class with exactly the same computation. argos: a package
    for Argos Translate and LibreTranslate, of a translator with one sentencepiece tokenizer or word tokenizers. int8:
    a model folder of a quarter of the size, any family. A model that the format does not support is an error, and
    nothing is written; `regard train --for` trains a model that the format supports.
    """

    model: Model
    to: ExportFormat
    """target format"""
    out: Annotated[Path, Arg("FOLDER")]
    """output folder; argos: output file, such as en_de.argosmodel"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "export", argv)
    if options.to == "argos":
        check_output_file(options.out, [options.model])
    else:
        check_output_folder(options.out, [options.model])
    is_argos = options.to == "argos"
    pipeline = load(options.model, "cpu", expect=Translator) if is_argos else load(options.model, "cpu")
    written = export_model(pipeline, options.to, options.out)
    print_note(f"Wrote {options.out}: {written}.")
    return 0
