"""Parts of messages."""

from __future__ import annotations

from utils.errors import MAX_MESSAGE, UserError, first_line, nearest, plural, quoted


def test_words() -> None:
    assert [plural(1, "batch"), plural(2, "batch")] == ["1 batch", "2 batches"]
    assert [plural(2, noun) for noun in ("epoch", "process", "box")] == ["2 epochs", "2 processes", "2 boxes"]
    known = ("epochs", "batch-size", "imgsz")
    assert nearest("epoch", known) == " (did you mean 'epochs'?)"
    assert nearest("lr", {"lrf": 0, "lr0": 1}) == " (did you mean 'lr0'?)"
    assert nearest("imgs", known) == " (did you mean 'imgsz'?)"
    assert nearest("weights", known) == nearest("epochs", ()) == ""
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n one two\n"), length=6) == "one..."
    assert first_line(ValueError()) == "ValueError"


def test_a_message_is_short_whatever_it_quotes() -> None:
    assert quoted(["a"]) == "['a']"
    assert len(quoted("a" * 10**6)) == 160
    assert "passw" not in quoted("https://user:password@host", 25)  # hidden before it is cut
    text = str(UserError(f"data.yaml: `train` must be a path, not {'a' * 10**6}; fix it"))
    assert len(text) < MAX_MESSAGE + 10
    assert text.startswith("data.yaml: `train` must be a path, not aaa")
