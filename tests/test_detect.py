"""detect.py and its use from Python, on drawn images."""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageShow
from torch import nn
from torchvision.ops import box_iou

import detect
from data.builtin.shapes import NAMES
from data.images import read_image
from data.media import Frame, MediaItem, as_pixels
from detect import FileNames, Predictor, groups
from models.loading import transfer
from models.tasks.classify import ClassificationRecipe, ClassificationTask
from models.tasks.result import Results
from models.weights import read_weights
from models.yolo import build_model
from predictor import class_numbers
from tests.conftest import RunScript
from tests.making import noise, tiny_detector, write_image, write_yaml
from utils.batch import Batch
from utils.checkpoint.weight_files import serialised, weights_content
from utils.distributed.failure import run_main
from utils.errors import UserError
from utils.files import ROOT, read_yaml
from utils.plots.drawing import Style
from utils.summary import StageTimer

SIDE, CONFIDENCE, OVERLAP = 160, 0.1, 0.45


def write_detector(file: Path, deviation: float, statistics: torch.Tensor | None = None) -> Path:
    """Write a yolov5n with random last layers of this deviation, and BatchNorm's statistics of these images."""
    torch.manual_seed(0)  # module fixtures are made before the seed of a test is set
    names = dict(enumerate(NAMES))
    model = build_model({**read_yaml(ROOT / "models" / "yolov5n.yaml"), "nc": len(names)})
    for level in model.head.m:
        nn.init.normal_(level.weight, std=deviation)
        nn.init.normal_(level.bias)
    if statistics is not None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1
        with torch.inference_mode():
            model.train()(statistics)
    file.write_bytes(serialised(weights_content(model, {**model.yaml, "task": "detect"}, names, {"imgsz": 96})))
    return file


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that detect objects of all confidences, on any machine."""
    return write_detector(tmp_path_factory.mktemp("weights") / "last.pt", deviation=1)


@pytest.fixture(scope="module")
def predictor(detector: Path) -> Predictor:
    return Predictor(detector, imgsz=SIDE, conf_thres=CONFIDENCE, device="cpu")


@pytest.fixture(scope="module")
def photo(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn image of 160 x 150 pixels, which need padding."""
    image = cv2.imread(str(small_data.with_suffix("") / "images" / "train" / "000010.jpg"))
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    cv2.imwrite(str(file), image[:150])
    return file


@pytest.fixture
def classifier(tmp_path: Path) -> str:
    """Random weights of a small classifier, as after a training at 64 pixels."""
    names = {0: "cat", 1: "dog", 2: "cow"}
    task = ClassificationTask(names, ClassificationRecipe())
    yaml = {**read_yaml(ROOT / "models" / "resnet18.yaml"), "nc": 3}
    model = task.build_model(task.model_yaml(yaml), 64)
    path = tmp_path / "kinds.pt"
    path.write_bytes(serialised(weights_content(model, {**yaml, "task": "classify"}, names, {"imgsz": 64})))
    return str(path)


def truncated(file: Path) -> Path:
    """Write the first half of an image."""
    content = write_image(file, noise(160, 120)).read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return file


# Predictions


