"""Images of other channels and of 16 bits: read by one rule, trained on, refused, exported."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import detect
import export
import val
from data.augment import Augmenter, Sample
from data.data_yaml import read_data
from data.images import read_pixels
from data.media import as_pixels
from models.loading import StartingPoint, load_and_freeze
from models.tasks import TASKS
from models.weights import Weights
from models.yolo import build_model
from tests.conftest import NOT_HERE, CallMain
from tests.making import tiny_detector, write_label, write_yaml
from utils.batch import PixelFormat
from utils.checkpoint import serialise, weights_content
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import read_yaml

FOUR = np.random.default_rng(0).integers(0, 4096, (40, 48, 4), np.uint16)
NAMES = {0: "low", 1: "high"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a set of 8 colour PNGs, stacked with grey ones of 12 bits, which alone tell the classes apart."""
    folder, rng = tmp_path_factory.mktemp("channels"), np.random.default_rng(0)
    for number in range(8):
        colour, heat = rng.integers(0, 99, (64, 64, 3), np.uint8), rng.integers(0, 900, (64, 64), np.uint16)
        colour[16:40, 8:40], heat[16:40, 8:40] = 200, (1500, 4000)[number % 2]
        for part, image in (("rgb", colour), ("heat", heat)):
            file = folder / part / "images" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(file), image)
        write_label(folder / "rgb" / "images" / f"{number}.png", f"{number % 2} 0.375 0.4375 0.5 0.375")
    content = {"path": str(folder), "train": "rgb/images", "val": "rgb/images", "names": NAMES}
    return write_yaml(folder / "data.yaml", {**content, "channels": ["rgb/images", "heat/images"], "range": [0, 4095]})


def encoded(suffix: str) -> bytes:
    """Return `FOUR` as a file."""
    planes, file = np.ascontiguousarray(np.moveaxis(FOUR, 2, 0)), io.BytesIO()
    if suffix == ".png":
        return bytes(cv2.imencode(suffix, cv2.cvtColor(FOUR, cv2.COLOR_RGBA2BGRA))[1])
    if suffix == ".npy":
        np.save(file, FOUR)
    else:
        tifffile = pytest.importorskip("tifffile", reason=f"{NOT_HERE}tifffile")
        if suffix == "lzw.tif":  # which tifffile alone does not decode
            return bytes(cv2.imencodemulti(".tif", list(planes))[1])
        tifffile.imwrite(file, planes, photometric="minisblack", planarconfig="separate" if "plane" in suffix else None)
    return file.getvalue()


@pytest.mark.parametrize("suffix", [".npy", ".png", "planes.tif", "pages.tif", "lzw.tif"])
def test_all_files_have_the_same_pixels(suffix: str, tmp_path: Path) -> None:
    (file := tmp_path / f"a{suffix}").write_bytes(encoded(suffix))
    np.testing.assert_array_equal(read_pixels(file, PixelFormat(4))[..., ::-1], FOUR)
    scaled = read_pixels(file, PixelFormat(4, (1000, 3000)))[..., ::-1]
    np.testing.assert_array_equal(scaled, np.rint((FOUR.clip(1000, 3000) - 1000.0) * 65535 / 2000))
    with pytest.raises(UserError, match=f"{file.name} has 4 channels, not 5"):
        read_pixels(file, PixelFormat(5))


@pytest.mark.parametrize("values", [np.nan, np.inf, 255.0])
def test_floats_are_shares_or_need_a_range(values: float, tmp_path: Path) -> None:
    image = np.full((8, 8, 2), 0.5, np.float32)
    image[0, 0] = values
    np.save(tmp_path / "a.npy", image)
    with pytest.raises(UserError, match=r"a\.npy has values that are not finite, or not in 0 to 1 without a `range`"):
        read_pixels(tmp_path / "a.npy", PixelFormat(2))
    if values == 255:
        assert read_pixels(tmp_path / "a.npy", PixelFormat(2, (0, 255)))[0, 0].tolist() == [65535, 65535]


def test_arrays_and_tensors_in_memory() -> None:
    """As of a file with the channels 0 to 3; OpenCV has them in the order 2, 1, 0, 3."""
    expected = np.multiply(FOUR[..., ::-1], 16)
    image = FOUR * 16
    for given, bgr in (
        (image, False),
        (torch.from_numpy(np.moveaxis(image, 2, 0)), False),
        (image[..., [2, 1, 0, 3]], True),
    ):
        np.testing.assert_array_equal(as_pixels(given, bgr, PixelFormat(4)), expected)


