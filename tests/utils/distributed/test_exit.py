"""The end of a single process; runs of several processes end in test_spawn.py."""

from __future__ import annotations

import pytest
from torch import distributed

from utils.distributed.exit import Stopped, is_first_to_fail, lost_contact, process_names, run_main, sign_in
from utils.errors import UserError


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


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shape mismatch")])
def test_an_unexpected_error_keeps_its_traceback(error: Exception) -> None:
    def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_main(main)


def test_one_process_is_always_the_first_to_fail() -> None:
    sign_in()
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
