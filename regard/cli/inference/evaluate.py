"""`regard evaluate`: metrics of a model on test data."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import numpy as np

from regard.cli.common import (
    Columns,
    Data,
    Decoding,
    DeviceOption,
    Empty,
    Ensemble,
    Model,
    Quiet,
    Truncate,
    open_model,
    parse,
    plot_format,
)
from regard.cli.options import Arg
from regard.config_reader import json_bytes
from regard.data.images.files import LABEL_COLUMN
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.evaluators import BleuTokenizer, evaluate
from regard.evaluation.text_metrics import METRIC_FORMATS
from regard.files import STDOUT, check_output_file, write_output
from regard.pipelines import ModelFolder, Translator


@dataclass(frozen=True)
class Options:
    """Evaluate a model on test data: regard evaluate MODEL --data test.en test.fr

    Translators are compared with reference translations; empty pairs are left out, and an empty source has an empty
    translation. Language models are evaluated on plain text: loss, perplexity per word, bits per byte. Classifiers need
    labeled texts, question answering models a file in SQuAD format, image models images with labels or masks, in any
    format that they can be trained on.
    """

    model: Model
    data: Data
    columns: Columns = ()
    languages: Annotated[tuple[str, ...], Arg("PAIR")] = ()
    """multilingual translators: language pair of each file, such as en-de en-fr"""
    alignments: Path | None = None
    """gold word alignments in Pharaoh format (0-0 1-2) of whitespace-separated words, one line per pair; by default
    those of the third column of the data, if it has them"""
    layer: Annotated[str | None, Arg("NAME", default="the sharpest")] = None
    """cross-attention to take alignments from"""
    ensemble: Ensemble = ()
    language: Literal["en", "de", "fr"] = "en"
    """answers: language whose articles and punctuation are ignored"""
    empty: Empty = False
    label: str = LABEL_COLUMN
    """images: column or array of the labels"""
    bleu_tokenizer: BleuTokenizer = "auto"
    """translations: tokenizer of sacreBLEU; auto: 13a, or one for references without spaces"""
    confusion: Path | None = None
    """labels: output file of a confusion matrix plot, .png, .svg or .pdf; its counts are in --json"""
    compare: Annotated[Path | None, Arg("MODEL", default="none")] = None
    """other model, for the difference of the metrics and its 95% confidence interval (paired bootstrap)"""
    json: Path | None = None
    """output file of the metrics as JSON; "-": standard output, with the table on standard error"""
    truncate: Truncate = False
    device: DeviceOption = "auto"
    quiet: Quiet = False
    decode: Decoding = field(default_factory=dict)


def run(argv: list[str]) -> int:
    options = parse(Options, "evaluate", argv)
    folder = ModelFolder.open(options.model)
    if options.confusion is not None:
        if getattr(folder.config, "head", None) not in ("classify", "segment"):
            raise RegardError("--confusion requires a classification or segmentation model.", "Leave it out.")
        plot_format(options.confusion)
    for output in (options.confusion, options.json):
        if output is not None:  # checked before the evaluation, which may take minutes
            check_output_file(output, [*options.data, options.alignments])
    expect = Translator if options.ensemble else folder.pipeline_class
    pipeline: Any = open_model(options.model, options.device, expect, options.ensemble)
    decoding = pipeline.decoding if isinstance(pipeline, Translator) else DecodeConfig()
    other = options.compare and open_model(options.compare, options.device, folder.pipeline_class)
    results = evaluate(
        pipeline,
        options.data,
        columns=options.columns,
        languages=options.languages,
        decode=replace(decoding, **options.decode),
        bleu_tokenizer=options.bleu_tokenizer,
        alignments=options.alignments,
        layer=options.layer,
        language=options.language,
        allow_empty=options.empty,
        label=options.label,
        truncate=options.truncate,
        quiet=options.quiet,
        compare=other,
    )
    return _write_results(results, options)


def _write_results(results: dict[str, Any], options: Options) -> int:
    if options.json is not None:
        write_output(options.json, json_bytes(results))
    if options.confusion is not None:
        write_output(options.confusion, plot_confusion(results, plot_format(options.confusion)))
    _print_table(results, sys.stderr if options.json == STDOUT else sys.stdout)
    return 0


def plot_confusion(results: dict[str, Any], file_format: str) -> bytes:
    """Plot of the confusion matrix of an evaluation, as the bytes of a file."""
    from regard.viewer.plots import draw_confusion  # matplotlib is slow to import

    items = "pixels" if "mean_iou" in results else "texts" if "texts" in results else "images"
    metric = "mean IoU" if items == "pixels" else "accuracy"
    value = results["mean_iou" if items == "pixels" else "accuracy"]
    title = f"{' '.join(results['data'])}: {metric} {value:.2f} %"
    return draw_confusion(np.array(results["confusion"]), results["labels"], title, items, file_format)


# Maximum number of classes in the table; all are in --json.
MAX_CLASSES = 30
COUNTS = ("sentences", "tokens", "words", "bytes", "texts", "questions", "images")


def _print_table(results: dict[str, Any], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    counts = (f"{results[name]:,} {name}" for name in COUNTS if name in results)
    table = Table("metric", title=f"{' '.join(results['data'])}: {', '.join(counts)}", title_justify="left")
    table.add_column("value", justify="right")
    intervals, comparison = results.get("intervals", {}), results.get("comparison", {})
    for name in ("95% interval", *(("other model", "difference", "its 95% interval") if comparison else ())):
        table.add_column(name, justify="right")
    # Metrics of other tasks than those of Regard.
    others = {
        key: (key, "{:.4g}") for key, value in results.items() if type(value) is float and key not in METRIC_FORMATS
    }
    for key, (name, value_format) in (METRIC_FORMATS | others).items():
        if key in results and not isinstance(results[key], dict):
            cells = [value_format.format(results[key]), _range(intervals.get(key), value_format)]
            if key in comparison:
                row = comparison[key]
                difference = f"{row['difference']:+.2f}"
                cells += [value_format.format(row["other"]), difference, _range((row["low"], row["high"]), "{:+.2f}")]
            table.add_row(name, *cells)
            for label, iou in results["iou"].items() if key == "mean_iou" else ():
                table.add_row(Text(f"  {label}"), value_format.format(iou))
    console = Console(file=file, highlight=False)
    console.print(table)
    if "per_pair" in results:
        console.print(_pair_table(results["per_pair"]))
    if "per_class" in results:
        console.print(_class_table(results["per_class"]))
    if "signature" in results:
        console.print(f"BLEU: {results['signature']}", soft_wrap=True)
    if "alignment_layer" in results:
        console.print(f"alignments from {results['alignment_layer']}", soft_wrap=True)


def _range(limits: Any, value_format: str) -> str:
    return "" if limits is None else " to ".join(value_format.removesuffix(" %").format(limit) for limit in limits)


def _pair_table(scores: dict[str, dict[str, Any]]) -> Any:
    """Table of the metrics per language pair."""
    from rich.table import Table

    names = ("bleu", "chrf", "exact_match", "perplexity")
    table = Table("pair", title="per language pair; the values above are their means", title_justify="left")
    for name in ("sentences", *(METRIC_FORMATS[name][0] for name in names)):
        table.add_column(name, justify="right")
    for pair, metrics in scores.items():
        values = (METRIC_FORMATS[name][1].format(metrics[name]) if name in metrics else "" for name in names)
        table.add_row(pair, f"{metrics['sentences']:,}", *values)
    return table


def _class_table(scores: dict[str, dict[str, float]]) -> Any:
    """Table of precision, recall and F1 per class; with many classes, of the most frequent ones."""
    from rich.table import Table
    from rich.text import Text

    shown = sorted(scores, key=lambda label: -scores[label]["support"])[:MAX_CLASSES]
    title = f"the {MAX_CLASSES} most frequent of {len(scores)} classes" if len(scores) > MAX_CLASSES else ""
    table = Table("class", title=title or None, title_justify="left")
    for name in ("precision", "recall", "F1", "support"):
        table.add_column(name, justify="right")
    for label in [name for name in scores if name in set(shown)]:
        one = scores[label]
        shares = (f"{one[name]:.2f} %" for name in ("precision", "recall", "f1"))
        table.add_row(Text(label), *shares, f"{one['support']:,}")
    return table
