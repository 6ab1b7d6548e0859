"""Errors that are written for the person at the keyboard."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something that the user can mend. The message is one sentence that names the file, line or key and what to do."""


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """` (did you mean 'x'?)` for the most similar of `known`, or an empty string where nothing reaches `likeness`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""
