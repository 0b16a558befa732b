"""The output that is explained: the predictions of a look, and the inputs from which the model makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.models.bert import MaskedTokenHead, TextHead, TextLabelHead
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.viewer.image_look import ImageLook
from regard.viewer.model_run import ModelRun
from regard.viewer.outcomes import Outcome, compute_outcome, masked_inputs
from regard.viewer.text_look import Look

# Logits of a batch: its number of tokens is limited accordingly.
MAX_BATCH_LOGITS, MAX_BATCH_TOKENS = 1 << 25, 8192


class ExplainedStep(NamedTuple):
    """A prediction: the index of its input, the row of the logits, and the id of the token or label."""

    sequence: int
    row: int
    column: int


@dataclass(frozen=True)
class ExplainedOutput:
    """The predictions of an output.

    A translation is predicted from the source and the target before each token (teacher forcing), a continuation from
    the text before each token. A masked language model predicts the most likely token at each masked position; of a
    text without masked tokens, every token with this token masked. A classifier predicts the most likely label.
    """

    inputs: list[tuple[list[int], ...]]
    """ids of each input: source and target, or a text; of an image, an empty tuple"""
    steps: list[ExplainedStep]
    tokens: list[str]
    """the token or label of each step"""


def explain_output(look: Look | ImageLook, outcome: Outcome | None = None) -> ExplainedOutput:
    """The explained output of a look; raises an error for a model without predictions, such as an embedder.

    >>> explain_output(look(translator, "The cat sleeps.")).tokens  # doctest: +SKIP
    ['le', 'chat', 'dort', '.', '<eos>']
    """
    if isinstance(look, ImageLook):
        if look.label is None:
            raise _nothing_to_explain(look.run.model.config.head)
        return ExplainedOutput([()], [ExplainedStep(0, 0, look.label_index(look.label))], [look.label])
    if look.pipeline is None:
        raise RegardError("This look has no model.", "Create it with regard.look.")
    return explain_text(look.pipeline, look, outcome or compute_outcome(look))


@singledispatch
def explain_text(pipeline: Any, look: Look, outcome: Outcome) -> ExplainedOutput:
    """The explained output of a text model; each class of pipelines registers a function."""
    raise _nothing_to_explain(getattr(pipeline.model.config, "head", "none"))


@explain_text.register
def explain_translation(translator: Translator, look: Look, outcome: Outcome) -> ExplainedOutput:
    source, target = look.ids
    columns = [*target[1:], translator.special.eos]
    return ExplainedOutput([(source, target)], _steps(0, 0, columns), [step.token for step in outcome.steps])


@explain_text.register
def explain_continuation(generator: TextGenerator, look: Look, outcome: Outcome) -> ExplainedOutput:
    (ids,) = look.ids
    added = outcome.generated
    if added:
        tokens = [step.token for step in outcome.steps]
        return ExplainedOutput([([*ids, *added[:-1]],)], _steps(0, len(ids) - 1, added), tokens)
    best = _best_columns(look, ids)[-1]
    return ExplainedOutput([(ids,)], _steps(0, len(ids) - 1, [best]), [column_name(look, best)])


@explain_text.register
def explain_encoder(encoder: TextEncoder, look: Look, outcome: Outcome) -> ExplainedOutput:
    return explain_head(encoder.head, encoder, look, outcome)


@singledispatch
def explain_head(head: TextHead, encoder: TextEncoder, look: Look, outcome: Outcome) -> ExplainedOutput:
    """The explained output of an encoder; each class of heads that predicts tokens or a label registers a function."""
    raise _nothing_to_explain(encoder.model.config.head)


@explain_head.register
def explain_label(head: TextLabelHead, encoder: TextEncoder, look: Look, outcome: Outcome) -> ExplainedOutput:
    best = encoder.model.config.labels.index(outcome.text)
    return ExplainedOutput([(look.ids[0],)], [ExplainedStep(0, 0, best)], [outcome.text])


@explain_head.register
def explain_masked_tokens(head: MaskedTokenHead, encoder: TextEncoder, look: Look, outcome: Outcome) -> ExplainedOutput:
    (ids,) = look.ids
    texts = masked_inputs(encoder, ids)
    if texts != [ids]:
        steps = [ExplainedStep(i, i, column) for i, column in enumerate(ids)]
        return ExplainedOutput([(text,) for text in texts], steps, [step.token for step in outcome.steps])
    masked = [i for i, token in enumerate(ids) if token == encoder.special.mask] or list(range(len(ids)))
    best_ids = _best_columns(look, ids)
    steps = [ExplainedStep(0, i, best_ids[i]) for i in masked]
    return ExplainedOutput([(ids,)], steps, [column_name(look, step.column) for step in steps])


def _steps(sequence: int, first_row: int, columns: Sequence[int]) -> list[ExplainedStep]:
    return [ExplainedStep(sequence, first_row + i, column) for i, column in enumerate(columns)]


def _nothing_to_explain(head: str) -> RegardError:
    return RegardError(
        f"A model with the head {head} predicts no tokens and no single label: there is no output to explain.",
        "Use a translator, a language model, a masked language model or a classifier.",
    )


def column_name(look: Look | ImageLook, column: int) -> str:
    """The label, or the text of the token, of a column of the logits."""
    return column_names(look, [column])[column]


def column_names(look: Look | ImageLook, columns: Sequence[int]) -> dict[int, str]:
    """Names of columns of the logits that tell them apart: see `Tokenizer.distinct_names`."""
    if labels := getattr(model_of(look).config, "labels", ()):
        return {column: labels[column] for column in columns}
    assert isinstance(look, Look)
    return look.pipeline.tokenizers[-1].distinct_names(columns)


@torch.no_grad()
def _best_columns(look: Look, ids: list[int]) -> list[int]:
    """The most likely token of each row."""
    return plain_logits(look, [(ids,)])[0].argmax(-1).tolist()


def model_of(look: Look | ImageLook) -> Any:
    """The model of a look."""
    return look.model if isinstance(look, ImageLook) else look.pipeline.model


def model_inputs(look: Look | ImageLook, inputs: Sequence[tuple[list[int], ...]]) -> list[Any]:
    """The arguments of the model's forward for a batch of inputs."""
    if isinstance(look, ImageLook):
        assert isinstance(look.run.images, Tensor)
        return [look.run.images.expand(len(inputs), -1, -1, -1)]
    return [look.pipeline.pack(list(side)) for side in zip(*inputs)]


