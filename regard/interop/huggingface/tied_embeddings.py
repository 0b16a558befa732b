"""Output layers of encoder-decoders that are tied to an embedding: copies in a file."""

import torch

from regard.interop.foreign_config import ForeignConfig
from regard.interop.huggingface.single_stack import Weights

OUTPUT = "lm_head.weight"
# Saved without its output layer, which is tied to the embedding, and with shorter names.
BARE_CLASSES = {"BartModel": "BartForConditionalGeneration"}


def require_output(settings: ForeignConfig, tensors: Weights) -> None:
    """Raise an error if the output layer is missing, and is not the embedding."""
    has_head = settings.get("architectures") not in [[name] for name in BARE_CLASSES]
    if has_head and OUTPUT not in tensors and not settings.get_bool("tie_word_embeddings", True):
        raise settings.unsupported("tie_word_embeddings", f"{OUTPUT} is missing")


def drop_copy(tensors: Weights, copy: str, original: str) -> bool:
    """Remove `copy` if it equals `original`; whether it is absent now."""
    if copy in tensors and not (original in tensors and torch.equal(tensors[copy], tensors[original])):
        return False
    tensors.pop(copy, None)
    return True
