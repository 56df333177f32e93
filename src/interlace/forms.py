"""Forms: what a value of a configuration's field may be, from TOML or a command line, and back to TOML.

    @dataclass(frozen=True)
    class Rope(Section):
        _place: ClassVar[str] = "model.rope"
        factor: Annotated[float, Range(low=1)]

    Rope.of({"factor": 0})      ConfigError: model.rope.factor must be a number of at least 1, found 0 (integer)

A field's annotation is its whole rule.  What the fields are, and which of them contradict each other, is `config`.
"""

from __future__ import annotations

import functools
import json
import math
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from interlace.errors import ConfigError, nearest


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `low`, `high` and `most` are allowed values, `above` and `below` are not.

    most: far beyond any use, but not for ever to work through; told to a larger value alone.
    """

    low: float | None = None
    above: float | None = None
    below: float | None = None
    high: float | None = None
    most: float | None = None

    def holds(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.high is None or value <= self.high)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        words = (("at least", self.low), ("above", self.above), ("below", self.below), ("at most", self.high))
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)


@dataclass(frozen=True)
class OneOf:
    """A closed list of values; the refusal names the nearest."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return value in self.values

    def nearest(self, value: Any) -> Any:
        if isinstance(value, int | float) and all(isinstance(known, int) for known in self.values):
            return closest(value, self.values)
        return nearest(str(value), [str(known) for known in self.values])

    def __str__(self) -> str:
        return "one of " + ", ".join(map(str, self.values))


Positive = Annotated[int, Range(low=1)]
Count = Annotated[int, Range(low=0)]
Probability = Annotated[float, Range(low=0, below=1)]
Amount = Annotated[float, Range(low=0)]
Above0 = Annotated[float, Range(above=0)]
Text = Annotated[str, Range(low=1)]  # the range is that of the length

_NAMES: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def rules(cls: type) -> dict[str, Any]:
    """Field name -> type with its rule, of a section class."""
    return _read_rules(cls)  # mypy takes no class for Hashable, hence two functions


@functools.cache
def _read_rules(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


@functools.cache
def _plain(cls: type) -> tuple[tuple[str, Any, Any, Range | OneOf | None], ...]:
    """(name, type with its rule, type, rule) of every field; object where more than type and rule must be looked at."""
    made = []
    for name, hint in _read_rules(cls).items():
        bare, rule, _ = _parts(hint)
        simple = bare in (int, bool) or (bare is str and not isinstance(rule, Range))
        made.append((name, hint, bare if simple else object, rule))
    return tuple(made)


def _parts(hint: Any) -> tuple[Any, Range | OneOf | None, bool]:
    """(bare type, rule, may be None) of an annotation."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        optional = type(None) in get_args(hint)
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Annotated:
        bare, rule = get_args(hint)
        return bare, rule, optional
    return hint, None, optional


def _describe(hint: Any) -> str:
    bare, rule, optional = _parts(hint)
    if get_origin(bare) is tuple:
        args = get_args(bare)
        many = "" if args[-1] is Ellipsis else f"{len(args)} "
        text = f"a list of {many}values, each {_describe(args[0])}"
    elif isinstance(rule, OneOf):
        text = str(rule)
    elif bare is str and rule:
        text = "a string that is not empty"
    elif bare in _NAMES:
        text = _NAMES[bare] + (f" of {rule}" if rule else "").replace("of above", "above")
    else:
        text = "a table"
    return f'{text}, or "none"' if optional else text


def _convert(value: Any, hint: Any) -> Any:
    """The value in the field's own type; ValueError when it has another type or lies outside the range."""
    bare, rule, optional = _parts(hint)
    if optional and (value is None or value == "none"):
        return None
    if get_origin(bare) is tuple:
        kinds = get_args(bare)
        if not isinstance(value, list | tuple) or (kinds[-1] is not Ellipsis and len(value) != len(kinds)):
            raise ValueError
        return tuple(_convert(item, kinds[0]) for item in value)
    if issubclass(bare, Section):
        return value if isinstance(value, bare) else bare.of(value)
    if bare is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, bare) or (isinstance(value, bool) and bare is not bool):
        raise ValueError
    if bare is float and not math.isfinite(value):
        raise ValueError
    if bare is str and "\0" in value:  # no path and no text of a run file
        raise ValueError
    if rule and not rule.holds(len(value) if isinstance(rule, Range) and bare is str else value):
        raise ValueError
    return value


def checked(value: Any, hint: Any, key: str, error: type[ConfigError] = ConfigError) -> Any:
    """The value of the field `key` in the field's own type, or an error that names key, rule, value and the nearest."""
    try:
        return _convert(value, hint)
    except (ValueError, OverflowError):
        close = more = ""
        bare, rule, _ = _parts(hint)
        if isinstance(rule, Range) and rule.most is not None and isinstance(value, int | float) and value > rule.most:
            more = f" and at most {rule.most:g}"
        if bare is str and isinstance(value, str) and "\0" in value:
            more = " and holds no NUL"
        if isinstance(rule, OneOf):
            near = rule.nearest(value)
            close = "" if near is None else f"; nearest is {near}"
        raise error(f"{key} must be {_describe(hint)}{more}, found {show(value)}{close}") from None


def show(value: Any) -> str:
    """A value and its type, as a person wrote it."""
    kind = {int: "integer", float: "number", bool: "truth value", str: "string"}.get(type(value), "")
    text = toml(value) if kind or isinstance(value, list | tuple | dict) else repr(value)
    return f"{text} ({kind})" if kind else text


def unknown(
    what: str, name: str, known: Sequence[str], place: str, error: type[ConfigError] = ConfigError
) -> ConfigError:
    """The error for a name that is not known in a place: it says the nearest, or all that are known."""
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
    return error(f"unknown {what} {name} in {place}: {hint}")


class Section:
    """Checks every field against its annotation on construction, whichever way the value came."""

    _place: ClassVar[str]
    _error: ClassVar[type[ConfigError]] = ConfigError

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, hint, kind, rule in _plain(own):
            value = getattr(self, name)
            if type(value) is kind and (rule is None or rule.holds(value)):
                continue  # the usual case: a search for a plan makes tens of thousands
            value = checked(value, hint, f"{self._place}.{name}".lstrip("."), self._error)
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, table: Any) -> Self:
        """A section from a TOML table; unknown and missing keys are refused by name."""
        if not isinstance(table, Mapping):
            raise ConfigError(f"{cls._place} must be a table, found {show(table)}")
        known = list(rules(cls))
        for key in table:
            if key not in known:
                raise unknown("key", key, known, f"[{cls._place}]")
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
        if missing := [name for name in required if name not in table]:
            raise ConfigError(f"[{cls._place}] lacks {', '.join(missing)}")
        return cls(**table)


def closest(value: float, candidates: Sequence[int]) -> int:
    """The nearest number, the lower of two."""
    return min(candidates, key=lambda candidate: (abs(candidate - value), candidate))


def typed(text: str, hint: Any) -> Any:
    """The value that a word on the command line means for a field: TOML where the field is no plain string."""
    bare, _, optional = _parts(hint)
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
    if (bare is str and not quoted) or (optional and text == "none"):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def as_table(section: Any) -> dict[str, Any]:
    """Key -> value of every field, as a TOML table has them."""
    return {f.name: getattr(section, f.name) for f in fields(section)}


def toml(value: Any) -> str:
    """A value in TOML; None is the string "none", which optional fields read back as None."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, Section):
        value = {key: item for key, item in as_table(value).items() if item is not None}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)
