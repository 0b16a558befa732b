"""`regard classify`: classification of texts or images."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from regard.cli.common import (
    Check,
    DeviceOption,
    Flag,
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    open_model,
    parse,
    read_blocks,
)
from regard.errors import RegardError
from regard.pipelines import ImageModel, TextEncoder, pipeline_kind, read_config
from regard.pipelines.scoring import Classification


@dataclass(frozen=True)
class Options:
    """Classify texts or images: regard classify MODEL "What a film!", regard classify MODEL photo.jpg

    Print one line per input: label, tab, probability. A tab in a text separates two texts, for models trained on
    pairs. Image models classify image files. To measure accuracy, use regard evaluate.
    """

    model: Model
    text: Texts = ()
    """texts or image files"""
    input: Input = None
    all: Flag = False
    """print the probabilities of all labels"""
    truncate: Truncate = False
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "classify", argv)
    classify, check = _make_classifier(options)
    for block in read_blocks(options.text, options.input, "Type texts or names of image files", check=check):
        for result in classify([text for _, text in block]):
            if options.all:
                print("\t".join(f"{label} {probability:.4f}" for label, probability in result.probabilities.items()))
            else:
                print(f"{result.label}\t{result.probability:.4f}")
        sys.stdout.flush()
    return 0


def _make_classifier(options: Options) -> tuple[Callable[[list[str]], list[Classification]], Check | None]:
    """A function that classifies a block of texts or image files, and the check of each text."""
    if pipeline_kind(read_config(options.model)[0]).pipeline_class is ImageModel:
        if options.truncate:
            raise RegardError("--truncate is not supported for image models.", "Leave it out.")
        return open_model(options.model, options.device, ImageModel).classify, None
    encoder = open_model(options.model, options.device, TextEncoder)
    unknown = UnknownCharacters(encoder.tokenizer, encoder.special.unk)

    def check(text: str, name: str) -> None:
        encoder.encode_rows([_split_pair(text)], name=name, truncate=options.truncate)
        unknown.check(text, name)

    return lambda texts: encoder.classify([_split_pair(text) for text in texts], truncate=options.truncate), check


def _split_pair(text: str) -> tuple[str, ...]:
    return tuple(text.split("\t")[:2])
