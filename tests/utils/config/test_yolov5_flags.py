"""Flags of YOLOv5 that are refused: the message says what to use instead."""

from __future__ import annotations

import pytest

from tests.making import options_of
from utils.config.options import TrainOptions, ValOptions, flags_of
from utils.config.yolov5_flags import REFUSED

KINDS = (TrainOptions, ValOptions)
EVOLUTION = (
    "is not built in: python -m utils.tune searches by optuna, and W&B sweeps on many machines; see "
    "docs/tracking.md#sweeps"
)


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        (TrainOptions, ["--evolve"], f"--evolve {EVOLUTION}"),
        (ValOptions, ["--evolve", "300"], f"--evolve {EVOLUTION}"),
        (TrainOptions, ["--evolve=300"], f"--evolve {EVOLUTION}"),
        (TrainOptions, ["--evolve_population", "data/hyps"], f"--evolve_population {EVOLUTION}"),
        (TrainOptions, ["--evolve-population=data/hyps"], f"--evolve-population {EVOLUTION}"),
        (ValOptions, ["--data", "x", "--resume_evolve=runs/evolve"], f"--resume_evolve {EVOLUTION}"),
        (ValOptions, ["--task", "study"], "--task study is not built in: call val.py once for each --imgsz"),
        (ValOptions, ["--task=study"], "--task study is not built in"),
        (ValOptions, ["--task", "speeed"], "argument --task: invalid choice: 'speeed'"),
        (TrainOptions, ["--partners", "near"], "--partners near is no longer built in: --partners window"),
        (TrainOptions, ["--quad"], "--quad is not built in: train at a larger --imgsz"),
        (TrainOptions, ["--lr0", "0.1"], "--lr0 is a hyperparameter: give --hyp.lr0"),
    ],
)
def test_a_refused_flag_is_one_line_and_exit_code_2(
    kind: type, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(kind, argv)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1


def test_a_refused_flag_is_not_a_flag_of_both_scripts() -> None:
    """A flag of one script may be refused in the other."""
    names = [{name for field in flags_of(kind) for name in (field.name, *field.metadata["aliases"])} for kind in KINDS]
    assert not set(REFUSED) & names[0] & names[1]
    assert all("-" not in name for name in REFUSED)  # the parser looks up names with underscores
