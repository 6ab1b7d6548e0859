"""Parts of messages."""

from __future__ import annotations

from utils.errors import first_line, nearest, plural


def test_plural() -> None:
    assert [plural(1, "batch"), plural(2, "batch")] == ["1 batch", "2 batches"]
    assert [plural(2, noun) for noun in ("epoch", "process")] == ["2 epochs", "2 processes"]


def test_nearest() -> None:
    known = ("epochs", "batch-size", "imgsz")
    assert nearest("epoch", known) == " (did you mean 'epochs'?)"
    assert nearest("imgs", known) == " (did you mean 'imgsz'?)"
    assert nearest("weights", known) == ""
    assert nearest("epochs", ()) == ""


def test_first_line() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n one two\n"), length=6) == "one..."
    assert first_line(ValueError()) == "ValueError"
