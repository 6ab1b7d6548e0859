"""The end of a single process, and the barrier; runs of several processes end in test_spawn.py."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import distributed

from utils.distributed import failure, store
from utils.distributed.failure import (
    Stopped,
    barrier,
    is_first_to_fail,
    lost_contact,
    on_failure,
    process_names,
    run_main,
    start_failure_monitor,
)
from utils.distributed.ranks import Ranks
from utils.distributed.store import RunStore
from utils.errors import UserError
from utils.files import ROOT


def test_the_reason_is_passed_on_once(capsys: pytest.CaptureFixture[str]) -> None:
    """To trackers, which may alert somebody; their errors change nothing."""
    reasons: list[str] = []

    def listen(reason: str) -> None:
        reasons.append(reason)
        raise ValueError("an error of the listener")

    def main() -> None:
        raise UserError("20 steps were not finite")

    on_failure(lambda reason: reasons.append("of an earlier run"))
    on_failure(listen)
    for _ in range(2):
        with pytest.raises(SystemExit):
            run_main(main)
    assert reasons == ["20 steps were not finite"]
    assert capsys.readouterr().err == 2 * "error: 20 steps were not finite\n"


def test_a_script_that_succeeds_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(lambda: None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("a.yaml, line 3: fix it"), 1, "error: a.yaml, line 3: fix it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Stopped(0), 0, ""),  # everything is printed
        (Stopped(143), 143, ""),
    ],
)
def test_exit_codes(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_main(main)
    assert raised.value.code == code
    assert capsys.readouterr() == ("", message)


def test_a_wrong_launch_is_an_error_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SystemExit) as raised:
        run_main(lambda: pytest.fail("it ran"))
    assert str(raised.value.code).startswith("error: the environment variable WORLD_SIZE is 'two'")  # exit code 1


@pytest.mark.parametrize("script", ["train", "val", "detect", "export"])
def test_ctrl_c_in_the_imports_of_a_script_prints_nothing(script: str, tmp_path: Path) -> None:
    for package in ("cv2", "numpy", "torch"):  # the first one that a script imports
        (tmp_path / f"{package}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    command = [sys.executable, str(ROOT / f"{script}.py")]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")  # 130 in a shell


def test_ctrl_c_is_an_exception_again_after_the_imports() -> None:
    """The scripts let it end the process without a traceback during their imports."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as raised:
            run_main(lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised.value.code == 130


@pytest.mark.parametrize("script", ["train", "val", "detect", "export"])
def test_the_imports_of_a_script_collect_no_garbage(script: str, tmp_path: Path) -> None:
    for package in ("cv2", "numpy", "torch"):  # the first one that a script imports
        (tmp_path / f"{package}.py").write_text("import gc\nraise SystemExit(f'collects: {gc.isenabled()}')")
    command = [sys.executable, str(ROOT / f"{script}.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=300, text=True)
    assert ended.stderr.strip() == "collects: False"


def test_garbage_is_collected_again_after_the_imports() -> None:
    gc.disable()
    try:
        run_main(lambda: None)
        assert gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shape mismatch")])
def test_an_unexpected_error_keeps_its_traceback(error: Exception) -> None:
    def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_main(main)


def test_one_process_is_always_the_first_to_fail() -> None:
    start_failure_monitor()
    assert process_names([0, 2]) == "process 0 and process 2"
    assert is_first_to_fail()
    assert is_first_to_fail()


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (RuntimeError("[/x/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"), "for 5 s"),
        (RuntimeError("[/x/gloo/pair.cc:561] Connection closed by peer [10.0.0.2]:5540. GLHF!"), "on 10.0.0.2 has"),
        (distributed.DistNetworkError("something else\nmore"), "(something else)"),
        (RuntimeError("shape mismatch"), ""),
    ],
)
def test_lost_contact(error: RuntimeError, part: str) -> None:
    message = lost_contact(error)
    assert part in message
    assert bool(message) == bool(part)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("SystemExit(0)", "error: {}, line 2: SystemExit: 0; fix it there"),
        ("RuntimeError('gloo/pair.cc: Connection closed by peer [10.0.0.2]:5540')", "error: a process on 10.0.0.2 has"),
    ],
)
def test_an_error_in_a_users_code_is_one_sentence(error: str, sentence: str, tmp_path: Path) -> None:
    """A layer of the user's may exchange BatchNorm's statistics when another process is lost."""
    file = tmp_path / "raising.py"
    file.write_text(f"def go():\n    raise {error}\n")
    text = f"""
from pathlib import Path
from utils.distributed.failure import run_main
from utils.user_code import imported

with imported(Path({str(file)!r}), "--task-file") as module:
    pass
run_main(module.go)
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith(sentence.format(file))
    assert done.stderr.count("\n") == 1


# The barrier


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], list]:
    """Three threads that act as processes: `work` gets the rank; its results or errors, by rank."""
    shared, local = distributed.HashStore(), threading.local()
    monkeypatch.setattr(store, "ranks", lambda: Ranks(local.rank, 3, local.rank, 3))
    monkeypatch.setattr(failure, "run_store", lambda: RunStore(shared))
    monkeypatch.setattr(failure, "world_size", lambda: 3)
    monkeypatch.setattr(failure, "_barrier_numbers", itertools.repeat(0))

    def run(work: Callable[[int], object]) -> list:
        def process(rank: int) -> object:
            local.rank = rank
            try:
                return work(rank)
            except (UserError, KeyError) as error:
                return error

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(process, range(3)))

    return run


def test_all_wait_for_the_slowest_process(three: Callable) -> None:
    def work(rank: int) -> tuple[float, float]:
        with barrier(60):
            time.sleep(0.3 * (rank == 1))
            done = time.monotonic()
        return done, time.monotonic()

    times = three(work)
    assert min(after for _, after in times) >= max(done for done, _ in times)


def test_a_process_that_does_not_finish_in_time_is_named(three: Callable) -> None:
    def work(rank: int) -> None:
        with barrier(0.2):
            if rank == 1:
                raise KeyError

    first, failed, last = three(work)
    assert isinstance(failed, KeyError)
    for error in (first, last):
        assert str(error).startswith("process 1 did not read the data within 0.2 s of the others (--dist-timeout), or ")


def test_one_process_does_not_wait() -> None:
    with barrier(0):
        pass


# The end of a script's process


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
        ("raise UserError('a sentence')", 1, "error: a sentence\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_a_script_ends_quickly_after_all_that_was_asked_for(ending: str, code: int, error: str) -> None:
    """Functions of `atexit` and threads are waited for; objects are not taken apart one by one."""
    text = f"""
import sys
from utils.birth import start_script
start_script()
import atexit, threading, time
from utils.distributed.failure import run_main
from utils.errors import UserError

class Loud:
    def __del__(self):
        print("taken apart", flush=True)

kept = Loud()
kept.itself = kept

def main():
    atexit.register(print, "of atexit", flush=True)
    threading.Thread(target=lambda: (time.sleep(0.3), print("of a thread"))).start()
    {ending}

run_main(main)
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (code, "of a thread\nof atexit\n", error)


def test_an_error_before_the_script_begins_is_one() -> None:
    text = "from utils.birth import start_script; start_script(); import no_such_module"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.endswith("No module named 'no_such_module'\n")
