"""Vocabulary shortlists of translators: learning from sentence pairs, and the file shortlist.safetensors."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as arrays_to_bytes

from regard.data.text.ibm_model1 import learn_translation_table
from regard.decode import Shortlist
from regard.errors import RegardError
from regard.files import write_atomically

SHORTLIST_FILE = "shortlist.safetensors"
# Pairs that are tokenized at once.
_BLOCK = 4096


def learn_shortlist(
    translator: Any,
    pairs: Iterable[tuple[str, str]],
    per_token: int,
    frequent: int,
    iterations: int,
    progress: Callable[[int, int], None] | None,
) -> Shortlist:
    """The shortlist of a translator: see `Translator.learn_shortlist`."""
    for name, value, least in (("per_token", per_token, 1), ("frequent", frequent, 0), ("iterations", iterations, 1)):
        if value < least:
            raise RegardError(f"{name} must be at least {least} (got {value}).", f"Raise {name}.")
    lines = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    if not lines:
        raise RegardError("There are no pairs with text to learn a shortlist from.", "Pass the training data.")
    special, config, longest = translator.special, translator.model.config, translator.trained_length
    encoded: list[tuple[list[int], list[int]]] = []
    for start in range(0, len(lines), _BLOCK):
        sides = zip(*lines[start : start + _BLOCK])
        sources, targets = (
            tokenizer.encode_batch(side) for tokenizer, side in zip(translator.tokenizers, sides, strict=True)
        )
        # The special tokens of a source take the part of the empty word of IBM Model 1.
        encoded += [
            (special.add_special_tokens(source[:longest]), target[:longest]) for source, target in zip(sources, targets)
        ]
    table = learn_translation_table(encoded, config.target_vocab, iterations=iterations, progress=progress)
    best = table.best_targets(config.source_vocab, per_token)
    if translator.source_tokenizer is translator.target_tokenizer:  # names and numbers are copied
        best = np.concatenate((best, np.arange(config.source_vocab, dtype=np.int32)[:, None]), axis=1)
    counts = np.bincount([token for _, target in encoded for token in target], minlength=config.target_vocab)
    order = np.argsort(-counts, kind="stable")[:frequent]
    return Shortlist(best, np.sort(order[counts[order] > 0]).astype(np.int32), config.target_vocab)


def write_shortlist(folder: Path, shortlist: Shortlist) -> None:
    """Write the shortlist of a model folder."""
    write_atomically(folder / SHORTLIST_FILE, _to_bytes(shortlist))


def shortlist_fingerprint(shortlist: Shortlist) -> str:
    """A hash of the shortlist."""
    return hashlib.sha256(_to_bytes(shortlist)).hexdigest()[:16]


def _to_bytes(shortlist: Shortlist) -> bytes:
    return arrays_to_bytes({"targets": shortlist.targets, "frequent": shortlist.frequent})


def read_shortlist(folder: Path, source_vocab: int, target_vocab: int) -> Shortlist | None:
    """The shortlist of a model folder, checked against the sizes of its vocabularies; None if there is none."""
    path = folder / SHORTLIST_FILE
    if not path.exists():
        return None
    try:
        arrays = load_file(path, backend="pread")
    except (SafetensorError, OSError, ValueError) as error:
        raise _invalid(path, f"the file is damaged ({error})") from None
    for name in ("targets", "frequent"):
        if name not in arrays:
            raise _invalid(path, f"{name} is missing")
        array, axes = arrays[name], {"targets": 2, "frequent": 1}[name]
        if array.dtype != np.int32 or array.ndim != axes:
            raise _invalid(path, f"{name} must be int32 with {axes} axes (got {array.dtype} of shape {array.shape})")
        if array.size and not (array.min() >= -1 and array.max() < target_vocab):
            wrong = array[(array < -1) | (array >= target_vocab)].flat[0]
            raise _invalid(path, f"{name} contains the token {wrong}, but the target vocabulary has {target_vocab}")
    if len(arrays["targets"]) != source_vocab:
        rows = len(arrays["targets"])
        raise _invalid(path, f"targets has {rows} rows, but the source vocabulary has {source_vocab} tokens")
    return Shortlist(arrays["targets"], arrays["frequent"], target_vocab)


def _invalid(path: Path, detail: str) -> RegardError:
    return RegardError(f"{path}: {detail}.", "Delete the file, or learn it again: regard shortlist MODEL --data …")
