"""`regard translate`: lines in, lines out."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from regard.cli.common import (
    Ensemble,
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    as_text,
    named_blocks,
    note,
    open_model,
    parse,
    progress,
)
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop.onnx.onnx_runner import holds_graphs
from regard.pipelines import Device, Translator
from regard.pipelines.translator import Split
from regard.viewer import align, clearest_layer, format_links, need_attention


@dataclass(frozen=True)
class Options:
    """Translate lines, given as arguments, in a file, or on standard input: regard translate MODEL "The cat sleeps."

    Each line is answered by a line, an empty one by an empty one; from a pipe, as soon as it arrives. With more than
    the text on it, a line is text ||| score ||| alignment; of several hypotheses each has a line, which begins with its
    input's number, from 0.
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
    split: Split = "auto"
    """which lines are split into sentences, whose translations are joined: those too long for the model, all, none"""
    device: Device = "auto"
    quiet: Quiet = False
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = field(default_factory=DecodeConfig)


def run(argv: list[str]) -> int:
    options = parse(Options, "translate", argv)
    if options.alignments and holds_graphs(options.model):
        raise RegardError(
            f"{options.model} holds graphs, whose attention cannot be recorded.",
            "Name the model folder that they are of.",
        )
    split: Split = options.split
    if options.alignments:
        if split == "always":
            raise RegardError("--alignments are those of whole lines.", "Leave out --split always.")
        split = "never"
    translator = open_model(options.model, options.device, Translator, options.ensemble)
    if options.alignments:
        need_attention(translator)
    longest = translator.longest_output
    if longest is not None and options.decode.max_len != DecodeConfig().max_len and options.decode.max_len > longest:
        note(
            f"--max-len {options.decode.max_len}: the model's max_len allows {longest} tokens. "
            "For longer translations train with a larger --model.max-len."
        )
    unknown = UnknownCharacters(translator.source_tokenizer, translator.special.unk)

    def check(line: str, name: str) -> None:
        """Here the name of the line is known."""
        for sentence in translator.sentences(line, split if options.decode.n_best == 1 else "never"):
            translator.source_ids(sentence, name=name, truncate=options.truncate)
        unknown.check(line, name)

    layer, done = None, 0
    with progress("translating") as tell:
        for block in named_blocks(options.text, options.input, "Type lines to translate", check=check):
            texts = [line for _, line in block]
            prefixes = [as_text(options.prefix, "--prefix")] * len(texts) if options.prefix else None
            how: dict[str, Any] = {"prefixes": prefixes, "truncate": options.truncate, "split": split, "first": done}
            answers = translator.translate(texts, options.decode, **how)
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
