"""Work in the midst of a run: `within` starts one in this process, up to its first epoch, and gives its parts away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

import train
from job import Job
from models.loading import recipe_of
from models.tasks.contract import Criterion
from utils.config.settings import read_settings
from utils.distributed.model import DistributedModel
from utils.run import Run
from utils.training.steps import OptimizerSteps
from val import Evaluator, make_evaluator

T = TypeVar("T")
REAL_EPOCH, REAL_EVALUATOR = train.train_one_epoch, make_evaluator


class Left(Exception):
    """The work is done."""


class Parts(NamedTuple):
    """The arguments of `train.train_one_epoch`, and the evaluator that follows it."""

    run: Run
    job: Job
    model: DistributedModel
    loader: Any
    sampler: Any
    criterion: Criterion
    steps: OptimizerSteps
    evaluate: Evaluator

    def train_one_epoch(self) -> dict[str, float]:
        """Train the rest of the epoch, as a run does."""
        return REAL_EPOCH(*self[:-1])

    def take_steps(self, batches: Generator[Any, None, T]) -> T:
        """Train on the batches that a generator yields, and return what it returns: it may do anything between them.

        The epoch does not end.
        """
        returned = []

        def leaving() -> Iterator[Any]:
            returned.append((yield from batches))
            raise Left

        with pytest.raises(Left):
            self._replace(loader=Loader(self.loader, leaving())).train_one_epoch()
        return returned[0]


@dataclass
class Loader:
    """A loader that delivers chosen batches instead of its own."""

    real: Any
    batches: Iterator[Any]

    def __len__(self) -> int:
        return len(self.real)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        self.real.set_epoch(epoch)


def within(flags: Sequence[str], work: Callable[[Parts], T]) -> T:
    """Start a run with flags of train.py, do `work` instead of its first epoch, and return what that returns."""
    made: list[Evaluator] = []
    returned: list[T] = []

    def evaluator(*given: Any, **named: Any) -> Evaluator:
        made.append(REAL_EVALUATOR(*given, **named))
        return made[-1]

    def epoch(*parts: Any) -> Any:
        returned.append(work(Parts(*parts, *made)))
        raise Left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_evaluator", evaluator)
        patch.setattr(train, "train_one_epoch", epoch)
        with pytest.raises(Left):
            train.train(read_settings(flags, recipe_of))
    return returned[0]


def opened_files(main: Callable[[Sequence[str]], object], flags: Sequence[str], folder: str) -> list[str]:
    """Call a script's `main`; return the names of the files in a folder that this process has opened to write."""
    opened: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(folder) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            opened.append(Path(arguments[0]).name)

    sys.addaudithook(note)
    main(flags)
    return opened
