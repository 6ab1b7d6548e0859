"""detect.py and its use from Python, on drawn images."""

from __future__ import annotations

import csv
import errno
import functools
import json
import os
import re
import shutil
import sys
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageShow
from torch import nn

import detect
import export
from data.builtin import NAMES
from data.images import images_below, read_image
from data.media import Frame, MediaItem, as_pixels
from detect import Predictor, groups
from models.tasks.classify import ClassificationRecipe, ClassificationTask
from models.tasks.results import Results
from models.yolo import build_model
from tests.conftest import NOT_HERE, RunScript
from tests.making import contents, noise, plain, tiny_detector, write_image, write_yaml
from utils.checkpoint import serialise, weights_content
from utils.config.flags import OBJECT_TRACKERS
from utils.errors import UserError
from utils.files import ROOT, read_yaml
from utils.plots.drawing import Style
from utils.python_api import command_words

SIDE, CONFIDENCE, OVERLAP = 160, 0.1, 0.45


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of yolov5n with random last layers, which detect objects of all confidences on any machine."""
    torch.manual_seed(0)  # module fixtures are made before the seed of a test is set
    names = dict(enumerate(NAMES))
    model = build_model({**read_yaml(ROOT / "models" / "yolov5n.yaml"), "nc": len(names)})
    for level in model.head.m:
        nn.init.normal_(level.weight)
        nn.init.normal_(level.bias)
    file = tmp_path_factory.mktemp("weights") / "last.pt"
    file.write_bytes(serialise(weights_content(model, {**model.yaml, "task": "detect"}, names, {"imgsz": 96})))
    return file


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


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights of a small classifier, as after a training at 64 pixels."""
    names = {0: "cat", 1: "dog", 2: "cow"}
    task = ClassificationTask(names, ClassificationRecipe())
    yaml = {**read_yaml(ROOT / "models" / "resnet18.yaml"), "nc": 3}
    model = task.build_model(task.model_yaml(yaml), 64)
    path = tmp_path_factory.mktemp("weights") / "kinds.pt"
    path.write_bytes(serialise(weights_content(model, {**yaml, "task": "classify"}, names, {"imgsz": 64})))
    return str(path)


def truncated(file: Path) -> Path:
    """Write the first half of an image."""
    content = write_image(file, noise(160, 120)).read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return file


def write_video(file: Path, code: str, *frames: np.ndarray) -> Path:
    """Write BGR frames at 10 per second."""
    video = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*code), 10.0, frames[0].shape[1::-1])
    for frame in frames:
        video.write(frame)
    video.release()
    return file


