"""detect.py and its use from Python, on drawn images."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import nms

from data.images import read_image
from data.media import Frame, MediaItem
from detect import FileNames, Predictor, as_pixels, groups
from models.tasks.classification.task import ClassificationRecipe, ClassificationTask
from models.weights.reader import read_weights
from models.weights.transfer import transfer
from models.yolo import build_model
from tests.conftest import RunScript
from tests.making import noise, write_image
from utils.checkpoint.weight_files import serialised, weights_content
from utils.errors import UserError
from utils.files import ROOT, read_yaml

SIDE, CONFIDENCE, OVERLAP = 160, 0.1, 0.45


@pytest.fixture(scope="module")
def predictor(learned: Path) -> Predictor:
    return Predictor(learned, imgsz=SIDE, conf_thres=CONFIDENCE, device="cpu")


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


def test_against_a_plain_computation(learned: Path, photo: Path, predictor: Predictor) -> None:
    """The forward pass, which tests/models/test_yolo.py compares with YOLOv5's, on an image that is padded by hand,
    decoded by the formulas and suppressed by torchvision: only the most probable class of each box."""
    content = read_weights(learned)
    assert content.model
    model = build_model(content.model)
    transfer(model, content.state)
    image = read_image(photo)
    height, width = image.shape[:2]
    around = [(side // 2, side - side // 2) for side in (-height % 32, -width % 32)]
    padded = np.pad(image, (*around, (0, 0)), constant_values=114)
    inputs = torch.from_numpy(padded[..., ::-1].transpose(2, 0, 1).copy())[None] / 255
    rows = []
    with torch.inference_mode():
        for raw, anchors, stride in zip(model.eval()(inputs), model.detect.anchors, model.detect.stride, strict=True):
            s, (h, w) = raw[0].sigmoid(), raw.shape[2:4]
            cells = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1)
            xy = (s[..., :2] * 2 - 0.5 + cells) * stride
            wh = (s[..., 2:4] * 2) ** 2 * (anchors * stride)[:, None, None]
            rows.append(torch.cat((xy - wh / 2, xy + wh / 2, s[..., 4:]), -1).flatten(0, 2))
    boxes, scores = torch.cat(rows)[:, :4], torch.cat(rows)[:, 5:] * torch.cat(rows)[:, 4:5]
    confidence, label = scores.max(1)
    sure = confidence > CONFIDENCE
    boxes, confidence, label = boxes[sure], confidence[sure], label[sure]
    survivors = nms(boxes + 7680 * label[:, None], confidence, OVERLAP)
    corners = boxes - torch.tensor([around[1][0], around[0][0]] * 2)
    corners = corners.clamp(min=torch.zeros(4), max=torch.tensor([width, height] * 2))
    expected = torch.cat((corners, confidence[:, None], label[:, None]), 1)[survivors].numpy()
    assert len(expected) >= 2
    np.testing.assert_allclose(predictor(photo), expected, rtol=1e-4, atol=1e-2)


def test_every_form_of_an_image_gives_the_same(predictor: Predictor, photo: Path) -> None:
    expected = predictor(photo)
    assert expected.dtype == np.float32
    assert (np.diff(expected[:, 4]) <= 0).all()
    rgb = np.ascontiguousarray(read_image(photo)[..., ::-1])
    tensor = torch.from_numpy(rgb).permute(2, 0, 1)
    for form in (str(photo), rgb, Image.fromarray(rgb), tensor, tensor / 255):
        np.testing.assert_array_equal(predictor(form), expected)
    black = np.zeros((50, 80, 3), np.uint8)
    for image, predictions in zip((photo, black), predictor([photo, black]), strict=True):
        np.testing.assert_array_equal(predictions, predictor(image))
    np.testing.assert_array_equal(predictor(tensor[None])[0], expected)


def test_some_classes_only(learned: Path, photo: Path, predictor: Predictor) -> None:
    expected = predictor(photo)
    label = int(expected[0, 5])
    chosen = Predictor(learned, imgsz=SIDE, conf_thres=CONFIDENCE, classes=[label], device="cpu")(photo)
    np.testing.assert_array_equal(chosen, expected[expected[:, 5] == label])
    with pytest.raises(UserError, match="--classes 6: the model has classes 0 to 5"):
        Predictor(learned, classes=[6], device="cpu")


def test_the_size_of_a_detectors_training_is_printed(
    learned: Path, classifier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor = Predictor(learned, device="cpu")
    assert predictor.size.sides == (640, 640)
    line = "was trained at 96 px; the default size is 640, and --imgsz 96 gives that of the training"
    assert capsys.readouterr().out == f"{learned} {line}\n"
    for silent in ({"quiet": True}, {"imgsz": 96}, {"weights": classifier}):
        Predictor(**{"weights": learned, "device": "cpu", **silent})
        assert capsys.readouterr().out == ""


def test_a_rounded_size_is_printed(learned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictor = Predictor(learned, imgsz=(90, 128), device="cpu")
    assert predictor.size.sides == (96, 128)
    assert capsys.readouterr().out == "--imgsz 90 128 is rounded up to 96 128, whole strides of 32 pixels\n"


def test_a_classifiers_probabilities(classifier: str) -> None:
    """Without a size, images have that of the training."""
    image = noise(90, 70)
    model = Predictor(classifier, device="cpu")
    probabilities = model(image)
    assert probabilities.shape == (3,)
    np.testing.assert_array_equal(probabilities, Predictor(classifier, imgsz=64, device="cpu")(image))
    assert (probabilities != Predictor(classifier, imgsz=224, device="cpu")(image)).all()
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert model.names == {0: "cat", 1: "dog", 2: "cow"}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "a uint8 array"),
        (np.zeros((4, 4, 4), np.uint8), "3 channels, RGB, not 4"),
        (np.zeros((0, 4, 3), np.uint8), "a uint8 array"),
        (3, "not int"),
        ("nowhere.jpg", r"nowhere.jpg cannot be read as an image \(.*\); fix or remove it"),
    ],
)
def test_invalid_images(image: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_pixels(image)


def test_a_truncated_image_is_refused_by_name(tmp_path: Path) -> None:
    file = truncated(tmp_path / "cut.jpg")
    for image in (file, str(file), Image.open(file)):
        with pytest.raises(UserError, match=r"cut\.jpg cannot be read as an image \(image file is truncated"):
            as_pixels(image)


def test_grey_images_and_rotated_pictures() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert as_pixels(grey).shape == (3, 4, 3)
    picture = Image.fromarray(np.zeros((3, 4, 3), np.uint8))
    picture.getexif()[0x0112] = 6
    assert as_pixels(picture).shape == (4, 3, 3)


def test_the_example_of_the_page(
    learned: Path, photo: Path, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = (ROOT / "docs" / "detect.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    cv2.imwrite(str(tmp_path / "photo.jpg"), cv2.imread(str(photo)))
    shutil.copy(learned, tmp_path / "yolov5n.pt")
    monkeypatch.chdir(tmp_path)
    exec(example.replace("0.25", str(CONFIDENCE)), {})
    printed = capsys.readouterr().out
    assert any(f"{name} 0." in printed for name in predictor.names.values())


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


def test_a_folder_with_everything(
    learned: Path, photo: Path, predictor: Predictor, run_script: RunScript, tmp_path: Path
) -> None:
    """An image, a video and broken files: whatever can be read is processed, and the exit code is 1."""
    folder, image, expected = tmp_path / "in", cv2.imread(str(photo)), predictor(photo)
    folder.mkdir()
    shutil.copy(photo, folder / "photo.png")
    broken = [truncated(folder / f"cut.{kind}") for kind in ("jpg", "png", "webp", "bmp", "tif")]
    for name, content in {"empty.jpg": b"", "text.jpg": b"nothing"}.items():
        (folder / name).write_bytes(content)
        broken.append(folder / name)
    video = cv2.VideoWriter(str(folder / "clip.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, image.shape[1::-1])
    for _ in range(5):
        video.write(image)
    video.release()
    printed = run_script(
        "detect.py", "--weights", str(learned), "--source", str(folder), "--imgsz", str(SIDE), "--device", "cpu",
        "--project", str(tmp_path), "--save-txt", "--save-conf", "--save-csv", "--save-crop", "--save_format", "1",
        "--vid-stride", "2", "--batch-size", "2", "--conf-thres", str(CONFIDENCE), code=1,
    )  # fmt: skip
    for file in broken:
        assert printed.count(f"warning: {file} cannot be read as an image (") == 1
    assert "warning: 7 of the 9 sources could not be read, or not to the end; see above" in printed
    assert "Corrupt JPEG data" not in printed
    assert "4 images; per image: " in printed
    line = next(line for line in printed.splitlines() if line.startswith(str(folder / "photo.png")))
    names = [predictor.names[int(row[5])] for row in expected]
    assert f"{names.count(names[0])} {names[0]}" in line
    assert line.endswith(" ms")
    assert f"{folder / 'clip.avi'} (5/5): " in printed
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


def test_a_classifiers_weights(classifier: str, run_script: RunScript, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.jpg"), np.full((70, 90, 3), 90, np.uint8))
    how = ("--device", "cpu", "--project", str(tmp_path), "--save-txt", "--save-conf")
    printed = run_script("detect.py", "--weights", classifier, "--source", str(tmp_path / "*.jpg"), *how)
    text = (tmp_path / "exp" / "labels" / "a.txt").read_text().split()
    assert sorted(text[1::2]) == ["cat", "cow", "dog"]
    assert sum(map(float, text[::2])) == pytest.approx(1, abs=1e-4)
    assert f"{text[1]} {float(text[0]):.2f}" in printed


def test_bad_input(run_script: RunScript) -> None:
    assert run_script("detect.py", "--source", "nowhere", fails=True).startswith(
        "error: --source nowhere does not exist"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"imgsz": (1, 2, 3)}, "--imgsz 1 2 3: give one number of pixels, or height and width"),
        ({"imgsz": -8}, "--imgsz -8: give one"),
        ({"device": "0,1"}, "one device is enough here"),
        ({"weights": []}, "--weights names no file"),
    ],
)
def test_invalid_arguments_of_a_predictor(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Predictor(**flags)


# From Python


PROGRAM = """
import train, val
from utils.errors import UserError

if __name__ == "__main__":
    common = dict(data={data!r}, imgsz=64, device="cpu", workers=0, project={project!r}, noplots=True)
    trained = train.run(weights="", cfg={cfg!r}, epochs=1, batch=4, processes=2, **common)
    checked = val.run(weights=trained["folder"] + "/weights/best.pt", **common)
    assert trained["metrics/mAP_0.5"] == checked["metrics/mAP_0.5"], (trained, checked)
    assert trained["fitness"] == checked["fitness"]
    try:
        val.run(weights="nowhere.pt", **common)
    except UserError as error:
        print("refused:", error)
"""


def test_train_and_validate_from_python(small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    names = {"data": str(small_data), "project": str(tmp_path / "runs"), "cfg": "yolov5n.yaml"}
    program.write_text(PROGRAM.format(**names))
    printed = run_script(str(program), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert "refused: weights nowhere.pt" in printed
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["exp", "exp2"]