def test_against_a_plain_computation(tmp_path: Path) -> None:
    """The forward pass, which tests/models/test_yolo.py compares with YOLOv5's, on an image that is padded by hand,
    decoded by the formulas: only the most probable class of each box. Which of two boxes suppresses the other may hang
    on rounding, so what survives is held to the definition: no two of a class overlap, and nothing is missing without
    a survivor of its class that overlaps it and is at least as sure."""
    detector = write_detector(tmp_path / "last.pt", deviation=0.1, statistics=torch.rand(4, 3, SIDE, SIDE))
    content = read_weights(detector)
    assert content.model
    model = build_model(content.model)
    transfer(model, content.state)
    photo = write_image(tmp_path / "noise.png", noise(SIDE, SIDE - 10))
    image = read_image(photo)
    height, width = image.shape[:2]
    around = [(side // 2, side - side // 2) for side in (-height % 32, -width % 32)]
    padded = np.pad(image, (*around, (0, 0)), constant_values=114)
    inputs = torch.from_numpy(padded[..., ::-1].transpose(2, 0, 1).copy())[None] / 255
    rows = []
    with torch.inference_mode():
        for raw, anchors, stride in zip(model.eval()(inputs), model.head.anchors, model.head.stride, strict=True):
            s, (h, w) = raw[0].sigmoid(), raw.shape[2:4]
            cells = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1)
            xy = (s[..., :2] * 2 - 0.5 + cells) * stride
            wh = (s[..., 2:4] * 2) ** 2 * (anchors * stride)[:, None, None]
            rows.append(torch.cat((xy - wh / 2, xy + wh / 2, s[..., 4:]), -1).flatten(0, 2))
    boxes, scores = torch.cat(rows)[:, :4], torch.cat(rows)[:, 5:] * torch.cat(rows)[:, 4:5]
    confidence, label = scores.max(1)
    corners = boxes - torch.tensor([around[1][0], around[0][0]] * 2)
    corners = corners.clamp(min=torch.zeros(4), max=torch.tensor([width, height] * 2))
    decoded = torch.cat((corners, confidence[:, None], label[:, None]), 1)
    found = torch.from_numpy(Predictor(detector, imgsz=SIDE, conf_thres=CONFIDENCE, device="cpu")(photo).array)
    assert len(found) > 100
    assert bool((found[:, 4] > CONFIDENCE).all())
    difference, origin = torch.cdist(found, decoded, p=torch.inf).min(1)
    assert difference.max() < 3e-2
    assert len(origin.unique()) == len(found)

    overlap = box_iou(boxes, boxes[origin])
    overlap[label[:, None] != label[origin]] = 0
    others = overlap[origin] * ~torch.eye(len(found), dtype=torch.bool)
    assert others.max() < OVERLAP + 1e-3
    suppressed = (overlap > OVERLAP - 1e-3) & (confidence[origin] >= confidence[:, None] - 1e-5)
    missing = confidence > CONFIDENCE + 1e-4
    missing[origin] = False
    assert missing.sum() > 10
    assert bool(suppressed[missing].any(1).all())


def test_every_form_of_an_image_gives_the_same(predictor: Predictor, photo: Path, tmp_path: Path) -> None:
    expected = predictor(photo)
    assert expected.array.dtype == np.float32
    assert (np.diff(expected.scores) <= 0).all()
    bgr = read_image(photo)
    rgb = np.ascontiguousarray(bgr[..., ::-1])
    tensor = torch.from_numpy(rgb).permute(2, 0, 1)
    for form in (str(photo), rgb, Image.fromarray(rgb), tensor, tensor / 255, Image.open(photo)):
        np.testing.assert_array_equal(predictor(form).array, expected.array)
    predictor.bgr = True
    for form in (bgr, photo, Image.fromarray(rgb), tensor.flip(0)):
        np.testing.assert_array_equal(predictor(form).array, expected.array)
    predictor.bgr = False
    black, folder, listing = np.zeros((50, 80, 3), np.uint8), str(photo.parent), tmp_path / "list.txt"
    listing.write_text(f"{photo}\n")
    for several in ([photo, black], (str(photo),), tensor[None], folder, f"{folder}/*.png", listing, [folder, black]):
        first, *others = predictor(several)
        np.testing.assert_array_equal(first.array, expected.array)
        assert len(others) == (isinstance(several, list))


def test_a_prediction(predictor: Predictor, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, array = predictor(photo), predictor(photo).array
    np.testing.assert_array_equal(result.boxes, array[:, :4])
    np.testing.assert_array_equal(result.scores, array[:, 4])
    assert result.classes.tolist() == array[:, 5].astype(int).tolist()
    assert result.names == predictor.names
    assert str(result) == f"{photo}: {result.describe()}"
    assert repr(result) == f"<DetectionPrediction of {result}>"
    image = read_image(photo)
    drawn = result.draw(image, Style(2, names=False))
    assert (drawn != image).any()
    np.testing.assert_array_equal(result.plot(line_thickness=2, hide_labels=True), drawn[..., ::-1])
    np.testing.assert_array_equal(result.plot(line_thickness=2, hide_labels=True, bgr=True), drawn)
    assert result.save(tmp_path / "drawn.png", line_thickness=2, hide_labels=True) == tmp_path / "drawn.png"
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "drawn.png")), drawn)
    frame = image[..., ::-1].copy()
    of_array = predictor(frame)
    assert str(of_array) == f"image: {result.describe()}"
    frame[:] = 0  # a camera's buffer is used again
    np.testing.assert_array_equal(of_array.plot(), result.plot())
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    table = result.to_df()
    assert list(table) == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    assert table["name"] == [predictor.names[k] for k in result.classes]
    np.testing.assert_array_equal(table["xmax"], array[:, 2])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"to_df\(\) needs pandas"):
        result.to_df()


def test_a_prediction_is_a_sequence_of_objects(predictor: Predictor, photo: Path) -> None:
    result, array = predictor(photo), predictor(photo).array
    assert len(result) == len(array) > 0
    objects = list(result)
    assert [list(each) for each in objects] == [
        ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"] for _ in array
    ]
    assert [list(each.values())[:6] for each in objects] == array.tolist()
    assert objects[0]["name"] == predictor.names[int(array[0, 5])]
    assert json.loads(result.to_json()) == objects
    nothing = predictor(photo, conf=1.0)
    assert (len(nothing), list(nothing), nothing.to_json(), str(nothing)) == (0, [], "[]", f"{photo}: nothing")


