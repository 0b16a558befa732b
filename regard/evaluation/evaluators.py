"""`evaluate`: every metric that a model and its test data allow."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Int

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images.files import LABEL_COLUMN
from regard.data.images.sets import NO_LABEL, ImageSet, RaggedImages, check_annotations, read_images, read_ragged_images
from regard.data.text.documents import read_documents
from regard.data.text.labeled_texts import label_ids, read_labeled_texts
from regard.data.text.languages import describe_languages, files_per_pair, parse_language_pairs
from regard.data.text.questions import read_squad
from regard.data.text.readers import (
    ROWS,
    Link,
    TextPair,
    built_in_part,
    check_links,
    data_files,
    errors_at_line,
    find_rows,
    read_aligned_pairs,
)
from regard.data.text.tagged_texts import check_tags, read_tagged_texts
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.alignment import align, alignment_error_rate, read_links, sharpest_layer
from regard.evaluation.bootstrap import ExampleSums, interval, share
from regard.evaluation.label_metrics import class_scores, label_scores, mask_scores
from regard.evaluation.tag_metrics import tag_scores
from regard.evaluation.teacher_forcing import attention_names
from regard.evaluation.text_metrics import confusion_counts, squad_scores, text_sums
from regard.models.bert import AnswerHead, TextLabelHead, TokenLabelHead
from regard.models.vit import ImageLabelHead, PixelLabelHead
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator, load
from regard.pipelines.decoding_request import check_options
from regard.pipelines.translation import language_tokens_of
from regard.progress import show_progress

if TYPE_CHECKING:
    from regard.pipelines.folder import AnyPipeline

logger = logging.getLogger(__name__)

BleuTokenizer = Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
# Examples evaluated between two progress updates.
CHUNK = 512
# Key of the sums over examples among the metrics of one model.
SUMS = "example sums"


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of `evaluate`; each model reads those that concern it."""

    columns: Sequence[str] = ()
    """columns of the texts and labels"""
    languages: Sequence[str] = ()
    """multilingual translators: the language pair of each file ("en-de", "en-fr")"""
    decode: DecodeConfig | None = None
    """translators: configuration of the search; None: that of the model"""
    bleu_tokenizer: BleuTokenizer = "auto"
    """translators: tokenizer of sacreBLEU"""
    alignments: str | Path | None = None
    """translators: file of gold word alignments (Pharaoh format); None: the third column of the data, if any"""
    layer: str | None = None
    """translators: cross-attention whose alignments are compared with the gold ones; None: the sharpest"""
    language: Literal["en", "de", "fr"] = "en"
    """question answering: language whose articles and punctuation are ignored"""
    allow_empty: bool = False
    """question answering: permits empty answers"""
    label: str = LABEL_COLUMN
    """images: column or array of the labels"""
    truncate: bool = False
    """cuts texts to the trained length"""
    quiet: bool = False
    """shows no progress on standard error"""


