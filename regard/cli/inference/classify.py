"""`regard classify`: classification of texts or images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from regard.cli.common import (
    Devices,
    Input,
    M,
    Model,
    Output,
    Overwrite,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    block_processor,
    check_file_options,
    is_stream,
    open_models,
    parse,
    print_or_write,
    suggest_input,
)
from regard.errors import RegardError
from regard.pipelines import Classification, ImageModel, ModelFolder, TextEncoder
from regard.pipelines.files import process_file
from regard.pipelines.scoring import format_classification
from regard.pipelines.text_encoder import split_pair

PROMPT = "Type texts or names of image files"


@dataclass(frozen=True)
class Options:
    """Classify texts or images: regard classify MODEL "What a film!", regard classify MODEL photo.jpg

    Print one line per input: label, tab, probability. A tab in a text separates two texts, for models trained on
    pairs. Image models classify image files. To measure accuracy, use regard evaluate. With --output, write to a file
    instead; if interrupted, the same command resumes.
    """

    model: Model
    text: Texts = ()
    """texts or image files"""
    input: Input = None
    output: Output = None
    overwrite: Overwrite = False
    all: bool = False
    """print the probabilities of all labels"""
    truncate: Truncate = False
    device: Devices = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "classify", argv)
    check_file_options(options.output, options.overwrite, [options.input])
    if ModelFolder.open(options.model).pipeline_class is ImageModel:
        _classify_images(options)
    else:
        _classify_texts(options)
    return 0


def _classify_texts(options: Options) -> None:
    suggest_input(options.text)
    first, *replicas = _open_models(options, TextEncoder)
    truncate = options.truncate

    def lines(texts: list[str]) -> Iterator[str]:
        return _format(first.classify(list(map(split_pair, texts)), truncate=truncate), options)

    def check(text: str, name: str) -> None:
        first.encode_rows([split_pair(text)], name=name, truncate=truncate)

    write = partial(first.classify_file, all_labels=options.all, truncate=truncate, replicas=replicas)
    unknown = UnknownCharacters(first.tokenizer, first.special.unk)
    print_or_write(options, "classifying", PROMPT, lines, write, check=check, unknown=unknown)


def _classify_images(options: Options) -> None:
    if options.truncate:
        raise RegardError("--truncate is not supported for image models.", "Leave it out.")
    models = _open_models(options, ImageModel)

    def lines(files: list[str], model: ImageModel = models[0]) -> Iterator[str]:
        return _format(model.classify(files), options)

    write = partial(
        process_file,
        processors=[block_processor(partial(lines, model=model)) for model in models],
        settings={"task": "classify", "model": models[0].fingerprint(), "all_labels": options.all},
        check=lambda file, name: models[0].classify([file]),
    )
    print_or_write(options, "classifying", PROMPT, lines, write)


def _open_models(options: Options, expect: type[M]) -> list[M]:
    return open_models(options.model, options.device, expect, parallel=not is_stream(options.output))


def _format(results: Iterable[Classification], options: Options) -> Iterator[str]:
    return (f"{format_classification(result, options.all)}\n" for result in results)
