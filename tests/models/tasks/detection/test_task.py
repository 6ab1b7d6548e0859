"""The verbs of the detection task, with numbers worked out by hand."""

from __future__ import annotations

import io
import pickle
import random
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from models.tasks import TASKS
from models.tasks.detection.loss import LossSettings
from models.tasks.detection.metrics import POINTS, ImageRecord
from models.tasks.detection.task import DetectionTask, _to_file
from models.tasks.detection.tta import GREY
from utils.config.options import Hyperparameters
from utils.summary import Box, Example, Summary

NAMES = {0: "disc", 1: "traffic light", 2: "bar"}


class Place(NamedTuple):
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[int, int] = (0, 0)


class Info(NamedTuple):
    image: int = 0
    size: tuple[int, int] = (100, 200)  # width, height
    placement: Place = Place()
    rows: np.ndarray = np.zeros((0, 5), np.float32)
    path: str = "/data/a.jpg"


class Images(NamedTuple):
    images: Tensor
    targets: Tensor
    infos: tuple[Info, ...]


def batch(*infos: Info, targets: Tensor | None = None, side: int = 64) -> Images:
    pixels = torch.full((len(infos), 3, side, side), 51, dtype=torch.uint8)
    return Images(pixels, torch.zeros(0, 6) if targets is None else targets, infos)


def labels(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 5)


@pytest.fixture
def task() -> DetectionTask:
    return DetectionTask(NAMES, Hyperparameters())


def test_the_name_in_a_yaml() -> None:
    assert TASKS["detect"] is DetectionTask


# The model


@pytest.mark.parametrize(("asked", "taken"), [(64, 64), (60, 64), (65, 72), (3, 16), (16, 16)])
def test_image_size_is_whole_strides_and_at_least_two(
    task: DetectionTask, tiny_yaml: dict[str, Any], asked: int, taken: int
) -> None:
    task.build_model(tiny_yaml, asked)  # its largest stride is 8
    assert task.imgsz == taken


def test_the_model_has_the_tasks_classes(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    model = task.build_model({**tiny_yaml, "nc": 80}, 64)
    assert model.names == NAMES
    assert model.yaml["nc"] == model.detect.nc == 3
    assert task.head is model.detect


def test_gains_are_scaled_to_the_model(tiny_yaml: dict[str, Any]) -> None:
    task = DetectionTask(NAMES, Hyperparameters(box=0.1, obj=0.7, cls=0.3, anchor_t=3.0), label_smoothing=0.2)
    task.build_model(tiny_yaml, 60)  # 2 levels, 3 classes, 64 pixels
    expected = LossSettings(
        box=0.1 * 1.5, obj=0.7 * 1.5 * 0.01, cls=0.3 * 1.5 * 3 / 80, anchor_t=3.0, label_smoothing=0.2
    )
    assert vars(task.criterion.settings) == pytest.approx(vars(expected))
    assert task.criterion.classes == 3


def test_inputs_are_0_to_1(task: DetectionTask) -> None:
    inputs = task.inputs(batch(Info(), side=2))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, torch.full((1, 3, 2, 2), 0.2))


