"""Validation of config fields: types, ranges and choices are declared in annotations and checked on construction.

Values from the command line, a recipe, Python or config.json all pass through the constructor of a dataclass, which
calls `check_ranges`.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from regard.errors import RegardError

MAX_INT = 10**9
"""upper limit of integer fields whose range states none"""


@dataclass(frozen=True)
class Range:
    """Range of a numeric field. NaN is always rejected, infinity unless `infinite` is set.

    >>> 0.5 in Range(low=0, below=1), math.nan in Range(above=0), math.inf in Range(above=0, infinite=True)
    (True, False, True)
    """

    low: float | None = None
    """minimum, inclusive"""
    high: float | None = None
    """maximum, inclusive"""
    above: float | None = None
    """lower bound, exclusive"""
    below: float | None = None
    """upper bound, exclusive"""
    infinite: bool = False
    """whether positive infinity is valid"""
    hint: str = ""
    """advice that replaces the default value in error messages"""

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


@dataclass(frozen=True, eq=False)
class OneOf:
    """Choices of a text field that are looked up when a value is checked: the keys of a registry, except some.

    >>> check_value(Annotated[str, OneOf({"dot": 1})], "dto", "model.score")
    Traceback (most recent call last):
    regard.errors.RegardError: model.score must be one of dot (got 'dto'). Did you mean 'dot'? If 'dto' is your own, \
