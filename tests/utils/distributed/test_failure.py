"""The end of a single process; runs of several processes end in test_spawn.py."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from utils.distributed.failure import (
    Stopped,
    is_first_to_fail,
    lost_contact,
    on_failure,
    process_names,
    run_main,
    start_failure_monitor,
)
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
