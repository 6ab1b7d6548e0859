"""What a head has taken over from weights for other classes, in words. Called by each head's head_transfer.py."""

from __future__ import annotations

from collections.abc import Mapping

from utils.errors import plural

MAX_NAMED_CLASSES = 5  # in a message


def classes_in_words(same: Mapping[int, int], new: Mapping[int, str]) -> str:
    """Return how many classes of the same name there are. same: their numbers. new: class names of the model."""
    listed = ", ".join(new[number] for number in list(same)[:MAX_NAMED_CLASSES])
    more = f" and {len(same) - MAX_NAMED_CLASSES} more" if len(same) > MAX_NAMED_CLASSES else ""
    return f"{plural(len(same), 'class')} of the same name ({listed}{more})" if same else "no class by its name"
