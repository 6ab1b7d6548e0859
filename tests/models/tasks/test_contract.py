"""What a task may leave out of its predictions: the flags that need it are refused, before anything is written."""

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
from models.tasks.contract import Image, Prediction
from models.tasks.predictions import DetectionPrediction
from models.tasks.segment_metrics import SegmentationPrediction
from utils.config.flags import ValOptions
from utils.errors import UserError
from utils.plots.drawing import Style

FLAGS = {"save_crop": "crops", "save_hybrid": "with_labels", "save_json": "coco_rows"}


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


def test_what_is_left_out() -> None:
    assert set(Count.refused()) == set(FLAGS)
    assert DetectionPrediction.refused() == SegmentationPrediction.refused() == {}
    classifier: Any = ClassificationTask.prediction
    assert set(classifier.refused()) == {"save_hybrid", "save_json"}
    assert {name: entry.load().prediction is not None for name, entry in TASKS.items()} == dict.fromkeys(TASKS, True)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_for_it_are_refused(flag: str) -> None:
    """At the start."""
    entry = TaskEntry(f"{__name__}:CountingTask", "data.classification:ClassificationData", "Classify")
    weights: Any = {"best.pt": SimpleNamespace(task_yaml={"task": "classify"})}
    members = Members({"best.pt": Path("best.pt")}, weights, entry)
    members.refuse(ValOptions, {flag: False})
    with pytest.raises(UserError, match=f"^--{flag.replace('_', '-')} is not for this model: .*; leave it out$"):
        members.refuse(ValOptions, {flag: True})


@pytest.mark.parametrize(("flag", "method"), FLAGS.items())
def test_a_method_that_is_left_out_says_which_flag_it_is_for(flag: str, method: str) -> None:
    """Its task may not have named the class."""
    prediction: Any = Count(0, "a.jpg", {0: "thing"}, 3)
    with pytest.raises(UserError, match=f"^--{flag.replace('_', '-')} is not for this model: .*; leave it out$"):
        getattr(prediction, method)(*([np.zeros((4, 4, 3), np.uint8)] if method == "crops" else []))