def test_boxes_in_the_forms_of_yolov5(predictor: Predictor, photo: Path) -> None:
    """Rows of box, confidence and class, in pixels or as shares of width and height."""
    result, array = predictor(photo), predictor(photo).array
    height, width = read_image(photo).shape[:2]
    left, top, right, bottom = array[:, :4].T
    centred = np.stack(((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), 1)
    shares = np.array([width, height, width, height])
    forms = {"xyxy": array[:, :4], "xywh": centred, "xyxyn": array[:, :4] / shares, "xywhn": centred / shares}
    for name, boxes in forms.items():
        found = getattr(result, name)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[:, :4], boxes, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[:, 4:], array[:, 4:])


def test_files_of_results(predictor: Predictor, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name, into a folder, or into the next run folder as in YOLOv5."""
    monkeypatch.chdir(tmp_path)
    result, frame = predictor(photo), read_image(photo)
    assert result.save() == Path("runs/detect/exp/photo.jpg")
    assert result.save("drawn") == Path("drawn/photo.jpg")
    (tmp_path / "a.b").mkdir()
    assert result.save("a.b") == Path("a.b/photo.jpg")
    results = predictor([photo, frame, str(photo)])
    assert results.save() == Path("runs/detect/exp2")
    assert sorted(file.name for file in Path("runs/detect/exp2").iterdir()) == ["image.jpg", "photo-2.jpg", "photo.jpg"]
    assert results.save("several", hide_labels=True) == Path("several")
    expected = cv2.imencode(".jpg", result.plot(hide_labels=True, bgr=True), (cv2.IMWRITE_JPEG_QUALITY, 95))[1]
    assert Path("several/photo.jpg").read_bytes() == expected.tobytes()


def test_results_of_several_images(
    predictor: Predictor, photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list, with the attributes of its members as lists, as `results.xyxy[0]` in YOLOv5."""
    one = predictor(photo)
    results = predictor([photo, np.zeros((50, 80, 3), np.uint8)], conf=float(one.scores[0]) - 1e-4)
    assert isinstance(results, list)
    assert len(results) == len(results.xyxy) == len(results.boxes) == 2
    np.testing.assert_array_equal(results.xyxy[0], results[0].array)
    assert str(results) == "\n".join(map(str, results))
    assert repr(results).startswith(f"[<DetectionPrediction of {photo}: ")
    assert [each["image"] for each in json.loads(results.to_json())] == results.path == [str(photo), "image"]
    assert json.loads(results.to_json())[0]["objects"] == list(results[0])
    capsys.readouterr()
    results.print()
    assert capsys.readouterr().out == f"{results}\n"
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert [list(table) for table in results.pandas().xyxy] == [list(results[0].columns())] * 2
    assert results.pandas().xyxy[0]["name"] == [predictor.names[k] for k in results[0].classes]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda data, columns: (data, columns)))
    rows, columns = results.to_df()
    assert columns == ["image", "xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    assert rows == [(result.path, *each.values()) for result in results for each in result]
    assert [row[1:7] for row in rows] == [tuple(row) for result in results for row in result.array.tolist()]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"to_df\(\) needs pandas, which is not installed; pip install pandas"):
        results.to_df()


def test_results_are_shown(predictor: Predictor, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's viewer, or in a notebook, which also draws a result that ends a cell."""
    results, shown = predictor([photo, photo]), []

    class Viewer(ImageShow.Viewer):
        def show_image(self, image: Image.Image, **options: Any) -> int:
            shown.append(image)
            return 1

    monkeypatch.setattr(ImageShow, "_viewers", [Viewer()])
    results.show(line_thickness=1)
    assert len(shown) == 2
    np.testing.assert_array_equal(np.asarray(shown[1]), results[0].plot(line_thickness=1))
    monkeypatch.setattr(ImageShow, "_viewers", [])
    with pytest.raises(UserError, match=r"^show\(\): this machine has no program that shows pictures; write a file"):
        results[0].show()
    shell = SimpleNamespace(kernel=None)
    notebook = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=shown.append))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    results[0].show()
    png = results[0]._repr_png_()
    np.testing.assert_array_equal(np.asarray(shown[2]), results[0].plot())
    np.testing.assert_array_equal(
        cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR), results[0].plot(bgr=True)
    )
    assert replace(results[0], pixels=None)._repr_png_() is None


def test_some_classes_only(detector: Path, photo: Path, predictor: Predictor) -> None:
    expected = predictor(photo).array
    label = int(expected[0, 5])
    of_label = expected[expected[:, 5] == label]
    for classes in ([label], label, str(label), predictor.names[label]):
        chosen = Predictor(detector, imgsz=SIDE, conf_thres=CONFIDENCE, classes=classes, device="cpu")(photo)
        np.testing.assert_array_equal(chosen.array, of_label)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("6", "--classes 6: "),
        ("traffic lihgt", "--classes traffic lihgt: .*'traffic light'"),
        ("zebra", "--classes zebra: "),
    ],
)
def test_names_and_numbers_of_classes(word: str, message: str) -> None:
    names = {0: "Cat", 1: "traffic light", 2: "Cat"}
    assert class_numbers(["traffic light", 0, "2"], names) == (1, 0, 2)
    assert class_numbers(["Cat"], names) == (0, 2)
    with pytest.raises(UserError, match=f"^{message}"):
        class_numbers([word], names)


