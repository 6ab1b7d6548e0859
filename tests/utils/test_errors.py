"""Errors for people."""

from __future__ import annotations

from utils.errors import nearest


def test_nearest() -> None:
    known = ("epochs", "batch-size", "imgsz")
    assert nearest("epoch", known) == " (did you mean 'epochs'?)"
    assert nearest("imgs", known) == " (did you mean 'imgsz'?)"
    assert nearest("weights", known) == ""
    assert nearest("epochs", ()) == ""
