"""Model families. Each module holds a model, its frozen config and its named sizes."""

from typing import Any, NamedTuple

from regard.models.bert import Bert, BertConfig
from regard.models.gpt import GPT, GPTConfig
from regard.models.seq2seq import Seq2Seq, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vit import ViT, ViTConfig


class Family(NamedTuple):
    config: type[Any]
    model: type[Any]


FAMILIES = {
    "transformer": Family(TransformerConfig, Transformer),
    "seq2seq": Family(Seq2SeqConfig, Seq2Seq),
    "gpt": Family(GPTConfig, GPT),
    "bert": Family(BertConfig, Bert),
    "vit": Family(ViTConfig, ViT),
}
ModelConfig = TransformerConfig | Seq2SeqConfig | GPTConfig | BertConfig | ViTConfig
TranslationModel = Transformer | Seq2Seq
Model = Transformer | Seq2Seq | GPT | Bert | ViT


def family_name(config: ModelConfig) -> str:
    """The name of a config's family in FAMILIES.

    >>> family_name(TransformerConfig())
    'transformer'
    """
    return next(name for name, family in FAMILIES.items() if isinstance(config, family.config))


def make_model(config: ModelConfig) -> Any:
    """Build a model with initialized weights from its config."""
    return FAMILIES[family_name(config)].model(config)
