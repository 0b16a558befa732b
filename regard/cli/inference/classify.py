"""`regard classify`: texts, or pictures, to labels."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from regard.cli.common import (
    Check,
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    named_blocks,
    open_model,
    parse,
)
from regard.errors import RegardError
from regard.pipelines import Device, ImageModel, TextEncoder, pipeline_kind, read_config
from regard.pipelines.scoring import Classified


@dataclass(frozen=True)
class Options:
    """Classify texts or images: regard classify MODEL "What a film!", regard classify MODEL photo.jpg

    Each is answered by a line: the label, a tab, how likely it is. A tab inside a text parts it in two, for models that
    were trained on two texts. A model of images takes the names of pictures' files. How often the labels are right:
    regard evaluate.
    """

    model: Model
    text: Texts = ()
    """texts, or files of pictures; without any, and without --input, each line of standard input is one"""
    input: Input = None
    all: bool = False
    """tell how likely every label is"""
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "classify", argv)
    classify, check = _classifier(options)
    for block in named_blocks(options.text, options.input, "Type texts, or names of image files", check=check):
        for one in classify([text for _, text in block]):
            if options.all:
                print("\t".join(f"{label} {share:.4f}" for label, share in one.probabilities.items()))
            else:
                print(f"{one.label}\t{one.probability:.4f}")
        sys.stdout.flush()
    return 0


def _classifier(options: Options) -> tuple[Callable[[list[str]], list[Classified]], Check | None]:
    """A function that classifies a block of texts, or of image files, and the check of each text."""
    if pipeline_kind(read_config(options.model)[0]).kind is ImageModel:
        if options.truncate:
            raise RegardError("Images are not truncated.", "Leave out --truncate.")
        return open_model(options.model, options.device, ImageModel).classify, None
    encoder = open_model(options.model, options.device, TextEncoder)
    unknown = UnknownCharacters(encoder.tokenizer, encoder.special.unk)

    def check(text: str, name: str) -> None:
        encoder.encode_rows([_parts(text)], name=name, truncate=options.truncate)
        unknown.check(text, name)

    return lambda texts: encoder.classify([_parts(text) for text in texts], truncate=options.truncate), check


def _parts(text: str) -> tuple[str, ...]:
    return tuple(text.split("\t")[:2])
