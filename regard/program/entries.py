"""The calls of each model family that become programs: `forward` for looking and scoring, and the parts of decoding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.packed import Padded
from regard.models import GPT, Bert, Seq2Seq, Transformer, ViT
from regard.program.capture import capture
from regard.program.program import Program, program_of


class Entry(NamedTuple):
    """A call of a model: example inputs by their names, and the names of sizes that vary, axis by axis."""

    call: Callable[..., Any]
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, Sequence[str | None]]


def forward_entry(model: nn.Module, image: Tensor | None = None) -> Entry:
    """`forward` of one example: ids (1, S) of source and target, or of a text; or an image of one size.

    Sizes bear the names of the inputs.
    """
    device = next(model.parameters()).device
    # Lengths that differ from each other and from 1.
    tokens = [torch.zeros(1, length, dtype=torch.long, device=device) for length in (5, 7)]
    match model:
        case Transformer() | Seq2Seq():
            sizes = {name: (None, name) for name in ("source", "target")}
            return Entry(_forward_pair, dict(zip(sizes, tokens)), sizes)
        case GPT() | Bert():
            return Entry(_forward_text, {"text": tokens[0]}, {"text": (None, "text")})
        case ViT() if image is not None:
            return Entry(_forward_image, {"image": image}, {})
    raise RegardError(f"There is no program of a {type(model).__name__}.", "Use a model of one of Regard's families.")


def _forward_pair(model: Any, source: Tensor, target: Tensor) -> Tensor:
    return model(Padded(source), Padded(target))


def _forward_text(model: Any, text: Tensor) -> Tensor:
    return model(Padded(text))


def _forward_image(model: Any, image: Tensor) -> Tensor:
    return model(image)


_programs: WeakKeyDictionary[nn.Module, dict[Any, Program]] = WeakKeyDictionary()


def forward_program(model: nn.Module, image: Tensor | None = None) -> Program:
    """The program of a model's `forward`, captured once per model (of images: once per size).

    >>> from regard.models.gpt import GPTConfig
    >>> model = GPT(GPTConfig(width=8, heads=2, layers=1, feedforward=16, vocab=11))
    >>> program = forward_program(model)
    >>> program.inputs, program.outputs, program is forward_program(model)
    (('text',), ('linear_6',), True)
    """
    kept = _programs.setdefault(model, {})
    key = None if image is None else tuple(image.shape)
    if key not in kept:
        kept[key] = program_of(capture(model, *forward_entry(model, image)))
    return kept[key]
