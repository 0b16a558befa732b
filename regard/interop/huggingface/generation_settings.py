"""generation_config.json: its settings become the default options of decoding; chat templates."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.files import read_file
from regard.interop.tensor_files import read_json

logger = logging.getLogger("regard")

CHAT_TEMPLATE_FILE = "chat_template.jinja"
# Value of max_extra that leaves max_len as the only limit of the output.
_UNLIMITED = 1_000_000
# Settings with the same meaning in DecodeConfig.
_SAME = {
    "length_penalty": "length_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "min_new_tokens": "min_len",
}
# Other settings that are applied.
_CONVERTED = (
    *("do_sample", "num_beams", "early_stopping", "max_length", "max_new_tokens", "min_length"),
    *("suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
)
# Settings that change the output and are not supported, with the values that have no effect.
_UNSUPPORTED: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_p": None,
    "top_h": None,
    "exponential_decay_length_penalty": None,
    "renormalize_logits": False,
    "guidance_scale": 1.0,
    "stop_strings": None,
    "max_time": None,
    "watermarking_config": None,
    "dola_layers": None,
    "token_healing": False,
    "constraints": None,
    "force_words_ids": None,
    "forced_decoder_ids": None,
    "num_return_sequences": 1,
}


class GenerationSettings(NamedTuple):
    """Settings of generation as stored in a file, and as options of decoding."""

    stored: dict[str, Any]
    decoding: DecodeConfig


def read_generation_settings(
    table: Mapping[str, Any],
    special: SpecialTokens,
    vocab: int,
    origin: object,
    *,
    base: DecodeConfig,
    continues_source: bool,
) -> GenerationSettings:
    """The settings in a config, applied to the options `base`; one warning lists those that are not supported.

    `continues_source`: for language models, lengths include the prompt. A maximum length of 20, the default of
    transformers, is not applied.

    >>> table = {"num_beams": 4, "bad_words_ids": [[0], [7]]}
    >>> base = DecodeConfig()
    >>> stored, decoding = read_generation_settings(table, SpecialTokens(), 9, "x", base=base, continues_source=False)
    >>> decoding.beam, decoding.early_stopping, decoding.suppress_sequences
    (4, False, ((7,),))
    """
    known = (*_SAME, *_CONVERTED, *_UNSUPPORTED)
    stored = {key: table[key] for key in known if table.get(key) is not None and table[key] != []}
    refused = {key for key, harmless in _UNSUPPORTED.items() if key in stored and stored[key] != harmless}
    decoding = base

    def apply(key: str, **fields: Any) -> None:
        nonlocal decoding
        try:
            decoding = replace(decoding, **fields)
        except (RegardError, TypeError):
            refused.add(key)

    is_sampled, beams = stored.get("do_sample", False), stored.get("num_beams", 1)
    if type(beams) is int and beams > 1:
        apply("num_beams", method="beam", beam=beams)
        stopping = stored.get("early_stopping", False)
        if stopping == "never":
            apply("early_stopping", early_stopping=True, patience=math.inf)
        else:
            apply("early_stopping", early_stopping=stopping)
        refused |= {"do_sample"} if is_sampled else set()
    elif is_sampled is True:
        apply("do_sample", method="sample", top_k=50)
    elif "num_beams" in stored or ("do_sample" in stored and continues_source):
        apply("num_beams", method="greedy")
    for key, field in _SAME.items():
        if key in stored:
            apply(key, **{field: stored[key]})
    refused |= _apply_lengths(stored, special, continues_source, apply)
    sequences, unsupported = _suppressed(stored, special, vocab)
    apply("bad_words_ids", suppress_sequences=sequences)
    refused |= unsupported
    if stored.get("forced_bos_token_id") is not None and continues_source:
        refused.add("forced_bos_token_id")
    if stored.get("forced_eos_token_id") not in (None, special.eos):
        refused.add("forced_eos_token_id")
    if refused:
        listed = ", ".join(f"{key} = {stored[key]!r}" for key in stored if key in refused)
        logger.warning("%s: these settings of generation are not supported and are ignored: %s.", origin, listed)
    return GenerationSettings(stored, decoding)


def _apply_lengths(stored: Mapping[str, Any], special: SpecialTokens, continues_source: bool, apply: Any) -> set[str]:
    """Apply maximum and minimum lengths. transformers counts `<eos>` and, in max_length, prompt or `<sos>`."""
    forced_end = int(stored.get("forced_eos_token_id") == special.eos)
    maximum, minimum = stored.get("max_length", 20), stored.get("min_length", 0)
    if type(new := stored.get("max_new_tokens")) is int:
        apply("max_new_tokens", max_len=max(0, new - forced_end), max_extra=_UNLIMITED)
    elif type(maximum) is int and maximum != 20:
        if continues_source:
            apply("max_length", max_total_len=max(0, maximum - forced_end))
        else:
            apply("max_length", max_len=max(0, maximum - 1 - forced_end), max_extra=_UNLIMITED)
    if minimum and continues_source:
        return {"min_length"}
    if minimum and "min_new_tokens" not in stored:
        apply("min_length", min_len=minimum - 1 if type(minimum) is int else minimum)
    return set()


def _suppressed(
    stored: Mapping[str, Any], special: SpecialTokens, vocab: int
) -> tuple[tuple[tuple[int, ...], ...], set[str]]:
    """The token sequences that are never generated, and the settings among them that are not supported."""
    tokens, words = stored.get("suppress_tokens", []), stored.get("bad_words_ids", [])
    unsupported = set()
    if not _are_ids(tokens) or set(tokens) & set(special.ends):
        tokens, unsupported = [], {"suppress_tokens"}
    if not isinstance(words, Sequence) or not all(_are_ids(word) and word for word in words):
        words, unsupported = [], unsupported | {"bad_words_ids"}
    # <eos> alone is no bad word in transformers either; <pad> and <sos> are never generated anyway.
    excluded = {special.pad, special.sos, *special.ends}
    sequences = [(token,) for token in tokens] + [tuple(word) for word in words if word not in [[e] for e in excluded]]
    return tuple(sequence for sequence in dict.fromkeys(sequences) if max(sequence) < vocab), unsupported


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, Sequence) and all(type(index) is int and index >= 0 for index in ids)


def read_chat_template(folder: Path) -> Any:
    """The chat template of a folder, as text or as a list of named templates; None if there is none."""
    path = folder / CHAT_TEMPLATE_FILE
    if path.exists():
        return read_file(path).decode(errors="replace")
    for file in ("chat_template.json", "tokenizer_config.json"):
        if (template := read_json(folder / file).get("chat_template")) is not None:
            return template
    return None
