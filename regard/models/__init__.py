"""Model families: one file per family, with its config and named sizes, and the registry of families."""

from typing import Any, NamedTuple, Protocol

from regard.errors import RegardError
from regard.models.bert import TEXT_HEADS, Bert, BertConfig, TextHead
from regard.models.gpt import GPT, GPTConfig
from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vit import IMAGE_HEADS, ImageHead, ViT, ViTConfig
from regard.ranges import definition, format_value, register


class ModelConfig(Protocol):
    """Config of a model: a frozen dataclass with at least `width` and `max_len`; `check` raises an error if fields
    contradict each other.
    """

    @property
    def width(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    def check(self) -> None: ...


class Family(NamedTuple):
    """A model family: its config class, its model class, and the pipeline that runs its models.

    `pipeline` is "translator" (forward of source and target), "text_generator" or "text_encoder" (forward of one text),
    or "image_model" (forward of images).
    """

    config: type[Any]
    model: type[Any]
    pipeline: str


FAMILIES = {
    "transformer": Family(TransformerConfig, Transformer, "translator"),
    "seq2seq": Family(Seq2SeqConfig, Seq2Seq, "translator"),
    "gpt": Family(GPTConfig, GPT, "text_generator"),
    "bert": Family(BertConfig, Bert, "text_encoder"),
    "vit": Family(ViTConfig, ViT, "image_model"),
}
TranslationModel = Transformer | Seq2Seq


def register_family(name: str, config: type[Any], model: type[Any], *, pipeline: str) -> None:
    """Add a model family: recipes, training, model folders and commands then accept it by name.

    `config` is a frozen dataclass with defaults (see `ModelConfig`). `model` is a module that is built from a config
    and keeps it as `model.config`. `pipeline` is one of those listed in `Family`. A model class of the same module and
    name replaces the earlier one.

    >>> register_family("gpt", BertConfig, Bert, pipeline="text_encoder")
    Traceback (most recent call last):
    regard.errors.RegardError: The family 'gpt' is already registered, by regard.models.gpt.GPT. Choose another name.
    """
    known = sorted({family.pipeline for family in FAMILIES.values()})
    if pipeline not in known:
        raise RegardError(f"pipeline must be one of {', '.join(known)} (got {pipeline!r}).")
    register(FAMILIES, "family", name, Family(config, model, pipeline), lambda family: family.model)


def register_head(name: str, head: TextHead | ImageHead) -> None:
    """Add a task head of text encoders or Vision Transformers: their configs then accept it by name.

    `head` is an instance of a subclass of `TextHead` or `ImageHead`, or of the head that is most similar: evaluation,
    the server, the viewer and exports then treat it like that one, unless they register a function for its class.

    >>> register_head("classify", TextHead())
    Traceback (most recent call last):
    regard.errors.RegardError: The head 'classify' is already registered, by regard.models.bert.TextLabelHead. \
Choose another name.
    """
    registry: dict[str, Any] = TEXT_HEADS if isinstance(head, TextHead) else IMAGE_HEADS
    register(registry, "head", name, head, type)


def family_name(config: Any) -> str:
    """Name of the family that a config belongs to.

    >>> family_name(TransformerConfig())
    'transformer'
    """
    for name, family in FAMILIES.items():
        if definition(type(config)) == definition(family.config):
            return name
    raise RegardError(
        f"model must be the config of a registered model family (got {format_value(config)}).",
        "Register a new family with register_family.",
    )


def make_model(config: Any) -> Any:
    """Create a model with random parameters from its config."""
    return FAMILIES[family_name(config)].model(config)
