"""What tasks share: optional methods of predictions and the flags that need them, class weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.ensemble import Members
from models.tasks import TASKS, TaskEntry
from models.tasks.classify import ClassificationTask
from models.tasks.contract import OPTIONAL_METHODS, Image, Prediction, weights_by_class
from tests.making import CLASS_NAMES
from utils.config.flags import ValOptions
from utils.errors import UserError
from utils.plots.drawing import Style


@dataclass(frozen=True, eq=False, repr=False)
class Count(Prediction):
    """The number of things in an image: it has neither boxes nor parts of the image."""

    count: int = 0

    @property
    def array(self) -> np.ndarray:
        return np.array([self.count])

    @property
    def scores(self) -> np.ndarray:
        return np.ones(1, np.float32)

    @property
    def classes(self) -> np.ndarray:
        return np.zeros(1, np.int64)

    def describe(self) -> str:
        return f"{self.count} things"

    def draw(self, image: Image, style: Style) -> Image:
        return image.copy()

    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        return [str(self.count)]


class CountingTask(ClassificationTask):
    prediction = Count
    features = ClassificationTask.features | {"boxes"}


def test_what_each_task_leaves_out() -> None:
    left_out: dict[str, Any] = {name: entry.load().prediction for name, entry in TASKS.items()}
    refused = {name: set(prediction.refused()) for name, prediction in left_out.items()}
    assert refused == {"detect": set(), "segment": {"tile"}, "classify": {"save_hybrid", "save_json", "track", "tile"}}


@pytest.mark.parametrize(("method", "flag"), [(method, flag) for method, (flag, _) in OPTIONAL_METHODS.items()])
def test_flags_for_a_method_that_is_left_out_are_refused(flag: str, method: str) -> None:
    """At the start; and when it is called, as a task may not name the class."""
    entry = TaskEntry(f"{__name__}:CountingTask", "data.classification:ClassificationData", "Classify")
    weights: Any = {"best.pt": SimpleNamespace(task="classify", model={})}
    members = Members({"best.pt": Path("best.pt")}, weights, entry)
    members.refuse_flags(ValOptions(), {flag: False})
    with pytest.raises(UserError, match=f"^--{flag.replace('_', '-')} "):
        members.refuse_flags(ValOptions(), {flag: True})
    prediction: Any = Count(0, "a.jpg", {0: "thing"}, 3)
    with pytest.raises(UserError, match=f"^--{flag.replace('_', '-')} "):
        getattr(prediction, method)(
            *[np.zeros((4, 4, 3), np.uint8)] * {"crops": 1, "review": 1, "joined": 3}.get(method, 0)
        )


def test_class_weights_in_the_order_of_the_classes() -> None:
    assert weights_by_class(CLASS_NAMES, {"bar": 2, "disc": 0.5}) == (0.5, 1.0, 2.0)
    assert weights_by_class(CLASS_NAMES, {}) == weights_by_class(CLASS_NAMES, {"bar": 1.0}) == ()
    with pytest.raises(UserError, match=r"class_weights.*'bra'.*'bar'"):
        weights_by_class(CLASS_NAMES, {"bra": 2})
