"""Ranges of numbers, and texts of a form."""

from __future__ import annotations

import math

import pytest

from utils.config.values import BELOW_ONE, FINITE, NOT_NEGATIVE, POSITIVE, SHARE, Range, accepts, expected, is_number


@pytest.mark.parametrize("value", [0, -3, 0.5, 1e300, 10**300])
def test_numbers(value: object) -> None:
    assert is_number(value)


@pytest.mark.parametrize("value", [True, False, None, "1", [1], math.nan, math.inf, -math.inf, 10**400])
def test_values_that_are_not_numbers(value: object) -> None:
    assert not is_number(value)


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


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (NOT_NEGATIVE, "0 or more"),
        (POSITIVE, "more than 0"),
        (SHARE, "0 to 1"),
        (BELOW_ONE, "0 or more and less than 1"),
        (Range(0, 2**32 - 1), "0 to 4294967295"),
        (Range(0, 0.001), "0 to 0.001"),
    ],
)
def test_the_text_completes_an_error_message(allowed: Range, text: str) -> None:
    assert str(allowed) == text


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("START:STOP", ("10:15", ""), ("10", "10:", "ten:15", "10:15:20")),
        ("owner/name", ("me/a-b.c",), ("me", "me/", "/a")),
    ],
)
def test_texts_of_a_form(form: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    metadata = {"form": form, "comma_separated": False}
    assert all(accepts(str, metadata, text) for text in right)
    assert not any(accepts(str, metadata, text) for text in wrong)
    assert expected(str, metadata) == f"of the form {form}"
