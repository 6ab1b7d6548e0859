"""The image size that is taken without --imgsz, and its rounding to whole strides."""

from __future__ import annotations

from typing import Any

import pytest

from models.ensemble import choose_size, fixed_size
from models.export import ExportMetadata
from models.loading import ImageSize, rounding, sides_of
from models.tasks.classify import ClassificationTask
from models.tasks.contract import Task
from models.tasks.detect import DetectionTask
from models.weights import Weights
from models.yolo import whole_strides
from utils.errors import UserError


def trained(imgsz: Any = None) -> Weights:
    """Return weights that were trained at a size, if they say so."""
    return Weights({}, {}, {}, "", {} if imgsz is None else {"imgsz": imgsz}, "lockstep")


def exported(height: int, width: int, dynamic: bool = False, imgsz: int = 64) -> Weights:
    """Return an exported file. imgsz: of the training."""
    settings = {"imgsz": imgsz}
    size = {"imgsz": (height, width), "batch": 1, "dynamic": dynamic, "half": False, "device": "cpu"}
    metadata = ExportMetadata("", {}, 8, {}, **size, suppression=None, settings=settings)
    return Weights({}, {}, {}, "", settings, "exported", metadata=metadata)


@pytest.mark.parametrize(
    ("side", "stride", "expected"), [(640, 32, 640), (641, 32, 672), (5, 32, 64), (33, 1, 33), (1, 1, 1)]
)
def test_whole_strides(side: int, stride: int, expected: int) -> None:
    assert whole_strides(side, stride) == expected


@pytest.mark.parametrize(
    ("requested", "taken", "messages"),
    [
        ([320], [320], []),
        ([320], [320, 320], []),
        ([300], [320], ["--imgsz 300 is rounded up to 320, whole strides of 32 pixels"]),
        ([300, 640], [320, 640], ["--imgsz 300 640 is rounded up to 320 640, whole strides of 32 pixels"]),
    ],
)
def test_a_rounded_size_is_printed(requested: list[int], taken: list[int], messages: list[str]) -> None:
    assert rounding(requested, taken, 32) == messages


def test_a_size_in_whole_strides() -> None:
    assert ImageSize((64, 96)).rounded(32) == ImageSize((64, 96))
    size = ImageSize((60, 96), messages=("a",)).rounded(32)
    assert (size.sides, len(size.messages)) == ((64, 96), 2)
    assert ImageSize((60, 96), is_fixed=True).rounded(32).sides == (60, 96)


@pytest.mark.parametrize(
    ("imgsz", "sides"), [(0, ()), ((), ()), (320, (320,)), ([320], (320,)), ((320, 640), (320, 640))]
)
def test_values_of_imgsz(imgsz: Any, sides: tuple[int, ...]) -> None:
    assert sides_of(imgsz) == sides


@pytest.mark.parametrize("imgsz", [-8, 2**15, (0, 320), (1, 2, 3)])
def test_other_values_of_imgsz_are_refused(imgsz: Any) -> None:
    with pytest.raises(UserError, match=r"^--imgsz .*: give one number of pixels, or height and width"):
        sides_of(imgsz)


@pytest.mark.parametrize(
    ("task", "weights", "suggested", "expected"),
    [
        (ClassificationTask, trained(64), 0, 64),
        (ClassificationTask, trained(64), 48, 64),
        (ClassificationTask, trained(), 48, 48),
        (ClassificationTask, trained(), 0, 224),
        (ClassificationTask, trained("64"), 0, 224),
        (ClassificationTask, trained(-1), 0, 224),
        (ClassificationTask, exported(32, 32), 48, 32),
        (DetectionTask, trained(64), 0, 64),
        (DetectionTask, trained(64), 320, 64),
        (DetectionTask, trained(), 320, 320),
        (DetectionTask, trained(), 0, 640),
        (DetectionTask, exported(32, 64, dynamic=True), 320, (32, 64)),
        (DetectionTask, exported(32, 64), 0, (32, 64)),
    ],
)
def test_the_default_size(task: type[Task], weights: Weights, suggested: int, expected: int | tuple[int, int]) -> None:
    """That of the training or the export, if the weights contain it."""
    sides = (expected, expected) if isinstance(expected, int) else expected
    assert choose_size({"a.pt": weights}, task, 0, suggested).sides == sides


def test_a_size_on_the_command_line_comes_before_all_but_an_exported_files() -> None:
    for task in (ClassificationTask, DetectionTask):
        assert choose_size({"a.pt": trained(64)}, task, (96, 128), suggested=48) == ImageSize((96, 128))
        size = choose_size({"a.onnx": exported(32, 64)}, task, 96)
        assert size == ImageSize((32, 64), True, ("exported for images of 32x64 only",))


@pytest.mark.parametrize("task", [ClassificationTask, DetectionTask])
def test_a_size_from_the_weights_is_printed(task: type[Task]) -> None:
    size = choose_size({"a.pt": trained(64)}, task, 0)
    assert size.messages == ("images of 64 px, the size in the weights",)
    assert choose_size({"a.onnx": exported(32, 64, dynamic=True)}, task, 0).messages == (
        "images of 32 64 px, the size in the weights",
    )
    assert choose_size({"a.pt": trained(64)}, task, 64).messages == ()
    assert choose_size({"a.pt": trained()}, task, 0).messages == ()


@pytest.mark.parametrize("task", [ClassificationTask, DetectionTask])
def test_an_ensemble_has_one_size(task: type[Task]) -> None:
    """Files without a size go along with the others."""
    weights = {"a.pt": trained(), "b.pt": trained(64), "c.onnx": exported(64, 64, dynamic=True)}
    assert choose_size(weights, task, 0).sides == (64, 64)
    weights["d.pt"] = trained(224)
    with pytest.raises(UserError, match=r"image sizes \(b\.pt at 64 px, c\.onnx at 64 px, d\.pt at 224 px\); give one"):
        choose_size(weights, task, 0)
    assert choose_size(weights, task, 96).sides == (96, 96)


def test_the_size_that_exported_files_require() -> None:
    assert fixed_size({"a.pt": trained(), "b.onnx": exported(64, 64, dynamic=True)}) is None
    assert fixed_size({"a.pt": trained(), "b.onnx": exported(32, 64)}) == (32, 64)
    message = r"different sizes \(a\.onnx 64x64, b\.onnx 32x64\); export them with --dynamic"
    with pytest.raises(UserError, match=message):
        fixed_size({"a.onnx": exported(64, 64), "b.onnx": exported(32, 64)})