def split_logits(
    look: Look | ImageLook, inputs: Sequence[tuple[list[int], ...]], logits: Float[Tensor, "rows V"]
) -> list[Float[Tensor, "_ V"]]:
    """The logits of each input: one row per token, or a single row of labels."""
    return list(logits.float().split([1 if has_label_row(look) else len(tokens[-1]) for tokens in inputs]))


def has_label_row(look: Look | ImageLook) -> bool:
    """Whether the logits have a single row of labels, not one row per token."""
    return isinstance(look, ImageLook) or (look.pipeline.head is not None and look.pipeline.head.is_per_text)


def recorded_run(look: Look | ImageLook, inputs: Sequence[tuple[list[int], ...]]) -> ModelRun | None:
    """The run of the look, if these inputs are its own."""
    if isinstance(look, ImageLook):
        return look.run.model_run if len(inputs) == 1 else None
    is_own = list(inputs) == [tuple(look.ids)] and look.segments is None
    return look.run if is_own else None


def plain_logits(look: Look | ImageLook, inputs: Sequence[tuple[list[int], ...]]) -> list[Float[Tensor, "_ V"]]:
    """The logits of the unchanged model for a batch of inputs, from the run of the look if they are its own."""
    run = recorded_run(look, inputs)
    if run is None:
        return run_inputs(look, inputs)
    return split_logits(look, inputs, run.output[1] if isinstance(look, ImageLook) else run.output)


def run_inputs(look: Look | ImageLook, inputs: Sequence[tuple[list[int], ...]]) -> list[Float[Tensor, "_ V"]]:
    """The logits of the model for a batch of inputs."""
    model = model_of(look).eval()
    return split_logits(look, inputs, model(*model_inputs(look, inputs)))


def step_logprob(look: Look | ImageLook, logits: Float[Tensor, "_ V"], step: ExplainedStep) -> Float[Tensor, ""]:
    """Log-probability of a prediction; of a regression, its value."""
    row = logits[step.row]
    match getattr(model_of(look).config, "problem_type", "single_label"):
        case "multi_label":
            return nn.functional.logsigmoid(row[step.column])
        case "regression":
            return row[step.column]
    return row.log_softmax(-1)[step.column]


def batch_size(look: Look | ImageLook, output: ExplainedOutput) -> int:
    """Number of inputs per batch, limited by memory."""
    config = model_of(look).config
    vocab = getattr(config, "target_vocab", 0) or getattr(config, "vocab", 0) or 1
    longest = max(sum(map(len, tokens)) for tokens in output.inputs) or config.max_len
    return max(1, min(MAX_BATCH_LOGITS // vocab, MAX_BATCH_TOKENS) // longest)
