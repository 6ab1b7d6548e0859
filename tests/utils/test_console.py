"""Console output: bars and colours, on terminals only."""

from __future__ import annotations

import io
import time

import pytest

from utils import console
from utils.console import Bar, RemainingTime, duration, show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "term", "yellow"),
    [
        (Terminal, "", "xterm", True),
        (Terminal, "1", "xterm", False),
        (Terminal, "", "dumb", False),
        (io.StringIO, "", "xterm", False),
    ],
)
def test_warnings_are_yellow_on_terminals(
    stream: type[io.StringIO], no_color: str, term: str, yellow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = stream()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    show("warning: a", "b")
    assert output.getvalue() == ("\x1b[33mwarning: a\x1b[0m\nb\n" if yellow else "warning: a\nb\n")


@pytest.mark.parametrize(("seconds", "expected"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("utils.console.time.monotonic", lambda: now[0])
    remaining = RemainingTime(8)
    assert remaining.seconds() == 0
    remaining.done, now[0] = 2, 16.0
    assert remaining.seconds() == 18.0
    remaining.done = 8
    assert remaining.seconds() == 0


def test_a_bar_measures_times_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("utils.console.time.monotonic", lambda: now[0])

    def batches() -> list[int]:
        for _ in range(4):
            now[0] += 1.0  # the wait for a batch
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


def test_a_bar_shows_values_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    bar = Bar("epoch 1/2", 24, True)
    for _ in bar.over(range(3), lambda _: 8):
        if bar.due():
            bar.show({"box": "0.1234", "wait": "3%"})
        time.sleep(0.11)  # tqdm draws every 0.1 s
    assert "epoch 1/2" in terminal.getvalue()
    assert "box 0.1234, wait 3%" in terminal.getvalue()
    hidden = Terminal()
    monkeypatch.setattr("sys.stderr", hidden)
    assert list(Bar("epoch", 8, shown=False).over([1], lambda _: 8)) == [1]
    assert hidden.getvalue() == ""
