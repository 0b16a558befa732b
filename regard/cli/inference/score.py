"""`regard score`: log-probabilities of translations."""

import math
from dataclasses import dataclass

from regard.cli.common import (
    Columns,
    Data,
    DeviceOption,
    Model,
    Quiet,
    Truncate,
    batch_progress,
    open_model,
    parse,
    print_note,
)
from regard.errors import RegardError
from regard.evaluation.evaluators import read_examples
from regard.pipelines import Translator


@dataclass(frozen=True)
class Options:
    """Score each target by its log-probability given the source: regard score MODEL --data pairs.tsv

    Print one line per pair: log-probability, mean per token, and number of tokens including the end, separated by tabs;
    an empty line for an empty pair. The total goes to standard error.
    """

    model: Model
    data: Data
    columns: Columns = ()
    truncate: Truncate = False
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "score", argv)
    pairs = read_examples(options.data, options.columns).pairs
    nonempty = [i for i, pair in enumerate(pairs) if any(side.strip() for side in pair)]
    for i in nonempty:
        if not pairs[i][0].strip():
            raise RegardError(f"{' '.join(options.data)}, pair {i + 1}: the source is empty.", "Remove the pair.")
    if not nonempty:
        raise RegardError(f"{' '.join(options.data)}: all pairs are empty.", "Pass files with text.")
    translator = open_model(options.model, options.device, Translator)
    with batch_progress("scoring") as on_progress:
        results = translator.score([pairs[i] for i in nonempty], truncate=options.truncate, progress=on_progress)
    scores = dict(zip(nonempty, results))
    for i in range(len(pairs)):
        score = scores.get(i)
        print(f"{score.logprob:.6f}\t{score.mean:.6f}\t{score.tokens}" if score else "")
    total = sum(score.logprob for score in scores.values())
    tokens = sum(score.tokens for score in scores.values())
    perplexity = math.exp(-total / tokens)
    print_note(f"{len(nonempty)} pairs, {tokens} tokens: log-probability {total:.4f}, perplexity {perplexity:.4f}")
    return 0