def test_thresholds_are_attributes(detector: Path, photo: Path, predictor: Predictor) -> None:
    every, label = predictor(photo), int(predictor(photo).classes[0])
    changed = Predictor(detector, imgsz=SIDE, device="cpu", conf=0.9)
    assert (changed.conf_thres, changed.conf, changed.iou_thres) == (0.9, 0.9, OVERLAP)
    changed.conf = CONFIDENCE
    np.testing.assert_array_equal(changed(photo).array, every.array)
    changed.classes, changed.max_det = [predictor.names[label]], 1
    assert changed.classes == (label,)
    np.testing.assert_array_equal(changed(photo).array, every.array[:1])
    changed.classes = changed.max_det = None
    np.testing.assert_array_equal(changed(photo).array, every.array)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("conf_tres", 0.1, "Predictor: unknown argument conf_tres (did you mean 'conf_thres'?)"),
        ("conf_thres", "high", "Predictor: conf_thres must be a number, 0 to 1, not 'high'"),
        ("conf", 2, "Predictor: conf_thres must be a number, 0 to 1, not 2"),
        ("classes", ["nothing"], "--classes nothing: "),
        ("imgsz", 96, "Predictor: imgsz cannot be changed; make another Predictor with imgsz=96"),
        ("bgr", 1, "Predictor: bgr must be True or False, not 1"),
    ],
)
def test_other_attributes_are_refused(name: str, value: object, message: str, predictor: Predictor) -> None:
    before = predictor.thresholds
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        setattr(predictor, name, value)
    assert predictor.thresholds == before
    with pytest.raises(AttributeError, match="conf_tres"):
        _ = predictor.conf_tres


def test_settings_of_one_call(detector: Path, photo: Path, predictor: Predictor, classifier: str) -> None:
    """Thresholds, size and the order of channels; the predictor keeps its own."""
    every, before = predictor(photo).array, predictor.thresholds
    count = int(np.argmax(every[:-1, 4] - every[1:, 4])) + 1  # those above the widest gap between confidences
    threshold = float(every[count - 1 : count + 1, 4].mean())
    for how in ({"conf": threshold}, {"conf_thres": threshold}):
        np.testing.assert_array_equal(predictor(photo, **how).array, every[:count])
    assert len(predictor(photo, iou=0.05).array) < len(every)
    label = predictor.names[int(every[0, 5])]
    np.testing.assert_array_equal(predictor([photo], classes=label, max_det=1)[0].array, every[:1])
    np.testing.assert_array_equal(predictor(read_image(photo), bgr=True).array, every)
    other = Predictor(detector, imgsz=(96, 128), conf_thres=CONFIDENCE, device="cpu")(photo).array
    for size in ({"size": (90, 128)}, {"imgsz": (96, 128)}, {"img_size": [96, 128]}):
        np.testing.assert_array_equal(predictor(photo, **size).array, other)
    np.testing.assert_array_equal(predictor.predict(str(photo), 128).array, predictor(photo, size=128).array)
    np.testing.assert_array_equal(predictor(photo, size=None, conf=None, iou=None).array, every)
    assert (predictor.thresholds, predictor.bgr) == (before, False)
    image, classify = noise(90, 70), Predictor(classifier, device="cpu")
    expected = Predictor(classifier, imgsz=96, device="cpu")(image).probs
    np.testing.assert_array_equal(classify(image, size=96).probs, expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"conf": 2}, "Predictor: conf_thres must be a number, 0 to 1, not 2"),
        ({"size": "big"}, "Predictor: imgsz must be a whole number, 1 to 16384, or a list of such, not 'big'"),
        ({"size": (1, 2, 3)}, "--imgsz 1 2 3: give one number of pixels, or height and width"),
        ({"augment": True}, "Predictor: augment cannot be changed; make another Predictor with augment=True"),
        ({"stream": True}, "Predictor: unknown argument stream"),
    ],
)
def test_wrong_settings_of_one_call(how: dict[str, Any], message: str, photo: Path, predictor: Predictor) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        predictor(photo, **how)


