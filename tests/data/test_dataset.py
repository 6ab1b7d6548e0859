"""What the data sets of all tasks share: their classes by name, and what is told of their loaders."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.dataset import DataOptions, data_source, dataset_class
from data.detection import DetectionData
from models.tasks import TASKS
from models.tasks.classification.task import ClassificationRecipe
from models.tasks.detection.task import DetectionTask
from utils.config.options import TrainOptions
from utils.errors import UserError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A data.yaml with two images of class folders, one of which has a label file too."""
    for folder in ("train/a", "train/b"):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(tmp_path / folder / "0.png")
    (tmp_path / "train/a/0.txt").write_text("0 .5 .5 .5 .5")
    (tmp_path / "data.yaml").write_text("train: train\nval: train\nnames: [a, b]\n")
    return tmp_path / "data.yaml"


def test_every_task_has_a_data_set() -> None:
    for entry in TASKS.values():
        kind = dataset_class(entry.data)
        assert kind.__name__ == entry.data.partition(":")[2]
        assert not kind.__abstractmethods__


def test_options_are_flags() -> None:
    flags = {field.name: field.default for field in fields(TrainOptions)}
    assert {field.name for field in fields(DataOptions)} <= set(flags)


@pytest.mark.parametrize("kind", ["data.detection:DetectionData", "data.classification:ClassificationData"])
def test_a_data_set_is_opened(kind: str, file: Path) -> None:
    source = data_source(str(file), kind)
    assert source.names() == {0: "a", 1: "b"}
    assert len(source.files()["train"]) == 2
    data = source.open(64, 32, DataOptions(cache="ram", close_mosaic=3))
    assert (data.imgsz, data.stride, data.options.cache) == (64, 32, "ram")
    assert data.uncached().options == DataOptions(close_mosaic=3)
    train, val = data.split("train"), data.split("val")
    assert data.identity(train, val) == {"yaml": str(file), "train": train.identity(), "val": val.identity()}
    messages = data.messages(train, val)
    assert [line.partition(": ")[0] for line in messages] == ["train", "val", "warning"]
    assert "2 of the 2 validation images are training images too" in messages[-1]


def test_a_data_set_without_a_yaml() -> None:
    with pytest.raises(UserError):
        data_source("nothing.yaml", "data.detection:DetectionData")


def test_loaders_say_what_is_cached_and_how_images_are_sampled(file: Path) -> None:
    options = DataOptions(cache="ram", close_mosaic=3, epochs=5)
    data = data_source(str(file), "data.detection:DetectionData").open(64, 32, options)
    assert isinstance(data, DetectionData)
    split = data.split("train")
    loader = data.train_loader(split, batch_size=2, hyp=DetectionTask.recipe(), seed=0)
    val_loader = data.evaluation_loader(split, data.evaluation_batches(split, batch_size=2, square=True))
    assert loader.batch_sampler.messages == ("--close-mosaic 3: no images mixed of several from epoch 3 on",)
    for each in (loader, val_loader):
        (line,) = data.cache_messages(each)
        assert line.startswith("--cache ram: room for 2 of 2 images")
    uncached = data.uncached().train_loader(split, batch_size=2, hyp=DetectionTask.recipe(), seed=0)
    assert data.cache_messages(uncached) == []


def test_rectangles_are_for_detectors(file: Path) -> None:
    data = data_source(str(file), "data.classification:ClassificationData").open(64, 1, DataOptions(rect=True))
    with pytest.raises(UserError, match=r"^--rect is for detectors"):
        data.train_loader(data.split("train"), batch_size=2, hyp=ClassificationRecipe(), seed=0)
