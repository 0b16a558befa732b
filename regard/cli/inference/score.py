"""`regard score`: log-probabilities of translations."""

import math
from dataclasses import dataclass, replace

from regard.cli.common import (
    Columns,
    Data,
    Devices,
    Model,
    Output,
    Overwrite,
    Quiet,
    SourceLanguage,
    TargetLanguage,
    Truncate,
    batch_progress,
    check_file_options,
    file_progress,
    is_stream,
    note_file,
    open_models,
    open_stream,
    parse,
    print_note,
)
from regard.data.text.readers import built_in_part, read_pairs
from regard.errors import RegardError
from regard.pipelines import Translator
from regard.pipelines.input_items import InputItems
from regard.pipelines.scoring import format_score


@dataclass(frozen=True)
class Options:
    """Score each target by its log-probability given the source: regard score MODEL --data pairs.tsv

    Print one line per pair: log-probability, mean per token, and number of tokens including the end, separated by tabs;
    an empty line for an empty pair. The total goes to standard error. With --output, write to a file instead; if
    interrupted, the same command resumes.
    """

    model: Model
    data: Data
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    output: Output = None
    overwrite: Overwrite = False
    columns: Columns = ()
    truncate: Truncate = False
    device: Devices = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "score", argv)
    options = replace(options, data=built_in_part(options.data, "test") or options.data)
    check_file_options(options.output, options.overwrite, options.data)
    if is_stream(options.output):
        _print_scores(options)
    else:
        _score_file(options)
    return 0


def _print_scores(options: Options) -> None:
    pairs = read_pairs(options.data, options.columns)
    nonempty = [i for i, pair in enumerate(pairs) if any(side.strip() for side in pair)]
    for i in nonempty:
        if not pairs[i][0].strip():
            raise RegardError(f"{' '.join(options.data)}, pair {i + 1}: the source is empty.", "Remove the pair.")
    if not nonempty:
        raise RegardError(f"{' '.join(options.data)}: all pairs are empty.", "Pass files with text.")
    (translator,) = open_models(options.model, options.device, Translator)
    translator = translator.with_target(options.to, options.source_language)
    with batch_progress("scoring") as on_progress:
        results = translator.score([pairs[i] for i in nonempty], truncate=options.truncate, progress=on_progress)
    scores = dict(zip(nonempty, results))
    with open_stream(options.output) as stream:
        for i in range(len(pairs)):
            print(format_score(scores[i]) if i in scores else "", file=stream)
    _note_total(len(scores), sum(score.logprob for score in results), sum(score.tokens for score in results))


def _score_file(options: Options) -> None:
    """Write the scores to a file, or resume it."""
    assert options.output is not None
    source = InputItems.from_pairs(options.data, options.columns)
    translators = open_models(options.model, options.device, Translator, parallel=True)
    first, *replicas = (translator.with_target(options.to, options.source_language) for translator in translators)
    with file_progress("scoring") as on_progress:
        summary = first.score_file(
            source,
            options.output,
            truncate=options.truncate,
            replicas=replicas,
            overwrite=options.overwrite,
            progress=on_progress,
        )
    note_file(summary, options.output)
    if summary.totals.get("tokens"):
        _note_total(*(summary.totals[name] for name in ("pairs", "logprob", "tokens")))


def _note_total(pairs: float, logprob: float, tokens: float) -> None:
    perplexity = math.exp(-logprob / tokens)
    print_note(f"{pairs} pairs, {tokens} tokens: log-probability {logprob:.4f}, perplexity {perplexity:.4f}")