def test_a_folder_with_videos(
    photo: Path, predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An animated GIF and a video among pictures: a prediction for each frame, which draws that frame."""
    image = Image.open(photo)
    frames = [image.rotate(angle) for angle in (0, 90, 180)]
    frames[0].save(tmp_path / "b.gif", save_all=True, append_images=frames[1:], duration=100)
    image.save(tmp_path / "a.png")
    video = cv2.VideoWriter(str(tmp_path / "c.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10.0, image.size)
    for value in (0, 80, 160, 240):
        video.write(np.full((image.height, image.width, 3), value, np.uint8))
    video.release()
    results = predictor(tmp_path)
    gif, clip = [[f"{tmp_path / name} ({k})" for k in range(1, n + 1)] for name, n in (("b.gif", 3), ("c.mp4", 4))]
    assert [result.path for result in results] == [str(tmp_path / "a.png"), *gif, *clip]
    np.testing.assert_array_equal(results[0].array, predictor(photo).array)
    assert [round(result.pixels().mean(), -1) for result in results[4:]] == [0, 80, 160, 240]
    turned = np.asarray(frames[1].convert("RGB"))
    assert np.abs(results[2].pixels()[..., ::-1].astype(int) - turned).mean() < 12  # a GIF has 256 colours
    assert [len(each) for each in (predictor(tmp_path / "b.gif"), predictor([photo, tmp_path / "c.mp4"]))] == [3, 5]
    assert capsys.readouterr().out == ""
    (tmp_path / "d.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"d\.mp4 cannot be read"):
        predictor(tmp_path)
    (tmp_path / "c.mp4").unlink()
    with pytest.raises(UserError, match=r"c\.mp4"):
        results[-1].plot()
    content = (tmp_path / "b.gif").read_bytes()
    (tmp_path / "b.gif").write_bytes(content[: len(content) * 2 // 3])
    assert 0 < len(predictor(tmp_path / "b.gif")) < 3
    assert f"warning: {tmp_path / 'b.gif'} cannot be read after " in capsys.readouterr().out


def test_the_default_size_is_that_of_the_training(
    detector: Path, classifier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for weights, side in ((detector, 96), (classifier, 64)):
        assert Predictor(weights, device="cpu").size.sides == (side, side)
        assert capsys.readouterr().out == f"images of {side} px, the size in the weights\n"
    for silent, side in (({"quiet": True}, 96), ({"imgsz": 128}, 128)):
        assert Predictor(detector, device="cpu", **silent).size.sides == (side, side)
        assert capsys.readouterr().out == ""


def test_a_rounded_size_is_printed(detector: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictor = Predictor(detector, imgsz=(90, 128), device="cpu")
    assert predictor.size.sides == (96, 128)
    assert capsys.readouterr().out == "--imgsz 90 128 is rounded up to 96 128, whole strides of 32 pixels\n"


def test_a_classifiers_probabilities(classifier: str) -> None:
    """Without a size, images have that of the training."""
    image = noise(90, 70)
    model = Predictor(classifier, device="cpu")
    result = model(image)
    probabilities = result.probs
    assert probabilities.shape == (3,)
    np.testing.assert_array_equal(probabilities, Predictor(classifier, imgsz=64, device="cpu")(image).array)
    assert (probabilities != Predictor(classifier, imgsz=224, device="cpu")(image).array).all()
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert result.top5 == [(model.names[k], probabilities[k]) for k in np.argsort(-probabilities, kind="stable")]
    assert result.scores.tolist() == sorted(probabilities, reverse=True)
    assert str(result).startswith(f"image: {model.names[int(result.classes[0])]} 0.")
    assert (result.plot() != image).any()
    assert model.names == {0: "cat", 1: "dog", 2: "cow"}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "a uint8 array"),
        (np.zeros((4, 4, 4), np.uint8), r"not uint8 \(4, 4, 4\)"),
        (np.zeros((0, 4, 3), np.uint8), "a uint8 array"),
        (3, "not int"),
        (b"jpeg", "not bytes"),
        (torch.full((3, 4, 4), 255.0), "floats from 0 to 1"),
        (torch.full((3, 4, 4), torch.nan), "floats from 0 to 1"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"not int64 \(4, 4, 3\)"),
        ("nowhere.jpg", "nowhere.jpg"),
        ("0", "^0 is a camera"),
    ],
)
def test_invalid_images(image: object, message: str, predictor: Predictor) -> None:
    with pytest.raises(UserError, match=message):
        predictor(image)


@pytest.mark.parametrize("name", ["custom", "yolov5n", "yolov5x6", "yolov5s-seg", "yolov5m-cls", "yolov9t"])
def test_a_model_of_torch_hub(name: str, detector: Path, photo: Path, predictor: Predictor) -> None:
    """Others than `custom` are release files: what is asked for is seen in the error."""
    load = functools.partial(torch.hub.load, str(ROOT), name, source="local", _verbose=False, conf=CONFIDENCE)
    if name == "custom":
        model = load(path=str(detector), imgsz=SIDE, device=torch.device("cpu"))
        for images in (photo, read_image(photo)[..., ::-1].copy(), [photo], photo.parent):
            results = model(images, size=SIDE)
            assert isinstance(results, Results)
            assert len(results) == len(results.xyxy) == 1
            np.testing.assert_array_equal(results.xyxy[0], predictor(photo).array)
            np.testing.assert_array_equal(results[0].array, predictor(photo).array)
    else:
        with pytest.raises(UserError, match=rf"/{name.replace('yolov9', 'v9-')}\.pt cannot be downloaded"):
            load(pretrained=True)


def test_a_truncated_image_is_refused_by_name(predictor: Predictor, tmp_path: Path) -> None:
    file = truncated(tmp_path / "cut.jpg")
    for image in (file, str(file), Image.open(file)):
        with pytest.raises(UserError, match=r"cut\.jpg cannot be read as an image \(image file is truncated"):
            predictor(image)


def test_grey_images_and_rotated_pictures() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert as_pixels(grey).shape == (3, 4, 3)
    picture = Image.fromarray(np.zeros((3, 4, 3), np.uint8))
    picture.getexif()[0x0112] = 6
    assert as_pixels(picture).shape == (4, 3, 3)


def test_the_example_of_the_page(
    detector: Path, photo: Path, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = (ROOT / "docs" / "detect.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    cv2.imwrite(str(tmp_path / "photo.jpg"), cv2.imread(str(photo)))
    shutil.copy(detector, tmp_path / "yolov5n.pt")
    monkeypatch.chdir(tmp_path)
    exec(example.replace("0.25", str(CONFIDENCE)), {})
    printed = capsys.readouterr().out
    assert any(f"{name} 0." in printed for name in predictor.names.values())


@pytest.mark.parametrize("images", [1, 2])
def test_the_times_are_those_of_a_warm_model(
    images: int, detector: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The first image is predicted once before its time is taken, also if it is the only one."""
    timers: list[object] = []
    predict = Predictor.predict_batch

    def recorded(self: Predictor, batch: Batch, timer: StageTimer | None = None) -> Any:
        timers.append(timer)
        return predict(self, batch, timer)

    monkeypatch.setattr(Predictor, "predict_batch", recorded)
    sources = [str(shutil.copy(photo, tmp_path / f"{number}.png")) for number in range(images)]
    flags = ["--weights", str(detector), "--imgsz", str(SIDE), "--device", "cpu", "--project", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["detect.py", *flags, "--source", *sources])
    detect.main()
    assert timers[0] is None
    assert len(timers) == images + 1
    assert isinstance(timers[1], StageTimer)
    assert len(timers[1].batches) == images
    assert f"{images} image{'s' * (images > 1)}; results in {tmp_path / 'runs' / 'exp'}\n" in capsys.readouterr().out


# Batches and names


def test_frames_of_one_shape_go_together() -> None:
    def frame(number: int, side: int, kind: str = "picture") -> tuple[Frame, object]:
        return Frame(MediaItem(kind, str(number)), np.zeros((1, 1, 3), np.uint8)), (torch.zeros(3, side, side),)

    frames = [frame(number, side) for number, side in enumerate((32, 32, 32, 64, 32))]
    assert [[one.item.name for one, _ in group] for group in groups(frames, 2)] == [["0", "1"], ["2"], ["3"], ["4"]]
    live = (frame(number, 32, "live") for number in range(10**9))
    assert len(next(groups(live, 2))) == 2


def test_file_names_are_unique() -> None:
    items = [
        MediaItem("picture", "a/x.jpg"),
        MediaItem("picture", "b/x.png"),
        MediaItem("video", "x.mp4"),
        MediaItem("live", "rtsp://h/s?a=1"),
    ]
    file_names = FileNames(items)
    assert list(file_names.stems.values()) == ["x", "x-2", "x-3", "s"]
    assert file_names.of(Frame(items[2], np.zeros((1, 1, 3), np.uint8), number=7)) == "x-3_7"
    assert file_names.of(Frame(items[0], np.zeros((1, 1, 3), np.uint8))) == "x"


# Whole runs


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Call detect.py's `main` in this process; return the exit code and what was printed."""

    def call(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["detect.py", *flags])
        capfd.readouterr()
        code = 0
        try:
            run_main(detect.main)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, "".join(capfd.readouterr())

    return call


def test_a_folder_with_everything(
    detector: Path, photo: Path, predictor: Predictor, run_script: RunScript, tmp_path: Path
) -> None:
    """An image, a video and broken files: whatever can be read is processed, and the exit code is 1.

    In a process of its own, because FFmpeg's messages are turned off only before the first video of a process.
    """
    folder, image, expected = tmp_path / "in", cv2.imread(str(photo)), predictor(photo).array
    folder.mkdir()
    shutil.copy(photo, folder / "photo.png")
    broken = [truncated(folder / f"cut.{kind}") for kind in ("jpg", "png", "webp", "bmp", "tif")]
    for name, content in {"empty.jpg": b"", "text.jpg": b"nothing"}.items():
        (folder / name).write_bytes(content)
        broken.append(folder / name)
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "bad.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(90))
    video = cv2.VideoWriter(str(folder / "clip.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, image.shape[1::-1])
    for _ in range(5):
        video.write(image)
    video.release()
    printed = run_script(
        "detect.py", "--weights", str(detector), "--source", str(folder), str(folder / "*.png"), "--imgsz", str(SIDE),
        "--device", "cpu", "--project", str(tmp_path), "--save-txt", "--save-conf", "--save-csv", "--save-crop",
        "--save_format", "1", "--vid-stride", "2", "--batch-size", "2", "--conf-thres", str(CONFIDENCE), code=1,
    )  # fmt: skip
    for file in (*broken, folder / "gone.jpg"):
        assert printed.count(f"warning: {file} cannot be read as an image (") == 1
    assert f"warning: {folder}/pipe.jpg is not a regular file; give the name of a picture or video" in printed
    assert f"warning: {folder}/bad.mp4 cannot be read" in printed
    assert "warning: 10 of the 12 sources could not be read completely; see above" in printed
    for raw in ("Corrupt JPEG data", "moov atom", "[mov", "BytesIO"):
        assert raw not in printed
    assert f"weights: {detector}\n" in printed
    times, without, images = printed[printed.index("per image: ") :].splitlines()[:3]
    assert times.endswith(" ms post-processing,")
    assert without == "  without loading and the warm-up"
    assert images.startswith("4 images; results in ")
    line = next(line for line in printed.splitlines() if line.startswith(str(folder / "photo.png")))
    names = [predictor.names[int(row[5])] for row in expected]
    assert f"{names.count(names[0])} {names[0]}" in line
    assert line.endswith(" ms")
    assert f"{folder / 'clip.avi'} (5): " in printed
    out = tmp_path / "exp"
    assert cv2.imread(str(out / "photo.png")).shape == image.shape
    clip = cv2.VideoCapture(str(out / "clip.mp4"))
    assert (clip.get(cv2.CAP_PROP_FRAME_COUNT), clip.get(cv2.CAP_PROP_FPS)) == (3, 5)
    files = sorted(path.name for path in (out / "labels").iterdir())
    assert files == ["clip_0.txt", "clip_2.txt", "clip_4.txt", "photo.txt"]
    rows = np.loadtxt(out / "labels" / "photo.txt", ndmin=2)
    np.testing.assert_allclose(rows, expected[:, [5, 0, 1, 2, 3, 4]], rtol=1e-4, atol=1e-2)
    with (out / "predictions.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["Prediction"] for row in table if row["Image Name"] == "photo.png"] == names
    crop = cv2.imread(str(out / "crops" / names[0] / "photo.jpg"))
    assert abs(crop.shape[1] - (expected[0, 2] - expected[0, 0])) < 2


def test_a_classifiers_weights(classifier: str, command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.jpg"), np.full((70, 90, 3), 90, np.uint8))
    how = ("--device", "cpu", "--project", str(tmp_path), "--save-txt", "--save-conf")
    code, printed = command("--weights", classifier, "--source", str(tmp_path / "*.jpg"), *how)
    assert code == 0
    text = (tmp_path / "exp" / "labels" / "a.txt").read_text().split()
    assert sorted(text[1::2]) == ["cat", "cow", "dog"]
    assert sum(map(float, text[::2])) == pytest.approx(1, abs=1e-4)
    assert f"{text[1]} {float(text[0]):.2f}" in printed


def test_from_python(detector: Path, photo: Path, predictor: Predictor, tmp_path: Path) -> None:
    """detect.run writes the files of the command, and returns where they are."""
    shutil.copy(photo, tmp_path / "photo.png")
    cut = truncated(tmp_path / "cut.jpg")
    project = tmp_path / "runs"
    how = {"imgsz": SIDE, "conf": CONFIDENCE, "device": "cpu", "project": project, "quiet": True}
    result = detect.run(weights=detector, source=tmp_path, save_txt=True, **how)
    assert (result["folder"], result["images"]) == (str(project / "exp"), 1)
    (problem,) = result["problems"]
    assert problem.startswith(f"{cut} cannot be read as an image (")
    rows = (project / "exp" / "labels" / "photo.txt").read_text().splitlines()
    assert rows == predictor(photo).label_rows(with_confidence=False)
    assert (project / "exp" / "photo.png").is_file()
    with pytest.raises(UserError, match=r"^detect\.run: unknown argument sauce \(did you mean 'source'\?\)$"):
        detect.run(sauce=tmp_path)


def test_a_run_that_writes_nothing_leaves_no_folder(
    detector: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither does the name of one stay taken, nor a file that was there go away."""
    cut = truncated(tmp_path / "cut.jpg")
    project = tmp_path / "runs"
    how = {"weights": detector, "imgsz": SIDE, "device": "cpu", "project": project}
    with pytest.raises(UserError, match=rf"^{cut} cannot be read as an image \(image file is truncated"):
        detect.run(source=cut, save_txt=True, save_csv=True, save_crop=True, **how)
    assert not list(project.iterdir())
    capsys.readouterr()
    assert detect.run(source=photo, nosave=True, **how) == {"folder": None, "images": 1, "problems": []}
    assert "results in" not in capsys.readouterr().out
    older = project / "exp" / "mine.txt"
    older.parent.mkdir()
    older.touch()
    with pytest.raises(UserError, match="cannot be read"):
        detect.run(source=cut, exist_ok=True, **how)
    assert older.is_file()


def test_bad_input(command: Callable[..., tuple[int, str]]) -> None:
    code, printed = command("--source", "nowhere")
    assert code == 1
    assert printed.startswith("error: the source 'nowhere' does not exist")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"imgsz": (1, 2, 3)}, "--imgsz 1 2 3: give one number of pixels, or height and width"),
        ({"imgsz": -8}, "Predictor: imgsz must be a whole number, 1 to 16384, or a list of such, not -8"),
        ({"device": "0,1"}, "--device 0,1: one device is enough here"),
        ({"weights": []}, "--weights is empty"),
        ({"weights": 42}, "weights 42 are not a file"),
        ({"weights": "nowhere.pt"}, "weights nowhere.pt are not a file; check the path"),
        ({"conf_tres": 0.5}, "Predictor: unknown argument conf_tres (did you mean 'conf_thres'?)"),
        ({"save_txt": True}, "Predictor: unknown argument save_txt"),
        ({"augment": "yes"}, "Predictor: augment must be True or False, not 'yes'"),
    ],
)
def test_invalid_arguments_of_a_predictor(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        Predictor(**flags)


@pytest.mark.gpu
def test_on_a_gpu(detector: Path, photo: Path, predictor: Predictor, run_script: RunScript, tmp_path: Path) -> None:
    """The objects of the CPU, in full and in half precision; detect.py times the GPU's work."""
    expected = predictor(photo)
    for half in (False, True):
        found = Predictor(detector, imgsz=SIDE, conf_thres=CONFIDENCE, device="cuda", half=half)(photo)
        near = np.abs(found.array[:, None, :4] - expected.array[:, :4]).max(2) < 1.0
        near &= found.array[:, None, 5] == expected.array[:, 5]
        # Some overlap by nearly the threshold of suppression: in half precision others of equal boxes are kept.
        assert min(near.any(0).mean(), near.any(1).mean()) > (0.5 if half else 0.95)
    flags = ("--weights", str(detector), "--source", str(photo), "--device", "0", "--half")
    assert " ms " in run_script("detect.py", *flags, "--imgsz", str(SIDE), "--project", str(tmp_path))


# From Python


PROGRAM = """
import train, val
from utils.errors import UserError

if __name__ == "__main__":
    common = dict(data={data!r}, imgsz=64, device="cpu", workers=0, project={project!r}, noplots=True)
    trained = train.run(weights="", cfg={cfg!r}, epochs=1, batch=4, processes=2, lr0=0.02, **common)
    checked = val.run(weights=trained["folder"] + "/weights/best.pt", **common)
    assert trained["metrics/mAP_0.5"] == checked["metrics/mAP_0.5"], (trained, checked)
    assert trained["fitness"] == checked["fitness"]
    again = val.run(weights=trained["folder"] + "/weights/best.pt", name="exp2", exist_ok=True, **common)
    assert again == checked, (again, checked)
    try:
        val.run(weights="nowhere.pt", **common)
    except UserError as error:
        print("refused:", error)
    try:
        train.run(epoch=3)
    except UserError as error:
        print("refused:", error)
"""


def test_train_and_validate_from_python(small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    names = {"data": str(small_data), "project": str(tmp_path / "runs"), "cfg": "yolov5n.yaml"}
    program.write_text(PROGRAM.format(**names))
    printed = run_script(str(program), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    looked_for = f"(looked for {ROOT / 'nowhere.pt'})"
    assert f"refused: weights nowhere.pt are not a file; check the path {looked_for}\n" in printed
    assert "refused: train.run: unknown argument epoch (did you mean 'epochs'?)\n" in printed
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["exp", "exp2"]
    assert read_yaml(tmp_path / "runs" / "exp" / "settings.yaml")["hyperparameters"]["lr0"] == 0.02


INTERRUPTED = """
import os, pathlib, signal, threading, time, train

def interrupt(saved):
    while not list(saved.glob("*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    folder = pathlib.Path({project!r}) / "exp"
    threading.Thread(target=interrupt, args=(folder / "checkpoint",), daemon=True).start()
    try:
        train.run(data={data!r}, weights="", cfg={cfg!r}, epochs=2, batch=2, imgsz=64, device="cpu", workers=0,
                  project={project!r}, noplots=True, save_steps=1, processes={processes})
    except KeyboardInterrupt:
        print("interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("fitness", train.run(resume=folder)["fitness"])
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ctrl_c_from_python(processes: int, small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """It is raised once everything is saved, and the same program can resume the run."""
    program = tmp_path / "program.py"
    cfg = write_yaml(tmp_path / "tiny.yaml", tiny_detector())
    names = {"data": str(small_data), "project": str(tmp_path / "runs"), "cfg": str(cfg), "processes": processes}
    program.write_text(INTERRUPTED.format(**names))
    printed = run_script(str(program), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    stopped, resumed = printed.split("interrupted\n")
    assert "stopped by SIGINT in epoch 1, after batch " in stopped
    assert "everything is saved: continue with --resume" in stopped
    assert "\nfitness 0." in resumed
