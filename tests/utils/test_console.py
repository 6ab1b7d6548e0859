"""Console output: bars and colours on terminals only."""

from __future__ import annotations

import io

import pytest

from utils import console
from utils.console import YELLOW, Bar, RemainingTime, coloured, duration, show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coloured("a", YELLOW, Terminal()) == "\x1b[33ma\x1b[0m"
    assert coloured("a", YELLOW, io.StringIO()) == "a"
    monkeypatch.setenv("TERM", "dumb")
    assert coloured("a", YELLOW, Terminal()) == "a"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("a", YELLOW, Terminal()) == "a"


def test_warnings_are_yellow_and_the_rest_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    show("warning: careful", "all is well")
    assert terminal.getvalue() == "\x1b[33mwarning: careful\x1b[0m\nall is well\n"


@pytest.mark.parametrize(("seconds", "expected"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_what_remains_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("utils.console.time.monotonic", lambda: now[0])
    remaining = RemainingTime(8)
    assert remaining.seconds() == 0
    remaining.done, now[0] = 2, 16.0
    assert remaining.seconds() == 18.0
    remaining.done = 8
    assert remaining.seconds() == 0


def test_a_bar_measures_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr("utils.console.time.monotonic", lambda: now[0])

    def batches() -> list[int]:
        for _ in range(4):
            now[0] += 1.0  # a batch is waited for
            yield 8

    bar = Bar("epoch", 48, True, done=16)
    assert bar.rate == 0
    for size in bar.over(batches(), lambda size: size):
        assert not bar.due()
        now[0] += 3.0
        assert bar.waiting == pytest.approx(0.25)
        assert size == 8
    assert (bar.waited, bar.seconds, bar.rate) == (4.0, 16.0, 2.0)
    assert "".join(capsys.readouterr()) == ""


def test_a_bar_on_a_terminal_shows_values_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    bar = Bar("epoch 1/2", 24, True)
    for _ in bar.over(range(3), lambda _: 8):
        if bar.due():
            bar.show({"box": "0.1234", "wait": "3%"})
        bar._bar.refresh()
    assert "epoch 1/2" in terminal.getvalue()
    assert "box 0.1234, wait 3%" in terminal.getvalue()
    hidden = Terminal()
    monkeypatch.setattr("sys.stderr", hidden)
    assert list(Bar("epoch", 8, shown=False).over([1], lambda _: 8)) == [1]
    assert hidden.getvalue() == ""
