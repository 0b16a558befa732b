"""`regard embed`: texts as vectors."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from regard.cli.common import (
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    named_blocks,
    note,
    open_model,
    parse,
)
from regard.errors import RegardError
from regard.files import STDOUT, write_whole
from regard.pipelines import Device, TextEncoder


@dataclass(frozen=True)
class Options:
    """Embed texts as vectors, such that similar texts have similar vectors: regard embed MODEL "A cat sleeps."

    A vector is the mean over the text's tokens, of length 1: the dot product of two is their cosine.
    """

    model: Model
    text: Texts = ()
    """texts; without any, and without --input, each line of standard input is one"""
    input: Input = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """file for the vectors: .npy (one row per text) or .jsonl; by default JSON lines on standard output"""
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "embed", argv)
    out = None if options.out == STDOUT else options.out
    form = "" if out is None else out.suffix
    if form not in ("", ".npy", ".jsonl"):
        raise RegardError(f"{options.out}: vectors are written as .npy or .jsonl.", "Change the name's ending.")
    encoder = open_model(options.model, options.device, TextEncoder)
    unknown = UnknownCharacters(encoder.tokenizer, encoder.special.unk)

    def check(text: str, name: str) -> None:
        encoder.text_ids(text, name=name, truncate=options.truncate)
        unknown.check(text, name)

    kept: list[np.ndarray] = []
    rows: list[str] = []
    for block in named_blocks(options.text, options.input, "Type texts", check=check):
        texts = [text for _, text in block]
        vectors = encoder.embed(texts, truncate=options.truncate)
        if form == ".npy":
            kept.append(vectors)
        else:
            lines = [_row(text, vector) for text, vector in zip(texts, vectors)]
            if out is None:
                sys.stdout.writelines(lines)
                sys.stdout.flush()
            else:
                rows += lines
    if out is not None:
        count = len(rows) or sum(map(len, kept))
        if form == ".npy":
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(kept))
            write_whole(out, buffer.getvalue())
        else:
            write_whole(out, "".join(rows).encode())
        note(f"{count} vectors of {encoder.model.config.width} numbers are in {out}.")
    return 0


def _row(text: str, vector: np.ndarray) -> str:
    return json.dumps({"text": text, "vector": [round(float(x), 7) for x in vector]}, ensure_ascii=False) + "\n"
