"""`regard score`: how probable the model finds given translations."""

import math
from dataclasses import dataclass

from regard.cli.common import (
    Columns,
    Data,
    Model,
    Quiet,
    Truncate,
    note,
    open_model,
    parse,
    read_examples,
    steps_of,
)
from regard.errors import RegardError
from regard.pipelines import Device, Translator


@dataclass(frozen=True)
class Options:
    """Score each target by its log-probability given the source: regard score MODEL --data pairs.tsv

    Each pair is answered by a line of its sum, its mean per token, and the number of tokens (the end included),
    separated by tabs; a pair of empty lines by an empty line. The total is told on stderr.
    """

    model: Model
    data: Data
    columns: Columns = ()
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "score", argv)
    pairs = read_examples(options.data, options.columns).pairs
    filled = [i for i, pair in enumerate(pairs) if any(side.strip() for side in pair)]
    for i in filled:
        if not pairs[i][0].strip():
            raise RegardError(f"{' '.join(options.data)}, pair {i + 1}: the source is empty.", "Remove the pair.")
    if not filled:
        raise RegardError(f"{' '.join(options.data)}: every pair is empty.", "Give some text.")
    translator = open_model(options.model, options.device, Translator)
    with steps_of("scoring") as tell:
        found = translator.score([pairs[i] for i in filled], truncate=options.truncate, progress=tell)
    scores = dict(zip(filled, found))
    for i in range(len(pairs)):
        one = scores.get(i)
        print(f"{one.logprob:.6f}\t{one.mean:.6f}\t{one.tokens}" if one else "")
    total, tokens = sum(one.logprob for one in scores.values()), sum(one.tokens for one in scores.values())
    perplexity = math.exp(-total / tokens)
    note(f"{len(filled)} pairs, {tokens} tokens: log-probability {total:.4f}, perplexity {perplexity:.4f}")
    return 0
