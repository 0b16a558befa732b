"""`regard export`: write a model in another format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.common import Model, Quiet, note, parse
from regard.interop import export_ctranslate2, export_folder, export_onnx
from regard.interop.export_targets import Target
from regard.pipelines import Translator, load


@dataclass(frozen=True)
class Options:
    """Export a model to another format: regard export MODEL --to ctranslate2 --out folder

    onnx: graphs of a model of any family, for ONNX Runtime. ctranslate2: translators. huggingface: a folder that
    transformers opens, as the class that computes exactly the same. A model that the format does not support is an
    error, and nothing is written; `regard train --for` trains a model that it supports.
    """

    model: Model
    to: Target
    """format"""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """folder to write"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "export", argv)
    if options.to == "huggingface":
        name = export_folder(load(options.model, "cpu"), options.out)
        note(f"{options.out} opens in transformers as {name}.")
        return 0
    if options.to == "ctranslate2":
        export_ctranslate2(load(options.model, "cpu", expect=Translator), options.out)
        note(f"{options.out} is a model folder for CTranslate2, with its tokenizer.")
    else:
        export_onnx(load(options.model, "cpu"), options.out)
        note(f"{options.out} holds ONNX graphs; commands that run a model take the folder, look and info do not.")
    return 0
