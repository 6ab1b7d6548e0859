"""Ranges of numbers, and values as the types of fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from utils.config.flags import BELOW_ONE, FINITE, NOT_NEGATIVE, POSITIVE, SHARE, Range, is_number, typed


def test_numbers() -> None:
    assert all(map(is_number, [0, -3, 0.5, 1e300, 10**300]))
    assert not any(map(is_number, [True, False, None, "1", [1], math.nan, math.inf, -math.inf, 10**400]))


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (FINITE, (-1e300, 0, 1e300), (math.inf, -math.inf, math.nan)),
        (NOT_NEGATIVE, (0, 1, 1e300), (-1e-9, math.inf, math.nan)),
        (POSITIVE, (1e-9, 1), (0, -1)),
        (SHARE, (0, 0.5, 1), (-0.1, 1.1)),
        (BELOW_ONE, (0, 0.999), (-0.1, 1)),
        (Range(-1, 2, exclusive_minimum=True), (-0.9, 2), (-1, 2.1)),
    ],
)
def test_bounds(allowed: Range, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)


CHOICES = {"choices": ("none", "all", "wandb", "FILE.py"), "comma_separated": True}


@pytest.mark.parametrize(
    ("hint", "metadata", "value", "result"),
    [
        (int, {"within": NOT_NEGATIVE}, "7", 7),
        (int, {}, 7.0, 7),
        (float, {}, "1e-3", 0.001),
        (float, {}, 3, 3.0),
        (bool, {}, True, True),
        (str, {}, Path("a/b"), str(Path("a/b"))),
        (str, {}, 0, "0"),  # such as device=0
        (str, CHOICES, " wandb , a/b.py,", "wandb,a/b.py"),
        (tuple[int, ...], {}, "90", (90,)),
        (tuple[int, ...], {}, [90, "128"], (90, 128)),
        (tuple[str, ...], {"comma_separated": True}, ["a, b", "c"], ("a", "b", "c")),
        (tuple[int | str, ...], {}, ["10", "*.bn", 3], (10, "*.bn", 3)),
        (Mapping[str, float], {"within": POSITIVE}, "{cat: 2}", {"cat": 2.0}),
        (Mapping[str, float], {}, {7: 1}, {"7": 1.0}),
    ],
)
def test_values_of_a_command_line_of_yaml_and_of_python(
    hint: Any, metadata: dict[str, Any], value: object, result: object
) -> None:
    read = typed(hint, metadata, value)
    assert (read, type(read)) == (result, type(result))


@pytest.mark.parametrize(
    ("hint", "metadata", "value"),
    [
        (int, {}, "many"),
        (int, {}, 2.5),
        (int, {}, True),
        (int, {"within": NOT_NEGATIVE}, -1),
        (float, {}, "nan"),
        (float, {}, None),
        (bool, {}, "yes"),
        (bool, {}, 1),
        (str, {}, None),
        (str, {}, True),
        (str, CHOICES, "wandb,x"),
        (str, CHOICES, "none,wandb"),
        (str, CHOICES, ".py"),
        (tuple[int, ...], {}, [1.5]),
        (tuple[int | str, ...], {}, [1.5]),
        (Mapping[str, float], {"within": POSITIVE}, {"cat": 0}),
        (Mapping[str, float], {}, "cat"),
        (Mapping[str, float], {}, [1]),
    ],
)
def test_wrong_values(hint: Any, metadata: dict[str, Any], value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        typed(hint, metadata, value)
