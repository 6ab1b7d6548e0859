"""Slicing options: a component gets the fields that it names, and no others."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def select(kind: type[T], source: Any, **more: Any) -> T:
    """A component's own settings: the fields of the same names of a larger dataclass, and `more`."""
    names = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(source)}  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **more)
