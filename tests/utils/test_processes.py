"""Where a launcher has put a process, starting processes, and how a script ends."""

from __future__ import annotations

import pytest

from utils.errors import UserError
from utils.processes import run_main


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


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_main(main)
