"""`regard export`: a model folder becomes a model of another program."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regard.cli.common import Model, parse
from regard.folder import Translator, load
from regard.interop import export_ctranslate2, export_folder, export_onnx


@dataclass(frozen=True)
class Options:
    """Writes a model for another program: regard export MODEL --to ctranslate2 --out folder

    huggingface: a folder that transformers opens, as the class that computes the same; where there is none, that is an
    error, and nothing is written. ctranslate2 and onnx: translators, for CTranslate2 and for ONNX Runtime.
    """

    model: Model
    to: Literal["huggingface", "ctranslate2", "onnx"]
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """the folder to write"""


def run(argv: list[str]) -> int:
    options = parse(Options, "export", argv)
    if options.to == "huggingface":
        name = export_folder(load(options.model, "cpu"), options.out)
        print(f"{options.out} opens in transformers as {name}.", file=sys.stderr)
        return 0
    translator = load(options.model, "cpu", expect=Translator)
    if options.to == "ctranslate2":
        export_ctranslate2(translator, options.out)
        print(f"{options.out} is a model of CTranslate2, its tokeniser beside it.", file=sys.stderr)
    else:
        export_onnx(translator, options.out)
        print(
            f"{options.out} holds graphs for ONNX Runtime; regard translate, evaluate and score run them.",
            file=sys.stderr,
        )
    return 0
