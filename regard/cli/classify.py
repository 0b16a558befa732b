"""`regard classify`: texts to labels."""

from dataclasses import dataclass

from regard.cli.common import Input, Model, Texts, Truncate, numbered_texts, parse
from regard.folder import Device, TextEncoder, load


@dataclass(frozen=True)
class Options:
    """Gives each text its label: regard classify MODEL "What a film!"

    Each text is answered by a line: the label, a tab, how likely it is. A tab inside a text parts it in two, for models
    that were trained on two texts. How often the labels are right on a file of labelled texts: regard evaluate.
    """

    model: Model
    text: Texts = ()
    """texts; without any, and without --input, each line of standard input is one"""
    input: Input = None
    all: bool = False
    """tell how likely every label is"""
    truncate: Truncate = False
    device: Device = "auto"


def run(argv: list[str]) -> int:
    options = parse(Options, "classify", argv)
    texts = [tuple(text.split("\t")[:2]) for _, text in numbered_texts(options.text, options.input, "Type texts")]
    encoder = load(options.model, options.device, expect=TextEncoder)
    for found in encoder.classify(texts, truncate=options.truncate):
        if options.all:
            print("\t".join(f"{label} {share:.4f}" for label, share in found.probabilities.items()))
        else:
            print(f"{found.label}\t{found.probability:.4f}")
    return 0
