"""`regard tag`: token classification."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from regard.cli.common import (
    DeviceOption,
    Input,
    Model,
    Output,
    Overwrite,
    Quiet,
    Texts,
    block_processor,
    check_file_options,
    open_model,
    parse,
    print_or_write,
    suggest_input,
)
from regard.evaluation.tag_metrics import find_entities
from regard.pipelines import TaggedWord, TextEncoder
from regard.pipelines.files import process_file


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

    def lines(texts: list[str]) -> Iterator[str]:
        return (f"{format_words(text, words)}\n" for text, words in zip(texts, encoder.tag(texts)))

    write = partial(
        process_file,
        processors=[block_processor(lines)],
        settings={"task": "tag", "model": encoder.fingerprint(), "entities": options.entities},
        check=lambda text, name: encoder.tag(text),
    )
    print_or_write(options, "tagging", "Type texts", lines, write)
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