# Predictions


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
    """A sequence of objects, a table, boxes in the forms of YOLOv5 and a picture."""
    result, array, image = predictor(photo), predictor(photo).array, read_image(photo)
    columns = ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    labels = [predictor.names[k] for k in array[:, 5].astype(int)]
    assert len(result) == len(array) > 20
    assert [[*each.values()] for each in result] == [
        [*row, name] for row, name in zip(array.tolist(), labels, strict=True)
    ]
    assert [list(each) for each in result] == [columns] * len(array)
    assert json.loads(result.to_json()) == list(result)
    assert result[0] is result
    nothing = predictor(photo, conf=1.0, verbose=False)
    assert (len(nothing), list(nothing), nothing.to_json()) == (0, [], "[]")
    left, top, right, bottom = array[:, :4].T
    centred = np.stack(((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), 1)
    shares = np.array([*image.shape[1::-1]] * 2)
    forms = {"xyxy": array[:, :4], "xywh": centred, "xyxyn": array[:, :4] / shares, "xywhn": centred / shares}
    for name, boxes in forms.items():
        np.testing.assert_allclose(getattr(result, name)[:, :4], boxes, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(getattr(result, name)[:, 4:], array[:, 4:])
    drawn = result.draw(image, Style(2, names=False))
    assert (drawn != image).any()
    np.testing.assert_array_equal(result.plot(line_thickness=2, hide_labels=True), drawn[..., ::-1])
    file = result.save(tmp_path / "drawn.png", line_thickness=2, hide_labels=True)
    np.testing.assert_array_equal(cv2.imread(str(file)), drawn)
    frame = image[..., ::-1].copy()
    of_array = predictor(frame)
    frame[:] = 0  # a camera's buffer is used again
    np.testing.assert_array_equal(of_array.plot(), result.plot())


def test_results_of_several_images(
    predictor: Predictor, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list, with the attributes of its members as lists, as `results.xyxy[0]` in YOLOv5; files of all images."""
    results = predictor([photo, read_image(photo), str(photo)])
    assert isinstance(results, list)
    np.testing.assert_array_equal(results.xyxy[0].cpu().numpy(), results[0].array)
    np.testing.assert_array_equal(results.render()[1], results[1].plot())
    with pytest.raises(AttributeError, match="plot"):
        results.crop(save=True)
    assert str(results) == "\n".join(map(str, results))
    objects = json.loads(results.to_json())
    assert [each["image"] for each in objects] == results.path == [str(photo), "image", str(photo)]
    assert objects[0]["objects"] == list(results[0])
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda data, columns=None: (data, columns)))
    rows, columns = results.to_df()
    assert columns == ["image", *results[0].columns()]
    assert rows == [(result.path, *each.values()) for result in results for each in result]
    assert [list(table) for table, _ in results.pandas().xyxy] == [list(results[0].columns())] * 3
    monkeypatch.setitem(sys.modules, "pandas", None)
    for one in (results, results[0]):
        with pytest.raises(UserError, match="pip install pandas"):
            one.to_df()
    monkeypatch.chdir(tmp_path)
    assert results[0].save() == Path("runs/detect/exp/photo.jpg")
    assert results.save() == Path("runs/detect/exp2")
    assert sorted(file.name for file in Path("runs/detect/exp2").iterdir()) == ["image.jpg", "photo-2.jpg", "photo.jpg"]
    copy = shutil.copy(photo, tmp_path / "photo.jpg")
    for source in (copy, [copy]):
        with pytest.raises(UserError, match=f"{copy} is the image itself"):
            predictor(source).save(tmp_path)
    assert copy.read_bytes() == photo.read_bytes()
    results.save(save_dir="several", hide_labels=True)
    expected = cv2.imencode(".jpg", results[0].plot(hide_labels=True, bgr=True), (cv2.IMWRITE_JPEG_QUALITY, 95))[1]
    assert Path("several/photo.jpg").read_bytes() == expected.tobytes()


def test_results_are_shown(predictor: Predictor, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's viewer, or in a notebook, which also draws a result that ends a cell."""
    results, pictures = predictor([photo, photo]), []
    plotted = results[0].plot()

    class Viewer(ImageShow.Viewer):
        def show_image(self, image: Image.Image, **options: Any) -> int:
            pictures.append(image)
            return 1

    monkeypatch.setattr(ImageShow, "_viewers", [Viewer()])
    results.show()
    monkeypatch.setattr(ImageShow, "_viewers", [])
    with pytest.raises(UserError, match="save"):
        results[0].show()
    shell = SimpleNamespace(kernel=None)
    notebook = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=pictures.append))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    results[0].show()
    assert len(pictures) == 3
    for picture in pictures:
        np.testing.assert_array_equal(np.asarray(picture), plotted)
    png = cv2.imdecode(np.frombuffer(results[0]._repr_png_(), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(png[..., ::-1], plotted)


def test_settings(detector: Path, photo: Path, predictor: Predictor) -> None:
    """Thresholds, classes and size: of a predictor, as its attributes, and of one call, after which it has its own."""
    every, before = predictor(photo).array, predictor.thresholds
    count = int(np.argmax(every[:-1, 4] - every[1:, 4])) + 1  # those above the widest gap between confidences
    threshold = float(every[count - 1 : count + 1, 4].mean())
    label = int(every[0, 5])
    of_label = every[every[:, 5] == label]
    expected: list[tuple[dict[str, Any], np.ndarray]] = [
        ({"conf": threshold}, every[:count]),
        ({"conf_thres": threshold}, every[:count]),
        *(({"classes": classes}, of_label) for classes in ([label], label, str(label), predictor.names[label])),
        ({"classes": predictor.names[label], "max_det": 1}, every[:1]),
    ]
    for how, found in expected:
        np.testing.assert_array_equal(predictor(photo, **how).array, found)
        changed = copy(predictor)
        for name, value in how.items():
            setattr(changed, name, value)
        np.testing.assert_array_equal(changed(photo).array, found)
    made = Predictor(detector, imgsz=SIDE, device="cpu", **{"conf": CONFIDENCE, **expected[-1][0]})
    assert (made.conf, made.conf_thres, made.iou_thres, made.classes) == (CONFIDENCE, CONFIDENCE, OVERLAP, (label,))
    np.testing.assert_array_equal(made(photo).array, every[:1])
    assert len(predictor(photo, iou=0.05).array) < len(every)
    np.testing.assert_array_equal(predictor(photo, size=None, conf=None, iou=None).array, every)
    np.testing.assert_array_equal(predictor(read_image(photo), bgr=True).array, every)
    changed = copy(predictor)
    changed.imgsz = (90, 128)
    assert (changed.imgsz, changed.img, predictor.imgsz) == ((96, 128), (96, 128), (SIDE, SIDE))
    for size in ({"size": (90, 128)}, {"imgsz": (96, 128)}, {"img_size": [96, 128]}):
        np.testing.assert_array_equal(predictor(photo, **size).array, changed.predict(source=photo).array)
    np.testing.assert_array_equal(predictor.predict(str(photo), 128).array, predictor(photo, size=128).array)
    assert (predictor.thresholds, predictor.bgr) == (before, False)


REFUSED = [
    ({"conf_tres": 0.1}, "conf_tres= .*'conf_thres'"),
    ({"conf": "high"}, "--conf-thres"),
    ({"conf_thres": 2}, "--conf-thres"),
    ({"classes": ["nothing"]}, "--classes nothing"),
    ({"classes": ["Disc"]}, "'disc'"),
    ({"classes": 6}, "--classes 6"),
    ({"augment": "yes"}, "augment"),
    ({"save_txt": True}, "^save_txt= "),
    ({"stream": True}, "^stream= is not needed"),
    ({"save": True}, r"^save= .* save\(\)"),
]
SIZES = [({"imgsz": "big"}, "imgsz"), ({"imgsz": -8}, "imgsz"), ({"imgsz": (1, 2, 3)}, "--imgsz 1 2 3")]


def test_wrong_settings(detector: Path, photo: Path, predictor: Predictor) -> None:
    before = predictor.thresholds
    wrong = [({"device": "0,1"}, "--device 0,1"), ({"weights": []}, "--weights"), ({"weights": 42}, "42")]
    for how, named in [*REFUSED, *SIZES, *wrong, ({"weights": "nowhere.pt"}, "nowhere.pt")]:
        with pytest.raises(UserError, match=named):
            Predictor(**{"weights": detector, "device": "cpu", "quiet": True, **how})
    for how, named in [*REFUSED, *SIZES]:
        with pytest.raises(UserError, match=named):
            predictor(photo, **how)
    for how, named in [*REFUSED, *SIZES, ({"device": "cpu"}, "device='cpu'")]:
        with pytest.raises(UserError, match=named):
            setattr(predictor, *how.popitem())
    with pytest.raises(AttributeError, match="conf_tres"):
        _ = predictor.conf_tres
    assert predictor.thresholds == before


def test_a_folder_with_videos(
    photo: Path, predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An animated GIF and a video among pictures: a prediction for each frame, which draws that frame."""
    image = Image.open(photo)
    frames = [image.rotate(angle) for angle in (0, 90, 180)]
    frames[0].save(tmp_path / "b.gif", save_all=True, append_images=frames[1:], duration=100)
    image.save(tmp_path / "a.png")
    write_video(tmp_path / "c.mp4", "mp4v", *(plain(*image.size, value) for value in (0, 80, 160, 240)))
    results = predictor(tmp_path)
    gif, clip = [[f"{tmp_path / name} ({k})" for k in range(1, n + 1)] for name, n in (("b.gif", 3), ("c.mp4", 4))]
    assert [result.path for result in results] == [str(tmp_path / "a.png"), *gif, *clip]
    np.testing.assert_array_equal(results[0].array, predictor(photo).array)
    assert [round(result.pixels().mean(), -1) for result in results[4:]] == [0, 80, 160, 240]
    turned = np.asarray(frames[1].convert("RGB"))
    assert np.abs(results[2].pixels()[..., ::-1].astype(int) - turned).mean() < 12  # a GIF has 256 colours
    assert [len(each) for each in (predictor(tmp_path / "b.gif"), predictor([photo, tmp_path / "c.mp4"]))] == [3, 5]
    assert capsys.readouterr().out == ""
    (tmp_path / "c.mp4").write_bytes(b"no video")
    for call in (results[-1].plot, lambda: predictor(tmp_path)):
        with pytest.raises(UserError, match=r"c\.mp4"):
            call()
    content = (tmp_path / "b.gif").read_bytes()
    (tmp_path / "b.gif").write_bytes(content[: len(content) * 2 // 3])
    assert 0 < len(predictor(tmp_path / "b.gif")) < 3
    assert str(tmp_path / "b.gif") in capsys.readouterr().out


def test_a_classifier(classifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its probabilities; without a size, images have that of the training."""
    image, model = noise(90, 70), Predictor(classifier, device="cpu")
    result, probabilities = model(image), model(image).probs
    assert probabilities.shape == (3,)
    np.testing.assert_array_equal(model(image, size=64).probs, probabilities)
    assert not np.array_equal(model(image, size=96).probs, probabilities)
    assert str(result).startswith(f"image: {model.names[int(result.classes[0])]} 0.")
    assert (result.plot() != image).any()
    file = write_image(tmp_path / "a.png", image)
    detect.run(weights=classifier, source=file, device="cpu", project=tmp_path, save_txt=True, save_conf=True)
    words = (tmp_path / "exp" / "labels" / "a.txt").read_text().split()
    assert words[1::2] == [name for name, _ in result.top5]
    np.testing.assert_allclose([*map(float, words[::2])], result.scores, atol=1e-4)
    assert f"{words[1]} {float(words[0]):.2f}" in capsys.readouterr().out


def test_invalid_images(predictor: Predictor, tmp_path: Path) -> None:
    cut = truncated(tmp_path / "cut.png")
    images: list[tuple[object, str]] = [
        (np.zeros((4, 4, 3), np.float32), "uint8"),
        (np.zeros((4, 4, 4), np.uint8), r"\(4, 4, 4\)"),
        (np.zeros((0, 4, 3), np.uint8), "uint8"),
        (3, "int"),
        (b"jpeg", "bytes"),
        (torch.full((3, 4, 4), 255.0), "from 0 to 1"),
        (torch.full((3, 4, 4), torch.nan), "from 0 to 1"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "int64"),
        ("nowhere.jpg", r"nowhere\.jpg"),
        ("0", "^0 is a camera"),
        *((image, r"cut\.png") for image in (cut, str(cut), Image.open(cut))),
    ]
    for image, named in images:
        with pytest.raises(UserError, match=named):
            predictor(image)
    assert as_pixels(np.zeros((3, 4), np.uint8)).shape == (3, 4, 3)
    picture = Image.fromarray(np.zeros((3, 4, 3), np.uint8))
    picture.getexif()[0x0112] = 6  # turned by a quarter
    assert as_pixels(picture).shape == (4, 3, 3)


def test_models_of_torch_hub(
    detector: Path, photo: Path, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others than `custom` are release files: what is asked for is seen in the error."""
    load = functools.partial(torch.hub.load, str(ROOT), source="local", _verbose=False, conf=CONFIDENCE)
    model = load("custom", path=str(detector), imgsz=SIDE, device=torch.device("cpu"))
    for images in (photo, read_image(photo)[..., ::-1].copy(), [photo], photo.parent):
        results = model(images, size=SIDE)
        assert isinstance(results, Results)
        assert len(results) == len(results.xyxy) == 1
        assert results.names == predictor.names
        np.testing.assert_array_equal(results.xyxy[0], predictor(photo).array)
    model.agnostic, model.multi_label, model.amp = True, False, False
    model.conf = None
    assert model.eval().agnostic_nms
    assert model.conf == 0.25
    with pytest.raises(UserError, match="multi"):
        model.multi_label = True
    with pytest.raises(AttributeError, match="device="):
        model.to("cuda")
    for wrong in ({"classes": 10}, {"autoshape": False}, {"channels": 1}, {"pretrained": False}, {"shape": 1}):
        with pytest.raises(UserError, match=f"^{next(iter(wrong))}=[^-]*$"):  # without a flag
            load("custom", path=str(detector), **wrong)
    model = load("yolov5n", path=str(detector), autoshape=True, channels=3, imgsz=SIDE, device="cpu")
    results = model(imgs=[photo, photo])
    assert results.n == len(results.plot()) == 2
    for name in ("t", "s"):
        with pytest.raises(AttributeError, match=f"no {name}:"):
            getattr(results, name)
    monkeypatch.chdir(tmp_path)
    for unknown in (results, results[0]):
        with pytest.raises(TypeError, match="colour"):
            unknown.save(colour=1)
    assert not any(tmp_path.iterdir())
    folders = [results.save(labels=False, exist_ok=True) for _ in range(2)]
    assert folders == [Path("runs/detect/exp")] * 2
    assert (results.render(labels=False)[0] == results[0].plot(hide_labels=True)).all()
    for name in ("yolov5n", "yolov5x6", "yolov5s-seg", "yolov5m-cls", "yolov9t"):
        with pytest.raises(UserError, match=rf"/{name.replace('yolov9', 'v9-')}\.pt cannot be downloaded"):
            load(name, pretrained=True)


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


# Batches and names


def test_frames_of_one_shape_go_together() -> None:
    """Those of a camera, which has no end, as soon as there are enough."""

    def frame(number: int, side: int, kind: str = "picture") -> tuple[Frame, object]:
        return Frame(MediaItem(kind, str(number)), np.zeros((1, 1, 3), np.uint8)), (torch.zeros(3, side, side),)

    frames = [frame(number, side) for number, side in enumerate((32, 32, 32, 64, 32))]
    assert [[one.item.name for one, _ in group] for group in groups(frames, 2)] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert len(next(groups((frame(number, 32, "live") for number in range(10**9)), 2))) == 2


# Whole runs


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
    broken += [folder / name for name in ("empty.jpg", "text.jpg", "bad.mp4")]
    for file, content in zip(broken[5:], (b"", b"nothing", b"\0\0\0\x18ftypmp42" + bytes(90)), strict=True):
        file.write_bytes(content)
    broken += [folder / name for name in ("gone.jpg", "pipe.jpg", "pipe.mp4")]
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    for pipe in broken[-2:]:
        os.mkfifo(pipe)
    write_video(folder / "clip.avi", "MJPG", *[image] * 5)
    printed = run_script(
        "detect.py", "--weights", str(detector), "--source", str(folder), str(folder / "*.png"), "--imgsz", str(SIDE),
        "--device", "cpu", "--project", str(tmp_path), "--save-txt", "--save-conf", "--save-csv", "--save-crop",
        "--save_format", "1", "--vid-stride", "2", "--batch-size", "2", "--conf-thres", str(CONFIDENCE), code=1,
    )  # fmt: skip
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    for file in broken:
        assert len([line for line in warnings if re.match(f"warning: {file}:? ", line)]) == 1
    assert len(warnings) == len(broken)
    for raw in ("Corrupt JPEG data", "moov atom", "[mov", "BytesIO"):
        assert raw not in printed
    assert f"weights: {detector}\n" in printed
    assert "per image: " in printed
    assert "\n5 images; results in " in printed
    line = next(line for line in printed.splitlines() if line.startswith(str(folder / "photo.png")))
    names = [predictor.names[int(row[5])] for row in expected]
    assert f"{names.count(names[0])} {names[0]}" in line
    assert f"{folder / 'clip.avi'} (5): " in printed
    out = tmp_path / "exp"
    assert cv2.imread(str(out / "photo.png")).shape == image.shape
    clip = cv2.VideoCapture(str(out / "clip.mp4"))
    assert (clip.get(cv2.CAP_PROP_FRAME_COUNT), clip.get(cv2.CAP_PROP_FPS)) == (3, 5)
    files = sorted(path.name for path in (out / "labels").iterdir())
    assert {*files} - {"cut-2.txt"} == {"clip_1.txt", "clip_3.txt", "clip_5.txt", "photo.txt"}
    rows = np.loadtxt(out / "labels" / "photo.txt", ndmin=2)
    np.testing.assert_allclose(rows, expected[:, [5, 0, 1, 2, 3, 4]], rtol=1e-4, atol=1e-2)
    with (out / "predictions.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["Prediction"] for row in table if row["Image Name"] == "photo.png"] == names
    crop = cv2.imread(str(out / "crops" / names[0] / "photo.jpg"))
    assert abs(crop.shape[1] - (expected[0, 2] - expected[0, 0])) < 2


def test_from_python(detector: Path, photo: Path, predictor: Predictor, tmp_path: Path) -> None:
    """detect.run writes the files of the command, and returns where they are; a run without files leaves no folder."""
    source, runs = tmp_path / "in", tmp_path / "runs"
    source.mkdir()
    shutil.copy(photo, source / "photo.png")
    cut = truncated(source / "cut.png")
    how = {"weights": detector, "imgsz": SIDE, "conf": CONFIDENCE, "device": "cpu", "project": runs, "quiet": True}
    result = detect.run(source=source, save_txt=True, **how)
    assert (result["folder"], result["images"]) == (str(runs / "exp"), 1)
    assert [problem.split()[0] for problem in result["problems"]] == [str(cut)]
    rows = (runs / "exp" / "labels" / "photo.txt").read_text().splitlines()
    assert rows == predictor(photo).label_rows(with_confidence=False)
    assert (runs / "exp" / "photo.png").is_file()
    assert list(images_below(runs)) == []  # a data set around it leaves the pictures out, by settings.yaml
    before = contents(runs)
    with pytest.raises(UserError, match=str(cut)):
        detect.run(source=cut, save_txt=True, save_csv=True, save_crop=True, **how)
    with pytest.raises(UserError, match=str(cut)):
        detect.run(source=cut, exist_ok=True, **how)
    assert detect.run(source=photo, nosave=True, **how) == {"folder": None, "images": 1, "problems": []}
    assert contents(runs) == before
    assert [folder.name for folder in runs.iterdir()] == ["exp"]
    for wrong, named in (({"sauce": source}, "'--source'"), ({"source": "nowhere"}, "'nowhere'"), ({}, "--source")):
        with pytest.raises(UserError, match=named):
            detect.run(**wrong)


def test_nothing_of_the_user_is_replaced_or_removed(detector: Path, photo: Path, tmp_path: Path) -> None:
    """Not the sources, by a link or a list either, and no folder that was there."""
    how = {"weights": detector, "device": "cpu", "project": tmp_path, "exist_ok": True, "quiet": True, "conf": 0.01}
    for name in ("photos/photo.png", "photos/labels/a.txt", "b/photo.png", "run/.lock", "run/crops/photo.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, tmp_path / name)
    (tmp_path / "list.txt").write_text("run/crops/photo.png\n")
    (tmp_path / "link.png").symlink_to("run/crops/photo.png")
    (tmp_path / "run/labels").mkdir()
    for target, link in (("b/photo.png", "run/photo.png"), ("b", "labels"), ("list.txt", "run/labels/photo.txt")):
        (tmp_path / link).symlink_to(tmp_path / target)
    before = contents(tmp_path)
    for source in ("photos", "run/crops", "run/**/*.png", "list.txt", "link.png"):
        with pytest.raises(UserError, match=r"--exist-ok: .*choose another --name"):
            detect.run(source=tmp_path / source, name="photos" if source == "photos" else "run", save_txt=True, **how)
    (tmp_path / "empty/labels").mkdir(parents=True)
    (tmp_path / "empty/link").symlink_to(photo)
    (tmp_path / "empty/.lock").touch()
    for name in ("empty", "new"):
        detect.run(source=photo, name=name, nosave=True, **how)
    own = {"empty/link", "empty/.lock", "empty/settings.yaml"}
    assert {name for name, content in contents(tmp_path).items() if before.get(name) != content} == own
    detect.run(source=photo, name="run", save_txt=True, **how)  # in place of the links
    changed = {name for name, content in contents(tmp_path).items() if before.get(name) != content}
    assert (
        changed == {f"run/{name}" for name in ("photo.png", "labels/photo.txt", "images.json", "settings.yaml")} | own
    )


def test_files_that_cannot_be_written_are_problems(
    detector: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One for each source; a full disk ends the run."""
    out, source, image = tmp_path / "exp", tmp_path / "in", cv2.imread(str(photo))
    source.mkdir()
    for name in (long := "x" * 251, "m", "n", "o"):
        cv2.imwrite(str(source / f"{name}.jpg"), image)
    write_video(source / "clip.avi", "MJPG", *[image] * 3)
    out.mkdir()
    (out / ".lock").touch()
    planted = ["m.jpg", "labels/n.txt", "labels/clip_1.txt", "clip.mp4", "predictions.csv"]
    for name in planted:
        (out / name).mkdir(parents=True)
    flags = {"weights": detector, "imgsz": SIDE, "conf": CONFIDENCE, "device": "cpu", "project": tmp_path}
    how = {**flags, "source": source, "save_txt": True, "save_csv": True, "save_crop": True, "exist_ok": True}
    problems = detect.run(**how)["problems"]
    named = [out / name for name in ("clip.mp4", "m.jpg", "labels/n.txt", f"{long}.jpg", "predictions.csv")]
    assert [problem.split(" cannot be written")[0] for problem in problems] == list(map(str, named))
    assert capsys.readouterr().out.count("warning: ") == 5
    assert {"m.txt", f"{long}.txt", "o.txt", "clip_2.txt"} <= {path.name for path in (out / "labels").iterdir()}
    assert (out / "n.jpg").is_file()
    monkeypatch.setattr(sys, "argv", ["detect.py", *command_words(how)])
    with pytest.raises(SystemExit, match="1"):
        detect.main()
    assert "7 images; results in " in (printed := capsys.readouterr().out)
    assert printed.endswith("; 5 problems, see the warnings\n")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"\.jpg cannot be written: No space left"):
        detect.run(**{**flags, "source": f"{source}/*.jpg"})
    writer = Mock(**{"fourcc.return_value": 0})  # it writes nothing, without an error
    monkeypatch.setattr(cv2, "VideoWriter", writer)
    (problem,) = detect.run(**{**flags, "source": source / "clip.avi", "name": "full"})["problems"]
    assert problem.startswith(f"{tmp_path / 'full/clip.mp4'} cannot be written")


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


# Tracks

FRAMES, RADIUS = 40, 16
# Centres (frames, discs, 2): the first two discs pass each other, the third crosses both of their paths.
CENTRES = [[20, 60], [140, 82], [80, 150]] + np.arange(FRAMES)[:, None, None] * [[3, 0], [-3, 0], [0, -3.2]]


def draw_discs(centres: np.ndarray) -> np.ndarray:
    image = noise(SIDE, SIDE) // 5  # a still background, by which BoT-SORT sees that the camera stands still
    for radius, value in ((RADIUS, 60), (5, 255)):
        for centre in centres.round().astype(int).tolist():
            cv2.circle(image, centre, radius, (value,) * 3, -1)
    return image


def idf1(ids: list[np.ndarray], found: list[np.ndarray]) -> float:
    """Return IDF1 of the `ids` of each frame's `found` centres (k, 2): a true disc is within a radius."""
    from scipy.optimize import linear_sum_assignment  # only trackers need scipy

    shared = np.zeros((CENTRES.shape[1], 1 + np.concatenate(ids).max()))
    for truth, tracks, centres in zip(CENTRES, ids, found, strict=True):
        distances = np.linalg.norm(truth[:, None] - centres, axis=2)
        np.add.at(shared, (distances.argmin(0), tracks), (tracks >= 0) & (distances.min(0) < RADIUS))
    matched = shared[linear_sum_assignment(shared, maximize=True)].sum()
    return float(2 * matched / (CENTRES[..., 0].size + (np.concatenate(ids) >= 0).sum()))


def test_tracks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Videos, a stream and pictures, by weights that are set by hand to detect a disc's white middle, and exported."""
    pytest.importorskip("trackers", reason=f"{NOT_HERE}requirements-track.txt")
    yaml = {"anchors": [[2 * RADIUS] * 2], "backbone": [[-1, 1, "Conv", [8, 3, 2]]] * 3}
    model = build_model({**yaml, "head": [[[2], 1, "Detect", ["nc", "anchors"]]]}, nc=1).requires_grad_(False)
    for layer in model.model[:3]:  # a mean of 2 x 2 pixels
        layer.conv.weight.zero_()[0, 0, 1:, 1:] = 0.25
    model.model[0].conv.weight *= 20  # SiLU then hardly changes it
    model.head.m[0].weight.zero_()[4, 0] = 3.0
    model.head.m[0].bias.copy_(torch.tensor([0, 0, 0, 0, -20.0, 10.0]))
    content = weights_content(model, {**model.yaml, "task": "detect"}, {0: "disc"}, {"imgsz": SIDE})
    (weights := tmp_path / "best.pt").write_bytes(serialise(content))
    images = [*map(draw_discs, CENTRES)]
    videos = [write_video(tmp_path / name, "MJPG", *images) for name in ("a.avi", "b.avi")]
    for number, image in enumerate(images):
        cv2.imwrite(str(tmp_path / f"{number:03}.png"), image)
    flags: dict[str, Any] = {"iou": 0.3, "save_txt": True, "save_csv": True, "save_format": 1, "project": tmp_path}
    for file in (weights, *export.run(weights=weights, include="onnx")):
        out = Path(detect.run(weights=file, source=videos, track=True, batch_size=3, **flags)["folder"])
        table, printed = [*csv.DictReader((out / "predictions.csv").open(newline=""))], capsys.readouterr().out
        for video in videos:
            assert f"{video}: 3 tracks in 40 frames\n" in printed
            rows = [np.loadtxt(out / "labels" / f"{video.stem}_{k}.txt", ndmin=2) for k in range(1, FRAMES + 1)]
            ids = [frame[:, 5].astype(int) for frame in rows]
            assert idf1(ids, [(frame[:, 1:3] + frame[:, 3:5]) / 2 for frame in rows]) > 0.9
            tracks = [int(row["Track"]) for row in table if row["Image Name"].startswith(f"{video} ")]
            assert tracks == np.concatenate(ids).tolist()
            assert {*tracks} - {-1} == {0, 1, 2}
    flags |= {"weights": weights, "source": tmp_path / "*.png"}
    detect.run(**{**flags, "source": f"file://{videos[0]}"}, track="ocsort", vid_stride=2)
    tracked, plain = (Path(detect.run(**flags, track=track)["folder"]) for track in ("sort", None))
    assert "/a.avi: 3 tracks in 20 frames\n" in (printed := capsys.readouterr().out)
    assert f"{tmp_path}: 3 tracks in 40 frames\n" in printed
    assert (cv2.imread(str(tracked / "039.png")) != cv2.imread(str(plain / "039.png"))).any()
    assert (plain / "predictions.csv").read_text().startswith("Image Name,Prediction,Confidence\n")
    with pytest.raises(UserError, match="--track: only without --save-json"):
        detect.run(**flags, track=True, save_json=True)
    predictor = Predictor(weights, iou_thres=0.3, quiet=True)
    for name, frames in [*((name, iter(images)) for name in OBJECT_TRACKERS), ("ocsort", videos[0])]:
        results = [*predictor.track(frames, name)]
        assert idf1([each.ids for each in results], [each.xywh[:, :2] for each in results]) > 0.9
        assert {found["track"] for each in results for found in each} - {-1} == {0, 1, 2}
    assert sorted(results[-1].to_supervision().tracker_id.tolist()) == [0, 1, 2]
    with pytest.raises(UserError, match="--track must be one of 'bytetrack'"):
        next(predictor.track(images, tracker="deepsort"))
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(UserError, match=r"^trackers is not installed; pip install --no-deps -r requirements-track"):
        next(predictor.track(images))


# Training from Python

PROGRAM = """
import os, pathlib, signal, threading, time, train, val

def interrupt(saved):
    while not list(saved.glob("*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    project = pathlib.Path({project!r})
    common = dict(data={data!r}, imgsz=64, device="cpu", workers=0, project=project, noplots=True)
    threading.Thread(target=interrupt, args=(project / "exp" / "checkpoint",), daemon=True).start()
    try:
        train.run(weights="", cfg={cfg!r}, epochs=2, batch=2, lr0=0.02, save_steps=1, processes=2, **common)
    except KeyboardInterrupt:
        print("interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trained = train.run(resume=project / "exp")
    checked = val.run(weights=trained["folder"] + "/weights/best.pt", **common)
    assert trained["metrics/mAP_0.5"] == checked["metrics/mAP_0.5"], (trained, checked)
    assert trained["fitness"] == checked["fitness"]
    again = val.run(weights=trained["folder"] + "/weights/best.pt", name="exp2", exist_ok=True, **common)
    assert again == checked, (again, checked)
    assert train.run(resume=project / "exp") == trained  # it is finished
    stopped = train.run(weights="", cfg={cfg!r}, batch=2, time_limit=1e-9, name="exp3", **common)
    assert stopped["folder"] == str(project / "exp3") and "fitness" in stopped, stopped
"""


def test_train_and_validate_from_python(small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """On two processes. Ctrl-C is raised once everything is saved; the same program can resume the run and validate."""
    program, runs = tmp_path / "program.py", tmp_path / "runs"
    cfg = write_yaml(tmp_path / "tiny.yaml", tiny_detector())
    names = {"data": str(small_data), "project": str(runs), "cfg": str(cfg)}
    program.write_text(PROGRAM.format(**names))
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    stopped, _ = run_script(str(program), launcher=(), **variables).split("interrupted\n")
    assert "stopped by SIGINT in epoch 1, after batch " in stopped
    assert "--resume" in stopped
    assert sorted(path.name for path in runs.iterdir()) == ["exp", "exp2", "exp3"]
    assert read_yaml(runs / "exp" / "settings.yaml")["hyperparameters"]["lr0"] == 0.02
