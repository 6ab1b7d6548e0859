"""Jobs in the background: in order, with a time limit, and one warning; and the start of processes."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

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
