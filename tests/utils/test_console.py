"""Console output: bars and colours, on terminals only."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time

import pytest

from utils import console
from utils.console import (
    Bar,
    RemainingTime,
    columns,
    duration,
    joined,
    listed,
    short_name,
    show,
    surviving_output,
    table,
    wrapped,
)
from utils.files import ROOT


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


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", b"\xc3\xbc\\udcff\n"), ("ascii", b"\\xfc\\udcff\n")])
def test_names_of_files_are_printed_in_any_encoding(
    encoding: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding))
    show("\u00fc\udcff")
    assert output.getvalue() == expected


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
            bar.show(["box 0.1234", "wait 3%"])
        time.sleep(0.11)  # tqdm draws every 0.1 s
    assert "epoch 1/2" in terminal.getvalue()
    assert "box 0.1234, wait 3%" in terminal.getvalue()
    hidden = Terminal()
    monkeypatch.setattr("sys.stderr", hidden)
    assert list(Bar("epoch", 8, shown=False).over([1], lambda _: 8)) == [1]
    assert hidden.getvalue() == ""


# Output that cannot be written

SCRIPT = """
import sys
from utils.console import show, surviving_output

with surviving_output():
    for number in range(2000):
        show(f"line {number}")
    print("done", file=sys.stderr)
"""
FULL = "/dev/full"  # every write fails: no space left on device


@pytest.mark.parametrize(
    ("redirection", "printed"),
    [
        (f">{FULL}", "done"),
        (">&-", "done"),
        (f">{FULL} 2>&1", ""),
        (">&- 2>&-", ""),
        (f"2>{FULL} | tail -n 1", "line 1999"),
        ("| head -n 1", "line 0\ndone"),
    ],
)
def test_output_that_cannot_be_written_does_not_end_a_script(redirection: str, printed: str) -> None:
    """The exit code is that of the script."""
    command = ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {redirection}', sys.executable, SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (ended.returncode, (ended.stdout + ended.stderr).strip()) == (0, printed)


def test_names_that_a_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", terminal)
    with surviving_output():
        show("M\xfcll \udcff")
    assert terminal.buffer.getvalue() == b"M\\xfcll \\udcff\n"  # type: ignore[attr-defined]


BAR_VALUES = [
    *("left 1:12:34", "box 0.123 seg 0.456 obj 0.789 cls 0.012"),
    *("best mask mAP 0.321", "1234 img/s", "wait 12%", "memory 12.3 GiB"),
]


@pytest.mark.parametrize(
    ("columns", "title", "values"),
    [
        (80, "epoch 299/300", BAR_VALUES[:2]),
        (80, "epoch 1999/2000", [BAR_VALUES[0], *BAR_VALUES[2:4]]),  # what does not fit is left out
        (120, "epoch 299/300", BAR_VALUES[:4]),
        (200, "epoch 299/300", BAR_VALUES),
        (30, "epoch 299/300", []),
    ],
)
def test_a_bar_fits_the_terminal(columns: int, title: str, values: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        bar = Bar(title, 24, True)
        for _ in bar.over(range(3), lambda _: 8):
            bar.show(BAR_VALUES)
            time.sleep(0.11)  # tqdm draws every 0.1 s
        printed = os.read(master, 65536).decode()
    os.close(master)
    drawings = [drawing.rstrip() for drawing in printed.split("\r")]
    assert max(map(len, drawings)) <= columns
    last = max(drawing for drawing in drawings if drawing.startswith(title))
    assert last.partition("| ")[2] == ", ".join(values)


@pytest.mark.parametrize("width", [5, 6, 22])
def test_a_long_name_loses_its_middle(width: int) -> None:
    assert short_name("x" * width, width) == "x" * width
    short = short_name(f"begin{'-' * 30}end", width)
    assert len(short) == width
    assert (short[0], short[-1], ".." in short) == ("b", "d", True)


# Widths


@pytest.mark.parametrize(("given", "expected"), [("60", 80), ("80", 80), ("132", 132), ("", 80), ("none", 80)])
def test_columns_without_a_terminal(given: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of $COLUMNS, but never fewer than 80."""
    monkeypatch.setenv("COLUMNS", given)
    monkeypatch.setattr("sys.__stdout__", io.StringIO())
    assert columns() == expected


LONG = "warning: a sentence that is longer than the eighty columns of this terminal, in /a/folder-of/pictures/1.jpg"


@pytest.mark.parametrize(
    ("stream", "width", "lines"),
    [
        (Terminal, "80", [LONG[:79], f"  {LONG[80:]}"]),
        (Terminal, "120", [LONG]),
        (io.StringIO, "80", [LONG]),
    ],
)
def test_long_lines_are_broken_on_terminals(
    stream: type[io.StringIO], width: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path stays whole; a file or pipe gets every message as one line."""
    output = stream()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("NO_COLOR", "1")
    show(LONG)
    assert output.getvalue().splitlines() == lines


def test_a_row_of_a_table_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = f"  conv2d  {'12.5 ms  ' * 10}100"
    assert wrapped(row) == row
    assert wrapped(f"  {LONG}").splitlines()[1] == f"    {LONG.split(' ', 13)[-1]}"


def test_parts_on_as_few_lines_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert joined(["a" * 40, "b" * 30]) == [f"{'a' * 40}, {'b' * 30}"]
    assert joined(["a" * 40, "b" * 39, "c"]) == [f"{'a' * 40},", f"  {'b' * 39}, c"]


def test_a_list_of_names() -> None:
    assert listed([], 80) == ""
    assert listed(list("abcdefghij"), 80) == "a, b, c, d, e, f, g, h, i, j"
    assert listed(list("abcdefghijkl"), 80) == "a, b, c, d, e, f, g, h, i, j and 2 more"
    assert listed(["traffic light", "stop sign", "dog"], 29) == "traffic light, stop sign, dog"
    assert listed(["traffic light", "stop sign", "dog"], 28) == "traffic light and 2 more"
    assert listed(["x" * 40, "dog"], 30) == f"{'x' * 9}..{'x' * 8} and 1 more"
    assert listed(["x" * 40], 20) == f"{'x' * 9}..{'x' * 9}"


NUMBERS: list[str | float] = [12, *[1 / 3] * 8]  # 11 columns with their names; 60 characters beside these


@pytest.mark.parametrize(
    ("width", "name", "printed", "number"),
    [
        (100, "x" * 40, "x" * 40, "0.3333"),
        (80, "x" * 21, "x" * 21, "0.3333"),
        (80, "x" * 22, "x" * 22, "0.333"),  # three decimals before a name is cut
        (80, f"{'x' * 40}y", f"{'x' * 14}..{'x' * 12}y", "0.333"),
        (20, "x" * 40, "xxx..xxx", "0.333"),
    ],
)
def test_a_table_fits(width: int, name: str, printed: str, number: str) -> None:
    head, row = table([["Class", "n", *"abcdefgh"], [name, *NUMBERS]], width)
    assert row.split() == [printed, "12", *[number] * 8]
    assert len(head) == len(row)
    assert len(row) <= max(width, 60)


def test_a_table_without_rows() -> None:
    assert table([]) == []
