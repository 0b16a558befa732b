"""`regard classify`: texts, or pictures, to labels."""

from dataclasses import dataclass

from regard.cli.common import Input, Model, Quiet, Texts, Truncate, numbered_texts, parse
from regard.errors import RegardError
from regard.folder import OPENED, Device, ImageModel, TextEncoder, load, read_config
from regard.folder.scoring import Classified
from regard.models import family_of


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
    given = [text for _, text in numbered_texts(options.text, options.input, "Type texts, or names of pictures")]
    if OPENED[family_of(read_config(options.model)[0])].kind is ImageModel:
        found = _pictures(given, options)
    else:
        encoder = load(options.model, options.device, expect=TextEncoder)
        found = encoder.classify([tuple(text.split("\t")[:2]) for text in given], truncate=options.truncate)
    for one in found:
        if options.all:
            print("\t".join(f"{label} {share:.4f}" for label, share in one.probabilities.items()))
        else:
            print(f"{one.label}\t{one.probability:.4f}")
    return 0


def _pictures(files: list[str], options: Options) -> list[Classified]:
    if options.truncate:
        raise RegardError("Pictures are not cut short.", "Leave out --truncate.")
    return load(options.model, options.device, expect=ImageModel).classify(files)
