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


@pytest.fixture(autouse=True)
def not_nicer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tests themselves do not give way; how far they were to."""
    asked: list[int] = []
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(cv2, "setNumThreads", lambda count: None)
    return asked


def test_the_background_gives_way_and_is_silent(
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
        (["empty"], "empty holds nothing to draw from"),
        (["exp", "--only", "labels.png"], "there is no picture labels.png (did you mean 'labels.jpg'?)"),
        (["exp", "--out", "a.png"], "--out is for the chart of several runs"),
        (["exp", "exp", "--only", "results.png"], "--only is for the pictures of one run"),
        (["exp", "nowhere"], "nowhere is not a folder"),
        (["exp", "exp", "--out", "a.nothing"], "a.nothing cannot be written: no such format"),
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


def test_only_a_picture_without_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = make_run_folder(tmp_path / "exp")
    (exp / "labels.csv").unlink()
    assert run([str(exp), "--only", "labels.jpg"]) == 1
    assert capfd.readouterr().err == f"error: {exp} holds nothing to draw from; there must be labels.csv\n"


def test_main_ends_with_the_exit_code(tmp_path: Path) -> None:
    """Training calls it without `sys.exit`."""
    exp = make_run_folder(tmp_path / "exp")
    for arguments, code in (([str(exp), "--only", "results.png"], 0), ([str(tmp_path / "nowhere")], 1)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code


def test_runs_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make_run_folder(tmp_path / "exp"), make_run_folder(tmp_path / "exp2", epochs=5)
    before = sorted(first.iterdir())
    assert run([str(first), str(second)]) == 0
    assert capfd.readouterr().out.splitlines() == [
        " run  epochs      mAP_0.5       recall",
        " exp       3  0.5000 in 2  0.5000 in 0",
        "exp2       5  1.0000 in 4  0.5000 in 0",
        "comparison.png",
    ]
    assert cv2.imread("comparison.png").shape == (535, 960, 3)  # with a line of names
    assert sorted(first.iterdir()) == before
    assert run([str(first), str(second), "--out", "charts/a.jpg", "--background"]) == 0
    assert not capfd.readouterr().out
    assert cv2.imread("charts/a.jpg").shape == (535, 960, 3)


def test_a_run_that_cannot_be_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others are."""
    first, second = make_run_folder(tmp_path / "exp"), make_run_folder(tmp_path / "exp2")
    (first / "results.csv").unlink()
    out = tmp_path / "a.png"
    assert run([str(first), str(second), "--out", str(out)]) == 1
    told, warning = capfd.readouterr()
    assert told.splitlines()[1].split()[0] == "exp2"
    assert warning == f"warning: {first / 'results.csv'} cannot be read: No such file or directory\n"
    (second / "results.csv").write_text("epoch,train/loss\n")
    assert run([str(first), str(second), "--out", str(out)]) == 1
    assert "error: there is no results.csv with an epoch in " in capfd.readouterr().err


def test_training_can_start_it_cheaply(tmp_path: Path) -> None:
    """Neither torch nor pyplot is imported, and matplotlib not before a chart is drawn."""
    exp = make_run_folder(tmp_path / "exp")
    code = (
        "import sys; sys.path[0] = sys.argv[2]; from utils.plots.__main__ import run;"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules);"
        "run([sys.argv[1], '--background', '--only', 'results.png', 'labels.jpg']);"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    environment = {**os.environ, "MPLBACKEND": "TkAgg", "DISPLAY": ""}
    told = subprocess.run(
        [sys.executable, "-c", code, str(exp), str(ROOT)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (told.stdout, told.stderr) == ("False False\nFalse True False\n", "")


def test_the_command(tmp_path: Path) -> None:
    """A notebook's back end in the environment is no harm."""
    exp = make_run_folder(tmp_path / "exp")
    command = [sys.executable, "-m", "utils.plots", str(exp), "--only", "results.png", "labels.jpg"]
    environment = {**os.environ, "MPLBACKEND": "no such back end"}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (told.returncode, told.stdout, told.stderr) == (0, "results.png\nlabels.jpg\n", "")
