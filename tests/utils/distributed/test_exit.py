"""How a process ends. How whole runs of several processes end is in tests/utils/distributed/test_spawn.py."""

from __future__ import annotations

import pytest
from torch import distributed

from utils.distributed.exit import Stopped, is_first_to_fail, lost_contact, process_names, run_main, sign_in
from utils.errors import UserError


@pytest.mark.parametrize("code", [0, 143])
def test_a_run_that_was_stopped_has_said_why(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise Stopped(code)

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == code
    assert capsys.readouterr() == ("", "")


def test_one_process_has_nobody_to_tell() -> None:
    sign_in()
    assert process_names([0, 2]) == "process 0 and process 2"
    assert is_first_to_fail()
    assert is_first_to_fail()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[/x/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"), "for 5 s"),
        (RuntimeError("[/x/gloo/pair.cc:561] Connection closed by peer [10.0.0.2]:5540. GLHF!"), "on 10.0.0.2 has"),
        (distributed.DistNetworkError("something else\nmore"), "(something else)"),
        (RuntimeError("shape mismatch"), ""),
    ],
)
def test_lost_contact(error: RuntimeError, said: str) -> None:
    found = lost_contact(error)
    assert said in found
    assert bool(found) == bool(said)


# One process


def test_a_script_that_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    run_main(lambda: None)
    assert capsys.readouterr() == ("", "")


def test_a_users_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise UserError("a.yaml, line 3: mend it")

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 1
    assert capsys.readouterr() == ("", "error: a.yaml, line 3: mend it\n")


def test_interruption_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError("shape mismatch")])
def test_a_mistake_of_ours_keeps_its_traceback(error: Exception) -> None:
    def main() -> None:
        raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        run_main(main)
