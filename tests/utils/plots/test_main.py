"""The command `python -m utils.plots`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cv2
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
        (["exp", "--only", "labels.png"], "unknown picture labels.png (did you mean 'labels.jpg'?)"),
        (["exp", "--out", "a.png"], "--out is for the chart of several runs"),
        (["exp", "exp", "--only", "results.png"], "--only is for the pictures of one run"),
        (["exp", "nowhere"], "nowhere is not a folder"),
        (["exp", "exp", "--out", "a.nothing"], "a.nothing cannot be written: unknown format"),
        (["exp", "exp", "--out", "exp/results.csv/a.png"], "exp/results.csv/a.png cannot be written: "),
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


def test_runs_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make_run_folder(tmp_path / "exp"), make_run_folder(tmp_path / "exp2", epochs=5)
    before = sorted(first.iterdir())
    assert run([str(first), str(second)]) == 0
    assert capfd.readouterr().out.splitlines() == [  # epochs from 1
        " run  epochs      mAP_0.5       recall",
        " exp       3  0.5000 in 3  0.5000 in 1",
        "exp2       5  1.0000 in 5  0.5000 in 1",
        "comparison.png",
    ]
    chart = cv2.imread("comparison.png").shape
    assert sorted(first.iterdir()) == before
    assert run([str(first), str(second), "--out", "charts/a.jpg", "--background"]) == 0
    assert not capfd.readouterr().out
    assert cv2.imread("charts/a.jpg").shape == chart


def test_a_run_that_cannot_be_compared_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = make_run_folder(tmp_path / "exp"), make_run_folder(tmp_path / "exp2")
    (first / "results.csv").unlink()
    out = tmp_path / "a.png"
    assert run([str(first), str(second), "--out", str(out)]) == 1
    printed, warning = capfd.readouterr()
    assert printed.splitlines()[1].split()[0] == "exp2"
    assert warning.startswith(f"warning: {first / 'results.csv'} cannot be read (FileNotFoundError: ")
    (second / "results.csv").write_text("epoch,train/loss\n")
    assert run([str(first), str(second), "--out", str(out)]) == 1
    assert "error: there is no results.csv with an epoch in " in capfd.readouterr().err


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
