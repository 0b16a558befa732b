"""`regard embed`: texts as vectors."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from regard.cli.common import Input, Model, Quiet, Texts, Truncate, note, numbered_texts, parse
from regard.errors import RegardError
from regard.files import write_whole
from regard.folder import Device, TextEncoder, load


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
    """where the vectors go: .npy (one row a text) or .jsonl; by default JSON lines on standard output"""
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "embed", argv)
    form = "" if options.out is None else options.out.suffix
    if form not in ("", ".npy", ".jsonl"):
        raise RegardError(f"{options.out}: vectors are written as .npy or .jsonl.", "Change the name's ending.")
    named = list(numbered_texts(options.text, options.input, "Type texts"))
    encoder = load(options.model, options.device, expect=TextEncoder)
    for name, text in named:  # here, where the name of the line is known
        encoder.text_ids(text, name=name, truncate=options.truncate)
    texts = [text for _, text in named]
    vectors = encoder.embed(texts, truncate=options.truncate)
    if form == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, vectors)
        write_whole(options.out, buffer.getvalue())  # type: ignore[arg-type]
    else:
        rows = [
            json.dumps({"text": text, "vector": [round(float(x), 7) for x in vector]}, ensure_ascii=False) + "\n"
            for text, vector in zip(texts, vectors)
        ]
        if options.out is None:
            sys.stdout.writelines(rows)
        else:
            write_whole(options.out, "".join(rows).encode())
    if options.out is not None:
        note(f"{len(texts)} vectors of {vectors.shape[1]} numbers are in {options.out}.")
    return 0
