"""--fitness: the weighted sum that it names, and its errors."""

from __future__ import annotations

import pytest

from utils.errors import UserError
from utils.summary import Summary
from utils.training.fitness import Fitness

METRICS, CLASS_METRICS = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95"), ("AP50", "AP")
CLASSES = ("cat", "traffic light, red", "a=b")
VALUES = {"precision": 0.3, "recall": 0.75, "mAP_0.5": 0.6, "mAP_0.5:0.95": 0.4}
BY_CLASS = {"AP50": {"cat": 0.5, "a=b": 0.125}, "AP": {"cat": 0.25, "traffic light, red": 0.75}}
SUMMARY = Summary(VALUES, 0.1 * 0.6 + 0.9 * 0.4, ["head"], ["row"], by_class=BY_CLASS, headline={"mAP": 0.4})


def parsed(text: str) -> Fitness:
    return Fitness.parsed(text, METRICS, CLASS_METRICS, CLASSES)


@pytest.mark.parametrize(
    ("text", "value", "highest"),
    [
        ("recall=1", 0.75, 1),
        (" metrics/recall = 2 , precision=-0.5", 1.35, 2),
        ("AP(cat)=1", 0.25, 1),
        ("AP(traffic light, red)=0.5,AP50(cat)=0.5", 0.625, 1),
        ("AP50(a=b)=4", 0.5, 4),
        ("precision=-1", -0.3, 1),
        ("mAP_0.5=1e-1,mAP_0.5:0.95=.9,", 0.42, 1),
    ],
)
def test_a_weighted_sum(text: str, value: float, highest: float) -> None:
    summary = parsed(text).of(SUMMARY)
    assert summary.fitness == pytest.approx(value)
    assert summary.highest_fitness == pytest.approx(highest)
    assert (summary.metrics, summary.headline) == (VALUES, {"mAP": 0.4, "fitness": summary.fitness})


@pytest.mark.parametrize("text", ["", "recall=1"])
def test_nan_is_the_worst(text: str) -> None:
    nan = Summary({**VALUES, "recall": float("nan")}, float("nan"), ["head"], ["row"])
    assert parsed(text).of(nan).fitness == float("-inf")


def test_without_the_flag_the_summary_is_the_tasks() -> None:
    assert parsed("").of(SUMMARY) is SUMMARY


def test_the_default_in_words_is_the_default_to_the_bit() -> None:
    assert parsed("mAP_0.5:0.95=0.9,mAP_0.5=0.1").of(SUMMARY).fitness == SUMMARY.fitness


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recal=1", "unknown metric 'recal' (did you mean 'recall'?); known are precision, recall, mAP_0.5, "),
        (
            "AP(dog)=1",
            "'AP(dog)'; known are precision, recall, mAP_0.5, mAP_0.5:0.95, AP50(CLASS), AP(CLASS) of the classes ",
        ),
        ("AP=1", "unknown metric 'AP'"),
        ("recall", "is not of the form METRIC=WEIGHT,METRIC=WEIGHT"),
        ("recall=", "is not of the form METRIC=WEIGHT,METRIC=WEIGHT"),
        ("recall=high", "is not of the form METRIC=WEIGHT,METRIC=WEIGHT"),
        ("recall=nan", "is not of the form METRIC=WEIGHT,METRIC=WEIGHT"),
        (",", "is not of the form METRIC=WEIGHT,METRIC=WEIGHT"),
        ("recall=1,recall=2", "'recall' occurs twice"),
        ("AP(cat)=1,AP(cat)=2", "'AP(cat)' occurs twice"),
        ("recall=0,AP(cat)=0", "all weights are 0"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(text)
    assert str(caught.value).startswith(f"--fitness '{text}': ")
    assert message in str(caught.value)


def test_a_class_that_no_validation_image_has() -> None:
    parsed("AP(cat)=1,recall=1").check_labels({"cat"})
    with pytest.raises(UserError, match=r"^--fitness: AP\(cat\) has no value, because no validation image has a label"):
        parsed("AP(cat)=1").check_labels({"a=b"})
