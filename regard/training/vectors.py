"""Pre-trained word vectors as initial embeddings."""

from typing import Any

import torch

from regard.data import Tokenizer, read_vectors
from regard.errors import RegardError
from regard.training.recipe import TrainConfig


@torch.no_grad()
def use_vectors(model: Any, config: TrainConfig, source: Tokenizer, target: Tokenizer) -> None:
    """Puts the vectors of the words that a vocabulary knows in the place of their random ones.

    The source is the only side of a model that has but one.
    """
    sides = [(config.source_vectors, source, getattr(model, "source_embedding", None) or model.embedding)]
    if hasattr(model, "target_embedding"):
        sides.append((config.target_vectors, target, model.target_embedding))
    for path, tokenizer, embedding in sides:
        if not path:
            continue
        vocabulary = tokenizer.vocabulary
        vectors = read_vectors(path, set(vocabulary))
        table = embedding.tokens.weight
        width = len(next(iter(vectors.values()))) if vectors else table.shape[1]
        if width != table.shape[1]:
            raise RegardError(
                f"{path}: its vectors are {width} wide, the model's embeddings {table.shape[1]}.",
                f"Set model.width to {width}.",
            )
        found = [i for i, word in enumerate(vocabulary) if i >= 4 and word in vectors]
        if not found:
            raise RegardError(
                f"{path}: none of its words is in the vocabulary.",
                "Use tokenizer.kind word, and vectors of that language.",
            )
        known = torch.stack([torch.as_tensor(vectors[vocabulary[i]], dtype=torch.float32) for i in found])
        # As large on average as the random ones they replace: the model's own scale stays right.
        known *= table[4:].norm(dim=1).mean() / known.norm(dim=1).mean()
        table[found] = known.to(table)
