"""`UserError`, which is printed as one sentence, and parts of messages. Imported everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_MESSAGE = 2000  # characters: a value that a message quotes may have a million


class UserError(Exception):
    """An error that the user can fix. Its message: what is wrong, in which file, line or key, and what to do."""

    def __init__(self, message: str = "") -> None:
        half = MAX_MESSAGE // 2
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}")


def first_line(error: BaseException, length: int = 160) -> str:
    """Return the first line of an error's message, or its type if there is none, cut to `length` characters."""
    return shortened(str(error).strip().partition("\n")[0] or type(error).__name__, length)


def shortened(text: str, length: int = 160) -> str:
    """Return `text`, cut to `length` characters for a message."""
    return text if len(text) <= length else text[: length - 3] + "..."


def shown(value: object) -> str:
    """Return a value of a file or flag as Python writes it, shortened for a message."""
    return shortened(repr(value))


def plural(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    ending = "es" if noun.endswith(("ss", "tch", "x")) else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return ` (did you mean 'x'?)` for the most similar of `known`, or '' if none reaches `likeness`, from 0 to 1."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
