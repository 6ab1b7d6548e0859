"""Tests of data.preview: a page with the items that a training with the same flags sees."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from data.builtin import shapes_cls
from data.dataset import DataOptions, data_source
from data.preview import main
from models.tasks.detection.task import DetectionTask
from tests.making import noise, write_image, write_yaml
from utils.config.hyperparameters import read_hyperparameters
from utils.errors import UserError
from utils.files import ROOT

EXAMPLE = str(ROOT / "examples" / "own_augmentations.py")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten images with a box each."""
    for number in range(10):
        write_image(
            tmp_path / f"set/images/<{number}>.png", noise(64, 48, seed=number), f"{number % 2} 0.5 0.5 0.5 0.5"
        )
    return write_yaml(tmp_path / "set.yaml", {"path": "set", "train": "images", "val": "images", "names": ["a", "b"]})


def pictures(page: Path) -> list[np.ndarray]:
    texts = re.findall(r'base64,([^"]+)"', page.read_text())
    return [cv2.imdecode(np.frombuffer(base64.b64decode(text), np.uint8), cv2.IMREAD_COLOR) for text in texts]


def test_the_items_of_a_training(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same flags, same pictures as the task draws of the items of the loader, with the file names as captions."""
    page = tmp_path / "page.html"
    flags = ("--data", str(data), "--cfg", "yolov5n.yaml", "--hyp", "med", "--imgsz", "64", "--seed", "5")
    main([*flags, "--augmentations", EXAMPLE, "--items", "3", "--epoch", "2", "--out", str(page)])
    printed = capsys.readouterr().out
    assert printed == (
        f"hyperparameters: --hyp med\naugmentations of {EXAMPLE}: fog, Cutout (each item)\n3 training items in {page}\n"
    )
    options = DataOptions(augmentations=EXAMPLE, partners="window")
    opened = data_source(str(data), "data.detection:DetectionData").open(64, 32, options)
    hyp: Any = read_hyperparameters("med", DetectionTask.recipe, {})
    loader: Any = opened.train_loader(opened.split("train", hyp), 16, hyp, seed=5)
    loader.batch_sampler.set_epoch(2)
    samples = next(iter(loader.batch_sampler))[:3]
    task = DetectionTask({0: "a", 1: "b"}, hyp)
    for sample, picture in zip(samples, pictures(page), strict=True):
        wanted = task.draw_batch(opened.collate([loader.dataset[sample]]))
        encoded = cv2.imdecode(cv2.imencode(".jpg", wanted)[1], cv2.IMREAD_COLOR)
        assert np.array_equal(picture, encoded)
    captions = re.findall("<figcaption>(.*?)</figcaption>", page.read_text())
    names = sorted(f"&lt;{number}&gt;.png" for number in range(10))
    assert captions == [f"{k}: {data.parent}/set/images/{names[sample.image]}" for k, sample in enumerate(samples)]


def test_more_items_than_images(data: Path, tmp_path: Path) -> None:
    """The page ends with the epoch, whose last batch is filled up."""
    main(["--data", str(data), "--imgsz", "64", "--batch-size", "4", "--out", str(tmp_path / "page.html")])
    assert len(pictures(tmp_path / "page.html")) == 12


def test_other_tasks(tmp_path: Path, drawn_outlines: Path) -> None:
    page = tmp_path / "page.html"
    main(
        [
            "--data",
            str(drawn_outlines),
            "--cfg",
            "yolov5n-seg.yaml",
            "--imgsz",
            "64",
            "--items",
            "2",
            "--out",
            str(page),
        ]
    )
    assert len(pictures(page)) == 2
    folder = shapes_cls.draw_dataset(tmp_path / "classes", train=6, val=6)
    classes = write_yaml(tmp_path / "classes.yaml", {"path": str(folder), "train": "train", "val": "val"})
    main(["--data", str(classes), "--cfg", "resnet18.yaml", "--imgsz", "48", "--items", "2", "--out", str(page)])
    assert len(pictures(page)) == 2


def test_bad_input(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--mask-ratio is for masks, not for detect with the head Detect; leave it out"):
        main(["--data", str(data), "--mask-ratio", "2", "--out", str(tmp_path / "page.html")])
    with pytest.raises(UserError, match=r"^--out .*/set cannot be written \(.*\); name another file$"):
        main(["--data", str(data), "--imgsz", "64", "--items", "1", "--out", str(tmp_path / "set")])
    for wrong, message in ((("--items", "0"), "0 is out of range"), (("--itms", "3"), "did you mean '--items'")):
        with pytest.raises(SystemExit):
            main(["--data", str(data), *wrong])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
