"""`regard translate`: lines in, lines out."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import tyro

from regard.cli.common import (
    Ensemble,
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    as_text,
    numbered_texts,
    open_translator,
    parse,
    progress,
)
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.folder import Device
from regard.interop.onnx_runner import holds_graphs
from regard.viewer import align, clearest_layer, format_links, need_attention

# So many lines are sorted by length into batches before the first of them is answered.
BLOCK = 1024


@dataclass(frozen=True)
class Options:
    """Translate lines, given as arguments, in a file, or on standard input: regard translate MODEL "The cat sleeps."

    Each line is answered by a line, an empty one by an empty one. With more than the text on it, a line is
    text ||| score ||| alignment; of several hypotheses each has a line, which begins with its input's number, from 0.
    """

    model: Model
    text: Texts = ()
    """lines to translate; without any, and without --input, standard input is read"""
    input: Input = None
    ensemble: Ensemble = ()
    scores: bool = False
    """add what hypotheses are ranked by: the log-probability, with length and coverage penalty"""
    alignments: bool = False
    """add which word became which (source-target, from 0), read off the clearest cross-attention of the first model"""
    prefix: str = ""
    """what every translation must begin with"""
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = field(default_factory=DecodeConfig)


def run(argv: list[str]) -> int:
    options = parse(Options, "translate", argv)
    lines = numbered_texts(options.text, options.input, "Type lines to translate")
    if options.alignments and holds_graphs(options.model):
        raise RegardError(
            f"{options.model} holds graphs, and what those regard is not seen.",
            "Name the model folder that they are of.",
        )
    translator = open_translator(options.model, options.device, options.ensemble)
    if options.alignments:
        need_attention(translator)
    layer, done = None, 0
    with progress("translating") as tell:
        for block in _blocks(lines, 1 if sys.stdin.isatty() else BLOCK):
            for name, line in block:  # here, where the name of the line is known
                translator.source_ids(line, name=name, truncate=options.truncate)
            texts = [line for _, line in block]
            prefixes = [as_text(options.prefix, "--prefix")] * len(texts) if options.prefix else None
            answers = translator.translate(texts, options.decode, prefixes=prefixes, truncate=options.truncate)
            columns = [
                [str(i) for i, answer in enumerate(answers, done) for _ in answer] if options.decode.n_best > 1 else [],
                [one.text.replace("\n", " ") for answer in answers for one in answer],
                [f"{one.score:.4f}" for answer in answers for one in answer]
                if options.scores or options.decode.n_best > 1
                else [],
            ]
            if options.alignments:
                pairs = [(text, one.text) for text, answer in zip(texts, answers) for one in answer]
                layer = layer or clearest_layer(translator, pairs, truncate=True)
                columns.append([format_links(links) for links in align(translator, pairs, layer, truncate=True)])
            for fields in zip(*filter(None, columns)):
                print(" ||| ".join(fields))
            sys.stdout.flush()
            done += len(block)
            tell(done, None)
    return 0


def _blocks(lines: Iterable[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    lines = iter(lines)
    while block := list(islice(lines, size)):
        yield block
