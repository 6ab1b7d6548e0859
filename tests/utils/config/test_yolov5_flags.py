"""Flags of YOLOv5 that are refused: the message says what to use instead."""

from __future__ import annotations

import pytest

from utils.config.options import TrainOptions, ValOptions, flags_of
from utils.config.parser import parse_options
from utils.config.yolov5_flags import REFUSED

KINDS = (TrainOptions, ValOptions)


EVOLUTION = "is not built in: W&B sweeps tune hyperparameters, each trial on as many devices as you like"


@pytest.mark.parametrize(
    "argv",
    [
        ["--evolve"],
        ["--evolve", "300"],
        ["--evolve=300"],
        ["--evolve_population", "data/hyps"],
        ["--evolve-population=data/hyps"],
        ["--resume_evolve", "runs/evolve"],
        ["--data", "x", "--resume_evolve=runs/evolve"],
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_yolov5_has_and_we_do_not(kind: type, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2, with what to do instead."""
    with pytest.raises(SystemExit) as caught:
        parse_options(kind, argv)
    assert caught.value.code == 2
    name = next(word for word in argv if "evolve" in word).partition("=")[0]
    assert capsys.readouterr().err == f"error: {name} {EVOLUTION}; see sweep.yaml and docs/tracking.md#sweeps\n"


@pytest.mark.parametrize(
    ("kind", "argv", "says"),
    [
        (ValOptions, ["--task", "study"], "--task study is not built in: call val.py once for each --imgsz"),
        (ValOptions, ["--task=study"], "--task study is not built in"),
        (ValOptions, ["--task", "speeed"], "argument --task: invalid choice: 'speeed'"),
        (TrainOptions, ["--quad"], "--quad is not built in: train at a larger --imgsz"),
        (TrainOptions, ["--lr0", "0.1"], "--lr0 is a hyperparameter: give --hyp.lr0"),
    ],
)
def test_what_takes_its_place_is_said(
    kind: type, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(kind, argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert said.count("\n") == 1


def test_what_is_refused_is_no_flag_of_both_scripts() -> None:
    """A flag of one script may be refused in the other."""
    names = [{name for field in flags_of(kind) for name in (field.name, *field.metadata["aliases"])} for kind in KINDS]
    assert not set(REFUSED) & names[0] & names[1]
    assert all("-" not in name for name in REFUSED)  # it is looked up with underscores
