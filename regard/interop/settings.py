"""What a config.json of another program says."""

from collections.abc import Mapping
from typing import Any, TypeVar

from regard.errors import RegardError

T = TypeVar("T")


class Settings:
    """A config of theirs, asked for one value at a time; a missing or senseless one is an error that names its key.

    A key that is absent or null has the default: configs are often saved without what their class has by default.

    >>> settings = Settings({"hidden_size": 12, "hidden_act": "mish"}, "config.json")
    >>> settings.number("hidden_size"), settings.flag("tie_word_embeddings", True)
    (12, True)
    >>> print(settings.refusal("hidden_act", "it knows relu"))
    config.json: hidden_act = 'mish' is nothing that Regard has: it knows relu. Such a model is not supported.
    """

    def __init__(self, table: Mapping[str, Any], origin: str) -> None:
        self.table, self.origin = table, origin

    def over(self, table: Mapping[str, Any]) -> "Settings":
        """The same with some values replaced."""
        return Settings({**self.table, **table}, self.origin)

    def number(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise RegardError(f"{self.origin}: {key} = {value!r} should be a number.", "Is the config complete?")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A number of which there is at least one."""
        value = self.number(key, default)
        if value == 0:
            raise RegardError(f"{self.origin}: {key} = 0 cannot be.", "Mend the file.")
        return value

    def fraction(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise RegardError(f"{self.origin}: {key} = {value!r} should be a number.", "Is the config complete?")
        return float(value)

    def fractions(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Several numbers, or one."""
        value = self._value(key, default)
        several = value if isinstance(value, list | tuple) else [value]
        if not several or any(type(one) not in (int, float) for one in several):
            raise RegardError(f"{self.origin}: {key} = {value!r} should be numbers.", "Is the config complete?")
        return tuple(float(one) for one in several)

    def sides(self, key: str, default: int) -> tuple[int, int]:
        """Height and width; or one number, which is both."""
        value = self._value(key, default)
        both = value if isinstance(value, list | tuple) else [value, value]
        if len(both) != 2 or any(type(one) is not int or one < 1 for one in both):
            raise RegardError(f"{self.origin}: {key} = {value!r} should be a height and a width.", "Mend the file.")
        return both[0], both[1]

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise RegardError(f"{self.origin}: {key} = {value!r} should be true or false.", "Mend the file.")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: str) -> T:
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(key, f"it knows {', '.join(choices)}")
        return choices[value]

    def must_be(self, key: str, wanted: Any) -> None:
        """Refuses what changes the computation into one that we do not have."""
        if self._value(key, wanted) != wanted:
            raise self.refusal(key, f"it knows {wanted!r} there")

    def refusal(self, key: str, why: str) -> RegardError:
        return RegardError(
            f"{self.origin}: {key} = {self.table.get(key)!r} is nothing that Regard has: {why}.",
            "Such a model is not supported.",
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.table.get(key)
        return default if value is None else value
