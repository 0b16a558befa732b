"""`regard export`: a model folder becomes a model of another program."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regard.cli.common import Model, Quiet, note, parse
from regard.folder import Translator, load
from regard.interop import export_ctranslate2, export_folder, export_onnx


@dataclass(frozen=True)
class Options:
    """Export a model to another format: regard export MODEL --to ctranslate2 --out folder

    huggingface: a folder that transformers opens, as the class that computes the same; where there is none, that is an
    error, and nothing is written. ctranslate2 and onnx: translators, for CTranslate2 and for ONNX Runtime.
    """

    model: Model
    to: Literal["huggingface", "ctranslate2", "onnx"]
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """the folder to write"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "export", argv)
    if options.to == "huggingface":
        name = export_folder(load(options.model, "cpu"), options.out)
        note(f"{options.out} opens in transformers as {name}.")
        return 0
    translator = load(options.model, "cpu", expect=Translator)
    if options.to == "ctranslate2":
        export_ctranslate2(translator, options.out)
        note(f"{options.out} is a model of CTranslate2, its tokenizer beside it.")
    else:
        export_onnx(translator, options.out)
        note(f"{options.out} holds graphs for ONNX Runtime; regard translate, evaluate and score run them.")
    return 0
