"""`regard translate`: translate lines of text."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from regard.cli.common import (
    NO_HINT,
    DeviceOption,
    Ensemble,
    Flag,
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    check_utf8,
    open_model,
    parse,
    print_note,
    read_blocks,
    streaming_progress,
)
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation import align, format_links
from regard.evaluation.alignment import sharpest_layer
from regard.evaluation.teacher_forcing import require_attention
from regard.interop.onnx.onnx_runner import is_onnx_folder
from regard.pipelines import Translator
from regard.pipelines.translator import Split

PhraseOption = tyro.conf.UseAppendAction[
    Annotated[tuple[str, ...], tyro.conf.arg(metavar="PHRASE", help_behavior_hint=NO_HINT)]
]


@dataclass(frozen=True)
class Options:
    """Translate lines of text: regard translate MODEL "The cat sleeps."

    Lines come from arguments, a file or standard input. Print one line per input line; an empty line stays empty. Input
    from a pipe is translated as it arrives. With --scores or --alignments, a line is text ||| score ||| alignment. With
    --n-best above 1, print one line per hypothesis, starting with the index of the input line, from 0.
    """

    model: Model
    text: Texts = ()
    """lines to translate"""
    input: Input = None
    ensemble: Ensemble = ()
    scores: Flag = False
    """print the score of each translation: its log-probability with length and coverage penalty"""
    alignments: Flag = False
    """print word alignments (source-target, from 0) from the sharpest cross-attention of the first model"""
    prefix: Annotated[str, tyro.conf.arg(help_behavior_hint=NO_HINT)] = ""
    """forced beginning of every translation"""
    require: PhraseOption = ()
    """phrase that every translation must contain, as whole words; can be repeated"""
    forbid: PhraseOption = ()
    """phrase that no translation may contain, as whole words; can be repeated"""
    truncate: Truncate = False
    split: Split = "auto"
    """lines to split into sentences, which are translated separately; auto: lines beyond the trained length"""
    device: DeviceOption = "auto"
    quiet: Quiet = False
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = field(default_factory=DecodeConfig)


def run(argv: list[str]) -> int:
    options = parse(Options, "translate", argv)
    if options.alignments and is_onnx_folder(options.model):
        raise RegardError(
            f"{options.model} contains ONNX graphs, whose attention cannot be recorded.",
            "Pass the model folder that they were exported from.",
        )
    split: Split = options.split
    if options.require:
        if split == "always":
            raise RegardError("--require and --split always cannot be combined.", "Leave out --split always.")
        split = "never"
    if options.alignments:
        if split == "always":
            raise RegardError("--alignments and --split always cannot be combined.", "Leave out --split always.")
        split = "never"
    phrases = {"required": options.require, "forbidden": options.forbid}
    for name, values in (("--require", options.require), ("--forbid", options.forbid)):
        for phrase in values:
            check_utf8(phrase, name)
    translator = open_model(options.model, options.device, Translator, options.ensemble)
    if options.alignments:
        require_attention(translator)
    limit = translator.max_output_len
    if limit is not None and options.decode.max_len != DecodeConfig().max_len and options.decode.max_len > limit:
        print_note(
            f"--max-len {options.decode.max_len}: the length limit of the model is {limit} tokens. "
            "For longer translations, train with a larger --model.max-len."
        )
    unknown = UnknownCharacters(translator.source_tokenizer, translator.special.unk)

    def check(line: str, name: str) -> None:
        """Check the length of a line; errors contain its name."""
        for sentence in translator.split_line(line, split if options.decode.n_best == 1 else "never"):
            translator.encode_source(sentence, name=name, truncate=options.truncate)
        unknown.check(line, name)

    layer, done = None, 0
    with streaming_progress("translating") as on_progress:
        for block in read_blocks(options.text, options.input, "Type lines to translate", check=check):
            texts = [line for _, line in block]
            prefixes = [check_utf8(options.prefix, "--prefix")] * len(texts) if options.prefix else None
            inputs: dict[str, Any] = {"prefixes": prefixes, "truncate": options.truncate, "split": split, **phrases}
            results = translator.translate(texts, options.decode, **inputs, first_index=done)
            columns = [
                [str(i) for i, n_best in enumerate(results, done) for _ in n_best] if options.decode.n_best > 1 else [],
                [one.text.replace("\n", " ") for n_best in results for one in n_best],
                [f"{one.score:.4f}" for n_best in results for one in n_best]
                if options.scores or options.decode.n_best > 1
                else [],
            ]
            if options.alignments:
                pairs = [(text, one.text) for text, n_best in zip(texts, results) for one in n_best]
                layer = layer or sharpest_layer(translator, pairs, truncate=True)
                columns.append([format_links(links) for links in align(translator, pairs, layer, truncate=True)])
            for fields in zip(*filter(None, columns)):
                print(" ||| ".join(fields))
            sys.stdout.flush()
            done += len(block)
            on_progress(done, None)
    return 0
