"""Configs of other formats: their values, checked; tables of their keys; fields of ours that they do not support."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from regard.errors import RegardError
from regard.ranges import Count, Natural, check_value

T = TypeVar("T")
_HINT = "Is the config complete?"


class Settings:
    """The table of a config.json; a missing or invalid value is an error that names the file and the key.

    A key that is absent or null has the default: configs are often saved without the defaults of their class.

    >>> settings = Settings({"hidden_size": 12, "hidden_act": "mish"}, "config.json")
    >>> settings.size("hidden_size"), settings.flag("tie_word_embeddings", True)
    (12, True)
    >>> print(settings.refusal("hidden_act", "it knows relu"))
    config.json: hidden_act = 'mish' is unsupported: it knows relu. Such a model cannot be imported.
    """

    def __init__(self, table: Mapping[str, Any], origin: str) -> None:
        self.table, self.origin = table, origin

    def over(self, table: Mapping[str, Any]) -> "Settings":
        """The same with some values replaced."""
        return Settings({**self.table, **table}, self.origin)

    def value(self, key: str, default: Any = None) -> Any:
        """A value of any type."""
        found = self.table.get(key)
        return default if found is None else found

    def checked(self, key: str, annotation: Any, default: Any) -> Any:
        """A value of this type and range."""
        return check_value(annotation, self.value(key, default), f"{self.origin}: {key}", _HINT)

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number from 0."""
        return self.checked(key, Natural, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1."""
        return self.checked(key, Count, default)

    def fraction(self, key: str, default: float) -> float:
        return self.checked(key, float, default)

    def fractions(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Several numbers, or one."""
        value = self.value(key, default)
        several = value if isinstance(value, list | tuple) and value else [value]
        return check_value(tuple[float, ...], several, f"{self.origin}: {key}", _HINT)

    def sides(self, key: str, default: int) -> tuple[int, int]:
        """Height and width, or one number that is both."""
        value = self.value(key, default)
        both = value if isinstance(value, list | tuple) and len(value) == 2 else [value, value]
        height, width = check_value(tuple[Count, ...], both, f"{self.origin}: {key}", _HINT)
        return height, width

    def flag(self, key: str, default: bool) -> bool:
        return self.checked(key, bool, default)

    def choice(self, key: str, choices: Mapping[str, T], default: str) -> T:
        value = self.value(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(key, f"it knows {', '.join(choices)}")
        return choices[value]

    def must_be(self, key: str, wanted: Any) -> None:
        """Refuse a value that selects an unsupported computation."""
        if self.value(key, wanted) != wanted:
            raise self.refusal(key, f"it knows {wanted!r} there")

    def refusal(self, key: str, why: str) -> RegardError:
        return RegardError(
            f"{self.origin}: {key} = {self.table.get(key)!r} is unsupported: {why}.", "Such a model cannot be imported."
        )


class Key(NamedTuple):
    """A field of our config, the key of theirs, and the default of their class, whose type is the field's.

    `names` are their values and ours, where these are names.
    """

    ours: str
    theirs: str
    default: Any
    names: Mapping[str, str] | None = None


Keys = Sequence[Key]


def with_defaults(keys: Keys, **defaults: Any) -> Keys:
    """The keys of a class with other defaults.

    >>> with_defaults([Key("width", "hidden_size", 768)], width=4096)
    [Key(ours='width', theirs='hidden_size', default=4096, names=None)]
    """
    return [key._replace(default=defaults.get(key.ours, key.default)) for key in keys]


def read_keys(keys: Keys, settings: Settings) -> dict[str, Any]:
    """The fields of our config, from theirs.

    >>> read_keys([Key("width", "hidden_size", 768)], Settings({"hidden_size": 12}, "config.json"))
    {'width': 12}
    """
    types = {int: Count, float: float, bool: bool}
    return {
        key.ours: settings.choice(key.theirs, key.names, key.default)
        if key.names
        else settings.checked(key.theirs, types[type(key.default)], key.default)
        for key in keys
    }


def write_keys(keys: Keys, config: Any) -> dict[str, Any]:
    """Their config, from the fields of ours.

    >>> from regard.models import GPTConfig
    >>> write_keys([Key("width", "hidden_size", 768)], GPTConfig(width=64))
    {'hidden_size': 64}
    """
    found = {}
    for key in keys:
        value = getattr(config, key.ours)
        found[key.theirs] = their_name(key.names, value) if key.names else value
    return found


def their_name(names: Mapping[str, str], ours: str) -> str:
    """Their name of ours; the first of their names where they have none.

    >>> their_name({"silu": "swiglu", "gelu_new": "geglu"}, "geglu"), their_name({"silu": "swiglu"}, "relu")
    ('gelu_new', 'silu')
    """
    return next((theirs for theirs, name in names.items() if name == ours), next(iter(names)))


def misfits(config: Any, supported: Mapping[str, tuple]) -> dict[str, tuple]:
    """The fields whose value in a config is not supported, and the values that are.

    >>> from regard.models import TransformerConfig
    >>> misfits(TransformerConfig(heads=3), {"heads": (1, 2), "norm": ("pre", "post")})
    {'heads': (1, 2)}
    """
    return {field: values for field, values in supported.items() if getattr(config, field) not in values}


def in_words(config: Any, found: Mapping[str, tuple]) -> str:
    """Misfits as a part of a sentence.

    >>> from regard.models import TransformerConfig
    >>> in_words(TransformerConfig(heads=3), {"heads": (1, 2)})
    'heads = 3 (there: 1 or 2)'
    """
    return ", ".join(
        f"{field} = {getattr(config, field)!r} (there: {' or '.join(map(repr, values))})"
        for field, values in found.items()
    )
