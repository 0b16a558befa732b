"""`regard embed`: text embeddings."""

from dataclasses import dataclass
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
    file_progress,
    input_shards,
    is_stream,
    open_models,
    open_stream,
    parse,
    print_note,
    read_blocks,
    suggest_input,
)
from regard.cli.options import Arg
from regard.data.text.readers import uncompressed_suffix
from regard.errors import RegardError
from regard.pipelines import TextEncoder
from regard.pipelines.input_items import is_pattern
from regard.pipelines.text_encoder import format_embedding

PROMPT = "Type texts"


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
    unknown = UnknownCharacters(first.tokenizer, first.special.unk)
    if to_stream:
        _print_embeddings(options, first, unknown)
        return 0
    assert options.output is not None
    with file_progress("embedding") as on_progress:
        summary = first.embed_file(
            input_shards(options.text, options.input, PROMPT, unknown),
            options.output,
            truncate=options.truncate,
            replicas=replicas,
            cluster=options.cluster,
            overwrite=options.overwrite,
            progress=on_progress,
        )
    print_note(f"Wrote {summary.items:,} vectors of width {first.embedding_width} to {options.output}.")
    return 0


def _check_extension(output: Path) -> None:
    suffix = uncompressed_suffix(output)
    if suffix not in ("", ".npy", ".jsonl"):
        raise RegardError(f"{output}: expected the extension .npy or .jsonl.", "Change the file extension.")
    if suffix == ".npy" and output.suffix != ".npy":
        raise RegardError(f"{output}: compressed .npy files are not supported.", "Use .npy or .jsonl.gz.")


def _print_embeddings(options: Options, encoder: TextEncoder, unknown: UnknownCharacters) -> None:
    """Print JSON lines as the texts arrive."""

    def check(text: str, name: str) -> None:
        encoder.encode_for_embedding(text, name=name, truncate=options.truncate)
        unknown.check(text, name)

    with open_stream(options.output) as stream:
        for block in read_blocks(options.text, options.input, PROMPT, check=check):
            texts = [text for _, text in block]
            stream.writelines(map(format_embedding, texts, encoder.embed(texts, truncate=options.truncate)))
            stream.flush()
