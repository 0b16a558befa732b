"""`regard import`: convert a model from another format to a model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from regard.cli.common import Quiet, parse, print_note
from regard.cli.options import Arg
from regard.files import check_output_folder
from regard.interop.formats import import_model
from regard.pipelines import save


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

    model: Annotated[Path, Arg("FOLDER", is_positional=True)]
    """folder or file to import"""
    out: Annotated[Path, Arg("MODEL")]
    """output model folder"""
    tokenizer: Path | None = None
    """llama2.c: tokenizer file"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "import", argv)
    check_output_folder(options.out, [options.model])
    pipeline = import_model(options.model, tokenizer=options.tokenizer)
    save(options.out, pipeline)
    size = sum(parameter.numel() for parameter in pipeline.model.parameters())
    print_note(
        f"Imported {pipeline.description} with {size / 1e6:.2f} M parameters to {options.out}. "
        f"Use it with: {pipeline.commands}."
    )
    return 0
