"""`UserError`, which is printed as one sentence, `Stopped`, and the text of messages. Imported everywhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_MESSAGE = 2000  # characters: a value that a message quotes may have a million
# An address; as a Path it has one slash after the colon. A password may contain @ and :, and a query is secret too.
ADDRESS = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]+:/{1,2})(?:[^/\s]*@)?([^?\s]*)(?:\?(?=[\w%])\S*)?")

# What torch puts before the message of an error in a loader process, which it raises again in the training process.
OF_LOADER = re.compile(r"(?s)\ACaught \w+ in DataLoader worker process .*\n[\w.]+Error: ")


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong, in which file, line or key, and what to do."""

    def __init__(self, message: str = "", code: int = 1) -> None:
        super().__init__(public(OF_LOADER.sub("", message).rstrip()))
        self.code = code  # exit code of the process


class Stopped(SystemExit):
    """The run ends early, on request, with the exit code `code`; everything is saved and printed."""


def public(text: str, length: int = MAX_MESSAGE) -> str:
    """Return `text` without user names, passwords and queries of addresses, cut to `length` characters."""
    text = ADDRESS.sub(r"\1\2", text) if ":/" in text else text
    return text if len(text) <= length else text[: length - 3] + "..."


def first_line(error: BaseException, length: int = 160) -> str:
    """Return the first line of an error's message, or its type if there is none, cut to `length` characters."""
    return public(str(error).strip().partition("\n")[0] or type(error).__name__, length)


def quoted(value: object, length: int = 160) -> str:
    """Return a value of a file or flag as Python writes it, `public` and cut to `length` characters."""
    return public(repr(value), length)


def plural(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    ending = "es" if noun.endswith(("ss", "tch", "x")) else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return ` (did you mean 'x'?)` for the most similar of `known`, '' if none reaches `likeness`, from 0 to 1; of
    equals for the first in the alphabet, as lr0 for lr."""
    by_lower = {name.lower(): name for name in known}
    ranked = sorted((-difflib.SequenceMatcher(None, name, word.lower()).ratio(), name) for name in by_lower)
    return f" (did you mean '{by_lower[ranked[0][1]]}'?)" if ranked and -ranked[0][0] >= likeness else ""
