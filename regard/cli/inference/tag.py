"""`regard tag`: token classification."""

from collections.abc import Callable
from dataclasses import dataclass

from regard.cli.common import (
    DeviceOption,
    Input,
    Model,
    Output,
    Overwrite,
    Quiet,
    Texts,
    check_file_options,
    file_progress,
    input_texts,
    is_stream,
    note_file,
    open_model,
    open_stream,
    parse,
    read_blocks,
    suggest_input,
)
from regard.evaluation.tag_metrics import find_entities
from regard.pipelines import TaggedWord, TextEncoder
from regard.pipelines.files import BlockOutput, process_file

PROMPT = "Type texts"


@dataclass(frozen=True)
class Options:
    """Tag the words of texts: regard tag MODEL "Ada Lovelace lived in London."

    Print one line per word: word, tab, tag, tab, probability; and an empty line after each text. To measure F1 and
    accuracy, use regard evaluate. With --output, write to a file instead; if interrupted, the same command resumes.
    """

    model: Model
    text: Texts = ()
    """texts"""
    input: Input = None
    output: Output = None
    overwrite: Overwrite = False
    entities: bool = False
    """print one line per entity of BIO tags: its text, tab, label"""
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "tag", argv)
    suggest_input(options.text)
    check_file_options(options.output, options.overwrite, [options.input])
    encoder = open_model(options.model, options.device, TextEncoder)
    format_words = format_entities if options.entities else format_tags
    if not is_stream(options.output):
        assert options.output is not None

        def process(texts: list[str], first_index: int, on_batch: Callable[[int, int], None]) -> BlockOutput:
            rows = map(format_words, texts, encoder.tag(texts))
            return BlockOutput("".join(f"{row}\n" for row in rows).encode())

        with file_progress("tagging") as on_progress:
            summary = process_file(
                input_texts(options.text, options.input, PROMPT),
                options.output,
                [process],
                settings={"task": "tag", "model": encoder.fingerprint(), "entities": options.entities},
                check=lambda text, name: encoder.tag(text),
                overwrite=options.overwrite,
                progress=on_progress,
            )
        note_file(summary, options.output)
        return 0
    with open_stream(options.output) as stream:
        for block in read_blocks(options.text, options.input, PROMPT):
            texts = [text for _, text in block]
            for text, words in zip(texts, encoder.tag(texts)):
                print(format_words(text, words), file=stream)
            stream.flush()
    return 0


def format_tags(text: str, words: list[TaggedWord]) -> str:
    """A text in CoNLL format with probabilities.

    >>> format_tags("Ada", [TaggedWord("Ada", "B-PER", 0.9, 0, 3)])
    'Ada\\tB-PER\\t0.9000\\n'
    """
    return "".join(f"{word.text}\t{word.tag}\t{word.probability:.4f}\n" for word in words)


def format_entities(text: str, words: list[TaggedWord]) -> str:
    """The entities of a text.

    >>> format_entities("Ada slept.", [TaggedWord("Ada", "B-PER", 0.9, 0, 3), TaggedWord("slept", "O", 0.9, 4, 9)])
    'Ada\\tPER\\n'
    """
    entities = find_entities([word.tag for word in words])
    return "".join(f"{text[words[start].start : words[end - 1].end]}\t{label}\n" for label, start, end in entities)
