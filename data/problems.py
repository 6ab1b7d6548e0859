"""What was left out of a split, as sentences `what is wrong; what follows`. Called by the data sets."""

from __future__ import annotations

from collections.abc import Sequence

from utils.errors import UserError

PRINTED_PROBLEMS = 5  # of a split, at most


def problem_warnings(problems: Sequence[str], title: str) -> list[str]:
    """Return the first few problems of a split as warnings, and the number of others. title: of the split."""
    messages = [f"warning: {problem}" for problem in problems[:PRINTED_PROBLEMS]]
    if (more := len(problems) - PRINTED_PROBLEMS) > 0:
        messages.append(f"warning: {more} more such problems in {title}; problems.txt in the run folder lists all")
    return messages


def refuse(problems: Sequence[str], title: str) -> None:
    """Raise the first problem as `UserError`, if there is any: --strict."""
    if problems:
        raise UserError(f"{problems[0].rpartition('; ')[0]} (--strict; {len(problems)} such problems in {title})")
