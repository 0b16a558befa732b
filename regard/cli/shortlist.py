"""`regard shortlist`: learn the vocabulary shortlist of a translator."""

from dataclasses import dataclass
from typing import Annotated

from regard.cli.common import Columns, Model, Quiet, batch_progress, parse, print_note
from regard.cli.options import Arg
from regard.data.text.readers import read_pairs
from regard.pipelines import Translator, load
from regard.pipelines.shortlist import SHORTLIST_FILE, write_shortlist
from regard.pipelines.translator import FREQUENT_TOKENS, TOKENS_PER_SOURCE_TOKEN

TrainingData = Annotated[
    tuple[str, ...],
    Arg(
        "FILE",
        "training data: two parallel files, or TSV, CSV or JSONL; plain or compressed; phrasebook: the built-in "
        "training split",
    ),
]


@dataclass(frozen=True)
class Options:
    """Learn a vocabulary shortlist from the training data: regard shortlist MODEL --data pairs.tsv

    Write shortlist.safetensors into the model folder: for each source token its most probable translations (IBM Model
    1), and the most frequent target tokens. `regard translate --shortlist` then considers only these tokens.
    """

    model: Model
    data: TrainingData
    columns: Columns = ()
    per_token: int = TOKENS_PER_SOURCE_TOKEN
    """number of target tokens per source token"""
    frequent: int = FREQUENT_TOKENS
    """number of frequent target tokens, allowed in every translation"""
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "shortlist", argv)
    translator = load(options.model, "cpu", expect=Translator)
    pairs = read_pairs(options.data, options.columns)
    with batch_progress("learning") as on_progress:
        shortlist = translator.learn_shortlist(
            pairs, per_token=options.per_token, frequent=options.frequent, progress=on_progress
        )
    write_shortlist(options.model, shortlist)
    print_note(f"Wrote {options.model / SHORTLIST_FILE}, learned from {len(pairs):,} pairs.")
    return 0
