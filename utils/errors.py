"""The error that is shown to the user as one sentence, and suggestions for misspelled words. Imported everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix. Its message says what is wrong, in which file, line or key, and what to do."""


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return ` (did you mean 'x'?)` for the most similar of `known`, or '' if none reaches `likeness`, from 0 to 1."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
