"""Calls of the scripts from Python."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from utils.config.options import TrainOptions, ValOptions
from utils.config.parser import parse_options
from utils.distributed.exit import Stopped
from utils.errors import UserError
from utils.python_api import RESULT, as_arguments, call, hand_over
from utils.summary import Summary

SUMMARY = Summary({"mAP_0.5": 0.5}, 0.25, ["head", "all"], [], losses={"box_loss": 2.0})


def test_flags_become_arguments() -> None:
    flags = {"imgsz": 320, "weights": "", "rect": True, "cos_lr": False, "freeze": (0, 2), "name": None, "seed": 0}
    words = as_arguments(TrainOptions, flags)
    assert words == ["--imgsz=320", "--weights=", "--rect", "--freeze", "0", "2", "--seed=0"]
    options = parse_options(TrainOptions, words)
    assert (options.imgsz, options.weights, options.rect, options.freeze) == (320, "", True, (0, 2))


def test_aliases_and_hyperparameters() -> None:
    words = as_arguments(TrainOptions, {"img": 64, "img_size": 96, "hyp.lr0": 0.1, "patience": -1})
    assert words == ["--imgsz=64", "--imgsz=96", "--hyp.lr0=0.1", "--patience=-1"]


def test_several_weights() -> None:
    assert parse_options(ValOptions, as_arguments(ValOptions, {"weights": ["a.pt", "b.pt"]})).weights == (
        "a.pt",
        "b.pt",
    )


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UserError, match=r"unknown argument epoch \(did you mean 'epochs'\?\)"):
        as_arguments(TrainOptions, {"epoch": 1})


def test_the_result_is_returned(tmp_path: Path) -> None:
    def main(argv: Sequence[str]) -> None:
        assert argv == ["--epochs=1"]
        hand_over(SUMMARY, tmp_path)

    result = call(main, "train", {"epochs": 1})
    assert result == {"metrics/mAP_0.5": 0.5, "val/box_loss": 2.0, "fitness": 0.25, "folder": str(tmp_path)}
    assert RESULT not in os.environ


def test_no_result_is_written_without_a_call(tmp_path: Path) -> None:
    hand_over(SUMMARY, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Stopped(0), ""),
        (Stopped(130), "the run ended early with exit code 130"),
        (SystemExit(3), "the run failed with exit code 3; see the messages above"),
    ],
)
def test_the_end_of_a_script_is_an_error_and_restores_signal_handlers(error: BaseException, message: str) -> None:
    def main(argv: Sequence[str]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise error

    before = signal.getsignal(signal.SIGINT)
    if message:
        with pytest.raises(UserError, match=message):
            call(main, "train", {})
    else:
        assert call(main, "train", {}) == {}
    assert signal.getsignal(signal.SIGINT) is before


def test_each_script_has_its_own_flags() -> None:
    words: list[Sequence[str]] = []
    call(words.append, "val", {"weights": ["a.pt", "b.pt"], "save_json": True})
    assert words == [["--weights", "a.pt", "b.pt", "--save-json"]]
    with pytest.raises(UserError, match="unknown argument epochs"):
        call(words.append, "val", {"epochs": 1})
    assert len(words) == 1
