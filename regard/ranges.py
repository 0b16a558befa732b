"""Ranges of config fields: declared once in the annotations, checked whenever a config is made.

Command line, recipe, Python and config.json all end in the constructor of a dataclass, which calls `check_ranges`.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from regard.errors import RegardError

LARGEST = 10**9
"""the largest whole number of a field whose range has no upper limit"""


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts; NaN never, infinity only if the range says so.

    >>> 0.5 in Range(low=0, below=1), math.nan in Range(above=0), math.inf in Range(above=0, infinite=True)
    (True, False, True)
    """

    low: float | None = None
    """smallest number"""
    high: float | None = None
    """largest number"""
    above: float | None = None
    """lower limit that is not itself allowed"""
    below: float | None = None
    """upper limit that is not itself allowed"""
    infinite: bool = False
    hint: str = ""
    """what to do instead, where the default says too little"""

    def __contains__(self, value: float) -> bool:
        # Comparisons with NaN are false, so it fails the last test.
        if isinstance(value, float) and math.isinf(value):
            return self.infinite and value > 0
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and value == value
        )

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"between {self.low:,} and {self.high:,}"
        limits = (("at least", self.low), ("above", self.above), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{word} {limit:,}" for word, limit in limits if limit is not None) or "finite"


Count = Annotated[int, Range(low=1)]
"""at least one"""
Natural = Annotated[int, Range(low=0)]
"""whole numbers from 0"""
Layers = Annotated[int, Range(low=1, high=10_000)]
"""height of a stack"""
ImageSide = Annotated[int, Range(low=1, high=16_384)]
"""height or width of an image, in pixels"""
OptionalImageSide = Annotated[int, Range(low=0, high=16_384)]
"""the same; 0: not given"""
Seed = Annotated[int, Range(low=0, high=2**63 - 1)]
"""what torch and NumPy take as a seed"""
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
"""a probability, or a part of a whole"""
Rate = Annotated[float, Range(low=0, below=1)]
"""a probability or a decay at which 1 would leave nothing: dropout, label smoothing, moving averages"""
Epsilon = Annotated[float, Range(above=0, high=1)]
"""what a norm adds to the variance"""


def check_ranges(config: Any, prefix: str = "") -> None:
    """Refuse a config with a field of the wrong type, outside of its range or not among its choices.

    Lists become tuples, and whole numbers in fields of type float become floats. `prefix` is put before the field's
    name in messages, such as "train.".

    >>> @dataclass(frozen=True)
    ... class Config:
    ...     lr: Positive = 1e-3
    ...     def __post_init__(self) -> None:
    ...         check_ranges(self, "train.")
    >>> Config(lr=math.nan)
    Traceback (most recent call last):
    regard.errors.RegardError: train.lr must be above 0 (got nan). The default is 0.001.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kept = check_value(field.type, value, f"{prefix}{field.name}", default_hint(field))
        if kept is not value:
            object.__setattr__(config, field.name, kept)  # the only way into a frozen dataclass


def default_hint(field: dataclasses.Field) -> str:
    """The default of a field, as a sentence."""
    return "" if field.default is dataclasses.MISSING else f"The default is {field.default!r}."


def check_value(annotation: Any, value: Any, name: str, hint: str = "") -> Any:
    """The value as a field with this annotation holds it; an error that names it if it cannot.

    >>> check_value(tuple[float, ...], [1, 2], "data.weights")
    (1.0, 2.0)
    """
    limits, annotation = _without_metadata(annotation)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        kinds = [part for part in parts if part is not NoneType]
        if len(kinds) == 1:
            return check_value(kinds[0], value, name, hint)
        return _instance(value, kinds, name)
    if origin is Literal:
        return _choice(value, parts, name)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _refusal(name, "a list", value, hint)
        return tuple(check_value(parts[0], one, f"{name}[{i}]", hint) for i, one in enumerate(value))
    if annotation is int:
        return _whole_number(value, limits, name, hint)
    if annotation is float:
        return _number(value, limits or Range(), name, hint)
    if annotation is bool:
        if type(value) is not bool:
            raise _refusal(name, "true or false", value, hint)
    elif annotation is str:
        _check_text(value, name, hint)
    elif isinstance(annotation, type):
        return _instance(value, [annotation], name)
    return value


def is_list(annotation: Any) -> bool:
    """Whether a field holds several values.

    >>> is_list(tuple[str, ...]), is_list(Count)
    (True, False)
    """
    return get_origin(_without_metadata(annotation)[1]) is tuple


def _without_metadata(annotation: Any) -> tuple[Range | None, Any]:
    if get_origin(annotation) is not Annotated:
        return None, annotation
    inner, *metadata = get_args(annotation)
    return next((one for one in metadata if isinstance(one, Range)), None), inner


def _whole_number(value: Any, limits: Range | None, name: str, hint: str) -> int:
    limits = limits or Range()
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refusal(name, "a whole number", value, hint)
    if value not in limits:
        raise _refusal(name, str(limits), value, limits.hint or hint)
    if limits.high is None and value > LARGEST:
        raise _refusal(name, f"at most {LARGEST:,}", value, hint)
    return value


def _number(value: Any, limits: Range, name: str, hint: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refusal(name, "a number", value, hint)
    try:
        number = float(value)
    except OverflowError:
        raise _refusal(name, "a number that a float can hold", value, hint) from None
    if number not in limits:
        raise _refusal(name, str(limits), value, limits.hint or hint)
    return value if isinstance(value, float) else number


def _choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of these {len(choices)}."
    raise _refusal(name, f"one of {', '.join(choices)}", value, hint)


def _check_text(value: Any, name: str, hint: str) -> None:
    if not isinstance(value, str):
        raise _refusal(name, "text", value, hint)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refusal(name, "text in UTF-8", value, hint) from None
    if "\0" in value:
        raise _refusal(name, "text without NUL characters", value, hint)


def _instance(value: Any, kinds: list[Any], name: str) -> Any:
    if not isinstance(value, tuple(kinds)):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise _refusal(name, f"a {names}" if len(kinds) == 1 else f"one of {names}", value, "")
    return value


def _refusal(name: str, expected: str, value: Any, hint: str) -> RegardError:
    return RegardError(f"{name} must be {expected} (got {format_value(value)}).", hint)


def format_value(value: Any) -> str:
    """A value in a message: its repr, cut short.

    >>> format_value("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…"
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in a list in a list …
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:37] + "…"
