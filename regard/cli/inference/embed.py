"""`regard embed`: text embeddings."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from regard.cli.common import (
    DeviceOption,
    Input,
    Model,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    open_model,
    parse,
    print_note,
    read_blocks,
)
from regard.errors import RegardError
from regard.files import STDOUT, write_atomically
from regard.pipelines import TextEncoder


@dataclass(frozen=True)
class Options:
    """Embed texts as vectors: regard embed MODEL "A cat sleeps."

    A vector is the mean over the tokens of a text, normalized to length 1: the dot product of two vectors is their
    cosine similarity.
    """

    model: Model
    text: Texts = ()
    """texts"""
    input: Input = None
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: JSON lines on standard output)")
    ] = None
    """output file, .npy (one row per text) or .jsonl"""
    truncate: Truncate = False
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "embed", argv)
    out = None if options.out == STDOUT else options.out
    suffix = "" if out is None else out.suffix
    if suffix not in ("", ".npy", ".jsonl"):
        raise RegardError(f"{options.out}: expected the extension .npy or .jsonl.", "Change the file extension.")
    encoder = open_model(options.model, options.device, TextEncoder)
    unknown = UnknownCharacters(encoder.tokenizer, encoder.special.unk)

    def check(text: str, name: str) -> None:
        encoder.encode_text(text, name=name, truncate=options.truncate)
        unknown.check(text, name)

    arrays: list[np.ndarray] = []
    rows: list[str] = []
    for block in read_blocks(options.text, options.input, "Type texts", check=check):
        texts = [text for _, text in block]
        vectors = encoder.embed(texts, truncate=options.truncate)
        if suffix == ".npy":
            arrays.append(vectors)
        else:
            lines = [_row(text, vector) for text, vector in zip(texts, vectors)]
            if out is None:
                sys.stdout.writelines(lines)
                sys.stdout.flush()
            else:
                rows += lines
    if out is not None:
        count = len(rows) or sum(map(len, arrays))
        if suffix == ".npy":
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(arrays))
            write_atomically(out, buffer.getvalue())
        else:
            write_atomically(out, "".join(rows).encode())
        print_note(f"Wrote {count} vectors of width {encoder.model.config.width} to {out}.")
    return 0


def _row(text: str, vector: np.ndarray) -> str:
    return json.dumps({"text": text, "vector": [round(float(x), 7) for x in vector]}, ensure_ascii=False) + "\n"
