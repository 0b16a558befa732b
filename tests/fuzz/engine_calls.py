"""The fuzz target `engine`: calls of the decoding engine with any options, and sources of 0 to 20,000 tokens.

An input is a JSON table: `family`, `lengths` of the sources and `prefixes` (numbers of tokens), `config` (options of
`DecodeConfig`). Small calls must give the results of the plain search.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.decode import DecodeConfig, Request, decode_all, engine
from regard.errors import RegardError
from regard.models.config_checks import length_limit
from tests.decode.models import (
    VOCAB,
    decode_both,
    gpt,
    seq2seq,
    special_options,
    transformer,
)
from tests.decode.test_shortlist import SHORTLIST

LONGEST = 20_000
# Tokens times hypotheses of a call; more would only take longer.
MAX_WORK = 40_000
MAX_KEYS = 100_000_000
# The same, of calls that the plain search repeats.
MAX_COMPARED = 1_500
MODELS = {
    "transformer": transformer,
    "wide heads": lambda: transformer(width=64),
    "learned": lambda: transformer(positions="learned", max_len=300),
    "rotary": lambda: transformer(positions="rotary"),
    "gpt": gpt,
    "seq2seq": seq2seq,
}
_make = cache(lambda family: MODELS[family]())


def make_seeds() -> list[bytes]:
    """Calls of every family and method."""
    configs: list[dict[str, Any]] = [
        {"method": "greedy", "max_len": 9, "precision": "int8"},
        {"method": "beam", "beam": 3, "n_best": 2, "max_len": 20, "min_len": 3, "length_penalty": 0.5, "patience": 2.0},
        {"method": "sample", "max_len": 12, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "n_best": 2, "seed": 7},
        {"method": "beam", "beam": 2, "max_len": 8, "suppress_sequences": [[7], [8, 9]], "shortlist": True},
        {"method": "greedy", "max_len": 280, "min_len": 280, "max_extra": 300, "max_ratio": 0.0, "unknown": False},
    ]
    calls = [
        {"family": family, "lengths": [3, 17, 257 if i % 2 else 1], "prefixes": [0, 2, 0], "config": config}
        for i, family in enumerate(MODELS)
        for config in configs
        if family != "gpt" or "shortlist" not in config
    ]
    return [json.dumps(call).encode() for call in calls]


def compile_all(folder: Path) -> None:
    """Decode all seeds, so that the time limit of an input does not include the compilation of kernels."""
    for seed in make_seeds():
        (folder / "call.json").write_bytes(seed)
        decode_call(folder)


def decode_call(folder: Path) -> None:
    """Decode the call of a file."""
    try:
        call = json.loads((folder / "call.json").read_bytes())
        options = {name: _freeze(value) for name, value in call["config"].items()}
        config, family = DecodeConfig(**options), call["family"]
        lengths, prefix_lengths = (_natural_numbers(call[name]) for name in ("lengths", "prefixes"))
        model = _make(family)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise RegardError(f"no call: {type(error).__name__}") from None
    torch.set_num_threads(1)  # without workers: targets must not start processes
    engine.COMPILED_SENTENCES = 0
    longest = length_limit(model.config) or LONGEST
    sources = [[4 + (7 * i + n) % (VOCAB - 4) for i in range(min(n, longest) - 1)] + [3] for n in lengths if n]
    prefixes = [[5 + i % (VOCAB - 5) for i in range(n)] for n in prefix_lengths[: len(sources)]]
    prefixes += [[]] * (len(sources) - len(prefixes))
    hypotheses = config.beam if config.method == "beam" else config.n_best
    outputs = [max(config.limit(len(source)), len(prefix)) for source, prefix in zip(sources, prefixes)]
    work = sum(map(len, sources)) + hypotheses * sum(outputs)
    keys = hypotheses * sum(n * n for n in outputs)  # of the attention of all steps
    if work > MAX_WORK or keys > MAX_KEYS or hypotheses > 100:
        raise RegardError("too much work")
    shortlist = SHORTLIST if config.shortlist else None
    options = special_options(model) | {"prefixes": prefixes, "shortlist": shortlist, "max_total_len": None}
    if family == "gpt" and config.shortlist:
        raise RegardError("shortlists are for translation")
    if work <= MAX_COMPARED and config.precision in ("auto", "float32") and config.engine == "auto":
        for ours, theirs in zip(
            *decode_both(model, sources, config, **options)
        ):  # up to rounding, which weights amplify
            assert len(ours) == len(theirs)
            assert all(abs(a.score - b.score) < 0.02 * max(1.0, abs(b.score)) for a, b in zip(ours, theirs))
    else:
        decode_all(model, Request(sources, config, **options))


def _natural_numbers(values: Any) -> list[int]:
    return [min(abs(int(value)), LONGEST) for value in values[:50]]


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
