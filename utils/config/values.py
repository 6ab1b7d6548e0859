"""The values that a flag, a hyperparameter or a YAML key may have, and the one check of them, `typed`."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import yaml

from utils.errors import UserError, shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float that fits into a float; bools are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Range:
    """The finite numbers from `minimum` to `maximum`; an exclusive bound is not in the range."""

    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.minimum < value if self.exclusive_minimum else self.minimum <= value
        below = value < self.maximum if self.exclusive_maximum else value <= self.maximum
        return above and below and is_number(value)

    def __str__(self) -> str:
        minimum, maximum = f"{self.minimum:.10g}", f"{self.maximum:.10g}"
        low = f"more than {minimum}" if self.exclusive_minimum else f"{minimum} or more"
        if self.maximum == math.inf:
            return low
        return f"{low} and less than {maximum}" if self.exclusive_maximum else f"{minimum} to {maximum}"


FINITE, NOT_NEGATIVE, POSITIVE = Range(), Range(0), Range(0, exclusive_minimum=True)
SHARE, BELOW_ONE = Range(0, 1), Range(0, 1, exclusive_maximum=True)
IMGSZ = Range(1, 2**14)  # the side of an image, in pixels
NUMBER_OR_NAME = int | str
PYTHON_SUFFIX = ".py"
PYTHON_FILE = f"FILE{PYTHON_SUFFIX}"  # among the choices of a flag: any Python file
OPSETS = Range(12, 21)  # ONNX operator sets that torch's exporters write and ONNX Runtime 1.20 runs


def typed(hint: Any, metadata: Mapping[str, Any], value: object) -> Any:
    """Return a value of a command line, a YAML or a Python call as a field's type.

    Text may stand for a number, and one value for a tuple. Raises `ValueError` that says what is expected.

    Args:
        hint: the field's type
        metadata: the field's metadata, see `flags.flag`
    """
    try:
        return _typed(hint, metadata, value)
    except (ValueError, TypeError, OverflowError, yaml.YAMLError):
        raise ValueError(expected(hint, metadata)) from None


def _typed(hint: Any, metadata: Mapping[str, Any], value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is Mapping:
        mapping = yaml.safe_load(value) if isinstance(value, str) else value
        return {str(key): _typed(float, metadata, number) for key, number in dict(mapping).items()}
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if metadata.get("comma_separated"):
            items = [word for item in items for word in separated(str(item))]
        return tuple(_typed(typing.get_args(hint)[0], {**metadata, "comma_separated": False}, item) for item in items)
    if hint == NUMBER_OR_NAME:
        return int(value) if isinstance(value, int) or re.fullmatch(r"-?\d+", value) else value
    if hint in (int, float):
        number = float(value) if isinstance(value, str) else value
        if number not in metadata.get("within", FINITE) or hint(number) != number:
            raise ValueError
        return hint(number)
    if hint is str and (isinstance(value, PurePath) or type(value) is int):
        value = str(value)
    if not isinstance(value, hint):
        raise ValueError
    return value if hint is bool else _text(value, metadata)


def _text(text: str, metadata: Mapping[str, Any]) -> str:
    """Return a text whose words are choices, of which `PYTHON_FILE` is any Python file."""
    choices, synonyms = metadata.get("choices") or (), metadata.get("synonyms") or {}
    words = separated(text) if metadata.get("comma_separated") else [text]
    words = [synonyms.get(word.lower(), word) for word in words]
    for word in words if choices and text else ():
        is_file = PYTHON_FILE in choices and PurePath(word).suffix == PYTHON_SUFFIX
        if not (word in choices or is_file) or (len(words) > 1 and word in ("none", "all")):
            raise ValueError
    return ",".join(words)


def separated(text: str) -> list[str]:
    """Return the words of a comma-separated text."""
    return [word.strip() for word in text.split(",") if word.strip()]


def expected(hint: Any, metadata: Mapping[str, Any]) -> str:
    """Describe the values that `typed` takes: `a whole number, 1 or more`."""
    within = metadata.get("within", FINITE)
    if typing.get_origin(hint) is Mapping:
        return f"names with numbers, {within}, such as {{cat: 2, dog: 1.5}}"
    if typing.get_origin(hint) is tuple:
        return f"{expected(typing.get_args(hint)[0], metadata)}, or a list of such"
    if choices := metadata.get("choices"):
        return f"one of {', '.join(map(repr, choices))}"
    nouns = {bool: "True or False", str: "a text or path", int: "a whole number", float: "a number"}
    noun = nouns.get(hint, "a whole number or a name")
    return noun if within == FINITE or hint not in (int, float) else f"{noun}, {within}"


def typed_values(
    kind: type[DataclassInstance], values: Mapping[str, Any], named: Callable[[str], str]
) -> dict[str, Any]:
    """Return values by field name as the types of the fields of `kind`. Raises `UserError`.

    Args:
        named: names a field in errors
    """
    hints, result = typing.get_type_hints(kind), {}
    for key, value in values.items():
        try:
            result[key] = typed(hints[key], kind.__dataclass_fields__[key].metadata, value)
        except ValueError as error:
            raise UserError(f"{named(key)} must be {error}, not {shortened(repr(value), 80)}") from None
    return result


def select(kind: type[T], source: DataclassInstance, **more: Any) -> T:
    """Return a `kind` with the fields of `source` that have the same names, overridden by `more`."""
    names = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(source)}
    return kind(**{**{name: getattr(source, name) for name in names}, **more})
