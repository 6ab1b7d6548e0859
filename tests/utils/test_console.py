"""Console output: bars on terminals only, tables, and jobs in the background."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from utils import console
from utils.console import Background, Bar, log, table
from utils.files import ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", b"\xc3\xbc\\udcff\n"), ("ascii", b"\\xfc\\udcff\n")])
def test_names_of_files_are_printed_in_any_encoding(
    encoding: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding))
    log("\u00fc\udcff")
    assert output.getvalue() == expected


def test_a_line_that_is_wider_than_the_terminal_is_wrapped_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    for output, end in ((Terminal(), "\n  to /a/folder\n"), (io.StringIO(), " to /a/folder\n")):
        monkeypatch.setattr("sys.stdout", output)
        log("saving all results to /a/folder")
        assert output.getvalue() == f"saving all results{end}"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output(closed: str) -> None:
    code = "from utils.console import *; log('a'); [*Bar('b', 1, True).iterate([1], int)]; sys.stderr.write('c')"
    assert subprocess.run(["sh", "-c", f'{sys.executable} -c "{code}" {closed}'], cwd=ROOT).returncode == 0


def test_a_run_holds_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Until its folder is open; a quiet one prints warnings, and what must be printed always."""
    log, heard = console.Log(), list[str]()
    log.reset(True, quiet=True, hold=True)
    log("held", "", "warning: held too")
    assert capsys.readouterr().out == ""
    log.release(heard.append)
    log("quiet")
    log("result", always=True)
    assert capsys.readouterr().out == "warning: held too\nresult\n"
    assert heard == ["held", "warning: held too", "quiet", "result"]
    log.reset(False, hold=True)
    log.release(heard.append)
    log("of another process")
    assert (capsys.readouterr().out, heard[4:]) == ("", [])
    log.reset()
    log("after the run")
    assert (capsys.readouterr().out, heard[4:]) == ("after the run\n", [])


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
    for size in bar.iterate(batches(), lambda size: size):
        assert not bar.due
        now[0] += 3.0
        assert size == 8
    assert bar.waiting == pytest.approx(0.25)
    assert (bar.waited, bar.seconds, bar.rate) == (4.0, 16.0, 2.0)
    assert "".join(capsys.readouterr()) == ""


def test_a_bar_shows_values_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    bar = Bar("epoch 1/2", 24, True)
    due = []
    for _ in bar.iterate(range(3), lambda _: 8):
        due.append(bar.due)
        if bar.due:
            bar.show(["box 0.1234", "wait 3%", "too wide" * 9])
    assert due == [False, True, True]
    assert "epoch 1/2" in terminal.getvalue()
    assert "box 0.1234, wait 3%" in terminal.getvalue()
    hidden = Terminal()
    monkeypatch.setattr("sys.stderr", hidden)
    assert list(Bar("epoch", 8, visible=False).iterate([1], lambda _: 8)) == [1]
    assert hidden.getvalue() == ""


# Output that cannot be written

SCRIPT = """
import gc, sys
gc.disable()  # as the scripts do
from utils.console import log
from utils.distributed.failure import run_main

def main():
    for number in range(2000):
        log(f"line {number}")
    print("done", file=sys.stderr)
run_main(main)
"""


@pytest.mark.parametrize("redirection", [">/dev/full", "| head -n 1 >/dev/null"])
def test_output_that_cannot_be_written_does_not_end_a_script(redirection: str) -> None:
    """The exit code is that of the script."""
    command = ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {redirection}', sys.executable, SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "done\n")


NUMBERS: list[str | float] = [12, *[1 / 3] * 8]  # 11 columns with their names; 51 characters beside these


@pytest.mark.parametrize(
    ("width", "name", "printed"),
    [(100, "x" * 40, "x" * 40), (80, "x" * 29, "x" * 29), (80, "x" * 30, f"{'x' * 26}..."), (20, "x" * 40, "xxxxx...")],
)
def test_a_table_fits(width: int, name: str, printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    head, row = table([["Class", "n", *"abcdefgh"], [name, *NUMBERS]])
    assert row.split() == [printed, "12", *["0.333"] * 8]
    assert len(head) == len(row)
    assert len(row) <= max(width, 51 + 8)
    assert table([]) == []


# Jobs in the background


def test_failures_are_one_warning_and_later_jobs_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In order; after `finish` none is run."""
    done: list[int] = []
    work = Background("it has failed")
    work.submit(lambda: 1 / 0)
    work.submit(lambda: (_ for _ in ()).throw(GeneratorExit))
    for number in range(20):
        work.submit(lambda number=number: done.append(number))
    assert work.finish(5)
    work.submit(lambda: done.append(20))
    assert work.finish(5)
    assert done == list(range(20))
    assert capsys.readouterr().out.count("it has failed") == 1


def test_finish_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "abandoned", False)
    stuck = threading.Event()
    work = Background("it has failed")
    work.submit(stuck.wait)
    assert not work.finish(0.05)
    assert Background.abandoned
    stuck.set()


def test_a_fork_waits_while_a_thread_starts_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the forked process has the program's pipe too, and the thread would wait for that process."""
    Background("").finish(10)
    starting, start = threading.Event(), subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start_slowly(*arguments: Any) -> None:
        starting.set()
        time.sleep(0.5)
        start(*arguments)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", start_slowly)
    command = [sys.executable, "-S", "-c", ""]
    thread = threading.Thread(target=partial(subprocess.run, command, stderr=subprocess.PIPE), daemon=True)
    thread.start()
    assert starting.wait(60)
    if not (child := os.fork()):
        time.sleep(600)
        os._exit(0)
    try:
        thread.join(60)
        assert not thread.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
