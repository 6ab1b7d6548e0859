"""Errors for people."""

from __future__ import annotations

from utils.errors import first_line, nearest


def test_nearest() -> None:
    known = ("epochs", "batch-size", "imgsz")
    assert nearest("epoch", known) == " (did you mean 'epochs'?)"
    assert nearest("imgs", known) == " (did you mean 'imgsz'?)"
    assert nearest("weights", known) == ""
    assert nearest("epochs", ()) == ""


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n one two\n"), length=6) == "one..."
    assert first_line(ValueError()) == "ValueError"
