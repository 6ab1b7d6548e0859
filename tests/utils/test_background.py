"""Jobs in the background: in order, with a time limit, and one warning; and the start of processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from utils.background import Background, own_python


def test_jobs_are_done_in_order() -> None:
    done: list[int] = []
    work = Background("it has failed", print)
    for number in range(20):
        work.do(lambda number=number: done.append(number))
    assert work.finish(5)
    assert done == list(range(20))


def test_failures_are_one_warning_and_later_jobs_run() -> None:
    warnings: list[str] = []
    done: list[str] = []
    work = Background("it has failed", warnings.append)
    work.do(lambda: 1 / 0)
    work.do(lambda: [][0])
    work.do(lambda: (_ for _ in ()).throw(GeneratorExit))
    work.do(lambda: done.append("after"))
    assert work.finish(5)
    assert warnings == ["warning: it has failed (ZeroDivisionError: division by zero); training continues"]
    assert done == ["after"]


def test_finish_has_a_time_limit() -> None:
    stuck = threading.Event()
    work = Background("it has failed", print)
    work.do(stuck.wait)
    assert not work.finish(0.05)
    stuck.set()


def test_jobs_can_follow_a_finish() -> None:
    done: list[int] = []
    work = Background("it has failed", print)
    assert work.finish(0)
    for number in range(2):
        work.do(lambda number=number: done.append(number))
        assert work.finish(5)
    assert done == [0, 1]


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").write_text("raise RuntimeError('not this one')")
    command = own_python("utils.errors", "UserError")
    assert subprocess.run(command, cwd=tmp_path).returncode == 0


def test_a_fork_keeps_no_object_of_its_caller() -> None:
    """A loader that stays until garbage is collected ends its processes after five seconds for each."""

    class Loader:
        """Something that the caller of a fork holds."""

    def start() -> weakref.ref[Loader]:
        loader = Loader()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return weakref.ref(loader)

    gc.disable()
    try:
        assert start()() is None
    finally:
        gc.enable()


def test_no_fork_while_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process forked meanwhile would inherit the pipe that `Popen` waits for, whoever calls it."""
    execute, started, inside = subprocess.Popen._execute_child, threading.Event(), threading.Event()  # type: ignore[attr-defined]

    def slow_execute(*arguments: Any) -> None:
        inside.set()
        time.sleep(0.3)
        execute(*arguments)
        started.set()

    monkeypatch.setattr(subprocess.Popen, "_execute_child", slow_execute)
    thread = threading.Thread(target=lambda: subprocess.Popen([sys.executable, "-c", ""]).wait())
    thread.start()
    assert inside.wait(5)
    child = os.fork()
    if not child:
        os._exit(0 if started.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
