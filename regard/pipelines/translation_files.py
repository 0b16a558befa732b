"""Files of any size: translation and scoring, methods of `Translator`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.decode import DecodeConfig
from regard.decode.shortlist import require_shortlist
from regard.errors import RegardError
from regard.pipelines.files import (
    BlockOutput,
    FileProgress,
    FileSummary,
    ProcessItems,
    process_file,
    process_shards,
)
from regard.pipelines.input_items import InputItems, find_shards
from regard.pipelines.ray_workers import Cluster, make_processors
from regard.pipelines.scoring import format_score
from regard.pipelines.shortlist import shortlist_fingerprint
from regard.pipelines.translation import Split, Translation, format_translations

if TYPE_CHECKING:
    from regard.pipelines.translator import Translator

AddColumn = Callable[["Translator", Sequence[str], list[list[Translation]]], list[str]]
"""computes a column of the output, one entry per translation, from lines and their translations"""


def translate_file(
    translator: "Translator",
    source: str | Path | InputItems[str],
    output: str | Path,
    config: DecodeConfig | None = None,
    *,
    prefix: str = "",
    required: Sequence[str] = (),
    forbidden: Sequence[str] = (),
    truncate: bool = False,
    split: Split = "auto",
    scores: bool = False,
    replicas: Sequence["Translator"] = (),
    cluster: Cluster | None = None,
    overwrite: bool = False,
    progress: Callable[[FileProgress], None] | None = None,
    add_column: AddColumn | None = None,
    settings: dict[str, Any] | None = None,
) -> FileSummary:
    """Translate a file of any size, plain or compressed, in constant memory; the same call resumes it if killed.

    Each line of the output is the best translation of a line; with `scores` or `n_best` above 1, see
    `format_translations`. `prefix` and the phrases apply to every line. `replicas` are copies of this translator,
    on other devices, that work in parallel; with `cluster="ray"`, a Ray cluster does the work (see
    `ray_processors`). If `source` is a pattern such as "part-*.en", `output` is a folder, which gets one file per
    input file. An existing output is an error unless `overwrite` is set. `add_column` computes a further column,
    and `settings` must contain what it depends on. A multilingual model needs `with_target`,
    unless it has default languages.

    >>> translator.translate_file("corpus.en.gz", "corpus.fr.gz")  # doctest: +SKIP
    FileSummary(items=100000, resumed_items=0, seconds=61.5, totals={})
    """
    translator = translator.with_target()
    config = config or translator.decoding
    settings = translator.language_settings | (settings or {})
    if config.shortlist:
        settings["shortlist_file"] = shortlist_fingerprint(require_shortlist(translator.shortlist))
    translator.encode_prefix(prefix, truncate=truncate)
    options: dict[str, Any] = {"truncate": truncate, "split": split}
    options |= {"required": list(required), "forbidden": list(forbidden)}

    def make_processor(replica: "Translator") -> ProcessItems[str]:
        def process(lines: list[str], first_index: int, on_batch: Callable[[int, int], None]) -> BlockOutput:
            prefixes = [prefix] * len(lines) if prefix else None
            results = replica.translate(
                lines, config, prefixes=prefixes, first_index=first_index, progress=on_batch, **options
            )
            column = None if add_column is None else add_column(replica, lines, results)
            rows = format_translations(results, config, first_index, scores=scores, column=column)
            return BlockOutput("".join(f"{row}\n" for row in rows).encode())

        return process

    def check(line: str, name: str) -> None:
        translator.check_line(line, name, truncate=truncate, split=split if config.n_best == 1 else "never")

    return process_shards(
        find_shards(source, output),
        make_processors(make_processor, translator, replicas, cluster),
        settings={
            "task": "translate",
            "model": translator.fingerprint(),
            "prefix": prefix,
            "scores": scores,
            **options,
            **dataclasses.asdict(config),
            **settings,
        },
        check=check,
        allowed_changes=translator.truncation_changes,
        overwrite=overwrite,
        progress=progress,
    )


def score_file(
    translator: "Translator",
    source: str | Path | Sequence[str | Path] | InputItems[tuple[str, str]],
    output: str | Path,
    *,
    columns: Sequence[str] = (),
    truncate: bool = False,
    replicas: Sequence["Translator"] = (),
    overwrite: bool = False,
    progress: Callable[[FileProgress], None] | None = None,
) -> FileSummary:
    """Score the pairs of a file, or of two parallel files, of any size, like `translate_file`.

    Each line of the output has log-probability, mean per token and number of tokens, separated by tabs; an empty
    pair gives an empty line. The totals are the sums of `pairs`, `logprob` and `tokens`.

    >>> translator.score_file(["corpus.en", "corpus.fr"], "scores.tsv").totals["tokens"]  # doctest: +SKIP
    1327
    """

    translator = translator.with_target()

    def make_processor(replica: "Translator") -> ProcessItems[tuple[str, str]]:
        def process(
            pairs: list[tuple[str, str]], first_index: int, on_batch: Callable[[int, int], None]
        ) -> BlockOutput:
            nonempty = [pair for pair in pairs if any(side.strip() for side in pair)]
            scores = replica.score(nonempty, truncate=truncate, progress=on_batch)
            results = iter(scores)
            rows = [format_score(next(results)) if any(side.strip() for side in pair) else "" for pair in pairs]
            logprob, tokens = sum(score.logprob for score in scores), sum(score.tokens for score in scores)
            totals = {"pairs": len(scores), "logprob": logprob, "tokens": tokens}
            return BlockOutput("".join(f"{row}\n" for row in rows).encode(), totals)

        return process

    def check(pair: tuple[str, str], name: str) -> None:
        if pair[1].strip() and not pair[0].strip():
            raise RegardError(f"{name}: the source is empty.", "Remove the pair.")
        translator.encode_source(pair[0], name=name, truncate=truncate)
        translator.encode_target(pair[1], name=name, truncate=truncate)

    return process_file(
        source if isinstance(source, InputItems) else InputItems.from_pairs(source, columns),
        output,
        [make_processor(replica) for replica in (translator, *replicas)],
        settings={
            "task": "score",
            "model": translator.fingerprint(),
            "truncate": truncate,
            **translator.language_settings,
        },
        check=check,
        allowed_changes=translator.truncation_changes,
        overwrite=overwrite,
        progress=progress,
    )
