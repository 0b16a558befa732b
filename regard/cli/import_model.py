"""`regard import`: a model of another program becomes a model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.common import Quiet, note, parse
from regard.errors import RegardError
from regard.interop import import_folder, import_llama2c
from regard.pipelines import pipeline_kind, save


@dataclass(frozen=True)
class Options:
    """Import a model of another format as a model folder: regard import FOLDER --out model

    FOLDER is in Hugging Face's format (config.json, safetensors, tokeniser): BERT, RoBERTa, XLM-RoBERTa, CamemBERT,
    DistilBERT, ALBERT, GPT-2, Llama, Qwen2, Qwen3, BART, Marian, T5, ViT, DeiT. Or it is a Vision Transformer of timm:
    a folder with its config.json, or the safetensors alone. Or it is a checkpoint of llama2.c, with --tokenizer.
    Nothing in it is run, and no network is touched. A tensor that is missing or not known is an error that names it.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    out: Annotated[Path, tyro.conf.arg(metavar="MODEL")]
    """the model folder to write"""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """llama2.c: the file of its tokenizer"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "import", argv)
    if (options.out / "config.json").exists():
        raise RegardError(f"{options.out} holds a model already.", "Choose another --out, or delete that folder first.")
    if options.model.is_file() and options.model.suffix != ".safetensors":
        if options.tokenizer is None:
            raise RegardError(f"{options.model} is a file: a checkpoint of llama2.c?", "Give --tokenizer FILE with it.")
        bundle = import_llama2c(options.model, options.tokenizer)
    else:
        bundle = import_folder(options.model)
    save(options.out, bundle)
    opened = pipeline_kind(bundle.model.config)
    size = sum(one.numel() for one in bundle.model.parameters())
    note(
        f"{opened.says[0].upper()}{opened.says[1:]} of {size / 1e6:.2f} M parameters is in {options.out}. "
        f"Use it with: {opened.commands}."
    )
    return 0