def evaluate(
    model: "str | Path | AnyPipeline",
    data: str | Path | Iterable[Any],
    *,
    compare: "str | Path | AnyPipeline | None" = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model (or a model folder) on test data, and return every metric that applies, by name.

    `data` names files, or is an iterable of rows as for `regard.train`.

    - A translator: BLEU (sacreBLEU), chrF, exact match, word error rate, loss and perplexity of the references; with
      gold word alignments also the alignment error rate. With several `languages`, "per_pair" has the metrics of each
      pair, the others are means.
    - A language model: loss, perplexity per word and bits per byte of plain text.
    - A text classifier: accuracy, F1, calibration error.
    - A question-answering model: exact match and F1 on a file in SQuAD's format.
    - A tagging model: accuracy of the tags and, if they are BIO tags, F1 of the entities, on a file in CoNLL format.
    - An image model: accuracy, or intersection over union of masks.

    "intervals" has the 95% confidence intervals of metrics that are sums over examples. With a model to `compare`,
    "comparison" has its value, the difference from it and the interval of the difference, by metric (paired bootstrap
    over the examples, Koehn 2004). `options` are those of `EvaluationOptions`, such as `columns`, `decode`, `truncate`
    and `quiet`.

    >>> evaluate("model", "test.tsv")["bleu"]  # doctest: +SKIP
    42.7
    """
    check_options(options, EvaluationOptions.__annotations__, "evaluate")
    if isinstance(model, str | Path):
        model = load(model)
    if isinstance(compare, str | Path):  # an error now, not after minutes
        compare = load(compare)
    settings = EvaluationOptions(**options)
    fields = {Translator: ("source", "target"), TextEncoder: ("text", "label")}.get(type(model), ("text",))
    with data_files(data, settings.columns or fields) as files:
        metrics = measure(model, files, settings)
        sums = metrics.pop(SUMS, {})
        if compare is not None:
            if not sums:
                raise RegardError(
                    "This model has no metric whose difference has an interval.",
                    "Compare translators on one language pair, or classifiers.",
                )
            others = measure(compare, files, settings).get(SUMS, {})
            metrics["comparison"] = {name: _compare(sums[name], others[name]) for name in sums if name in others}
    return {"data": [ROWS] if find_rows(data) is not None else files} | metrics


def _compare(metric: ExampleSums, other: ExampleSums) -> dict[str, float]:
    low, high = interval(metric.resampled - other.resampled)
    return {"other": other.value, "difference": metric.value - other.value, "low": low, "high": high}


def _sampled_metrics(sums: dict[str, ExampleSums]) -> dict[str, Any]:
    """The values and intervals of metrics; the sums over examples are for a comparison, and not returned to users."""
    intervals = {name: list(interval(metric.resampled)) for name, metric in sums.items()}
    return {name: metric.value for name, metric in sums.items()} | {"intervals": intervals, SUMS: sums}


@singledispatch
def measure(pipeline: Any, files: Sequence[str], options: EvaluationOptions) -> dict[str, Any]:
    """The metrics of a pipeline; each class of pipelines registers a function."""
    raise RegardError(f"Cannot evaluate {type(pipeline).__name__}.", "Pass what regard.load returns.")


@measure.register(TextEncoder)
@measure.register(ImageModel)
def measure_encoder(pipeline: Any, files: Sequence[str], options: EvaluationOptions) -> dict[str, Any]:
    return measure_head(pipeline.head, pipeline, files, options)


@singledispatch
def measure_head(head: Any, pipeline: Any, files: Sequence[str], options: EvaluationOptions) -> dict[str, Any]:
    """The metrics of an encoder or image model; each class of heads registers a function."""
    raise RegardError(
        f"A model with the head {pipeline.model.config.head} has no evaluation metric.",
        "Fine-tune it for a task first: regard train --from MODEL …",
    )


@measure.register
def measure_translator(translator: Translator, files: Sequence[str], options: EvaluationOptions) -> dict[str, Any]:
    """The metrics of a translator; of several language pairs, the means and the metrics of each pair."""
    languages = options.languages
    pairs = parse_language_pairs(languages, "languages")
    if not pairs:
        try:
            bound = translator.with_target()
        except RegardError:
            raise RegardError(
                f"The model is multilingual; the languages of {' '.join(files)} are unknown.",
                f"{describe_languages(translator.target_languages, 'into')} Pass languages, one pair per file: "
                "--languages en-de en-fr",
            ) from None
        return _evaluate_translator(bound, files, options)
    if len(set(pairs)) < len(pairs):
        raise RegardError(f"languages = {list(languages)}: a pair is listed twice.", "Evaluate one file per pair.")
    # A model that is not told the source language may be tested on any. An error now, not after minutes of translating.
    needs_source = language_tokens_of(translator).source is not None
    translators = [translator.with_target(pair.target, pair.source if needs_source else None) for pair in pairs]
    per_pair = {
        str(pair): _evaluate_translator(pair_translator, pair_files, options)
        for pair, pair_translator, pair_files in zip(pairs, translators, files_per_pair(files, pairs, "data"))
    }
    first = next(iter(per_pair.values()))
    if len(per_pair) == 1:
        return first
    for metrics in per_pair.values():
        del metrics[SUMS]
    means: dict[str, Any] = {
        name: fmean(metrics[name] for metrics in per_pair.values())
        for name, value in first.items()
        if type(value) is float and all(name in metrics for metrics in per_pair.values())
    }
    return {"sentences": sum(metrics["sentences"] for metrics in per_pair.values())} | means | {"per_pair": per_pair}


def _evaluate_translator(translator: Translator, files: Sequence[str], options: EvaluationOptions) -> dict[str, Any]:
    truncate, quiet, layer = options.truncate, options.quiet, options.layer
    # An unavailable tokenizer is an error now, not after minutes of translating.
    text_sums([], [], options.bleu_tokenizer)
    pairs, gold = _read_test_pairs(files, options.columns, options.alignments)
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    start = time.perf_counter()
    with show_progress("translating", silent=quiet) as on_progress:
        decode = options.decode or translator.decoding
        translations = translator.translate(sources, decode, truncate=truncate, progress=on_progress)
    seconds = time.perf_counter() - start
    sums, signature = text_sums([n_best[0].text for n_best in translations], references, options.bleu_tokenizer)
    metrics: dict[str, Any] = {"sentences": len(pairs), **_sampled_metrics(sums), "signature": signature}
    metrics["sentences_per_second"] = len(sources) / seconds
    if not translator.ensemble_members:
        metrics |= _reference_loss(translator, pairs, truncate, quiet)
    if gold is not None and (names := attention_names(translator, "cross")):
        if layer is None:
            layer = sharpest_layer(translator, pairs, truncate=truncate)
        elif layer not in names:
            raise RegardError(f"Unknown cross-attention {layer!r}.", f"Choose from: {', '.join(names)}.")
        links = align(translator, pairs, layer, truncate=truncate)
        metrics |= {
            "alignment_error_rate": 100 * alignment_error_rate(links, gold),
            "alignment_layer": layer,
        }
    return metrics


def _read_test_pairs(
    files: Sequence[str], columns: Sequence[str], alignments: str | Path | None
) -> tuple[list[TextPair], list[list[Link]] | None]:
    """Pairs that are not empty, and their gold alignments, if known. Of built-in data, the test part is read."""
    pairs, gold = read_aligned_pairs(built_in_part(files, "test") or files, columns)
    name = " ".join(files)
    if alignments is not None:
        gold = read_links(alignments)
        if len(gold) != len(pairs):
            raise RegardError(
                f"{alignments} has {len(gold)} lines, but {name} has {len(pairs)} pairs.",
                "Provide one line of links per pair.",
            )
        for number, (pair, links) in enumerate(zip(pairs, gold), 1):
            with errors_at_line(alignments, number):
                check_links(links, *pair)
    rows = [i for i, pair in enumerate(pairs) if any(text.strip() for text in pair)]
    if not rows:
        raise RegardError(f"{name}: all pairs are empty.", "Pass files with text.")
    if len(rows) < len(pairs):
        logger.warning("Empty pairs left out: %d.", len(pairs) - len(rows))
    return [pairs[i] for i in rows], None if gold is None else [gold[i] for i in rows]


def _reference_loss(translator: Translator, pairs: list[TextPair], truncate: bool, quiet: bool) -> dict[str, Any]:
    pairs = [pair for pair in pairs if pair[0].strip()]
    with show_progress("scoring", silent=quiet) as on_progress:
        scores = translator.score(pairs, truncate=truncate, progress=on_progress)
    if not scores:
        return {}
    loss = -sum(score.logprob for score in scores) / sum(score.tokens for score in scores)
    return {"loss": loss, "perplexity": math.exp(loss)}


@measure.register
def measure_generator(model: TextGenerator, files: Sequence[str], options: EvaluationOptions) -> dict[str, Any]:
    with show_progress("evaluating", silent=options.quiet) as on_progress:
        loss = model.evaluate(read_documents(files), progress=on_progress)
    return {
        "tokens": loss.tokens,
        "words": loss.words,
        "bytes": loss.bytes,
        "loss": loss.loss,
        "perplexity": math.exp(min(50.0, loss.loss)),
        "word_perplexity": loss.word_perplexity,
        "bits_per_byte": loss.bits_per_byte,
    }


@measure_head.register
def measure_text_labels(
    head: TextLabelHead, encoder: TextEncoder, files: Sequence[str], options: EvaluationOptions
) -> dict[str, Any]:
    if encoder.model.config.problem_type != "single_label":
        raise RegardError(
            f"Models with problem_type = {encoder.model.config.problem_type!r} cannot be evaluated: their outputs are "
            "not the probabilities of alternatives.",
            "Use regard classify, and compare its output.",
        )
    names, examples = encoder.model.config.labels, read_labeled_texts(files, options.columns)
    targets = np.array(label_ids(examples, names))  # an error for labels that the model does not have
    probabilities = []
    with show_progress("classifying", silent=options.quiet) as on_progress:
        for rows in _chunks(len(examples), on_progress):
            for result in encoder.classify([examples[i].texts for i in rows], truncate=options.truncate):
                probabilities.append([result.probabilities[name] for name in names])
    return {"texts": len(examples)} | _classification_metrics(np.array(probabilities), targets, names)


@measure_head.register
def measure_answers(
    head: AnswerHead, encoder: TextEncoder, files: Sequence[str], options: EvaluationOptions
) -> dict[str, Any]:
    questions = [question for file in files for question in read_squad(file)]
    questions = [dataclasses.replace(question, id=str(i)) for i, question in enumerate(questions)]  # ids may repeat
    unanswerable = sum(not question.answers for question in questions)
    if unanswerable and not options.allow_empty:
        logger.warning("Unanswerable questions: %d. Use --empty (allow_empty=True) for empty answers.", unanswerable)
    answers: dict[str, str] = {}
    with show_progress("answering", silent=options.quiet) as on_progress:
        for rows in _chunks(len(questions), on_progress):
            chunk = [questions[i] for i in rows]
            predicted = encoder.answer(chunk, empty=options.allow_empty)
            answers |= {question.id: answer for question, answer in zip(chunk, predicted)}
    exact, f1 = squad_scores(answers, questions, options.language)
    return {"questions": len(questions), "without_answer": unanswerable, "exact_match": exact, "f1": f1}


@measure_head.register
def measure_tags(
    head: TokenLabelHead, encoder: TextEncoder, files: Sequence[str], options: EvaluationOptions
) -> dict[str, Any]:
    names, texts = encoder.model.config.labels, read_tagged_texts(files, options.columns)
    words = len(check_tags(texts, names))
    predicted: list[list[str]] = []
    with show_progress("tagging", silent=options.quiet) as on_progress:
        for rows in _chunks(len(texts), on_progress):
            tagged = encoder.tag([texts[i].words for i in rows])
            predicted += [[word.tag for word in words] for words in tagged]
    scores = tag_scores(predicted, [text.tags for text in texts], names)
    metrics: dict[str, Any] = {"texts": len(texts), "words": words, "accuracy": scores.accuracy}
    if scores.entities is not None:
        entities = scores.entities
        metrics |= {"precision": entities.precision, "recall": entities.recall, "f1": entities.f1}
        metrics["per_class"] = {label: vars(label_scores) for label, label_scores in scores.labels.items()}
    return metrics


@measure_head.register
def measure_image_labels(
    head: ImageLabelHead, model: ImageModel, files: Sequence[str], options: EvaluationOptions
) -> dict[str, Any]:
    images = _read_test_images(model, files, options, "labels")
    start = time.perf_counter()
    targets = images.with_names(model.labels).labels
    with show_progress("classifying", silent=options.quiet) as on_progress:
        chunks = [model.probabilities(images.select(rows)) for rows in _chunks(len(images), on_progress)]
    metrics = _classification_metrics(np.concatenate(chunks), targets, model.labels)
    return _with_rate(metrics, len(images), start)


@measure_head.register
def measure_pixel_labels(
    head: PixelLabelHead, model: ImageModel, files: Sequence[str], options: EvaluationOptions
) -> dict[str, Any]:
    images = _read_test_images(model, files, options, "masks")
    start = time.perf_counter()
    return _with_rate(_segmentation_metrics(model, images, options.quiet), len(images), start)


def _read_test_images(
    model: ImageModel, files: Sequence[str], options: EvaluationOptions, annotations: Literal["labels", "masks"]
) -> ImageSet | RaggedImages:
    """Images of the size that the model takes, with labels or masks."""
    config = model.model.config
    common: dict[str, Any] = {"channels": config.channels, "label": options.label}
    images: ImageSet | RaggedImages
    with show_progress("reading", silent=options.quiet) as on_progress:
        if config.longest_side:
            images = read_ragged_images(
                files, patch=config.patch, longest=config.longest_side, progress=on_progress, **common
            )
        else:
            images = read_images(files, size=model.size, progress=on_progress, **common)
    check_annotations(images, annotations)
    return images


def _with_rate(metrics: dict[str, Any], images: int, start: float) -> dict[str, Any]:
    return {"images": images} | metrics | {"images_per_second": images / (time.perf_counter() - start)}


def _classification_metrics(
    probabilities: Float[np.ndarray, "M V"], targets: Int[np.ndarray, "M"], names: Sequence[str]
) -> dict[str, Any]:
    scores, real = label_scores(probabilities, targets), targets != IGNORE_INDEX
    per_class = class_scores(scores.counts)
    return {
        **_sampled_metrics({"accuracy": share(probabilities[real].argmax(1) == targets[real])}),
        **({"top_5": scores.top_5} if len(names) > 5 else {}),
        "macro_f1": float(np.mean([class_score.f1 for class_score in per_class])),
        "calibration_error": scores.calibration_error,
        "cross_entropy": scores.loss,
        "per_class": {name: dataclasses.asdict(class_score) for name, class_score in zip(names, per_class)},
        "labels": list(names),
        "confusion": scores.counts.tolist(),
    }


def _segmentation_metrics(model: ImageModel, images: ImageSet | RaggedImages, quiet: bool) -> dict[str, Any]:
    class_indices = np.full(256, IGNORE_INDEX, np.int64)  # by mask value
    class_indices[list(model.mask_values)] = np.arange(len(model.labels))
    for value in images.mask_values:
        if value != NO_LABEL and class_indices[value] == IGNORE_INDEX:
            known = ", ".join(map(str, model.mask_values[:10])) + (", …" if len(model.labels) > 10 else "")
            raise RegardError(
                f"The masks contain the value {value}, which is not a label of the model.",
                f"Use its labels ({known}), or {NO_LABEL} for unlabeled pixels.",
            )
    counts = np.zeros((len(model.labels), len(model.labels)), np.int64)
    with show_progress("segmenting", silent=quiet) as on_progress:
        for rows in _chunks(len(images), on_progress):
            for predicted, row in zip(model.segment(list(images.select(rows))), rows.tolist()):
                counts += confusion_counts(predicted, class_indices[images.mask(row)], len(model.labels))
    scores = mask_scores(counts)
    iou = {label: float(value) for label, value in zip(model.labels, scores.iou) if not np.isnan(value)}
    return {
        "mean_iou": scores.mean_iou,
        "iou": iou,
        "pixel_accuracy": scores.pixel_accuracy,
        "labels": list(model.labels),
        "confusion": counts.tolist(),
    }


def _chunks(count: int, on_progress: Callable[[int, int | None], None]) -> Iterator[Int[np.ndarray, "B"]]:
    """Row indices in chunks, with a progress update after each."""
    for start in range(0, count, CHUNK):
        yield np.arange(start, min(start + CHUNK, count))
        on_progress(min(start + CHUNK, count), count)
