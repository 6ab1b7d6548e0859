"""Calls of the scripts from Python."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tasks import hyperparameters
from utils.config.flags import TrainOptions, ValOptions
from utils.config.parser import given_flags
from utils.distributed.failure import GracefulStop, on_failure
from utils.errors import Stopped, UserError
from utils.files import lock_folder
from utils.python_api import call, words_of


def given_by(kind: type[Any] = TrainOptions, **flags: Any) -> dict[str, Any]:
    """Return the flags that a call of a script's `run` gives."""
    names = hyperparameters if kind is TrainOptions else tuple
    return given_flags(kind, words_of(flags), hyperparameters=names)


def test_arguments_are_what_the_parser_makes_of_a_command_line() -> None:
    words = (
        "--imgsz 320 --weights= --rect --freeze 0 -2 --seed 0 --device cpu --project a --cache --label-smoothing 1e-05"
    )
    given = given_by(
        img=320, weights="", rect=True, cos_lr=False, freeze=(0, -2), name=None, seed=0, device=torch.device("cpu"),
        project=Path("a"), cache=True, resume=False, label_smoothing=1e-5, mosaic=0,
        class_weights={"a b": 2, "c": 1.5}, **{"hyp.lr0": 0.1},
    )  # fmt: skip
    overrides = ["--hyp.lr0=0.1", "--hyp.mosaic", "0", "--hyp.class_weights", "{'a b': 2, 'c': 1.5}"]
    assert given == given_flags(TrainOptions, [*words.split(), *overrides])
    assert given["label_smoothing"] == 1e-5
    names = {"weights": ["a b.pt", Path("c d.pt")], "data": "-my data=1.yaml", "save_txt": True}
    assert given_by(ValOptions, **names, quiet=False) == {**names, "weights": ("a b.pt", "c d.pt")}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"epoch": 1}, "--epoch.*--epochs"),
        ({"zzz": 1}, "--zzz"),
        ({"rekt": False}, "--rect"),
        ({"epochs": "three"}, "--epochs"),
        ({"epochs": 1.5}, "--epochs"),
        ({"epochs": True}, "--epochs"),
        ({"label_smoothing": 1}, "--label-smoothing"),
        ({"rect": 1}, "--rect"),
        ({"optimizer": "Lion"}, "--optimizer"),
        ({"evolve": 300}, "--evolve"),
        ({"freeze": []}, "--freeze"),
        ({"kind": ValOptions, "lr0": 0.1}, "--lr0"),
    ],
)
def test_a_wrong_name_or_value_is_one_sentence(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        given_by(**flags)


def test_an_error_of_the_script_releases_the_run_folder(tmp_path: Path) -> None:
    """Even if the run's objects still exist, as after an error. Its trackers end."""
    locks, ended = [], []

    def start(words: list[str]) -> None:
        on_failure(lambda: ended.append(len(locks)))
        locks.append(lock_folder(tmp_path))
        raise UserError("--data none.yaml: there is none")

    for _ in range(2):
        with pytest.raises(UserError, match=r"none\.yaml: there is none$"):
            call(start, {})
    assert (len(locks), ended) == (2, [1, 2])


def test_what_a_script_of_one_process_returns_is_returned_in_any_thread() -> None:
    """Only the main thread may set signal handlers."""
    results: list[dict[str, Any]] = []

    def in_thread() -> None:
        with GracefulStop() as stop:
            results.append(call(dict.fromkeys, {"source": stop.after(1) or "a"}))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert results == [call(dict.fromkeys, {"source": "a"})] == [{"--source=a": None}]


@pytest.mark.parametrize(
    ("end", "raised"),
    [
        (Stopped(0), None),
        (Stopped(143), UserError),
        (SystemExit(3), UserError),
        (Stopped(130), KeyboardInterrupt),  # Ctrl-C in this process
        (SystemExit(130), KeyboardInterrupt),  # or in those that it has spawned
    ],
)
def test_the_end_of_a_script_is_an_error_and_restores_handlers_and_threads(
    end: BaseException, raised: type[BaseException] | None
) -> None:
    def start(words: list[str]) -> None:
        torch.set_num_threads(threads + 1)
        with GracefulStop():
            raise end

    before, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    if raised:
        with pytest.raises(raised, match=None if raised is KeyboardInterrupt else str(end)):
            call(start, {})
    else:
        assert call(start, {}) == {}
    assert (signal.getsignal(signal.SIGINT), torch.get_num_threads()) == (before, threads)
