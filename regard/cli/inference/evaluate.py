"""`regard evaluate`: how good a model is, by every measure that the data allow."""

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
    Empty,
    Ensemble,
    Examples,
    Model,
    Quiet,
    Truncate,
    note,
    open_model,
    parse,
    phrasebook_examples,
    plot_format,
    read_examples,
    steps_of,
)
from regard.cli.measuring import confusion_picture, parts, pictures, texts
from regard.config_reader import json_bytes
from regard.data import read_documents, read_squad
from regard.data.images.image_files import LABEL
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.text_metrics import squad_scores, text_scores
from regard.files import STDOUT, write_output, write_whole
from regard.pipelines import Device, ImageModel, LanguageModel, TextEncoder, Translator, pipeline_kind, read_config
from regard.viewer import align, alignment_error_rate, attentions, best_layer, clearest_layer, read_links

BleuTokenizer = Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
# Pairs of the phrasebook's validation split by which the layer is chosen.
VALIDATION_SIZE = 500


@dataclass(frozen=True)
class Options:
    """Evaluate a model on test data: regard evaluate MODEL --data test.en test.fr

    A translator's outputs are measured against references; a pair of empty lines is left out, an empty source alone is
    answered by an empty line, and judged. A language model is measured on plain text: its loss, its perplexity for each
    word, and bits for each byte. A model that classifies wants labelled texts, one that answers questions a file in the
    layout of SQuAD. A model of images wants pictures with labels, or with masks, in any of the files that it can be
    trained on.
    """

    model: Model
    data: Data
    columns: Columns = ()
    alignments: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """gold word alignments in Pharaoh format (0-0 1-2), of words between white space, a line for each pair"""
    layer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """the cross-attention whose alignments are measured; by default the best on the phrasebook's validation split, and
    for other data the clearest, chosen without gold"""
    ensemble: Ensemble = ()
    language: Literal["en", "de", "fr"] = "en"
    """of answers: articles and punctuation of the language do not count"""
    empty: Empty = False
    label: str = LABEL
    """of pictures: the column, or the array, that holds the labels"""
    bleu_tokenizer: BleuTokenizer = "auto"
    """of translations: sacreBLEU's tokenizer; auto: 13a, or what fits references written without spaces"""
    confusion: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """of labels: a picture of what was taken for what, .png or .svg; the numbers are in --json"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """file for the numbers, as JSON; "-": standard output, and the table goes to standard error"""
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = field(default_factory=DecodeConfig)


def run(argv: list[str]) -> int:
    options = parse(Options, "evaluate", argv)
    config, _ = read_config(options.model)
    kind = pipeline_kind(config).kind
    if options.confusion is not None:
        if getattr(config, "head", None) not in ("classify", "segment"):
            raise RegardError("This model gives no labels that could be confused.", "Leave out --confusion.")
        plot_format(options.confusion)  # refuses others before the minutes of evaluating, not after
    if kind is not Translator and not options.ensemble:
        measure = {LanguageModel: _language, TextEncoder: _encoder, ImageModel: _images}[kind]
        return _tell({"data": list(options.data)} | measure(options), options)
    text_scores([], [], options.bleu_tokenizer)  # an error of its comes before the minutes of translating, not after
    examples = _examples(options)
    translator = open_model(options.model, options.device, Translator, options.ensemble)
    results = {"data": list(options.data), "sentences": len(examples.pairs)}
    results |= _translations(translator, examples, options)
    if not options.ensemble:
        results |= _losses(translator, examples, options)
    if examples.gold is not None and attentions(translator, "cross"):
        results |= _alignments(translator, examples, examples.gold, options)
    return _tell(results, options)


def _language(options: Options) -> dict[str, Any]:
    model = open_model(options.model, options.device, LanguageModel)
    with steps_of("evaluating") as tell:
        found = model.evaluate(read_documents(options.data), progress=tell)
    return {
        "tokens": found.tokens,
        "words": found.words,
        "bytes": found.bytes,
        "loss": found.loss,
        "perplexity": math.exp(min(50.0, found.loss)),
        "word_perplexity": found.word_perplexity,
        "bits_per_byte": found.bits_per_byte,
    }


def _encoder(options: Options) -> dict[str, Any]:
    encoder = open_model(options.model, options.device, TextEncoder)
    match encoder.model.config.head:
        case "classify":
            return texts(encoder, options.data, options.columns, options.truncate)
        case "answer":
            read = [question for file in options.data for question in read_squad(file)]
            questions = [dataclasses.replace(one, id=str(i)) for i, one in enumerate(read)]  # files may share ids
            without = sum(not one.answers for one in questions)
            if without and not options.empty:
                note(f"Questions without an answer: {without}. With --empty the model may say so.")
            answers: dict[str, str] = {}
            with steps_of("answering") as tell:
                for part in parts(len(questions), tell):
                    some = [questions[i] for i in part]
                    answers |= {one.id: text for one, text in zip(some, encoder.answer(some, empty=options.empty))}
            exact, f1 = squad_scores(answers, questions, options.language)
            return {"questions": len(questions), "without_answer": without, "exact_match": exact, "f1": f1}
        case head:
            raise RegardError(
                f"There is no measure for a model with the head {head}.",
                "Train it on for a task first: regard train --from …",
            )


def _images(options: Options) -> dict[str, Any]:
    return pictures(open_model(options.model, options.device, ImageModel), options.data, options.label)


def _tell(results: dict[str, Any], options: Options) -> int:
    if options.json is not None:
        write_output(options.json, json_bytes(results))
    if options.confusion is not None:
        write_whole(options.confusion, confusion_picture(results, plot_format(options.confusion)))
    _show(results, sys.stderr if options.json == STDOUT else sys.stdout)
    return 0


def _examples(options: Options) -> Examples:
    """The pairs with any text, and their gold alignments."""
    examples, name = read_examples(options.data, options.columns), " ".join(options.data)
    if options.alignments is not None:
        examples = Examples(examples.pairs, read_links(options.alignments))
    gold = examples.gold
    if gold is not None and len(gold) != len(examples.pairs):
        raise RegardError(
            f"{options.alignments} has {len(gold)} lines, but {name} has {len(examples.pairs)} pairs.",
            "Give one line of links for each pair.",
        )
    kept = [i for i, pair in enumerate(examples.pairs) if any(side.strip() for side in pair)]
    if not kept:
        raise RegardError(f"{name}: every pair is empty.", "Give some text.")
    if len(kept) < len(examples.pairs):
        note(f"Pairs left out because they are empty: {len(examples.pairs) - len(kept)}.")
    return Examples(
        [examples.pairs[i] for i in kept], None if gold is None else [gold[i] for i in kept], examples.words
    )


def _translations(translator: Translator, examples: Examples, options: Options) -> dict[str, Any]:
    sources, references = [one for one, _ in examples.pairs], [other for _, other in examples.pairs]
    began = time.perf_counter()
    with steps_of("translating") as tell:
        answers = translator.translate(sources, options.decode, truncate=options.truncate, progress=tell)
    seconds = time.perf_counter() - began
    scores = text_scores([answer[0].text for answer in answers], references, options.bleu_tokenizer)
    return dataclasses.asdict(scores) | {"sentences_per_second": len(sources) / seconds}


def _losses(translator: Translator, examples: Examples, options: Options) -> dict[str, Any]:
    filled = [pair for pair in examples.pairs if pair[0].strip()]
    with steps_of("scoring") as tell:
        scores = translator.score(filled, truncate=options.truncate, progress=tell)
    if not scores:
        return {}
    loss = -sum(one.logprob for one in scores) / sum(one.tokens for one in scores)
    return {"loss": loss, "perplexity": math.exp(loss)}


def _alignments(
    translator: Translator, examples: Examples, gold: list[list[tuple[int, int]]], options: Options
) -> dict[str, Any]:
    layers = attentions(translator, "cross")
    if options.layer is not None:
        if options.layer not in layers:
            raise RegardError(f"There is no cross-attention {options.layer!r}.", f"There are: {', '.join(layers)}.")
        layer = options.layer
    elif options.data == (PHRASEBOOK,) and options.alignments is None:
        held_out = phrasebook_examples("val", VALIDATION_SIZE)
        layer = best_layer(translator, held_out.pairs, held_out.gold or [], words=held_out.words)
    else:
        layer = clearest_layer(translator, examples.pairs, truncate=options.truncate)
    predicted = align(translator, examples.pairs, layer, words=examples.words, truncate=options.truncate)
    return {"alignment_error_rate": 100 * alignment_error_rate(predicted, gold), "alignment_layer": layer}


MEASURES = {
    "bleu": ("BLEU", "{:.2f}"),
    "chrf": ("chrF", "{:.2f}"),
    "tokenized_bleu": ("BLEU, as tokenised, lower case", "{:.2f}"),
    "exact_match": ("exact match", "{:.1f} %"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "top_5": ("among the likeliest 5", "{:.2f} %"),
    "mean_iou": ("mean intersection over union", "{:.2f} %"),
    "pixel_accuracy": ("accuracy of pixels", "{:.2f} %"),
    "macro_f1": ("macro F1", "{:.2f} %"),
    "calibration_error": ("calibration error", "{:.2f} %"),
    "f1": ("F1", "{:.2f} %"),
    "word_error_rate": ("word error rate", "{:.2f} %"),
    "loss": ("loss, nats a token", "{:.4f}"),
    "cross_entropy": ("loss, nats", "{:.4f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "word_perplexity": ("perplexity a word", "{:.2f}"),
    "bits_per_byte": ("bits a byte", "{:.4f}"),
    "alignment_error_rate": ("alignment error rate", "{:.2f} %"),
    "sentences_per_second": ("sentences a second", "{:.1f}"),
    "pictures_per_second": ("pictures a second", "{:.1f}"),
}


# Classes beyond this number are in --json alone.
SHOWN_CLASSES = 30
COUNTS = ("sentences", "tokens", "words", "bytes", "texts", "questions", "pictures")


def _show(results: dict[str, Any], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    counted = (f"{results[name]:,} {name}" for name in COUNTS if name in results)
    table = Table("measure", title=f"{' '.join(results['data'])}: {', '.join(counted)}", title_justify="left")
    table.add_column("value", justify="right")
    for key, (name, form) in MEASURES.items():
        if key in results:
            table.add_row(name, form.format(results[key]))
            for label, share in results["iou"].items() if key == "mean_iou" else ():
                table.add_row(Text(f"  {label}"), form.format(share))
    console = Console(file=file, highlight=False)
    console.print(table)
    if "per_class" in results:
        console.print(_per_class(results["per_class"]))
    if "signature" in results:
        console.print(f"BLEU: {results['signature']}", soft_wrap=True)
    if "alignment_layer" in results:
        console.print(f"alignments from {results['alignment_layer']}", soft_wrap=True)


def _per_class(scores: dict[str, dict[str, float]]) -> Any:
    """Precision, recall and F1 of each class; of many classes, of the most frequent."""
    from rich.table import Table
    from rich.text import Text

    shown = sorted(scores, key=lambda label: -scores[label]["support"])[:SHOWN_CLASSES]
    title = f"the {SHOWN_CLASSES} most frequent of {len(scores)} classes" if len(scores) > SHOWN_CLASSES else ""
    table = Table("class", title=title or None, title_justify="left")
    for name in ("precision", "recall", "F1", "support"):
        table.add_column(name, justify="right")
    for label in [one for one in scores if one in set(shown)]:
        one = scores[label]
        shares = (f"{one[name]:.2f} %" for name in ("precision", "recall", "f1"))
        table.add_row(Text(label), *shares, f"{one['support']:,}")
    return table
