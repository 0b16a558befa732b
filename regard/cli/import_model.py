"""`regard import`: convert a model from another format to a model folder."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import tyro

from regard.cli.common import Quiet, parse, print_note
from regard.errors import RegardError
from regard.files import check_output_folder
from regard.interop import import_gguf, import_huggingface, import_llama2c
from regard.pipelines import pipeline_kind, save


@dataclass(frozen=True)
class Options:
    """Import a model from another format: regard import FOLDER --out model

    Hugging Face: a folder with config.json, safetensors and tokenizer of an encoder (BERT, RoBERTa, XLM-RoBERTa,
    CamemBERT, DistilBERT, ALBERT, ELECTRA, MPNet, ModernBERT, DeBERTa-v2), a language model (GPT-2, Llama, Qwen2,
    Qwen3, Mistral, SmolLM3, Phi-3, OLMo 2, Gemma 1 to 3, GPT-NeoX, OPT), an encoder-decoder (BART, mBART, Pegasus,
    Blenderbot, Marian, NLLB, M2M100, T5, mT5) or an image model (ViT, DeiT, DINOv2, image encoders of CLIP and
    SigLIP). timm: a Vision Transformer, as a folder with config.json or a safetensors file. GGUF: a .gguf file of a
    language model; quantized weights become float32. llama2.c: a checkpoint file, with --tokenizer. No code of the
    model is executed, and the network is not used. A missing or unknown tensor is an error that names it.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """folder or file to import"""
    out: Annotated[Path, tyro.conf.arg(metavar="MODEL")]
    """output model folder"""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """llama2.c: tokenizer file"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "import", argv)
    check_output_folder(options.out, [options.model])
    if not options.model.exists():
        raise RegardError(
            f"{options.model}: no such folder or file.",
            "regard import does not use the network: download the model first, for example with "
            "hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir all-MiniLM-L6-v2",
        )
    if options.model.is_dir() and not (options.model / "config.json").exists():
        checkpoint = next((file for file in sorted(options.model.glob("*.bin")) if file.stem != "tokenizer"), None)
        if checkpoint is not None and not checkpoint.name.startswith("pytorch_model"):
            tokenizer = options.model / "tokenizer.bin"
            raise RegardError(
                f"{options.model} has no config.json; {checkpoint.name} may be a llama2.c checkpoint.",
                f"Pass the file: regard import {quote(str(checkpoint))} --tokenizer {quote(str(tokenizer))} --out …",
            )
    if options.model.suffix == ".gguf":
        pipeline = import_gguf(options.model)
    elif options.model.is_file() and options.model.suffix != ".safetensors":
        if options.tokenizer is None:
            raise RegardError(
                f"{options.model} is a file; a llama2.c checkpoint requires --tokenizer.", "Pass --tokenizer FILE."
            )
        pipeline = import_llama2c(options.model, options.tokenizer)
    else:
        pipeline = import_huggingface(options.model)
    save(options.out, pipeline)
    kind = pipeline_kind(pipeline.model.config)
    size = sum(one.numel() for one in pipeline.model.parameters())
    print_note(
        f"Imported {kind.description} with {size / 1e6:.2f} M parameters to {options.out}. "
        f"Use it with: {kind.commands}."
    )
    return 0
