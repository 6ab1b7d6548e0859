"""Flags and hyperparameters that do not apply to a model: every task decides, also one that is not in this checkout."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from models.ensemble import Members
from models.tasks import TASKS, model_words
from models.tasks.contract import Task
from models.tasks.detect import DetectionTask
from models.weights import Weights
from tests.making import CLASS_NAMES, tiny_anchor_free, tiny_detector
from tests.models.tasks.mask_batches import tiny_segmenter
from utils.config.flags import OPTIONS_OF_SCRIPT, DetectOptions, TrainOptions, flags_of
from utils.config.hyperparameters import Augmentation, Hyperparameters, Recipe, keys_of
from utils.config.parser import refuse_flags
from utils.errors import UserError

YAMLS: dict[str, dict[str, Any]] = {
    "detect with the head Detect": tiny_detector(),
    "detect with the head DetectDFL": tiny_anchor_free(),
    "segment with the head Segment": tiny_segmenter(),
    "classify": {"task": "classify", "architecture": "resnet18", "nc": 2},
}


class LaterTask(Task):
    """A task that says nothing about flags."""


def features_of(yaml: Mapping[str, Any]) -> frozenset[str]:
    return TASKS[model_words(yaml).split()[0]].load().features_of(yaml)


def test_a_task_has_only_features_that_a_flag_needs() -> None:
    needed = {option.metadata["needs"] for kind in OPTIONS_OF_SCRIPT.values() for option in flags_of(kind)}
    for name, entry in TASKS.items():
        kind = entry.load()
        assert kind.features, name
        assert kind.features <= needed
    assert all(features_of(yaml) <= needed for yaml in YAMLS.values())


@pytest.mark.parametrize("script", OPTIONS_OF_SCRIPT)
def test_a_task_that_says_nothing_takes_the_universal_flags_alone(script: str) -> None:
    kind = OPTIONS_OF_SCRIPT[script]
    for option in flags_of(kind):
        given = {option.name: option.default or 1}
        if not (subject := option.metadata["needs"]):
            refuse_flags(kind, given, LaterTask.features_of({}), "later")
            continue
        flag = f"--{option.name.replace('_', '-')}"
        with pytest.raises(UserError, match=f"{flag} .*later"):
            refuse_flags(kind, given, LaterTask.features_of({}), "later")
        refuse_flags(kind, given, {subject}, "later")


@pytest.mark.parametrize(
    ("flag", "models"),
    [
        ("noautoanchor", {"detect with the head Detect", "segment with the head Segment"}),
        ("mask_ratio", {"segment with the head Segment"}),
        ("label_smoothing", {"detect with the head Detect", "segment with the head Segment", "classify"}),
        ("rect", set(YAMLS) - {"classify"}),
        ("close_mosaic", set(YAMLS)),
        ("multi_scale", set(YAMLS)),
    ],
)
def test_which_models_take_a_flag_of_training(flag: str, models: set[str]) -> None:
    for name, yaml in YAMLS.items():
        assert model_words(yaml) == name
        expected = nullcontext() if name in models else pytest.raises(UserError, match=name)
        with expected:
            refuse_flags(TrainOptions, {flag: 1}, features_of(yaml), name)


def test_a_flag_that_is_off_or_0_asks_for_nothing() -> None:
    given = {"noautoanchor": False, "close_mosaic": 0, "label_smoothing": 0.0}
    refuse_flags(TrainOptions, given, frozenset(), "a model")


def test_an_ensemble_takes_a_flag_that_applies_to_one_of_its_models() -> None:
    """The heads of its models may differ, not their task."""
    both = {
        name: Weights({}, yaml, {}, "detect", {}, "lockstep")
        for name, yaml in (("a.pt", tiny_anchor_free()), ("b.pt", tiny_detector()))
    }
    Members({name: Path(name) for name in both}, both, TASKS["detect"]).refuse(TrainOptions, {"noautoanchor": True})
    alone = Members({"a.pt": Path("a.pt")}, {"a.pt": both["a.pt"]}, TASKS["detect"])
    with pytest.raises(UserError, match="detect with the head DetectDFL"):
        alone.refuse(TrainOptions, {"noautoanchor": True})
    with pytest.raises(UserError, match="--retina-masks"):
        alone.refuse(DetectOptions, {"retina_masks": True})


# Hyperparameters


def test_the_keys_that_nothing_reads_depend_on_the_head() -> None:
    task = DetectionTask(CLASS_NAMES, Hyperparameters())
    gains = {"tal_box", "tal_cls", "tal_dfl", "tal_aux"}
    assert set(task.unread(tiny_detector())) == {"iou_t"} | gains
    loss = {"box", "obj", "cls", "obj_pw", "cls_pw", "anchor_t", "anchors", "anchor_recall", "fl_gamma"}
    assert set(task.unread(tiny_anchor_free())) == {"iou_t"} | loss
    assert task.unread({**tiny_detector(), "head": []}) == ()  # which building the model reports


def test_every_key_of_a_detector_is_read_by_augmentation_a_head_or_the_run() -> None:
    read = {"iou_t", "keep_head"} | keys_of(Recipe) | keys_of(Augmentation)
    assert read.union(*(head.hyperparameters for head in DetectionTask.heads)) == keys_of(Hyperparameters)


def test_a_task_with_keys_of_its_own_reads_all_of_them() -> None:
    classify = TASKS["classify"].load()
    assert classify({0: "a", 1: "b"}, classify.recipe()).unread(YAMLS["classify"]) == ()
