"""Outcomes: the output of a model for the input of a look, with the probabilities of its predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.models.bert import AnswerHead, MaskedTokenHead, TextHead, TextLabelHead, TokenLabelHead
from regard.models.vit import IMAGE_HEADS
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.viewer.image_look import ImageLook
from regard.viewer.text_look import Look

OutcomeKind = Literal["translation", "continuation", "labels", "answer", "mask", "embedding"]
# Alternatives listed per prediction, and for the next token of a language model.
TOP_K, NEXT_TOP_K = 5, 7
# Tokens that a language model generates.
CONTINUATION_TOKENS = 12
# Tokens of a text up to which every token is masked in turn (masked language models).
MAX_MASKED_TOKENS = 32
# Tokens of a text up to which each has its probability (language models).
MAX_INPUT_STEPS = 256
# Temperatures of the next-token distribution in a page.
TEMPERATURES = tuple(round(0.1 * i, 1) for i in range(1, 21))


class PredictionStep(NamedTuple):
    """A prediction: the token (or label), its probability, and the most likely alternatives."""

    token: str
    probability: float | None
    likeliest: dict[str, float]
    """by names that differ for tokens with the same text"""
    name: str = ""
    """of the token, among the alternatives"""


class NextToken(NamedTuple):
    """The distribution of the token after a text: the most likely tokens, each with the text that it appends.

    At temperature T, a token of log-probability l has the probability exp(l / T − n), where n is the `log_normalizers`
    entry of T: the logarithm of Σ exp(l / T) over the vocabulary.
    """

    tokens: list[str]
    texts: list[str]
    logprobs: list[float]
    log_normalizers: list[float]
    """one per entry of TEMPERATURES"""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The output of a model: a translation, a continuation, an answer or a label (empty for other encoders).

    `steps` are its predictions: the tokens of the translation or continuation; the label; for a masked language model,
    one per token of the text, predicted with this token masked. `logprob` is the log-probability of the translation or
    the continuation.
    """

    text: str
    logprob: float | None
    steps: list[PredictionStep] = field(repr=False)
    look: Look | ImageLook = field(repr=False)
    """the attention maps"""
    input_steps: list[PredictionStep] = field(default_factory=list, repr=False)
    """language models: the tokens of the text, from the second on; empty for long texts"""
    next_token: NextToken | None = field(default=None, repr=False)
    """language models: the distribution of the token after the text"""
    vector: Float[np.ndarray, "E"] | None = field(default=None, repr=False)
    """encoders without a head: the embedding of the text"""
    generated: list[int] = field(default_factory=list, repr=False)
    """language models: the ids of the continuation"""
    kind: OutcomeKind = "labels"


@torch.no_grad()
def compute_outcome(look: Look | ImageLook, pipeline: Any = None, generator: Any = None) -> Outcome:
    """The output of the model of a look, for the same input.

    `pipeline` is the model, by default that of the look; `generator` generates text in its place (see experiments.py).

    >>> compute_outcome(look(translator, "The cat sleeps.")).text  # doctest: +SKIP
    'Le chat dort.'
    """
    if isinstance(look, ImageLook):
        return label_outcome(look.probabilities, look) if look.probabilities else Outcome("", None, _areas(look), look)
    pipeline = pipeline or look.pipeline
    return text_outcome(pipeline, look, generator or pipeline)


def recorded_logits(look: Look) -> Float[Tensor, "rows V"]:
    """What the model returned for the input of a look."""
    if look.run is None:
        raise RegardError("This look has no recorded run: its output cannot be computed.", "Call regard.look again.")
    return look.run.output.float()


@singledispatch
def text_outcome(pipeline: Any, look: Look, generator: Any) -> Outcome:
    """The outcome of a text model; each class of pipelines registers a function."""
    raise RegardError(f"A look at {type(pipeline).__name__} has no outcome.", "Use a pipeline for text.")


@text_outcome.register
def translation_outcome(translator: Translator, look: Look, generator: Any) -> Outcome:
    targets = [*look.ids[1][1:], translator.special.eos]
    probabilities = recorded_logits(look).softmax(-1)
    steps = _steps(translator.target_tokenizer, probabilities, targets)
    return Outcome(look.translation, _logprob(probabilities, targets), steps, look, kind="translation")


@text_outcome.register
def continuation_outcome(language_model: TextGenerator, look: Look, generator: Any) -> Outcome:
    (ids,) = look.ids
    config = DecodeConfig(method="greedy", max_len=CONTINUATION_TOKENS)
    limit = language_model.length_limit
    added: list[int] = []
    text = ""
    if limit is None or len(ids) < limit:
        best = generator.generate([look.source], config, truncate=True)[0][0]
        text, added = best.text, list(best.hypothesis.ids)
    logits = recorded_logits(look)
    if len(added) > 1:  # those of the look predict the first one
        logits = language_model.model(language_model.pack([[*ids, *added]])).float()
    first = len(ids) - 1
    tokenizer = language_model.tokenizer
    probabilities = logits[first:].softmax(-1)
    steps = _steps(tokenizer, probabilities[: max(1, len(added))], added)
    input_steps = _steps(tokenizer, logits[:first].softmax(-1), ids[1:]) if first <= MAX_INPUT_STEPS else []
    following = _next_token(tokenizer, ids, logits[first].log_softmax(-1))
    logprob = _logprob(probabilities, added)
    return Outcome(text, logprob, steps, look, input_steps, following, generated=added, kind="continuation")


