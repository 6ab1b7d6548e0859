"""Slices of options: a component gets only the settings that it names. Used by the scripts and data sets."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def select(kind: type[T], source: DataclassInstance, **more: Any) -> T:
    """Return a `kind` with the fields of `source` that have the same names, overridden by `more`."""
    names = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(source)}
    return kind(**{**{name: getattr(source, name) for name in names}, **more})
