"""Joint vocabularies, for formats in which encoder and decoder share one vocabulary and its embedding.

The joint vocabulary is the source vocabulary followed by the target vocabulary: the encoder gets ids of the first part,
the decoder gets and predicts ids of the second. A bias of the output layer excludes the first part, so probabilities
stay exact.
"""

import dataclasses
import json
from collections.abc import Mapping

import tokenizers
import torch
from tokenizers import Regex, decoders
from torch import Tensor

from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND, Tokenizer
from regard.errors import RegardError
from regard.models.transformer import TransformerConfig

# Prefix of the names of target tokens: the last private-use character of Unicode, which starts no other token that
# Regard's tokenizers produce.
TARGET_PREFIX = "\U0010fffd"
# Output bias of source tokens: their probability becomes exactly 0.
EXCLUDED_BIAS = -1e9


def join_tokenizers(source: Tokenizer, target: Tokenizer, offset: int) -> Tokenizer:
    """A tokenizer that encodes like `source`, and decodes ids from `offset` on like `target` decodes ids from 0 on.

    >>> source, target = (Tokenizer.train([text], "word") for text in ("the cat", "le chat noir"))
    >>> joint = join_tokenizers(source, target, offset=6)
    >>> joint.encode("the cat") == source.encode("the cat")
    True
    >>> joint.backend_tokenizer.decode([6 + i for i in target.encode("le chat noir")])
    'le chat noir'
    """
    if FOREIGN_KIND in (source.kind, target.kind):
        raise RegardError(
            "Source and target have different imported tokenizers; a Hugging Face folder has one tokenizer.",
            "Export to ctranslate2 or onnx.",
        )
    table, decoder = (json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (source, target))
    table["model"]["vocab"] |= {
        TARGET_PREFIX + name: offset + index for name, index in target.backend_tokenizer.get_vocab().items()
    }
    table["added_tokens"] += [
        {**token, "id": offset + token["id"], "content": TARGET_PREFIX + token["content"]}
        for token in decoder["added_tokens"]
    ]
    library = tokenizers.Tokenizer.from_str(json.dumps(table))
    library.decoder = decoders.Sequence(
        [decoders.Replace(Regex(f"^{TARGET_PREFIX}"), ""), target.backend_tokenizer.decoder]
    )
    return Tokenizer(library, FOREIGN_KIND)


def join_special(special: SpecialTokens, offset: int) -> SpecialTokens:
    """The special ids of a model with a joint vocabulary: those of the decoder are shifted by `offset`.

    >>> join_special(SpecialTokens(end=3), 100)  # doctest: +NORMALIZE_WHITESPACE
    SpecialTokens(pad=100, unk=1, sos=102, eos=103, mask=None, begin=None, end=3, forced=None, between=None,
    other_eos=(), after_end=None)
    """
    decoder_ids = {name: getattr(special, name) for name in ("pad", "sos", "eos", "forced")}
    shifted = {name: i + offset for name, i in decoder_ids.items() if i is not None}
    return dataclasses.replace(special, **shifted, other_eos=tuple(i + offset for i in special.other_eos))


def join_config(config: TransformerConfig) -> TransformerConfig:
    """The config of the same model with a joint vocabulary.

    >>> join_config(TransformerConfig(source_vocab=5, target_vocab=7)).source_vocab
    12
    """
    size = config.source_vocab + config.target_vocab
    return dataclasses.replace(config, source_vocab=size, target_vocab=size, shared_vocab=True, output_bias=True)


def join_weights(config: TransformerConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the same model with a joint vocabulary."""
    if config.positions == "relative":
        raise RegardError(
            "T5ForConditionalGeneration has one vocabulary for source and target; this model has two.",
            "Train with tokenizer.shared = true, or export to ctranslate2 or onnx.",
        )
    source, target = "source_embedding.tokens.weight", "target_embedding.tokens.weight"
    joined = dict(weights)
    excluded = torch.full((config.source_vocab,), EXCLUDED_BIAS)
    joined["output.bias"] = torch.cat((excluded, joined.get("output.bias", torch.zeros(config.target_vocab))))
    joined[source] = torch.cat((joined[source], joined.pop(target)))
    if not config.tied:
        output = joined["output.weight"]
        joined["output.weight"] = torch.cat((output.new_zeros(config.source_vocab, config.width), output))
    return joined
