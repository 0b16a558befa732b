"""`regard embed`: text embeddings."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from regard.cli.common import (
    ClusterOption,
    Devices,
    InputShards,
    Model,
    Overwrite,
    Quiet,
    Texts,
    Truncate,
    UnknownCharacters,
    check_shard_options,
    input_shards,
    is_stream,
    open_models,
    parse,
    print_or_write,
    suggest_input,
)
from regard.cli.options import Arg
from regard.data.text.readers import uncompressed_suffix
from regard.errors import RegardError
from regard.pipelines import TextEncoder
from regard.pipelines.input_items import is_pattern
from regard.pipelines.text_encoder import format_embedding


@dataclass(frozen=True)
class Options:
    """Embed texts as vectors: regard embed MODEL "A cat sleeps."

    A vector is the mean over the tokens of a text, normalized to length 1: the dot product of two vectors is their
    cosine similarity. Models imported from sentence-transformers use their own pooling and layers. With --output, write
    to a file; if interrupted, the same command resumes.
    """

    model: Model
    text: Texts = ()
    """texts"""
    input: InputShards = None
    output: Annotated[Path | None, Arg(default="JSON lines on standard output", names=("output", "out"))] = None
    """output file, .npy (one row per text) or .jsonl, which may be compressed (.jsonl.gz); with several input files, a
    folder of .npy files"""
    overwrite: Overwrite = False
    truncate: Truncate = False
    device: Devices = "auto"
    cluster: ClusterOption = None
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "embed", argv)
    suggest_input(options.text)
    to_stream = is_stream(options.output)
    if options.output is not None and not to_stream and not is_pattern(options.input):
        _check_extension(options.output)
    check_shard_options(options.input, options.output, options.overwrite, options.device, options.cluster, ".npy")
    device = options.device if options.cluster is None else "cpu"
    first, *replicas = open_models(options.model, device, TextEncoder, parallel=not to_stream)

    def lines(texts: list[str]) -> Iterator[str]:
        return map(format_embedding, texts, first.embed(texts, truncate=options.truncate))

    def check(text: str, name: str) -> None:
        first.encode_for_embedding(text, name=name, truncate=options.truncate)

    print_or_write(
        options,
        "embedding",
        "Type texts",
        lines,
        partial(first.embed_file, truncate=options.truncate, replicas=replicas, cluster=options.cluster),
        check=check,
        unknown=UnknownCharacters(first.tokenizer, first.special.unk),
        source=input_shards,
        unit="vectors",
    )
    return 0


def _check_extension(output: Path) -> None:
    suffix = uncompressed_suffix(output)
    if suffix not in ("", ".npy", ".jsonl"):
        raise RegardError(f"{output}: expected the extension .npy or .jsonl.", "Change the file extension.")
    if suffix == ".npy" and output.suffix != ".npy":
        raise RegardError(f"{output}: compressed .npy files are not supported.", "Use .npy or .jsonl.gz.")