def test_listed_data_sets_have_one_format(data: Path, tmp_path: Path) -> None:
    content = {"train": [{"path": str(data)}], "val": str(data.parent / "rgb" / "images"), "names": NAMES}
    with pytest.raises(UserError, match=f"names {data}, whose `channels`, `range` or `tiles` are others"):
        read_data(str(write_yaml(tmp_path / "both.yaml", content)))


def test_twelve_bits_are_kept(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "12.png"), FOUR[..., 0])
    cv2.imwrite(str(tmp_path / "8.png"), (FOUR[..., 0] >> 4).astype(np.uint8))
    fine, coarse = (read_pixels(tmp_path / f"{bits}.png", PixelFormat(1, (0, 4095))) / 65535 for bits in (12, 8))
    assert (len(np.unique(fine)), len(np.unique(coarse))) == (len(np.unique(FOUR[..., 0])), 256)
    assert 1e-4 < abs(fine - coarse).mean() < abs(fine - coarse).max() < 1 / 255


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_augmented_in_every_channel_alike(channels: int) -> None:
    form, plane = PixelFormat(channels, (0, 1)), FOUR[..., :1] * 16
    sample = Sample(plane.repeat(channels, 2).reshape(form.shape(40, 48)), np.zeros((0, 4), np.float32), np.zeros(0))
    recipe = Hyperparameters(mosaic=0.5, mixup=0.5, degrees=20, hsv_h=0, hsv_s=0, hsv_v=0.5, fliplr=0.5)
    augmenter = Augmenter(recipe, 48, 4, lambda _: sample, lambda _: (48, 40), pixels=form)
    for seed in range(4):
        image = augmenter(0, (48, 64), np.random.default_rng(seed)).image
        assert (image.shape, image.dtype) == (form.shape(48, 64), np.uint16)
        assert np.ptp(image.reshape(48, 64, -1).astype(int), axis=2).max() <= 1 < image.std()


@pytest.mark.parametrize("flags", [["--cache", "ram"], ["--rect", "--cache", "disk", "--workers", "1"]])
def test_trained_on(flags: list[str], data: Path, tmp_path: Path, call_main: CallMain) -> None:
    cfg = write_yaml(tmp_path / "tiny.yaml", {**tiny_detector(), "nc": 2})
    words = ["--data", str(data), "--cfg", str(cfg), "--weights", "", "--batch-size", "4", "--imgsz", "64"]
    code, printed = call_main("train.py", *words, "--device", "cpu", "--project", str(tmp_path), *flags)
    assert code == 0, printed
    assert printed.count("hsv_h and hsv_s: no effect on images of 4 channels") == 1


def test_filters_of_rgb_see_the_same_grey(capsys: pytest.CaptureFixture[str]) -> None:
    task, yaml = TASKS["detect"].load()(NAMES, Hyperparameters()), {**tiny_detector(), "ch": 5}
    colour, model = task.build_model(tiny_detector(), 64), task.build_model(yaml, 64)
    content = Weights(colour.state_dict(), None, {}, "", {}, "tensors")
    start = StartingPoint(TASKS["detect"], yaml, "tiny.yaml", from_yaml=True).with_content(content, "w.pt", Path())
    load_and_freeze(model, start, task, TrainOptions(imgsz=64))
    grey = torch.rand(1, 1, 64, 64).expand(-1, 5, -1, -1)
    torch.testing.assert_close(colour.eval().model[0](grey[:, :3]), model.eval().model[0](grey))
    assert "w.pt (model.0.conv.weight: the mean of 3 channels for each of 5)" in capsys.readouterr().out


def test_one_rule_for_val_detect_and_exports(data: Path, tmp_path: Path) -> None:
    model = build_model({**tiny_detector(), **read_data(str(data)).pixels.model_keys(), "nc": 2})
    torch.nn.init.normal_(model.head.m[0].bias)
    (weights := tmp_path / "a.pt").write_bytes(serialise(weights_content(model, model.yaml, NAMES, {"imgsz": 64})))
    shared: Any = {"device": "cpu", "project": tmp_path, "conf_thres": 0.1}
    (exported,) = export.run(weights=weights, device="cpu", include=["torchscript"])
    first, second = (val.run(weights=file, data=data, **shared)["metrics/mAP_0.5"] for file in (weights, exported))
    assert first == pytest.approx(second, abs=1e-6)
    found = detect.run(weights=exported, source=data.parent / "rgb/images", save_txt=True, **shared)
    assert list(Path(found["folder"]).rglob("*.txt"))
    plain = write_yaml(tmp_path / "plain.yaml", {**read_yaml(data), "channels": 3, "range": None})
    with pytest.raises(UserError, match=r"takes images of 4 channels in the range 0 to 4095, but .* has 3 channels"):
        val.run(weights=weights, data=plain, **shared)
