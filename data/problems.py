"""Problems of a split, sentences `what is wrong; what is left out`: shown, or refused. Called by the data sets."""

from __future__ import annotations

from collections.abc import Sequence

from utils.errors import UserError, plural

PRINTED_PROBLEMS = 5  # of a split, at most


def problem_warnings(problems: Sequence[str], title: str) -> list[str]:
    """Return warnings of the first few problems, and how many more there are. title: of the split."""
    messages = [f"warning: {problem}" for problem in problems[:PRINTED_PROBLEMS]]
    if (more := len(problems) - PRINTED_PROBLEMS) > 0:
        count = plural(more, "more such problem")
        messages.append(f"warning: {count} in {title}; problems.txt in the run folder lists all")
    return messages


def refuse(problems: Sequence[str], title: str) -> None:
    """Raise the first problem, if any, as `UserError`: --strict."""
    if problems:
        count = plural(len(problems), "such problem")
        raise UserError(f"{problems[0].rpartition('; ')[0]} (--strict; {count} in {title})")
