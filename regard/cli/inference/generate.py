"""`regard generate`: text from a prompt."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from regard.cli.common import (
    Input,
    Model,
    Quiet,
    Texts,
    UnknownCharacters,
    note,
    numbered_texts,
    open_model,
    parse,
    progress,
)
from regard.decode import DecodeConfig
from regard.pipelines import Continuation, Device, LanguageModel


@dataclass(frozen=True)
class Options:
    """Generate text from a prompt: regard generate MODEL "Once upon a time"

    One prompt is answered by the whole text, written as it comes into being. Several prompts, or several samples of
    one, are answered by a JSON object a line: the prompt, the text after it, its score.
    """

    model: Model
    text: Texts = ()
    """beginnings of texts; without any, and without --input, each line of standard input is one"""
    input: Input = None
    truncate: Annotated[bool, tyro.conf.arg(help="keep only the end of prompts longer than in training")] = False
    device: Device = "auto"
    quiet: Quiet = False
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: DecodeConfig(method="sample")
    )


def run(argv: list[str]) -> int:
    options = parse(Options, "generate", argv)
    named = list(numbered_texts(options.text, options.input, "Type beginnings of texts"))
    writer = open_model(options.model, options.device, LanguageModel)
    unknown = UnknownCharacters(writer.tokenizer, writer.special.unk)
    for name, prompt in named:  # here, where the name of the line is known, and before anything is written
        writer.prompt_ids(prompt, name=name, truncate=options.truncate)
        unknown.check(prompt, name)
    prompts = [prompt for _, prompt in named]
    if len(prompts) == 1 and options.decode.n_best == 1:
        print(prompts[0], end="", flush=True)
        told = options.decode.method != "beam"

        def hear(_: int, text: str) -> None:
            print(text, end="", flush=True)

        found = writer.generate(prompts, options.decode, truncate=options.truncate, hear=hear if told else None)
        print("" if told else found[0][0].text)
        _note_limit(writer, prompts, found, options)
        return 0
    with progress("writing") as tell:
        answers = writer.generate(prompts, options.decode, truncate=options.truncate, progress=tell)
    for prompt, answer in zip(prompts, answers):
        for one in answer:
            row = {"prompt": prompt, "text": one.text, "score": round(one.score, 6)}
            print(json.dumps(row, ensure_ascii=False))
    sys.stdout.flush()
    _note_limit(writer, prompts, answers, options)
    return 0


def _note_limit(
    writer: LanguageModel, prompts: Sequence[str], answers: Sequence[Sequence[Continuation]], options: Options
) -> None:
    """Says that the model's table of positions ended a text, where --max-len would have allowed more."""
    longest = writer.length_limit
    if longest is None:
        return
    lengths = [
        (len(writer.prompt_ids(prompt, truncate=options.truncate)), len(one.hypothesis.ids))
        for prompt, answer in zip(prompts, answers)
        for one in answer
    ]
    if any(before + written >= longest and written < options.decode.max_len for before, written in lengths):
        note(
            f"Stopped at {longest} tokens, prompt included: that is the model's max_len, whatever --max-len allows. "
            "For longer texts train with a larger --model.max-len."
        )