def _next_token(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Float[Tensor, "V"]) -> NextToken:
    best, indices = logprobs.topk(min(NEXT_TOP_K, len(logprobs)))
    context = list(ids[-8:])
    start = len(tokenizer.decode(context))
    texts = [text[start:] for text in tokenizer.decode_batch([[*context, i] for i in indices.tolist()])]
    tokens = list(tokenizer.distinct_names(indices.tolist()).values())
    normalizers = [float((logprobs.double() / one).logsumexp(0)) for one in TEMPERATURES]
    return NextToken(tokens, texts, best.tolist(), normalizers)


@text_outcome.register
def encoder_outcome(encoder: TextEncoder, look: Look, generator: Any) -> Outcome:
    return head_outcome(encoder.head, encoder, look)


@singledispatch
def head_outcome(head: TextHead, encoder: TextEncoder, look: Look) -> Outcome:
    """The outcome of an encoder, by default an embedding; each class of heads registers a function."""
    vector = encoder.embed([look.source], truncate=True)[0]
    return Outcome("", None, [], look, vector=vector, kind="embedding")


@head_outcome.register
def text_label_outcome(head: TextLabelHead, encoder: TextEncoder, look: Look) -> Outcome:
    scores = encoder.label_scores(recorded_logits(look))[0].tolist()
    return label_outcome(dict(zip(encoder.model.config.labels, scores)), look)


@head_outcome.register
def token_label_outcome(head: TokenLabelHead, encoder: TextEncoder, look: Look) -> Outcome:
    tagged = " ".join(f"{word.text}/{word.tag}" for word in encoder.tag(look.source))
    return Outcome(tagged, None, [], look, kind="answer")


@head_outcome.register
def answer_outcome(head: AnswerHead, encoder: TextEncoder, look: Look) -> Outcome:
    return Outcome(look.translation, None, [], look, kind="answer")


@head_outcome.register
def masked_token_outcome(head: MaskedTokenHead, encoder: TextEncoder, look: Look) -> Outcome:
    (ids,), logits = look.ids, recorded_logits(look)
    texts = masked_inputs(encoder, ids)
    if texts != [ids]:
        logits = encoder.model(encoder.pack(texts)).float()
        logits = logits.unflatten(0, (len(ids), len(ids))).diagonal().T
    return Outcome("", None, _steps(encoder.tokenizer, logits.softmax(-1), ids), look, kind="mask")


def masked_inputs(encoder: TextEncoder, ids: list[int]) -> list[list[int]]:
    """A text with each token masked in turn; the text itself if it is long or contains masked tokens."""
    mask = encoder.special.mask
    if mask is None or mask in ids or len(ids) > MAX_MASKED_TOKENS:
        return [ids]
    return [[*ids[:i], mask, *ids[i + 1 :]] for i in range(len(ids))]


def label_outcome(probabilities: Mapping[str, float], look: Look | ImageLook) -> Outcome:
    """The outcome of a classifier."""
    best = dict(sorted(probabilities.items(), key=lambda one: -one[1])[:TOP_K])
    if not best:
        return Outcome("", None, [], look)
    label, probability = next(iter(best.items()))
    return Outcome(label, None, [PredictionStep(label, probability, best, label)], look)


def _areas(look: ImageLook) -> list[PredictionStep]:
    """For a segmenter: the fraction of pixels per label."""
    labels, output = look.run.model.config.labels, look.run.output
    if not IMAGE_HEADS[look.run.model.config.head].is_per_pixel or not isinstance(output, Tensor):
        return []
    shares = torch.bincount(output[0].argmax(0).flatten(), minlength=len(labels)) / output[0, 0].numel()
    best, indices = shares.topk(min(TOP_K, len(labels)))
    return [PredictionStep("pixels", None, {labels[i]: share for i, share in zip(indices.tolist(), best.tolist())})]


def _logprob(probabilities: Float[Tensor, "T V"], targets: Sequence[int]) -> float:
    return float(probabilities.double()[range(len(targets)), list(targets)].log().sum())


def _steps(tokenizer: Tokenizer, probabilities: Float[Tensor, "T V"], targets: Sequence[int]) -> list[PredictionStep]:
    """One step per row; rows beyond the last target have no token."""
    steps = []
    best, indices = probabilities.topk(min(TOP_K, probabilities.shape[1]))
    for i, (top_probabilities, ids) in enumerate(zip(best.tolist(), indices.tolist())):
        target = targets[i] if i < len(targets) else None
        names = tokenizer.distinct_names([*ids, *([] if target is None else [target])])
        likeliest = {names[token_id]: probability for token_id, probability in zip(ids, top_probabilities)}
        if target is None:
            steps.append(PredictionStep("", None, likeliest))
        else:
            text = tokenizer.decode([target]) or tokenizer.label(target)
            steps.append(PredictionStep(text, float(probabilities[i, target]), likeliest, names[target]))
    return steps


def outcome_header(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON for the page, without attention maps."""
    following = outcome.next_token
    return {
        "text": outcome.text,
        "logprob": outcome.logprob,
        "steps": [_step_header(step) for step in outcome.steps],
        "input_steps": [_step_header(step) for step in outcome.input_steps],
        "next_token": None if following is None else {**following._asdict(), "temperatures": list(TEMPERATURES)},
    }


def _step_header(step: PredictionStep) -> dict[str, Any]:
    return {
        "token": step.token,
        "name": step.name,
        "probability": step.probability,
        "likeliest": [[token, probability] for token, probability in step.likeliest.items()],
    }


def output_header(outcome: Outcome) -> dict[str, Any]:
    """The output of the model on the first screen of a page: its kind and its predictions."""
    return {"kind": outcome.kind, **outcome_header(outcome), "input_steps": []}