def test_losses_are_of_the_batchs_targets(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    model = task.build_model(tiny_yaml, 64)
    targets = torch.tensor([[1, 2, 0.5078125, 0.5078125, 4.5 / 64, 4.25 / 64]])  # near the anchor 4 x 4 of stride 4
    given = batch(Info(), Info(), targets=targets)
    terms = task.losses(model(task.inputs(given)), given)
    assert len(terms.means(terms.counts)) == len(task.loss_names) == 3
    # Cell (8.125, 8.125): itself, left and up, for the anchors 4 x 4 and 8 x 4; 16 x 16 has about 3.8 times its size.
    assert terms.counts[0].tolist() == [6, 3]
    assert terms.counts[1].tolist() == [2 * 2 * 16**2, 2 * 2 * 8**2]


# Predictions


def test_predictions_are_in_the_files_pixels(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    task.build_model(tiny_yaml, 64)
    outputs = [torch.full((2, 2, 16, 16, 8), -20.0), torch.full((2, 2, 8, 8, 8), -20.0)]
    # Image 1, anchor 16 x 16, cell (column 3, row 5) of stride 8: centre (28, 44), so 20, 36, 36, 52
    outputs[1][1, 0, 5, 3] = torch.tensor([0, 0, 0, 0, 0, -20, 20, -20])
    info = Info(size=(100, 70), placement=Place((0.5, 0.8), (4, 12)))
    nothing, found = task.predict([task.look(outputs)], batch(Info(), info))
    assert nothing.shape == (0, 6)
    expected = torch.tensor([[32, 30, 64, 50, 0.5, 1.0]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4, check_dtype=False)


def test_thresholds(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    task.build_model(tiny_yaml, 64)
    outputs = [torch.full((1, 2, 16, 16, 8), -20.0), torch.full((1, 2, 8, 8, 8), -20.0)]
    for column, objectness in enumerate((0.0, 1.0, -1.0)):
        outputs[1][0, 0, 4, 2 * column + 1] = torch.tensor([0, 0, 0, 0, objectness, 20, -20, -20])

    def confidences() -> list[float]:
        (found,) = task.predict([task.look(outputs)], batch(Info()))
        return found[:, 4].tolist()

    assert confidences() == pytest.approx([0.7311, 0.5, 0.2689], abs=1e-4)
    task.set_thresholds(conf_thres=0.3, iou_thres=0.6, max_det=300)
    assert confidences() == pytest.approx([0.7311, 0.5], abs=1e-4)
    task.set_thresholds(conf_thres=0.001, iou_thres=0.6, max_det=1)
    assert confidences() == pytest.approx([0.7311], abs=1e-4)


def test_to_file_undoes_the_placement_and_cuts_at_the_edges() -> None:
    info = Info(size=(100, 50), placement=Place((2.0, 0.5), (10, 20)))
    detections = torch.tensor([[30, 25, 110, 40, 0.9, 2], [0, 0, 300, 100, 0.5, 1], [-20, 10, 5, 15, 0.4, 0]])
    expected = torch.tensor([[10, 10, 50, 40, 0.9, 2], [0, 0, 100, 50, 0.5, 1], [0, 0, 0, 0, 0.4, 0]])
    exact, nothing, found = _to_file(
        [torch.tensor([[1, 2, 3, 4, 0.5, 0]]), torch.zeros(0, 6), detections], [Info(), info, info]
    )
    assert exact.tolist() == [[1, 2, 3, 4, 0.5, 0]]
    assert nothing.shape == (0, 6)
    torch.testing.assert_close(found, expected, check_dtype=False)
    assert _to_file([], []) == []


def test_text_rows(task: DetectionTask) -> None:
    given = batch(Info(size=(100, 200)), Info(size=(30, 30)), Info())
    found = [
        torch.tensor([[10, 20, 30, 60, 0.5, 2], [0, 0, 100, 200, 0.25, 0]]),
        torch.tensor([[0, 0, 10, 20, 0.875, 1.0]]),
        torch.zeros(0, 6),
    ]
    assert task.text_rows(found, given, False) == [
        ["2 0.2 0.2 0.2 0.2", "0 0.5 0.5 1 1"],
        ["1 0.166667 0.333333 0.333333 0.666667"],
        [],
    ]
    assert task.text_rows(found, given, True)[0] == ["2 0.2 0.2 0.2 0.2 0.5", "0 0.5 0.5 1 1 0.25"]


def test_text_rows_beside_labels(task: DetectionTask) -> None:
    """A detection goes where a label of its class overlaps it by more than the threshold; the label is 20, 20 to 60,
    60."""
    given = batch(Info(size=(100, 200), rows=labels((1, 0.4, 0.2, 0.4, 0.2))), Info())
    found = torch.tensor(
        [
            [20, 20, 60, 60, 0.9, 1],
            [20, 20, 60, 60, 0.8, 0],  # another class
            [20, 20, 60, 44, 0.7, 1],  # IoU 0.6
            [20, 20, 60, 48, 0.6, 1],  # IoU 0.7
            [0, 0, 10, 20, 0.5, 1],
        ]
    ).double()
    first, second = task.text_rows([found, found[-1:]], given, True, hybrid=True)
    assert first == [
        "1 0.4 0.2 0.4 0.2 1",
        "0 0.4 0.2 0.4 0.2 0.8",
        "1 0.4 0.16 0.4 0.12 0.7",
        "1 0.05 0.05 0.1 0.1 0.5",
    ]
    assert second == ["1 0.05 0.05 0.1 0.1 0.5"]
    assert task.text_rows([found[:0]] * 2, given, False, hybrid=True) == [["1 0.4 0.2 0.4 0.2"], []]
    assert len(task.score([found, found[-1:]], given)[0].confidence) == 5  # metrics are those of what was found


def test_results_are_in_pixels_of_the_file(task: DetectionTask) -> None:
    found = [torch.tensor([[1, 2, 3, 4, 0.5, 2.0]]), torch.zeros(0, 6)]
    first, second = task.results(found, batch(Info(image=3, path="/data/b.jpg"), Info(image=1)))
    assert (first.image, first.path, first.rows.tolist()) == (3, "/data/b.jpg", [[1, 2, 3, 4, 0.5, 2]])
    assert (second.image, second.rows.shape) == (1, (0, 6))


# Looking more than once


def shapes(model: Any, seen: list[Tensor]) -> Any:
    """A model that keeps what it is shown."""

    def forward(images: Tensor) -> Any:
        seen.append(images)
        return model(images)

    return forward


def test_one_look_is_the_model_at_the_images(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    model = task.build_model(tiny_yaml, 64).eval()
    images = torch.rand(1, 3, 48, 64)
    (look,) = task.looks(model, images)
    assert all(torch.equal(*pair) for pair in zip(look.outputs, model(images), strict=True))
    assert (look.scale, look.mirrored, look.left_out) == ((1, 1), 0, None)


def test_augmented_looks(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    """Three sizes, the second mirrored; of the first the coarse level is left out, of the last the fine one."""
    model = task.build_model(tiny_yaml, 64).eval()  # strides 4 and 8
    task.augment, seen = True, []
    images = torch.rand(1, 3, 48, 64)
    looks = task.looks(shapes(model, seen), images)
    assert seen[0] is images
    assert [tuple(one.shape[2:]) for one in seen] == [(48, 64), (40, 56), (32, 48)]
    assert [look.mirrored for look in looks] == [0, 64, 0]
    assert [look.left_out for look in looks] == [1, None, 0]
    # 0.83 and 0.67 of 64 and 48 are 53, 39 and 42, 32 whole pixels; what fills them up is grey
    assert [look.scale for look in looks] == [(1, 1), (53 / 64, 39 / 48), (42 / 64, 32 / 48)]
    for one, height, width in ((seen[1], 39, 53), (seen[2], 32, 42)):
        assert (one[..., width:] == GREY).all()
        assert (one[..., height:, :] == GREY).all()
        assert (one[..., :height, :width] != GREY).all()
    mean = images.flip(3)[..., :24].mean()
    torch.testing.assert_close(seen[1][..., :39, :20].mean(), mean, atol=0.03, rtol=0)
    assert len(task.predict(looks, batch(Info()))) == 1


def test_a_model_of_one_level_keeps_it(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    head = [[[1], 1, "Detect", ["nc", "anchors"]]]
    model = task.build_model({**tiny_yaml, "anchors": tiny_yaml["anchors"][:1], "head": head}, 64).eval()
    task.augment = True
    assert [look.left_out for look in task.looks(model, torch.rand(1, 3, 32, 32))] == [None] * 3


def test_picture_shows_the_batch(task: DetectionTask) -> None:
    given = batch(Info(), targets=torch.tensor([[0, 1, 0.5, 0.5, 0.5, 0.5]]))
    picture = task.picture(given)
    assert (picture.dtype, picture.shape) == (np.uint8, (64, 64, 3))
    assert (picture[40, 40] == 51).all()
    assert (picture[40, 16] != 51).any()  # the box's left edge


# Scores


def test_score_by_hand(task: DetectionTask) -> None:
    info = Info(image=7, size=(100, 50), rows=labels((1, 0.5, 0.5, 0.2, 0.8), (2, 0.1, 0.1, 0.1, 0.1)))
    # The first label is 40, 5, 60, 45. Beside it: exactly there; three quarters of it; there, but of another class.
    found = torch.tensor([[40, 5, 60, 45, 0.9, 1], [40, 5, 60, 35, 0.8, 1], [40, 5, 60, 45, 0.7, 0]])
    (record,) = task.score([found], batch(info))
    assert record.image == 7
    assert record.overlap == pytest.approx([1, 0.75, 0], abs=1e-6)
    assert record.beaten == pytest.approx([0, 1, 0], abs=1e-6)
    assert record.confidence == pytest.approx([0.9, 0.8, 0.7])
    assert record.label.tolist() == [1, 1, 0]
    assert record.side == pytest.approx([800**0.5, 600**0.5, 800**0.5])
    assert record.partner_side[:2] == pytest.approx([800**0.5, 800**0.5])
    assert record.true_label.tolist() == [1, 2]
    assert record.true_side == pytest.approx([800**0.5, 50**0.5])


def test_score_without_labels_or_detections(task: DetectionTask) -> None:
    found = torch.tensor([[40, 5, 60, 45, 0.9, 1.0]])
    background, missed = task.score(
        [found, torch.zeros(0, 6)], batch(Info(image=1), Info(image=2, rows=labels((0, 0.5, 0.5, 0.2, 0.2))))
    )
    assert (background.overlap.tolist(), background.true_label.tolist()) == ([0], [])
    assert (missed.confidence.tolist(), missed.true_label.tolist()) == ([], [0])
    summary = task.summarise([background, missed])
    assert summary.overall[1].split() == ["all", "2", "1", "0.0000", "0.0000", "0.0000", "0.0000"]


def three_images(task: DetectionTask) -> list[ImageRecord]:
    """A disc of 20 pixels and two lights of 40, all found exactly, and an empty image."""
    infos = (
        Info(image=0, size=(100, 100), rows=labels((0, 0.5, 0.5, 0.2, 0.2), (1, 0.3, 0.3, 0.4, 0.4))),
        Info(image=1, size=(100, 100), rows=labels((1, 0.3, 0.3, 0.4, 0.4))),
        Info(image=2, size=(100, 100)),
    )
    found = [
        torch.tensor([[40, 40, 60, 60, 0.9, 0], [10, 10, 50, 50, 0.8, 1.0]]),
        torch.tensor([[10, 10, 50, 50, 0.9, 1.0]]),
        torch.zeros(0, 6),
    ]
    return task.score(found, batch(*infos))


def test_the_overall_row(task: DetectionTask) -> None:
    """all images instances P R mAP50 mAP50-95; 101 points reach 0.995 at most."""
    head, overall = task.summarise(three_images(task)).overall
    assert head.split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert overall.split() == ["all", "3", "3", "1.0000", "1.0000", "0.9950", "0.9950"]


def test_details_per_class_and_size(task: DetectionTask) -> None:
    details = task.summarise(three_images(task)).details
    assert [line.split() for line in details] == [
        ["disc", "1", "1", "1.0000", "1.0000", "0.9950", "0.9950"],
        ["traffic", "light", "2", "2", "1.0000", "1.0000", "0.9950", "0.9950"],
        ["16-32", "px", "3", "1", "-", "-", "0.9950", "0.9950"],
        ["32-64", "px", "3", "2", "-", "-", "0.9950", "0.9950"],
    ]
    assert len({len(line) for line in details}) == 1  # columns


def test_metrics_and_fitness(task: DetectionTask) -> None:
    records = three_images(task)
    spoilt = [record._replace(overlap=np.minimum(record.overlap, 0.72)) for record in records]  # right up to 0.7
    summary = task.summarise(spoilt)
    assert tuple(summary.metrics) == task.metric_names == ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")
    assert list(summary.metrics.values()) == pytest.approx([1, 1, 0.995, 0.4975], abs=1e-6)
    assert summary.fitness == pytest.approx(0.1 * 0.995 + 0.9 * 0.4975)


def random_images(seed: int) -> tuple[list[Tensor], tuple[Info, ...]]:
    """Images of 0 to 3 labels and detections near them, on a grid of few places, so that many overlaps are equal."""
    rng = np.random.default_rng(seed)
    found, infos = [], []
    for image in range(12):
        rows = [(rng.integers(2), *(rng.integers(3, 8, 4) / 20)) for _ in range(rng.integers(4))]
        corners = rng.integers(0, 10, (rng.integers(9), 2)) * 5
        boxes = np.concatenate((corners, corners + rng.integers(4, 8, corners.shape) * 5), 1)
        confidence = -np.sort(-rng.integers(1, 5, (len(boxes), 1)) / 5, axis=0)
        found.append(torch.from_numpy(np.concatenate((boxes, confidence, rng.integers(0, 3, confidence.shape)), 1)))
        infos.append(Info(image, (100, 100), rows=labels(*rows)))
    return found, tuple(infos)


@pytest.mark.parametrize("seed", range(20))
def test_an_images_record_does_not_depend_on_the_others(task: DetectionTask, seed: int) -> None:
    found, infos = random_images(seed)
    together = task.score(found, batch(*infos))
    for own, info, record in zip(found, infos, together, strict=True):
        (alone,) = task.score([own], batch(info))
        assert all(np.array_equal(*pair) for pair in zip(alone, record, strict=True))
    assert task.score([], batch()) == []


def test_records_are_compact(task: DetectionTask) -> None:
    """They travel between processes: less than 50 bytes a detection, and none of another image."""
    infos = [Info(k, (100, 100), rows=labels((0, 0.5, 0.5, 0.2, 0.2))) for k in range(4)]
    records = task.score([torch.rand(300, 6).double()] * 4, batch(*infos))
    assert len(pickle.dumps(records[0])) < 300 * 50


def test_records_keep_boxes_of_the_images_that_are_shown_alone(task: DetectionTask) -> None:
    infos = [Info(k, rows=labels((0, 0.5, 0.5, 0.2, 0.2))) for k in range(3)]
    found = [torch.tensor([[10, 20, 30, 40, 0.9, 2.0]])] * 3
    assert [record.shown for record in task.score(found, batch(*infos))] == [None] * 3
    task.shown = frozenset([1, 7])
    first, second, third = task.score(found, batch(*infos))
    assert (first.shown, third.shown) == (None, None)
    assert second.shown is not None
    assert len(pickle.dumps(second)) < len(pickle.dumps(first)) + 700


# Evidence

IMAGE = (100, 100)
DISC, LIGHT = (0, 0.2, 0.2, 0.2, 0.2), (1, 0.7, 0.7, 0.4, 0.4)  # labels at 10, 10, 30, 30 and 50, 50, 90, 90


def box(low: float, high: float, confidence: float, label: int) -> list[float]:
    return [low, low, high, high, confidence, label]


def confusion(task: DetectionTask, rows: list[tuple[float, ...]], *found: list[float]) -> list[list[int]]:
    """Cells of the confusion matrix of one image; 3 is background."""
    detections = torch.tensor(found).view(-1, 6)
    return task.summarise(task.score([detections], batch(Info(0, IMAGE, rows=labels(*rows))))).evidence["confusion"]


def test_confusion_counts_what_was_taken_for_what(task: DetectionTask) -> None:
    assert confusion(task, [DISC, LIGHT], box(10, 30, 0.9, 0), box(50, 90, 0.8, 1)) == [[0, 0, 1], [1, 1, 1]]
    assert confusion(task, [DISC, LIGHT], box(10, 30, 0.9, 2), box(50, 90, 0.8, 1)) == [[0, 2, 1], [1, 1, 1]]


def test_a_second_detection_of_a_label_is_of_the_background(task: DetectionTask) -> None:
    assert confusion(task, [DISC], box(10, 30, 0.5, 0), box(10, 29, 0.9, 0)) == [[0, 0, 1], [3, 0, 1]]
    # The nearer one has the label, though it is of another class and less confident.
    assert confusion(task, [DISC], box(10, 29, 0.9, 0), box(10, 30, 0.3, 1)) == [[0, 1, 1], [3, 0, 1]]


def test_misses_and_false_detections(task: DetectionTask) -> None:
    assert confusion(task, [DISC, LIGHT]) == [[0, 3, 1], [1, 3, 1]]
    assert confusion(task, [], box(10, 30, 0.9, 2), box(50, 90, 0.8, 2)) == [[3, 2, 2]]
    assert confusion(task, [DISC], box(50, 90, 0.8, 0)) == [[0, 3, 1], [3, 0, 1]]  # elsewhere
    assert confusion(task, [DISC], box(10, 24, 0.8, 0)) == [[0, 0, 1]]  # 14 x 14 of 20 x 20: 0.49
    assert confusion(task, [DISC], box(10, 23, 0.8, 0)) == [[0, 3, 1], [3, 0, 1]]  # 13 x 13: 0.42
    assert confusion(task, []) == []


def test_confusion_is_of_confident_detections(task: DetectionTask) -> None:
    assert confusion(task, [DISC], box(10, 30, 0.25, 0)) == [[0, 3, 1]]
    assert confusion(task, [DISC], box(10, 30, 0.2500001, 0)) == [[0, 0, 1]]


def test_images_are_not_confused_with_each_other(task: DetectionTask) -> None:
    """The detection of the second image lies where the first has a label, and the third is empty."""
    infos = (Info(0, IMAGE, rows=labels(DISC)), Info(1, IMAGE), Info(2, IMAGE))
    found = [torch.zeros(0, 6), torch.tensor([box(10, 30, 0.9, 0)]), torch.zeros(0, 6)]
    assert task.summarise(task.score(found, batch(*infos))).evidence["confusion"] == [[0, 3, 1], [3, 0, 1]]


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_confusion_adds_up_to_labels_and_detections(task: DetectionTask, seed: int) -> None:
    found, infos = random_images(seed)
    matrix = np.zeros((4, 4), int)
    for true, predicted, count in task.summarise(task.score(found, batch(*infos))).evidence["confusion"]:
        matrix[true, predicted] = count
    truth = np.concatenate([info.rows[:, 0] for info in infos]).astype(int)
    sure = np.concatenate([image[image[:, 4] > 0.25, 5] for image in found]).astype(int)
    assert matrix[:3].sum(1).tolist() == np.bincount(truth, minlength=3).tolist()
    assert matrix[:, :3].sum(0).tolist() == np.bincount(sure, minlength=3).tolist()
    assert 0 < matrix[:3, :3].sum() < min(len(truth), len(sure))


def shown_images(task: DetectionTask) -> list[ImageRecord]:
    """An empty image; a disc that is found; a light that is not, beside a bar that is none; one that is not shown."""
    task.shown = frozenset([2, 4, 7])
    infos = (
        Info(7, IMAGE, rows=labels((1, 0.9, 0.5, 0.4, 0.25)), path="/data/c.jpg"),  # 70, 37.5, 110, 62.5
        Info(2, (64, 48), path='/data/a, "b".jpg'),
        Info(1, IMAGE, path="/data/hidden.jpg"),
        Info(4, (200, 100), rows=labels((0, 0.5, 0.5, 0.25, 0.5)), path="/data/b.jpg"),  # 75, 25, 125, 75
    )
    found = [
        torch.tensor([[0, 0, 100 / 3, 50, 0.25, 2], [0, 0, 9, 9, 0.249, 2]]).double(),
        torch.tensor([[0, 0, 9, 9, 0.2, 2.0]]).double(),
        torch.tensor([[0, 0, 9, 9, 0.9, 2.0]]).double(),
        torch.tensor([[75, 25, 125, 75, 0.5, 0], [10, 20, 30, 40, 0.5, 2]]).double(),
    ]
    return task.score(found, batch(*infos))


def test_documents(task: DetectionTask) -> None:
    documents = task.documents(task.summarise(shown_images(task)))
    assert set(documents) == {"classes.csv", "confusion_matrix.csv", "curves.csv", "PR_curve.csv", "val_boxes.csv"}
    assert documents["classes.csv"] == (
        "class,images,instances,precision,recall,AP50,AP50-95\n"
        "disc,1,1,1,1,0.995,0.995\n"
        "traffic light,1,1,0,0,0,0\n"
        "bar,0,0,,,,\n"
    )
    assert documents["confusion_matrix.csv"] == (
        "true \\ predicted,disc,traffic light,bar,background\n"
        "disc,1,0,0,0\n"
        "traffic light,0,0,0,1\n"
        "bar,0,0,0,0\n"
        "background,0,0,2,0\n"
    )
    assert documents["val_boxes.csv"] == (
        "image,kind,class,confidence,x1,y1,x2,y2\n"
        '"/data/a, ""b"".jpg",image,,,,,,\n'
        "/data/b.jpg,label,disc,,75,25,125,75\n"
        "/data/b.jpg,prediction,disc,0.5,75,25,125,75\n"
        "/data/b.jpg,prediction,bar,0.5,10,20,30,40\n"
        "/data/c.jpg,label,traffic light,,70,37.5,100,62.5\n"  # cut at the edge
        "/data/c.jpg,prediction,bar,0.25,0,0,33.3333,50\n"
    )
    places = [f"{place:g}" for place in POINTS]
    assert documents["curves.csv"].splitlines() == [
        "class,confidence,precision,recall",
        *(f"disc,{place},1,{int(float(place) <= 0.5)}" for place in places),
        *(f"traffic light,{place},0,0" for place in places),
    ]
    assert documents["PR_curve.csv"].splitlines() == [
        "class,recall,precision",
        *(f"disc,{place},{int(float(place) < 1)}" for place in places),
        *(f"traffic light,{place},0" for place in places),
    ]


def test_documents_without_any_label(task: DetectionTask) -> None:
    infos = (Info(0, IMAGE), Info(1, IMAGE))
    found = [torch.tensor([box(10, 30, 0.9, 1)]), torch.zeros(0, 6)]
    documents = task.documents(task.summarise(task.score(found, batch(*infos))))
    assert documents["classes.csv"].splitlines()[1:] == ["disc,0,0,,,,", "traffic light,0,0,,,,", "bar,0,0,,,,"]
    assert documents["confusion_matrix.csv"].splitlines()[-1] == "background,0,1,0,0"
    assert [len(documents[name].splitlines()) for name in ("curves.csv", "PR_curve.csv", "val_boxes.csv")] == [1, 1, 1]


def test_documents_of_one_class() -> None:
    task = DetectionTask({0: "item"}, Hyperparameters())
    summary = task.summarise(
        task.score([torch.tensor([box(10, 30, 0.9, 0)])], batch(Info(0, IMAGE, rows=labels(DISC))))
    )
    documents = task.documents(summary)
    assert documents["confusion_matrix.csv"] == "true \\ predicted,item,background\nitem,1,0\nbackground,0,0\n"
    assert documents["classes.csv"].splitlines()[1:] == ["item,1,1,1,1,0.995,0.995"]
    assert len(documents["curves.csv"].splitlines()) == 202


def test_a_run_from_before_there_was_evidence(task: DetectionTask) -> None:
    summary = Summary({}, 0.0, [], [])
    assert task.documents(summary) == {}
    assert task.examples(summary) == []


def test_scores_by_class(task: DetectionTask) -> None:
    summary = task.summarise(shown_images(task))
    assert {name: list(values) for name, values in summary.by_class.items()} == {
        "AP50": ["disc", "traffic light"],  # no bar has a label
        "AP": ["disc", "traffic light"],
    }
    assert summary.by_class["AP50"] == pytest.approx({"disc": 0.995, "traffic light": 0})
    records = [record._replace(overlap=np.minimum(record.overlap, 0.72)) for record in shown_images(task)]
    assert task.summarise(records).by_class["AP"] == pytest.approx({"disc": 0.4975, "traffic light": 0})


def test_examples(task: DetectionTask) -> None:
    empty, found, missed = task.examples(task.summarise(shown_images(task)))
    assert empty == Example('a, "b".jpg', 2, (64, 48), [], [])
    assert found == Example(
        "b.jpg",
        4,
        (200, 100),
        [Box(0, None, (0.375, 0.25, 0.625, 0.75))],
        [Box(0, 0.5, (0.375, 0.25, 0.625, 0.75)), Box(2, 0.5, (0.05, 0.2, 0.15, 0.4))],
    )
    assert missed[:3] == ("c.jpg", 7, IMAGE)
    ((label, confidence, corners),) = missed.labels
    assert (label, confidence) == (1, None)
    assert corners == pytest.approx((0.7, 0.375, 1, 0.625))
    assert [(one.label, one.confidence) for one in missed.predictions] == [(2, 0.25)]
    assert missed.predictions[0].xyxy == pytest.approx((0, 0, 1 / 3, 0.5))
    assert {type(side) for one in missed.predictions for side in one.xyxy} == {float}


def test_predictions_are_shown_in_falling_confidence(task: DetectionTask) -> None:
    task.shown = frozenset([0])
    found = torch.tensor([box(1, 9, 0.5, 0), box(2, 9, 0.75, 1), box(3, 9, 0.5, 2), box(4, 9, 0.1, 0)])
    summary = task.summarise(task.score([found], batch(Info(0, IMAGE))))
    (example,) = task.examples(summary)
    assert [(one.label, one.confidence) for one in example.predictions] == [(1, 0.75), (0, 0.5), (2, 0.5)]
    rows = task.documents(summary)["val_boxes.csv"].splitlines()[1:]
    assert [row.split(",")[1:4] for row in rows] == [
        ["prediction", "traffic light", "0.75"],
        ["prediction", "disc", "0.5"],
        ["prediction", "bar", "0.5"],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_who_made_which_record_does_not_matter(task: DetectionTask, seed: int) -> None:
    """One process with one batch, or several with others."""
    task.shown = frozenset(range(0, 12, 2))
    found, infos = random_images(seed)
    wanted = task.summarise(task.score(found, batch(*infos)))
    records = [record for k in range(0, 12, 5) for record in task.score(found[k : k + 5], batch(*infos[k : k + 5]))]
    random.Random(seed).shuffle(records)
    summary = task.summarise(records)
    assert (summary.metrics, summary.details, summary.by_class) == (wanted.metrics, wanted.details, wanted.by_class)
    for name in ("classes", "confusion", "shown"):
        assert summary.evidence[name] == wanted.evidence[name] != []
    for name, curve in wanted.evidence["curves"].items():
        assert torch.equal(summary.evidence["curves"][name], curve)
    assert task.documents(summary) == task.documents(wanted)
    assert task.examples(summary) == task.examples(wanted)


def test_evidence_goes_through_a_file(task: DetectionTask) -> None:
    """As a state holds it: copied, saved, and read without running anything; a path may hold any bytes."""
    with torch.inference_mode():
        records = shown_images(task)
        (odd,) = [record for record in records if record.image == 4]
        assert odd.shown is not None
        records[records.index(odd)] = odd._replace(shown=odd.shown._replace(path="/data/\udcff.jpg"))
        summary = task.summarise(records)
    file = io.BytesIO()
    torch.save(asdict(summary), file)
    file.seek(0)
    again = Summary(**torch.load(file, weights_only=True))
    assert task.documents(again) == task.documents(summary)
    assert task.examples(again) == task.examples(summary)
    assert again.by_class == summary.by_class
    assert "/data/\udcff.jpg,label" in task.documents(again)["val_boxes.csv"]


def test_evidence_is_small() -> None:
    """Of 80 classes: three curves of 201 numbers of four bytes each, and little else."""
    task = DetectionTask({k: f"class {k}" for k in range(80)}, Hyperparameters())
    infos = [Info(k, rows=labels((k % 80, 0.5, 0.5, 0.2, 0.2))) for k in range(160)]
    summary = task.summarise(task.score([torch.rand(30, 6).double()] * 160, batch(*infos)))
    assert all(curve.dtype == torch.float32 for curve in summary.evidence["curves"].values())
    file = io.BytesIO()
    torch.save(summary.evidence, file)
    assert 3 * 80 * 201 * 4 < file.tell() < 3 * 80 * 201 * 4 + 30_000
