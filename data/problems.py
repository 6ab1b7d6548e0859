"""What was left out of a split, as sentences `what is wrong; what follows`: shown, or refused."""

from __future__ import annotations

from collections.abc import Sequence

from utils.errors import UserError

SHOWN = 5


def told(problems: Sequence[str], title: str) -> list[str]:
    """The first few problems of a split as warnings, and how many more there are."""
    lines = [f"warning: {problem}" for problem in problems[:SHOWN]]
    if (more := len(problems) - SHOWN) > 0:
        lines.append(f"warning: {more} more such problems in {title}; problems.txt in the run folder lists all")
    return lines


def refuse(problems: Sequence[str], title: str) -> None:
    """--strict: raises the first problem as `UserError`, where there is any."""
    if problems:
        raise UserError(f"{problems[0].rpartition('; ')[0]} (--strict; {len(problems)} such problems in {title})")
