"""Settings of generation_config.json that choose how to decode: reported on import, kept for export."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.data.text.special_tokens import SpecialTokens
from regard.files import read_file
from regard.interop.tensor_files import read_json

logger = logging.getLogger("regard")

CHAT_TEMPLATE_FILE = "chat_template.jinja"
# Defaults of transformers for settings that change the output, and the option of Regard with the same effect, if any.
_SETTINGS: dict[str, tuple[Any, str]] = {
    "do_sample": (False, "--method sample"),
    "num_beams": (1, "--method beam --beam"),
    "length_penalty": (1.0, "--length-penalty"),
    "temperature": (1.0, "--temperature"),
    "top_k": (50, "--top-k"),
    "top_p": (1.0, "--top-p"),
    "max_new_tokens": (None, "--max-len"),
    "min_new_tokens": (None, "--min-len"),
    "max_length": (20, ""),
    "min_length": (0, ""),
    "repetition_penalty": (1.0, ""),
    "encoder_repetition_penalty": (1.0, ""),
    "no_repeat_ngram_size": (0, ""),
    "encoder_no_repeat_ngram_size": (0, ""),
    "bad_words_ids": (None, ""),
    "suppress_tokens": (None, ""),
    "begin_suppress_tokens": (None, ""),
    "sequence_bias": (None, ""),
    "early_stopping": (False, ""),
    "num_beam_groups": (1, ""),
    "diversity_penalty": (0.0, ""),
    "penalty_alpha": (None, ""),
    "typical_p": (1.0, ""),
    "epsilon_cutoff": (0.0, ""),
    "eta_cutoff": (0.0, ""),
    "min_p": (None, ""),
    "exponential_decay_length_penalty": (None, ""),
}


def read_generation_settings(table: Mapping[str, Any], special: SpecialTokens, origin: object) -> dict[str, Any]:
    """The settings in a config that differ from the defaults; one warning lists them, because none is applied.

    >>> read_generation_settings({"num_beams": 4, "top_k": 50, "bad_words_ids": [[0]]}, SpecialTokens(), "config.json")
    {'num_beams': 4}
    """
    settings = {
        key: table[key]
        for key, (default, _) in _SETTINGS.items()
        if table.get(key) is not None and table[key] != default and table[key] != []
    }
    # These are never generated anyway.
    if _single_tokens(settings.get("bad_words_ids")) <= {special.pad, special.sos}:
        settings.pop("bad_words_ids", None)
    options = [_format_option(_SETTINGS[key][1], value) for key, value in settings.items() if _SETTINGS[key][1]]
    others = [f"{key} = {value!r}" for key, value in settings.items() if not _SETTINGS[key][1]]
    parts = [f"pass {' '.join(options)} to decode as it says"] * bool(options)
    parts += [f"unsupported: {', '.join(others)}"] * bool(others)
    if parts:
        logger.warning("%s: its settings of generation are not applied (%s).", origin, "; ".join(parts))
    return settings


def read_chat_template(folder: Path) -> Any:
    """The chat template of a folder, as text or as a list of named templates; None if there is none."""
    path = folder / CHAT_TEMPLATE_FILE
    if path.exists():
        return read_file(path).decode(errors="replace")
    for file in ("chat_template.json", "tokenizer_config.json"):
        if (template := read_json(folder / file).get("chat_template")) is not None:
            return template
    return None


def _format_option(option: str, value: Any) -> str:
    return option if value is True else f"{option} {value}"


def _single_tokens(words: Any) -> set[Any]:
    """The tokens of a list of words of one token each; an impossible token for anything else."""
    if words is None:
        return set()
    if not isinstance(words, Sequence) or not all(isinstance(word, list) and len(word) == 1 for word in words):
        return {-1}
    return {word[0] if isinstance(word[0], int) else -1 for word in words}
