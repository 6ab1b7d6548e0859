"""The values that a flag, a hyperparameter or a YAML key may have. Imports nothing from the repository."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float that fits into a float; bools are not numbers."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


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
NAMED_NUMBER = re.compile(r"\s*(\S.*?)\s*=\s*([^=,()\s]+)\s*(?:,|$)")
PYTHON_SUFFIX = ".py"
PYTHON_FILE = f"FILE{PYTHON_SUFFIX}"  # among the choices of a flag: any Python file
OPSETS = Range(12, 21)  # ONNX operator sets that torch's exporters write and ONNX Runtime 1.20 runs


def accepts(hint: Any, metadata: Mapping[str, Any], value: object) -> bool:
    """Return whether a field takes a value that does not come from a command line.

    Args:
        hint: the field's type; a tuple takes a list of values
        metadata: the field's metadata, see `options.flag`
    """
    if typing.get_origin(hint) is Mapping:
        numbers = value.values() if isinstance(value, dict) else [None]
        return all(is_number(number) and number in metadata["within"] for number in numbers)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(accepts(typing.get_args(hint)[0], metadata, item) for item in value)
    if hint in (int, float):
        return is_number(value) and hint(value) == value and value in metadata.get("within", FINITE)
    if not isinstance(value, hint):
        return False
    if choices := metadata.get("choices"):
        return all(is_choice(word, choices) for word in (value.split(",") if metadata["comma_separated"] else [value]))
    return hint is bool or has_form(str(value), metadata.get("form", ""))


def is_choice(word: str, choices: Sequence[str]) -> bool:
    """Return whether a word is one of `choices`, of which `PYTHON_FILE` is any Python file."""
    return word in choices or (PYTHON_FILE in choices and word.endswith(PYTHON_SUFFIX) and word != PYTHON_SUFFIX)


def chosen(word: str, metadata: Mapping[str, Any]) -> str:
    """Return the choice of a field that a word stands for, or the word itself.

    Args:
        metadata: the field's metadata
    """
    choice: str = metadata["synonyms"].get(word.lower(), word)
    return choice


def has_form(text: str, form: str) -> bool:
    """Return whether text is empty or of a form such as owner/name, in which words in capitals are numbers."""
    pattern = re.sub(r"\w+", lambda word: r"\d+" if word[0].isupper() else r"[\w.-]+", form)
    return not form or not text or re.fullmatch(pattern, text) is not None


def separated(text: str) -> list[str]:
    """Return the words of a comma-separated text."""
    return [word.strip() for word in text.split(",") if word.strip()]


def named_numbers(text: str) -> list[tuple[str, float]]:
    """Return the pairs in a text such as `recall=1,AP(cat, dog)=0.5`; a name may contain commas. Raises ValueError."""
    pairs, end = [], 0
    while end < len(text):
        match = NAMED_NUMBER.match(text, end)
        if match is None or not math.isfinite(number := float(match[2])):
            raise ValueError(text)
        pairs.append((match[1], number))
        end = match.end()
    return pairs


def expected(hint: Any, metadata: Mapping[str, Any]) -> str:
    """Describe the values that `accepts` takes: `a whole number, 1 or more`."""
    if typing.get_origin(hint) is Mapping:
        return f"names with numbers, {metadata['within']}, such as {{cat: 2, dog: 1.5}}"
    if typing.get_origin(hint) is tuple:
        return f"{expected(typing.get_args(hint)[0], metadata)}, or a list of such"
    if choices := metadata.get("choices"):
        return f"one of {', '.join(map(repr, choices))}"
    if hint is bool:
        return "True or False"
    if hint == NUMBER_OR_NAME:
        return "a whole number or a name"
    if hint is str:
        return f"of the form {metadata['form']}" if metadata.get("form") else "a text or path"
    noun, within = "a whole number" if hint is int else "a number", metadata.get("within", FINITE)
    return noun if within == FINITE else f"{noun}, {within}"
