"""`regard export`: convert a model folder to another format."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import tyro

from regard.cli.common import Model, Quiet, parse, print_note
from regard.files import check_output_file, check_output_folder
from regard.interop import export_argos, export_ctranslate2, export_huggingface, export_onnx
from regard.interop.export_targets import ExportTarget
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
    to: Literal[ExportTarget, "argos", "int8"]
    """target format"""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """output folder; argos: output file, such as en_de.argosmodel"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "export", argv)
    if options.to == "argos":
        check_output_file(options.out, [options.model])
    else:
        check_output_folder(options.out, [options.model])
    if options.to == "int8":
        load(options.model, "cpu").save(options.out, precision="int8")
        print_note(f"Wrote {options.out}, a model folder with int8 weights.")
        return 0
    if options.to == "huggingface":
        name = export_huggingface(load(options.model, "cpu"), options.out)
        print_note(f"Wrote {options.out}, a folder for transformers ({name}).")
        return 0
    if options.to == "argos":
        export_argos(load(options.model, "cpu", expect=Translator), options.out)
        print_note(f"Wrote {options.out}. Install it with: argospm install {quote(str(options.out))}")
        return 0
    if options.to == "ctranslate2":
        export_ctranslate2(load(options.model, "cpu"), options.out)
        print_note(f"Wrote {options.out}, a CTranslate2 model with its tokenizer.")
    else:
        export_onnx(load(options.model, "cpu"), options.out)
        print_note(
            f"Wrote ONNX graphs to {options.out}. Commands that run a model accept this folder; look and info do not."
        )
    return 0
