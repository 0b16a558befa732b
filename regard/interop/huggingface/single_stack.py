"""Model classes with a single stack of blocks (BERT, GPT, ViT): configs and weights in both directions."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import RegardError
from regard.interop.foreign_config import ConfigKey, ForeignConfig, describe_unsupported, foreign_value
from regard.interop.huggingface.rope import layer_windows, rotary_fields
from regard.interop.weight_mapping import MappingTable, parameter_shapes, read_model_weights, write_weights
from regard.models.bert import TEXT_HEADS, BertConfig, ProblemType
from regard.models.gpt import GPTConfig

logger = logging.getLogger("regard")

Weights = dict[str, Tensor]

# Names of activations in configs of transformers, and in Regard; the first of several is written.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
# The same for gated feed-forward layers.
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
# Encoder sizes in the configs of BERT and ViT.
ENCODER_KEYS = [
    ConfigKey("width", "hidden_size", 768),
    ConfigKey("heads", "num_attention_heads", 12),
    ConfigKey("layers", "num_hidden_layers", 12),
    ConfigKey("feedforward", "intermediate_size", 3072),
    ConfigKey("dropout", "hidden_dropout_prob", 0.1),
    ConfigKey("norm_eps", "layer_norm_eps", 1e-12),
    ConfigKey("activation", "hidden_act", "gelu", ACTIVATIONS),
]


class ForeignClass(NamedTuple):
    """A model class of transformers: its mapping table, and functions that read and write its config.

    The table is a function of the config where conversions depend on its sizes.

    `write` accepts configs that the class does not support. Reading the result then gives a different config, and the
    difference is what the class does not support.
    """

    table: MappingTable | Callable[[Any], MappingTable]
    read: Callable[[ForeignConfig], Any]
    write: Callable[[Any], dict[str, Any]]

    def mapping_table(self, config: Any) -> MappingTable:
        return self.table if isinstance(self.table, MappingTable) else self.table(config)


# Kinds of classifiers, and their names in Regard.
PROBLEM_TYPES: dict[str, ProblemType] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
_IDENTITY = "torch.nn.modules.linear.Identity"


def read_problem_type(settings: ForeignConfig, labels: Sequence[str]) -> ProblemType:
    """What the outputs of a classifier are. Like transformers, a single label has a probability of its own.

    A cross-encoder of sentence-transformers names the activation of its output.

    >>> read_problem_type(ForeignConfig({}, "config.json"), ["LABEL_0"])
    'multi_label'
    """
    default = "multi_label_classification" if len(labels) == 1 else "single_label_classification"
    cross_encoder = settings.get("sentence_transformers", {})
    activation = cross_encoder.get("activation_fn") if isinstance(cross_encoder, Mapping) else None
    if len(labels) == 1 and settings.get("sbert_ce_default_activation_function", activation) == _IDENTITY:
        default = "regression"
    problem_type = settings.get_choice("problem_type", PROBLEM_TYPES, default)
    if problem_type == "single_label" and len(labels) == 1:
        raise settings.unsupported("problem_type", "there is only one label")
    return problem_type


def write_problem_type(problem_type: str, labels: Sequence[str]) -> dict[str, Any]:
    """The kind of a classifier as keys of a Hugging Face config."""
    if problem_type == "multi_label" and len(labels) == 1:
        return {}  # the default
    keys: dict[str, Any] = {"problem_type": foreign_value(PROBLEM_TYPES, problem_type)}
    if problem_type == "regression" and len(labels) == 1:
        keys["sentence_transformers"] = {"activation_fn": _IDENTITY}
    return keys


def read_labels(settings: ForeignConfig) -> tuple[str, ...]:
    """The label names of a classifier; equal ones, of which ImageNet has some, are numbered by their ids.

    >>> read_labels(ForeignConfig({"id2label": {"0": "crane", "1": "dog", "2": "crane"}}, "config.json"))
    ('crane', 'dog', 'crane (2)')
    """
    names = settings.table.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(settings.get_count("num_labels", 2)))
    try:
        labels = [str(names[str(i)]) for i in range(len(names))]
        return tuple(f"{label} ({i})" if label in labels[:i] else label for i, label in enumerate(labels))
    except (KeyError, TypeError):
        raise RegardError(
            f"{settings.origin}: id2label = {names!r}; expected names for the labels 0, 1, 2, …", "Fix the file."
        ) from None


def read_exclusive_labels(settings: ForeignConfig) -> tuple[str, ...]:
    """The label names of a classifier of which exactly one label applies; another kind is an error."""
    labels = read_labels(settings)
    if read_problem_type(settings, labels) != "single_label":
        key = "problem_type" if settings.get("problem_type") else "num_labels"
        raise settings.replace({"num_labels": len(labels)}).unsupported(
            key, "expected a classifier with two or more labels, of which one applies"
        )
    return labels


def write_labels(labels: Sequence[str]) -> dict[str, Any]:
    """The label names as keys of a Hugging Face config."""
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def read_single_stack(
    foreign_class: ForeignClass, settings: ForeignConfig, tensors: Mapping[str, Tensor]
) -> tuple[Any, Weights]:
    """Read the config and the weights of a model."""
    has_pooler = any("pooler." in name for name in tensors)  # many models without a head lack it
    config = foreign_class.read(settings.replace({"add_pooling_layer": has_pooler}))
    counts = {"blocks": _block_count(config)}
    return config, read_model_weights(config, foreign_class.mapping_table(config), counts, tensors, settings.origin)


def nearest_class(
    classes: Mapping[str, ForeignClass], config: Any, preferred: str = ""
) -> tuple[str, dict[str, tuple]]:
    """The class with the fewest unsupported fields, and those fields with the values that it supports.

    Classes with the head of the model come first. Of several that compute the same, `preferred` is chosen.
    """
    differences = {name: _differences(foreign_class, config) for name, foreign_class in classes.items()}
    name = min(
        differences,
        key=lambda candidate: ("head" in differences[candidate], len(differences[candidate]), candidate != preferred),
    )
    return name, differences[name]


def write_single_stack(
    classes: Mapping[str, ForeignClass], config: Any, weights: Mapping[str, Tensor], preferred: str = ""
) -> tuple[str, dict[str, Any], Weights]:
    """The class that computes the same as a model of this config, its config and its tensors; an error if none does."""
    name, differences = nearest_class(classes, config, preferred)
    if "head" in differences:
        raise RegardError(f"No class of transformers of this family has the head {config.head!r}.", "Export to onnx.")
    if differences:
        raise RegardError(
            f"No class of transformers computes what this model does; the nearest, {name}, does not support "
            f"{describe_unsupported(config, differences)}.",
            "Export to onnx, or train with --for huggingface.",
        )
    foreign_class = classes[name]
    expected = parameter_shapes(_round_trip(foreign_class, config))
    unused = sorted(weights.keys() - expected)
    if unused:
        logger.warning("left out, unused by %s: %s", name, ", ".join(unused))
    used = {key: weights[key] for key in expected}
    tensors = write_weights(foreign_class.mapping_table(config), {"blocks": _block_count(config)}, used)
    return name, foreign_class.write(config), tensors


def _block_count(config: Any) -> int:
    return getattr(config, "groups", 0) or config.layers


def _round_trip(foreign_class: ForeignClass, config: Any) -> Any:
    return foreign_class.read(ForeignConfig(foreign_class.write(config), "config.json"))


def _differences(foreign_class: ForeignClass, config: Any) -> dict[str, tuple]:
    """The fields that change in a round trip through the class, with their values after it."""
    before, after = _computation_fields(config), _computation_fields(_round_trip(foreign_class, config))
    return {field: (after[field],) for field in before if before[field] != after.get(field, before[field])}


@singledispatch
def complete_fields(config: Any, fields: dict[str, Any]) -> None:
    """Fill in implicit values of the fields of a family, and drop those without an effect."""


@complete_fields.register
def _complete_decoder_fields(config: GPTConfig, fields: dict[str, Any]) -> None:
    """Fill in implicit values of fields that differ among layers, and drop those without an effect."""
    if config.positions == "rotary":
        fields["unrotated_layers"] = tuple(sorted({i for i in config.unrotated_layers if i < config.layers}))
    if config.positions != "learned":
        del fields["position_offset"]
    fields["score_width"] = (config.score_width or fields["head_width"]) if config.score == "scaled_dot" else 0.0
    if not config.qk_norm:
        del fields["qk_norm_joint"]


@complete_fields.register
def _complete_encoder_fields(config: BertConfig, fields: dict[str, Any]) -> None:
    """Drop fields without an effect, given the others."""
    if config.relative == "none":
        del fields["relative_buckets"], fields["relative_distance"]
    if config.norm == "post":
        del fields["first_norm"]
    for name in TEXT_HEADS[config.head].unused_fields(config):
        del fields[name]
    fields["groups"] = config.groups or config.layers


def _computation_fields(config: Any) -> dict[str, Any]:
    """The fields that affect the computation, with implicit values filled in."""
    fields = dataclasses.asdict(config)
    del fields["dropout"]
    if "kv_heads" in fields:
        fields["kv_heads"] = config.kv_heads or config.heads
        fields["head_width"] = config.head_width or config.width // config.heads
    if fields["positions"] != "rotary":
        for field in rotary_fields(fields):
            del fields[field]
    elif fields.get("rotary_factor") == 1.0:
        fields |= {"rotary_context": 0, "rotary_scaling": "interpolate"}
    if "sliding_windows" in fields:
        fields["sliding_windows"] = windows = layer_windows(config)
        if fields["positions"] != "rotary" or not any(windows):
            fields["window_rotary_base"] = 0.0
        elif not config.window_rotary_base and fields.get("rotary_factor", 1.0) == 1.0:
            fields["window_rotary_base"] = config.rotary_base
    complete_fields(config, fields)
    return fields
