"""The command `python -m utils.plots`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.utils.plots.run_folder import make_run_folder
from utils.files import ROOT
from utils.plots.__main__ import main, run


def test_the_background_has_a_low_priority_and_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], not_nicer: list[int]
) -> None:
    exp = make_run_folder(tmp_path / "exp")
    assert run([str(exp), "--only", "results.png", "--background"]) == 0
    assert capfd.readouterr() == ("", "")
    assert not_nicer == [10]
    assert (exp / "results.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty has nothing to draw from"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run_folder(tmp_path / "exp")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 1
    out, error = capfd.readouterr()
    assert not out
    assert error.startswith(f"error: {problem}")
    assert error.count("\n") == 1


def test_a_picture_without_its_file_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "exp").mkdir()
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "exp"), "--only", "labels.jpg"])
    assert ended.value.code == 1
    assert capfd.readouterr().err == f"error: {tmp_path / 'exp'} has nothing to draw from; it needs labels.csv\n"


def test_the_command_imports_neither_torch_nor_pyplot(tmp_path: Path) -> None:
    """matplotlib is imported with the first chart; the back end of a notebook in the environment is ignored."""
    exp = make_run_folder(tmp_path / "exp")
    code = (
        "import sys; sys.path[0] = sys.argv.pop(1); from utils.plots.__main__ import main\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(exp), "--only", "results.png", "labels.jpg"]
    environment = {**os.environ, "MPLBACKEND": "no such back end", "DISPLAY": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "False False\nresults.png\nlabels.jpg\nFalse False\n"
