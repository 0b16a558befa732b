"""What relatives of BERT, GPT and ViT have in common: one stack of blocks, one table a class, a config both ways."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import Key, Settings, in_words
from regard.interop.weight_mapping import Table, read_model, shapes_of, write_weights

logger = logging.getLogger("regard")

Weights = dict[str, Tensor]

# Their names of what stands between the two maps of a feed-forward network, and ours; the first is the one we write.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
# The same where one map is the other's gate.
GATES = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
# The sizes of an encoder in the configs of BERT and ViT.
ENCODER_KEYS = [
    Key("width", "hidden_size", 768),
    Key("heads", "num_attention_heads", 12),
    Key("layers", "num_hidden_layers", 12),
    Key("feedforward", "intermediate_size", 3072),
    Key("dropout", "hidden_dropout_prob", 0.1),
    Key("norm_eps", "layer_norm_eps", 1e-12),
    Key("activation", "hidden_act", "gelu", ACTIVATIONS),
]


class Kind(NamedTuple):
    """A class of theirs: its names, what its config says in our words, and what ours says in its words.

    `write` may be given a config that the class cannot be: then reading what it wrote gives another one, which is how
    the difference is found.
    """

    table: Table
    read: Callable[[Settings], Any]
    write: Callable[[Any], dict[str, Any]]


def read_labels(settings: Settings) -> tuple[str, ...]:
    """The names of the labels of a classifier with one label per text or image.

    >>> read_labels(Settings({"id2label": {"0": "bad", "1": "good"}}, "config.json"))
    ('bad', 'good')
    """
    settings.must_be("problem_type", "single_label_classification")
    stated = settings.table.get("id2label")
    if stated is None:
        return tuple(f"LABEL_{i}" for i in range(settings.size("num_labels", 2)))
    try:
        return tuple(str(stated[str(i)]) for i in range(len(stated)))
    except (KeyError, TypeError):
        raise RegardError(
            f"{settings.origin}: id2label = {stated!r} should name the labels 0, 1, 2, …", "Fix the file."
        ) from None


def write_labels(labels: Sequence[str]) -> dict[str, Any]:
    """The names of the labels as their configs have them."""
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def read_one_stack(kind: Kind, settings: Settings, theirs: Mapping[str, Tensor]) -> tuple[Any, Weights]:
    """Our config, and the weights under our names."""
    pooler = any("pooler." in name for name in theirs)  # which many bare models lack
    config = kind.read(settings.over({"add_pooling_layer": pooler}))
    return config, read_model(config, kind.table, {"blocks": _blocks(config)}, theirs, settings.origin)


def write_one_stack(
    kinds: Mapping[str, Kind], config: Any, weights: Mapping[str, Tensor]
) -> tuple[str, dict[str, Any], Weights]:
    """The class that computes what a model of this config does, its config and its tensors; an error if none does."""
    differences = {name: _differences(kind, config) for name, kind in kinds.items()}
    name = min(differences, key=lambda one: len(differences[one]))
    if differences[name]:
        raise RegardError(
            f"No class of transformers computes what this model does; the nearest, {name}, differs in "
            f"{in_words(config, differences[name])}.",
            "Train with other choices to export there.",
        )
    kind = kinds[name]
    wanted = shapes_of(_there_and_back(kind, config))
    left = sorted(weights.keys() - wanted)
    if left:
        logger.warning("left out, for %s has no use for it: %s", name, ", ".join(left))
    kept = {ours: weights[ours] for ours in wanted}
    return name, kind.write(config), write_weights(kind.table, {"blocks": _blocks(config)}, kept)


def _blocks(config: Any) -> int:
    return getattr(config, "groups", 0) or config.layers


def _there_and_back(kind: Kind, config: Any) -> Any:
    return kind.read(Settings(kind.write(config), "config.json"))


def _differences(kind: Kind, config: Any) -> dict[str, tuple]:
    """The fields in which a config changes when it is written as theirs and read back, and what they become."""
    ours, back = _essence(config), _essence(_there_and_back(kind, config))
    return {field: (back[field],) for field in ours if ours[field] != back.get(field, ours[field])}


def _essence(config: Any) -> dict[str, Any]:
    """What a config says of the computation, with what is left to be understood filled in."""
    fields = dataclasses.asdict(config)
    del fields["dropout"]
    if "kv_heads" in fields:
        fields["kv_heads"] = config.kv_heads or config.heads
        fields["head_width"] = config.head_width or config.width // config.heads
    if fields["positions"] != "rotary":
        for field in ("rotary_base", "rotary_factor", "rotary_context"):
            fields.pop(field, None)
    elif fields.get("rotary_factor") == 1.0:
        fields["rotary_context"] = 0
    if "groups" in fields:
        fields["groups"] = config.groups or config.layers
        if config.head != "classify":
            del fields["labels"]
        if config.head in ("mask", "answer"):  # whose output does not pass through it
            del fields["pooler"]
    return fields
