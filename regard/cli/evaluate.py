"""`regard evaluate`: metrics of a model on test data."""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import tyro

from regard.cli.common import (
    PHRASEBOOK,
    Columns,
    Data,
    DeviceOption,
    Empty,
    Ensemble,
    Examples,
    Model,
    Quiet,
    Truncate,
    batch_progress,
    open_model,
    parse,
    phrasebook_examples,
    plot_format,
    print_note,
    read_examples,
)
from regard.cli.measuring import evaluate_images, evaluate_texts, index_blocks, plot_confusion
from regard.config_reader import json_bytes
from regard.data import read_documents, read_squad
from regard.data.image_files import LABEL
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.files import STDOUT, write_output, write_whole
from regard.folder import OPENED, ImageModel, LanguageModel, TextEncoder, Translator, read_config
from regard.models import family_of
from regard.training.metrics import squad_scores, text_scores
from regard.viewer import align, alignment_error_rate, attentions, best_layer, clearest_layer, read_links

BleuTokenizer = Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
# Number of phrasebook validation pairs for choosing the alignment layer.
VALIDATION_SIZE = 500


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
    alignments: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """gold word alignments in Pharaoh format (0-0 1-2) of whitespace-separated words, one line per pair"""
    layer: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the sharpest)")] = None
    """cross-attention to take alignments from (phrasebook: by default the best on its validation split)"""
    ensemble: Ensemble = ()
    language: Literal["en", "de", "fr"] = "en"
    """answers: language whose articles and punctuation are ignored"""
    empty: Empty = False
    label: str = LABEL
    """images: column or array of the labels"""
    bleu_tokenizer: BleuTokenizer = "auto"
    """translations: tokenizer of sacreBLEU; auto: 13a, or one for references without spaces"""
    confusion: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """labels: output file of a confusion matrix plot, .png or .svg; its counts are in --json"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """output file of the metrics as JSON; "-": standard output, with the table on standard error"""
    truncate: Truncate = False
    device: DeviceOption = "auto"
    quiet: Quiet = False
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = field(default_factory=DecodeConfig)


def run(argv: list[str]) -> int:
    options = parse(Options, "evaluate", argv)
    config, _ = read_config(options.model)
    pipeline_class = OPENED[family_of(config)].pipeline_class
    if options.confusion is not None:
        if getattr(config, "head", None) not in ("classify", "segment"):
            raise RegardError("--confusion requires a classification or segmentation model.", "Leave it out.")
        plot_format(options.confusion)  # checked before the evaluation, which may take minutes
    if pipeline_class is not Translator and not options.ensemble:
        evaluate = {LanguageModel: _evaluate_generator, TextEncoder: _evaluate_encoder, ImageModel: _evaluate_images}
        results = {"data": list(options.data)} | evaluate[pipeline_class](options)
        return _write_results(results, options)
    text_scores([], [], options.bleu_tokenizer)  # checks the tokenizer before translating, which may take minutes
    examples = _read_examples(options)
    translator = open_model(options.model, options.device, Translator, options.ensemble)
    results = {"data": list(options.data), "sentences": len(examples.pairs)}
    results |= _translation_scores(translator, examples, options)
    if not options.ensemble:
        results |= _loss_scores(translator, examples, options)
    if examples.gold is not None and attentions(translator, "cross"):
        results |= _alignment_scores(translator, examples, examples.gold, options)
    return _write_results(results, options)


def _evaluate_generator(options: Options) -> dict[str, Any]:
    model = open_model(options.model, options.device, LanguageModel)
    with batch_progress("evaluating") as on_progress:
        loss = model.evaluate(read_documents(options.data), progress=on_progress)
    return {
        "tokens": loss.tokens,
        "words": loss.words,
        "bytes": loss.bytes,
        "loss": loss.loss,
        "perplexity": math.exp(min(50.0, loss.loss)),
        "word_perplexity": loss.word_perplexity,
        "bits_per_byte": loss.bits_per_byte,
    }


def _evaluate_encoder(options: Options) -> dict[str, Any]:
    encoder = open_model(options.model, options.device, TextEncoder)
    match encoder.model.config.head:
        case "classify":
            return evaluate_texts(encoder, options.data, options.columns, options.truncate)
        case "answer":
            all_questions = [question for file in options.data for question in read_squad(file)]
            questions = [
                dataclasses.replace(one, id=str(i)) for i, one in enumerate(all_questions)
            ]  # files may share ids
            unanswerable = sum(not one.answers for one in questions)
            if unanswerable and not options.empty:
                print_note(f"Unanswerable questions: {unanswerable}. Use --empty to allow empty answers.")
            answers: dict[str, str] = {}
            with batch_progress("answering") as on_progress:
                for indices in index_blocks(len(questions), on_progress):
                    block = [questions[i] for i in indices]
                    texts = encoder.answer(block, empty=options.empty)
                    answers |= {question.id: text for question, text in zip(block, texts)}
            exact, f1 = squad_scores(answers, questions, options.language)
            return {"questions": len(questions), "without_answer": unanswerable, "exact_match": exact, "f1": f1}
        case head:
            raise RegardError(
                f"A model with the head {head} cannot be evaluated.",
                "Fine-tune it for a task first: regard train --from …",
            )


def _evaluate_images(options: Options) -> dict[str, Any]:
    return evaluate_images(open_model(options.model, options.device, ImageModel), options.data, options.label)


def _write_results(results: dict[str, Any], options: Options) -> int:
    if options.json is not None:
        write_output(options.json, json_bytes(results))
    if options.confusion is not None:
        write_whole(options.confusion, plot_confusion(results, plot_format(options.confusion)))
    _print_table(results, sys.stderr if options.json == STDOUT else sys.stdout)
    return 0


def _read_examples(options: Options) -> Examples:
    """The non-empty sentence pairs and their gold alignments."""
    examples, name = read_examples(options.data, options.columns), " ".join(options.data)
    if options.alignments is not None:
        examples = Examples(examples.pairs, read_links(options.alignments))
    gold = examples.gold
    if gold is not None and len(gold) != len(examples.pairs):
        raise RegardError(
            f"{options.alignments} has {len(gold)} lines, but {name} has {len(examples.pairs)} pairs.",
            "Write one line of links per pair.",
        )
    nonempty = [i for i, pair in enumerate(examples.pairs) if any(side.strip() for side in pair)]
    if not nonempty:
        raise RegardError(f"{name}: all pairs are empty.", "Pass files with text.")
    if len(nonempty) < len(examples.pairs):
        print_note(f"Empty pairs left out: {len(examples.pairs) - len(nonempty)}.")
    return Examples(
        [examples.pairs[i] for i in nonempty], None if gold is None else [gold[i] for i in nonempty], examples.words
    )


def _translation_scores(translator: Translator, examples: Examples, options: Options) -> dict[str, Any]:
    sources, references = [source for source, _ in examples.pairs], [target for _, target in examples.pairs]
    start = time.perf_counter()
    with batch_progress("translating") as on_progress:
        translations = translator.translate(sources, options.decode, truncate=options.truncate, progress=on_progress)
    seconds = time.perf_counter() - start
    scores = text_scores([n_best[0].text for n_best in translations], references, options.bleu_tokenizer)
    return dataclasses.asdict(scores) | {"sentences_per_second": len(sources) / seconds}


def _loss_scores(translator: Translator, examples: Examples, options: Options) -> dict[str, Any]:
    nonempty = [pair for pair in examples.pairs if pair[0].strip()]
    with batch_progress("scoring") as on_progress:
        scores = translator.score(nonempty, truncate=options.truncate, progress=on_progress)
    if not scores:
        return {}
    loss = -sum(one.logprob for one in scores) / sum(one.tokens for one in scores)
    return {"loss": loss, "perplexity": math.exp(loss)}


def _alignment_scores(
    translator: Translator, examples: Examples, gold: list[list[tuple[int, int]]], options: Options
) -> dict[str, Any]:
    layers = attentions(translator, "cross")
    if options.layer is not None:
        if options.layer not in layers:
            raise RegardError(f"Unknown cross-attention {options.layer!r}.", f"Choose from: {', '.join(layers)}.")
        layer = options.layer
    elif options.data == (PHRASEBOOK,) and options.alignments is None:
        validation = phrasebook_examples("val", VALIDATION_SIZE)
        layer = best_layer(translator, validation.pairs, validation.gold or [], words=validation.words)
    else:
        layer = clearest_layer(translator, examples.pairs, truncate=options.truncate)
    predicted = align(translator, examples.pairs, layer, words=examples.words, truncate=options.truncate)
    return {"alignment_error_rate": 100 * alignment_error_rate(predicted, gold), "alignment_layer": layer}


METRICS = {
    "bleu": ("BLEU", "{:.2f}"),
    "chrf": ("chrF", "{:.2f}"),
    "tokenized_bleu": ("BLEU, tokenized, lowercase", "{:.2f}"),
    "exact_match": ("exact match", "{:.1f} %"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "top_5": ("top-5 accuracy", "{:.2f} %"),
    "mean_iou": ("mean intersection over union", "{:.2f} %"),
    "pixel_accuracy": ("pixel accuracy", "{:.2f} %"),
    "macro_f1": ("macro F1", "{:.2f} %"),
    "calibration_error": ("calibration error", "{:.2f} %"),
    "f1": ("F1", "{:.2f} %"),
    "word_error_rate": ("word error rate", "{:.2f} %"),
    "loss": ("loss (nats per token)", "{:.4f}"),
    "cross_entropy": ("loss (nats)", "{:.4f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "word_perplexity": ("perplexity per word", "{:.2f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "alignment_error_rate": ("alignment error rate", "{:.2f} %"),
    "sentences_per_second": ("sentences per second", "{:.1f}"),
    "images_per_second": ("images per second", "{:.1f}"),
}


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
    for key, (name, value_format) in METRICS.items():
        if key in results:
            table.add_row(name, value_format.format(results[key]))
            for label, iou in results["iou"].items() if key == "mean_iou" else ():
                table.add_row(Text(f"  {label}"), value_format.format(iou))
    console = Console(file=file, highlight=False)
    console.print(table)
    if "per_class" in results:
        console.print(_class_table(results["per_class"]))
    if "signature" in results:
        console.print(f"BLEU: {results['signature']}", soft_wrap=True)
    if "alignment_layer" in results:
        console.print(f"alignments from {results['alignment_layer']}", soft_wrap=True)


def _class_table(scores: dict[str, dict[str, float]]) -> Any:
    """Table of precision, recall and F1 per class; with many classes, of the most frequent ones."""
    from rich.table import Table
    from rich.text import Text

    frequent = sorted(scores, key=lambda label: -scores[label]["support"])[:MAX_CLASSES]
    title = f"the {MAX_CLASSES} most frequent of {len(scores)} classes" if len(scores) > MAX_CLASSES else ""
    table = Table("class", title=title or None, title_justify="left")
    for name in ("precision", "recall", "F1", "support"):
        table.add_column(name, justify="right")
    for label in [one for one in scores if one in set(frequent)]:
        one = scores[label]
        shares = (f"{one[name]:.2f} %" for name in ("precision", "recall", "f1"))
        table.add_row(Text(label), *shares, f"{one['support']:,}")
    return table
