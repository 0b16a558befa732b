"""The families of models: one file each, its frozen config and its named sizes beside it."""

from typing import Any, NamedTuple

from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig


class Family(NamedTuple):
    config: type[Any]
    model: type[Any]


FAMILIES = {
    "transformer": Family(TransformerConfig, Transformer),
    "seq2seq": Family(Seq2SeqConfig, Seq2Seq),
}
ModelConfig = TransformerConfig | Seq2SeqConfig
TranslationModel = Transformer | Seq2Seq


def family_of(config: ModelConfig) -> str:
    """The name under which a config's family is listed.

    >>> family_of(TransformerConfig())
    'transformer'
    """
    return next(name for name, family in FAMILIES.items() if isinstance(config, family.config))


def make_model(config: ModelConfig) -> TranslationModel:
    """A model of fresh weights from its config."""
    return FAMILIES[family_of(config)].model(config)
