"""The verbs of the detection task, with numbers worked out by hand."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from models.losses import LossSettings
from models.tasks import TASKS
from models.tasks.detection import DetectionTask, _to_file
from utils.config import Hyperparameters
from utils.metrics import ImageRecord

NAMES = {0: "disc", 1: "traffic light", 2: "bar"}


class Place(NamedTuple):
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[int, int] = (0, 0)


class Info(NamedTuple):
    image: int = 0
    size: tuple[int, int] = (100, 200)  # width, height
    placement: Place = Place()
    rows: np.ndarray = np.zeros((0, 5), np.float32)


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
    nothing, found = task.predict(outputs, batch(Info(), info))
    assert nothing.shape == (0, 6)
    expected = torch.tensor([[32, 30, 64, 50, 0.5, 1.0]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4, check_dtype=False)


def test_thresholds(task: DetectionTask, tiny_yaml: dict[str, Any]) -> None:
    task.build_model(tiny_yaml, 64)
    outputs = [torch.full((1, 2, 16, 16, 8), -20.0), torch.full((1, 2, 8, 8, 8), -20.0)]
    for column, objectness in enumerate((0.0, 1.0, -1.0)):
        outputs[1][0, 0, 4, 2 * column + 1] = torch.tensor([0, 0, 0, 0, objectness, 20, -20, -20])

    def confidences() -> list[float]:
        (found,) = task.predict(outputs, batch(Info()))
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