import the module that registers it first.
    """

    registry: Mapping[str, Any]
    excluded: tuple[str, ...] = ()


def register(
    registry: MutableMapping[str, Any], kind: str, name: str, entry: Any, define: Callable[[Any], Any]
) -> None:
    """Add an entry to a registry. It replaces one from the same definition: a cell of a notebook that ran again.

    `define` returns the class or function that an entry comes from; its module and name identify the definition.

    >>> scores = {"dot": int}
    >>> register(scores, "score", "dot", float, lambda entry: entry)
    Traceback (most recent call last):
    regard.errors.RegardError: The score 'dot' is already registered, by builtins.int. Choose another name.
    """
    if name in registry and (known := definition(define(registry[name]))) != definition(define(entry)):
        raise RegardError(f"The {kind} {name!r} is already registered, by {known}.", "Choose another name.")
    registry[name] = entry


def definition(entry: Any) -> str:
    """Module and name of a class or function: the same for one that is defined again.

    >>> definition(OneOf)
    'regard.ranges.OneOf'
    """
    return f"{entry.__module__}.{entry.__qualname__}"


Count = Annotated[int, Range(low=1)]
"""positive integer"""
Natural = Annotated[int, Range(low=0)]
"""non-negative integer"""
Layers = Annotated[int, Range(low=1, high=10_000)]
"""number of layers in a stack"""
ImageSide = Annotated[int, Range(low=1, high=16_384)]
"""height or width of an image, in pixels"""
OptionalImageSide = Annotated[int, Range(low=0, high=16_384)]
"""height or width of an image, in pixels; 0: unspecified"""
Port = Annotated[int, Range(low=0, high=65_535)]
"""TCP port; 0: any free one"""
Seed = Annotated[int, Range(low=0, high=2**63 - 1)]
"""random seed that torch and NumPy accept"""
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
"""probability or fraction, 0 and 1 included"""
Rate = Annotated[float, Range(low=0, below=1)]
"""probability or decay below 1: dropout, label smoothing, EMA"""
Epsilon = Annotated[float, Range(above=0, high=1)]
"""constant added to the variance in a norm"""


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise an error if a field has the wrong type, is out of range or not among its choices.

    Lists become tuples, and integers in fields of type float become floats. Messages put `prefix`, such as "train.",
    before the name of the field.

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
        converted = check_value(field.type, value, f"{prefix}{field.name}", default_hint(field))
        if converted is not value:
            object.__setattr__(config, field.name, converted)  # the dataclass is frozen


def default_hint(field: dataclasses.Field) -> str:
    """Hint that states the default of a field."""
    return "" if field.default is dataclasses.MISSING else f"The default is {field.default!r}."


def check_value(annotation: Any, value: Any, name: str, hint: str = "") -> Any:
    """Convert a value to the type of an annotation; raise an error that names the field if it is invalid.

    Paths become text, and numbers of NumPy those of Python.

    >>> check_value(tuple[float, ...], [1, 2], "data.weights")
    (1.0, 2.0)
    """
    limits, annotation = _split_annotation(annotation)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy or PyTorch
        value = value.item()
    if isinstance(limits, OneOf):
        choices = tuple(choice for choice in limits.registry if choice not in limits.excluded)
        return _choice(value, choices, name, is_open=True)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        types = [part for part in parts if part is not NoneType]
        if len(types) == 1:
            return check_value(types[0], value, name, hint)
        return _instance(value, types, name)
    if origin is Literal:
        return _choice(value, parts, name)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _invalid(name, "a list", value, hint)
        return tuple(check_value(parts[0], item, f"{name}[{i}]", hint) for i, item in enumerate(value))
    if annotation is int:
        return _integer(value, limits, name, hint)
    if annotation is float:
        return _number(value, limits or Range(), name, hint)
    if annotation is bool:
        if type(value) is not bool:
            raise _invalid(name, "true or false", value, hint)
    elif annotation is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        _check_text(value, name, hint)
    elif isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False):
        return _instance(value, [annotation], name)
    return value


def is_list(annotation: Any) -> bool:
    """Whether an annotation is a tuple of values.

    >>> is_list(tuple[str, ...]), is_list(Count)
    (True, False)
    """
    return get_origin(_split_annotation(annotation)[1]) is tuple


def _split_annotation(annotation: Any) -> tuple[Range | OneOf | None, Any]:
    """The range or choices of an annotation, and its plain type."""
    if get_origin(annotation) is not Annotated:
        return None, annotation
    plain, *metadata = get_args(annotation)
    return next((item for item in metadata if isinstance(item, Range | OneOf)), None), plain


def _integer(value: Any, limits: Any, name: str, hint: str) -> int:
    limits = limits or Range()
    if not isinstance(value, int) or isinstance(value, bool):
        raise _invalid(name, "an integer", value, hint)
    if value not in limits:
        raise _invalid(name, str(limits), value, limits.hint or hint)
    if limits.high is None and value > MAX_INT:
        raise _invalid(name, f"at most {MAX_INT:,}", value, hint)
    return value


def _number(value: Any, limits: Range, name: str, hint: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _invalid(name, "a number", value, hint)
    try:
        number = float(value)
    except OverflowError:
        raise _invalid(name, "a number that a float can hold", value, hint) from None
    if number not in limits:
        raise _invalid(name, str(limits), value, limits.hint or hint)
    return value if isinstance(value, float) else number


def _choice(value: Any, choices: tuple[Any, ...], name: str, is_open: bool = False) -> Any:
    """The value if it is a choice; `is_open`: users can register others."""
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of these {len(choices)}."
    if is_open and isinstance(value, str):
        hint += f" If {format_value(value)} is your own, import the module that registers it first."
    raise _invalid(name, f"one of {', '.join(choices)}", value, hint)


def _check_text(value: Any, name: str, hint: str) -> None:
    if not isinstance(value, str):
        raise _invalid(name, "text", value, hint)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(name, "text in UTF-8", value, hint) from None
    if "\0" in value:
        raise _invalid(name, "text without NUL characters", value, hint)


def _instance(value: Any, types: list[Any], name: str) -> Any:
    if not isinstance(value, tuple(types)):
        names = ", ".join(expected.__name__ for expected in types)
        raise _invalid(name, f"a {names}" if len(types) == 1 else f"one of {names}", value, "")
    return value


def _invalid(name: str, expected: str, value: Any, hint: str) -> RegardError:
    return RegardError(f"{name} must be {expected} (got {format_value(value)}).", hint)


def format_value(value: Any) -> str:
    """A value for an error message: its repr, at most 60 characters.

    >>> format_value("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…"
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in a list in a list …
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:37] + "…"
