"""Mutation of structured files: JSON, lines of JSON, and the JSON header of safetensors files.

Random bytes rarely get past a parser. So half of the mutations replace, remove, copy or move values of a valid file.
"""

import copy
import json
import random
from typing import Any

HUGE = "an integer of 5000 digits"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 16, 255, 10**4, 2**31, 2**32, 2**63, 2**64, 10**9, 10**30, -(2**63)),
    *(
        0.0,
        -0.5,
        1e-300,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "a",
        "\0",
        "\ud800",
        "é",
        "x" * 300,
        "../x",
        "/dev/zero",
    ),
    *([], {}, [[]], [0], [None], ["a"], {"": 0}, [1, 2, 3], [[0, 1]], HUGE, "1" * 5000, "²", "-1", "nan"),
]


def mutate(data: bytes, draw: random.Random) -> bytes | None:
    """The data with one to three values changed; None if it has no structure that is understood."""
    size = int.from_bytes(data[:8], "little")
    if 2 <= size <= len(data) - 8:
        header = _mutate_json(data[8 : 8 + size], draw)
        if header is not None:
            body = data[8 + size :]
            return (
                len(header).to_bytes(8, "little") + header + (body if draw.random() < 0.9 else body[: len(body) // 2])
            )
    mutated = _mutate_json(data, draw)
    if mutated is None and b"\n" in data:
        lines = data.split(b"\n")
        index = draw.choice([i for i, line in enumerate(lines) if line[:1] in (b"{", b"[")] or [0])
        line = _mutate_json(lines[index], draw)
        mutated = None if line is None else b"\n".join([*lines[:index], line, *lines[index + 1 :]])
    return mutated


def _mutate_json(data: bytes, draw: random.Random) -> bytes | None:
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict | list):
        return None
    try:
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            _change(table, draw)
        text = json.dumps(table, ensure_ascii=draw.random() < 0.5)
        return text.replace(json.dumps(HUGE), "1" * 5000).encode()
    except (ValueError, RecursionError):  # a lone surrogate, a table that is too deep
        return None


LONGEST = 20_000


def _grow(value: Any, draw: random.Random) -> Any:
    """A value repeated until it is long, or inside of many lists."""
    count = int(LONGEST ** draw.random())
    if isinstance(value, str) and draw.random() < 0.8:
        part = draw.choice((value or "a", "- ", "a", "\n", " ", "one. ", "é🙂", "\u200d", "<b>", "\ud83d", "0"))
        return (part * count)[:count]
    if isinstance(value, list) and value and draw.random() < 0.8:
        count = min(count, 10 * LONGEST // len(repr(value)))
        return [copy.deepcopy(one) for one in value * (count + 1)]
    for _ in range(count // 20):  # beyond the depth that Python's JSON writes, at times
        value = [value] if draw.random() < 0.9 else {"a": value}
    return value


def _change(table: dict | list, draw: random.Random) -> None:
    """Change a random value of a nested table in place."""
    container: Any = table
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if not keys:
            return
        key = draw.choice(keys)
        value = container[key]
        if isinstance(value, dict | list) and value and draw.random() < 0.8:
            container = value
            continue
        break
    if isinstance(value, str) and value[:1] in ("{", "[") and draw.random() < 0.8:  # JSON in JSON
        inner = _mutate_json(value.encode(errors="replace"), draw)
        container[key] = value if inner is None else inner.decode()
        return
    kind = draw.random()
    if kind < 0.15:
        container[key] = _grow(value, draw)
    elif kind < 0.6:
        container[key] = copy.deepcopy(draw.choice(VALUES))  # it may be changed later
    elif kind < 0.7:
        del container[key]
    elif kind < 0.8:
        container[key] = copy.deepcopy(container[draw.choice(keys)])
    elif kind < 0.9 and isinstance(value, int | float):
        container[key] = value * draw.choice((2, -1, 1000)) + draw.choice((-1, 0, 1))
    elif isinstance(container, dict):
        container[str(draw.choice(VALUES))[:300] if draw.random() < 0.5 else str(key) + "x"] = value
    else:
        container.append(value)
