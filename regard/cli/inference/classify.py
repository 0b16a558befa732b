"""`regard classify`: classification of texts or images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.cli.common import (
    Devices,
    Input,
    Model,
    Output,
    Overwrite,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    check_file_options,
    file_progress,
    input_texts,
    is_stream,
    note_file,
    open_models,
    open_stream,
    parse,
    read_blocks,
    suggest_input,
)
from regard.errors import RegardError
from regard.pipelines import Classification, ImageModel, ModelFolder, TextEncoder
from regard.pipelines.files import BlockOutput, ProcessItems, process_file
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
    to_stream = is_stream(options.output)
    first, *replicas = open_models(options.model, options.device, TextEncoder, parallel=not to_stream)
    unknown = UnknownCharacters(first.tokenizer, first.special.unk)

    def check(text: str, name: str) -> None:
        first.encode_rows([split_pair(text)], name=name, truncate=options.truncate)
        unknown.check(text, name)

    if to_stream:
        _print_labels(
            options, lambda texts: first.classify(list(map(split_pair, texts)), truncate=options.truncate), check
        )
        return
    assert options.output is not None
    with file_progress("classifying") as on_progress:
        summary = first.classify_file(
            input_texts(options.text, options.input, PROMPT, unknown),
            options.output,
            all_labels=options.all,
            truncate=options.truncate,
            replicas=replicas,
            overwrite=options.overwrite,
            progress=on_progress,
        )
    note_file(summary, options.output)


def _classify_images(options: Options) -> None:
    if options.truncate:
        raise RegardError("--truncate is not supported for image models.", "Leave it out.")
    to_stream = is_stream(options.output)
    models = open_models(options.model, options.device, ImageModel, parallel=not to_stream)
    if to_stream:
        _print_labels(options, models[0].classify)
        return
    assert options.output is not None

    def make_processor(model: ImageModel) -> ProcessItems[str]:
        def process(files: list[str], first_index: int, on_batch: Callable[[int, int], None]) -> BlockOutput:
            rows = [format_classification(result, options.all) for result in model.classify(files)]
            return BlockOutput("".join(f"{row}\n" for row in rows).encode())

        return process

    with file_progress("classifying") as on_progress:
        summary = process_file(
            input_texts(options.text, options.input, PROMPT),
            options.output,
            [make_processor(model) for model in models],
            settings={"task": "classify", "model": models[0].fingerprint(), "all_labels": options.all},
            check=lambda file, name: models[0].classify([file]),
            overwrite=options.overwrite,
            progress=on_progress,
        )
    note_file(summary, options.output)


def _print_labels(
    options: Options,
    classify: Callable[[list[str]], Sequence[Classification]],
    check: Callable[[str, str], object] | None = None,
) -> None:
    """Print labels as the texts arrive."""
    with open_stream(options.output) as stream:
        for block in read_blocks(options.text, options.input, PROMPT, check=check):
            for result in classify([text for _, text in block]):
                print(format_classification(result, options.all), file=stream)
            stream.flush()
