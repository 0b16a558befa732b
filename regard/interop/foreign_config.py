"""Configs of other formats: typed access to their values, tables of their keys, fields that they do not support."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from regard.errors import RegardError
from regard.ranges import Count, Natural, check_value

T = TypeVar("T")
_HINT = "Check that the config is complete."


class ForeignConfig:
    """The values of a config.json; a missing or invalid value is an error that names the file and the key.

    A key that is absent or null has the default: configs are often saved without the defaults of their class.

    >>> settings = ForeignConfig({"hidden_size": 12, "hidden_act": "mish"}, "config.json")
    >>> settings.get_count("hidden_size"), settings.get_bool("tie_word_embeddings", True)
    (12, True)
    >>> print(settings.unsupported("hidden_act", "expected relu"))
    config.json: hidden_act = 'mish' is unsupported: expected relu. Such a model cannot be imported.
    """

    def __init__(self, table: Mapping[str, Any], origin: str) -> None:
        self.table, self.origin = table, origin

    def replace(self, table: Mapping[str, Any]) -> "ForeignConfig":
        """Return a copy with some values replaced."""
        return ForeignConfig({**self.table, **table}, self.origin)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type."""
        value = self.table.get(key)
        return default if value is None else value

    def get_checked(self, key: str, annotation: Any, default: Any) -> Any:
        """A value of this type and range."""
        return check_value(annotation, self.get(key, default), f"{self.origin}: {key}", _HINT)

    def get_natural(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0."""
        return self.get_checked(key, Natural, default)

    def get_count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        return self.get_checked(key, Count, default)

    def get_float(self, key: str, default: float) -> float:
        return self.get_checked(key, float, default)

    def get_floats(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of floats; a single float is a list of one."""
        value = self.get(key, default)
        values = value if isinstance(value, list | tuple) and value else [value]
        return check_value(tuple[float, ...], values, f"{self.origin}: {key}", _HINT)

    def get_size(self, key: str, default: int) -> tuple[int, int]:
        """Height and width; a single integer is both."""
        value = self.get(key, default)
        sides = value if isinstance(value, list | tuple) and len(value) == 2 else [value, value]
        height, width = check_value(tuple[Count, ...], sides, f"{self.origin}: {key}", _HINT)
        return height, width

    def get_bool(self, key: str, default: bool) -> bool:
        return self.get_checked(key, bool, default)

    def get_choice(self, key: str, choices: Mapping[str, T], default: str) -> T:
        """The entry of `choices` under the name that the config has for the key."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.unsupported(key, f"expected one of {', '.join(choices)}")
        return choices[value]

    def require(self, key: str, expected: Any) -> None:
        """Raise an error for a value that selects an unsupported computation."""
        if self.get(key, expected) != expected:
            raise self.unsupported(key, f"expected {expected!r}")

    def unsupported(self, key: str, reason: str) -> RegardError:
        """The error for an unsupported value."""
        return RegardError(
            f"{self.origin}: {key} = {self.table.get(key)!r} is unsupported: {reason}.",
            "Such a model cannot be imported.",
        )


class ConfigKey(NamedTuple):
    """A field of Regard's config, its key in another format, and the default of that format's class.

    The type of the default is the type of the value. `values` maps foreign values to Regard's where both are names.
    """

    field: str
    key: str
    default: Any
    values: Mapping[str, str] | None = None


ConfigKeys = Sequence[ConfigKey]


def replace_defaults(keys: ConfigKeys, **defaults: Any) -> ConfigKeys:
    """The keys of a class with other defaults, by field.

    >>> replace_defaults([ConfigKey("width", "hidden_size", 768)], width=4096)
    [ConfigKey(field='width', key='hidden_size', default=4096, values=None)]
    """
    return [key._replace(default=defaults.get(key.field, key.default)) for key in keys]


def read_fields(keys: ConfigKeys, settings: ForeignConfig) -> dict[str, Any]:
    """Read the fields of Regard's config from another format's.

    >>> read_fields([ConfigKey("width", "hidden_size", 768)], ForeignConfig({"hidden_size": 12}, "config.json"))
    {'width': 12}
    """
    types = {int: Count, float: float, bool: bool}
    return {
        key.field: settings.get_choice(key.key, key.values, key.default)
        if key.values
        else settings.get_checked(key.key, types[type(key.default)], key.default)
        for key in keys
    }


def write_fields(keys: ConfigKeys, config: Any) -> dict[str, Any]:
    """Write the fields of Regard's config as keys of another format.

    >>> from regard.models import GPTConfig
    >>> write_fields([ConfigKey("width", "hidden_size", 768)], GPTConfig(width=64))
    {'hidden_size': 64}
    """
    table = {}
    for key in keys:
        value = getattr(config, key.field)
        table[key.key] = foreign_value(key.values, value) if key.values else value
    return table


def foreign_value(values: Mapping[str, str], value: str) -> str:
    """The foreign name of one of Regard's values; the first foreign name if there is none.

    >>> foreign_value({"silu": "swiglu", "gelu_new": "geglu"}, "geglu"), foreign_value({"silu": "swiglu"}, "relu")
    ('gelu_new', 'silu')
    """
    return next((foreign for foreign, name in values.items() if name == value), next(iter(values)))


def unsupported_fields(config: Any, supported: Mapping[str, tuple]) -> dict[str, tuple]:
    """The fields of a config whose value is not supported, each with the values that are.

    >>> from regard.models import TransformerConfig
    >>> unsupported_fields(TransformerConfig(heads=3), {"heads": (1, 2), "norm": ("pre", "post")})
    {'heads': (1, 2)}
    """
    return {field: values for field, values in supported.items() if getattr(config, field) not in values}


def describe_unsupported(config: Any, fields: Mapping[str, tuple]) -> str:
    """List unsupported fields for an error message.

    >>> from regard.models import TransformerConfig
    >>> describe_unsupported(TransformerConfig(heads=3), {"heads": (1, 2)})
    'heads = 3 (supported: 1 or 2)'
    """
    return ", ".join(
        f"{field} = {getattr(config, field)!r} (supported: {' or '.join(map(repr, values))})"
        for field, values in fields.items()
    )
