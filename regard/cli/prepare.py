"""`regard prepare`: encode a corpus of any size into token shards."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

from regard.cli.common import Columns, Quiet, parse, print_note
from regard.cli.options import Arg
from regard.data.text.tokenizer import TOKENIZER_KINDS
from regard.errors import RegardError
from regard.training.recipe import DataConfig
from regard.training.shards.preparation import check_shards, prepare

Files = Annotated[
    tuple[str, ...],
    Arg(
        "FILE",
        'two parallel files, or TSV, CSV, JSONL, Parquet or plain text; plain or compressed; "-": standard input; '
        "hf:NAME:SPLIT: a dataset of the Hugging Face hub",
        is_positional=True,
    ),
]
Folder = Annotated[Path | None, Arg("FOLDER")]


@dataclass(frozen=True)
class Options:
    """Encode a corpus larger than memory: regard prepare corpus.tsv.gz --out shards

    Reads the files once, cleans them, splits off a validation part, trains a tokenizer on a sample and writes token
    shards, from which `regard train shards --out model` trains without loading them. The folder appears under its name
    when it is complete.
    """

    files: Files = ()
    task: str = "translate"
    """translate, text2text, language or mask"""
    out: Path = Path("shards")
    """folder to write"""
    tokenizer: Folder = None
    """folder whose tokenizers to use: a model, or other shards; by default new ones are trained"""
    kind: Annotated[str, Arg("KIND", default="chosen from the data")] = ""
    """kind of a new tokenizer: word, space, char, bpe or bytes"""
    vocab_size: Annotated[int, Arg(default="chosen from the data")] = 0
    """maximum vocabulary size of a new tokenizer"""
    validation: Annotated[tuple[str, ...], Arg("FILE", default="a split of the data")] = ()
    """validation files"""
    limit: int = DataConfig.limit
    """number of examples to read, the first ones; 0: all"""
    columns: Columns = ()
    prefixes: tuple[str, ...] = ()
    """text2text: prefix of each file"""
    max_ratio: float = DataConfig.max_ratio
    """maximum ratio of the lengths of both sides of a pair, in characters"""
    check: Folder = None
    """folder of token shards whose SHA-256 to check, instead of preparing data"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "prepare", argv)
    if options.check is not None:
        manifest = check_shards(options.check, quiet=options.quiet)
        print_note(
            f"{options.check} is intact: {manifest.training:,} {manifest.unit}, {sum(manifest.tokens):,} tokens."
        )
        return 0
    if not options.files:
        raise RegardError("No data is given.", "Pass files: regard prepare FILE … --out shards")
    if options.kind and options.kind not in TOKENIZER_KINDS:
        raise RegardError(f"--kind {options.kind} is unknown.", f"Choose from: {', '.join(TOKENIZER_KINDS)}.")
    settings = {"kind": options.kind, "vocab_size": options.vocab_size}
    settings = {key: value for key, value in settings.items() if value}
    if options.tokenizer is not None and settings:
        raise RegardError("--tokenizer uses existing tokenizers.", "Leave out --kind and --vocab-size.")
    dataset = prepare(
        options.files,
        options.out,
        task=options.task,
        tokenizer=settings if options.tokenizer is None else options.tokenizer,
        validation=options.validation,
        limit=options.limit,
        columns=options.columns,
        max_ratio=options.max_ratio,
        prefixes=options.prefixes,
        quiet=options.quiet,
    )
    manifest = dataset.training.manifest
    print_note(
        f"Wrote {options.out}: {dataset.describe()}; {sum(manifest.tokens):,} tokens in {manifest.shards:,} "
        f"shard{'s' * (manifest.shards > 1)}. Train with: regard train {quote(str(options.out))} --out model"
    )
    return 0
