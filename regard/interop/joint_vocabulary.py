"""Two vocabularies as one: for formats in which both sides of a model share a vocabulary and its embedding.

The joint vocabulary is the source's followed by the target's: the encoder reads ids of the first part, the decoder
reads and writes ids of the second. A bias of the output layer excludes the first part, so probabilities stay exact.
"""

import dataclasses
import json
from collections.abc import Mapping

import tokenizers
import torch
from tokenizers import Regex, decoders
from torch import Tensor

from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import FOREIGN, Tokenizer
from regard.errors import RegardError
from regard.models.transformer import TransformerConfig

# Begins the names of the target's tokens: the last private-use character of Unicode, which no tokenizer of ours puts
# before other characters of a token.
MARK = "\U0010fffd"
# Added to the logits of source tokens: their probability becomes exactly 0.
EXCLUDED = -1e9


def join_tokenizers(source: Tokenizer, target: Tokenizer, offset: int) -> Tokenizer:
    """A tokenizer that encodes as `source` does and decodes ids from `offset` on as `target` decodes ids from 0 on.

    >>> source, target = (Tokenizer.train([text], "word") for text in ("the cat", "le chat noir"))
    >>> joint = join_tokenizers(source, target, offset=6)
    >>> joint.encode("the cat") == source.encode("the cat")
    True
    >>> joint.library.decode([6 + i for i in target.encode("le chat noir")])
    'le chat noir'
    """
    if FOREIGN in (source.kind, target.kind):
        raise RegardError(
            "The source and the target have different imported tokenizers, and the exported folder has one tokenizer.",
            "Export to ctranslate2 or onnx.",
        )
    table, decoder = (json.loads(one.library.to_str()) for one in (source, target))
    table["model"]["vocab"] |= {MARK + name: offset + index for name, index in target.library.get_vocab().items()}
    table["added_tokens"] += [
        {**token, "id": offset + token["id"], "content": MARK + token["content"]} for token in decoder["added_tokens"]
    ]
    library = tokenizers.Tokenizer.from_str(json.dumps(table))
    library.decoder = decoders.Sequence([decoders.Replace(Regex(f"^{MARK}"), ""), target.library.decoder])
    return Tokenizer(library, FOREIGN)


def join_special(special: Special, offset: int) -> Special:
    """The special ids of a model with joint vocabularies: those of the decoder move up by `offset`.

    >>> join_special(Special(end=3), 100)
    Special(pad=100, unk=1, sos=102, eos=103, mask=None, begin=None, end=3, forced=None, between=None)
    """
    moved = {name: getattr(special, name) for name in ("pad", "sos", "eos", "forced")}
    return dataclasses.replace(special, **{name: i + offset for name, i in moved.items() if i is not None})


def join_config(config: TransformerConfig) -> TransformerConfig:
    """The config of the same model with joint vocabularies.

    >>> join_config(TransformerConfig(source_vocab=5, target_vocab=7)).source_vocab
    12
    """
    size = config.source_vocab + config.target_vocab
    return dataclasses.replace(config, source_vocab=size, target_vocab=size, shared_vocab=True, output_bias=True)


def join_weights(config: TransformerConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the same model with joint vocabularies."""
    if config.positions == "relative":
        raise RegardError(
            "T5ForConditionalGeneration has one vocabulary for both sides, and this model has two.",
            "Train with tokenizer.shared = true, or export to ctranslate2 or onnx.",
        )
    source, target = "source_embedding.tokens.weight", "target_embedding.tokens.weight"
    joined = dict(weights)
    excluded = torch.full((config.source_vocab,), EXCLUDED)
    joined["output.bias"] = torch.cat((excluded, joined.get("output.bias", torch.zeros(config.target_vocab))))
    joined[source] = torch.cat((joined[source], joined.pop(target)))
    if not config.tied:
        output = joined["output.weight"]
        joined["output.weight"] = torch.cat((output.new_zeros(config.source_vocab, config.width), output))
    return joined
