"""Files of any size: translation and scoring, methods of `Translator`."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from regard.decode import DecodeConfig
from regard.decode.shortlist import require_shortlist
from regard.errors import RegardError
from regard.pipelines.decoding_request import check_options
from regard.pipelines.files import (
    BlockOutput,
    Cluster,
    FileProgress,
    FileSummary,
    ProcessItems,
    make_processors,
    process_file,
    process_shards,
)
from regard.pipelines.input_items import InputItems, find_shards
from regard.pipelines.scoring import format_score
from regard.pipelines.shortlist import shortlist_fingerprint
from regard.pipelines.translation import (
    Translation,
    TranslationOptions,
    TranslationRequest,
    format_translations,
)

if TYPE_CHECKING:
    from regard.pipelines.translator import Translator


@dataclass(frozen=True)
class Column:
    """A further column of an output file."""

    compute: Callable[["Translator", Sequence[str], list[list[Translation]]], list[str]]
    """its entries, one per translation, from lines and their translations"""
    settings: dict[str, Any] = field(default_factory=dict)
    """what the entries depend on"""


class FileOptions(TranslationOptions, total=False):
    """Options of `translate_file`, beside those of decoding."""

    scores: bool
    column: Column | None


@dataclass(frozen=True)
class BlockTranslator:
    """Translates blocks of lines of a request, as lines of text."""

    translator: "Translator"
    request: TranslationRequest
    scores: bool
    column: Column | None

    def __call__(self, lines: list[str], first_index: int, on_batch: Callable[[int, int], None]) -> BlockOutput:
        results = self.translator.encode(self.request.block(lines, first_index)).run(progress=on_batch)
        column = None if self.column is None else self.column.compute(self.translator, lines, results)
        rows = format_translations(results, self.request.config, first_index, scores=self.scores, column=column)
        return BlockOutput("".join(f"{row}\n" for row in rows).encode())

    def check(self, line: str, name: str) -> None:
        """Raise an error if a line is invalid."""
        self.translator.encode(self.request.block([line], names=[name]))


def translate_file(
    translator: "Translator",
    source: str | Path | InputItems[str],
    output: str | Path,
    config: DecodeConfig | None = None,
    *,
    replicas: Sequence["Translator"] = (),
    cluster: Cluster | None = None,
    overwrite: bool = False,
    progress: Callable[[FileProgress], None] | None = None,
    **options: Unpack[FileOptions],
) -> FileSummary:
    """Translate a file of any size, plain or compressed, in constant memory; the same call resumes it if killed.

    Each line of the output is the best translation of a line; with `scores` or `n_best` above 1, see
    `format_translations`. The other options are those of `Translator.translate`, with `split="auto"`; prefix and
    phrases apply to every line. `replicas` are copies of this translator, on other devices, that work in parallel;
    with `cluster="ray"`, a Ray cluster does the work (see `ray_processors`). If `source` is a pattern such as
    "part-*.en", `output` is a folder, which gets one file per input file. An existing output is an error unless
    `overwrite` is set. `column` computes a further column.

    >>> translator.translate_file("corpus.en.gz", "corpus.fr.gz")  # doctest: +SKIP
    FileSummary(items=100000, resumed_items=0, seconds=61.5, totals={})
    """
    check_options(options, FileOptions.__annotations__, "translate_file")
    scores, column = options.pop("scores", False), options.pop("column", None)
    request = TranslationRequest.of((), config or translator.decoding, {"split": "auto", **options}, "translate_file")
    translator = translator.with_target(request.to, request.source_language)
    if isinstance(request.prefixes, str):
        translator.encode_prefix(request.prefixes, truncate=request.truncate)
    settings: dict[str, Any] = {"task": "translate", "model": translator.fingerprint(), "scores": scores}
    settings |= {"prefix": request.prefixes or "", "truncate": request.truncate, "split": request.split}
    settings |= {"required": list(request.required or ()), "forbidden": list(request.forbidden or ())}
    settings |= dataclasses.asdict(request.config) | translator.language_settings
    settings |= {} if column is None else column.settings
    if request.config.shortlist:
        settings["shortlist_file"] = shortlist_fingerprint(require_shortlist(translator.shortlist))
    make_processor = partial(BlockTranslator, request=request, scores=scores, column=column)
    return process_shards(
        find_shards(source, output),
        make_processors(make_processor, translator, replicas, cluster),
        settings=settings,
        check=make_processor(translator).check,
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
