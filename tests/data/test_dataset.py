"""The data sets of all tasks by name."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from data.dataset import DataOptions, class_messages, data_source, problem_warnings, split_identity
from tests.making import label_file, plain, write_image, write_yaml
from utils.config.flags import TrainOptions
from utils.errors import UserError


def test_options_are_flags() -> None:
    assert {field.name for field in fields(DataOptions)} <= {field.name for field in fields(TrainOptions)}


@pytest.mark.parametrize("name", ["val", "valid", "test"])
def test_a_folder_with_a_folder_per_split_needs_no_yaml(tmp_path: Path, name: str) -> None:
    """As YOLOv5's classifiers take it, and as Roboflow exports it."""
    images = [write_image(tmp_path / split / text / "a.png") for split in ("train", name) for text in ("cat", "dog")]
    source = data_source(str(tmp_path), "data.classification:ClassificationData")
    assert source.names() == {0: "cat", 1: "dog"}
    assert source.files() == {"train": images[:2], "val": images[2:]}
    if name == "test":
        assert source.spec.entries["test"] == ("test",)


def test_the_identity_of_a_split_takes_any_name(tmp_path: Path) -> None:
    names = {"größe.jpg": "288047", os.fsdecode(b"\xff.jpg"): "e6f527"}
    for name, digest in names.items():
        (tmp_path / name).touch()
        assert split_identity([tmp_path / name], b"labels")["files"].startswith(digest)


def test_the_classes_are_named_the_rare_ones_by_their_labels() -> None:
    names = {0: "cat", 1: "dog", 2: "pig"}
    assert class_messages(names, np.array([10, 500, 60]), np.array([1, 2, 3])) == ["3 classes: cat, dog, pig"]
    assert class_messages(names, np.array([9, 500, 0]), np.array([1, 0, 0])) == [
        "3 classes: cat, dog, pig",
        "  fewer than 10 training labels: pig (0), cat (9)",
        "  no validation labels: dog, pig",
    ]
    assert class_messages({0: "item"}, np.array([10]), np.array([1])) == ["1 class: item"]


def problems(count: int) -> list[str]:
    return [f"{number}.png: torn; left out" for number in range(count)]


def test_the_first_five_of_many_problems_are_shown_and_the_others_counted() -> None:
    assert problem_warnings(problems(7), "val") == [
        *problem_warnings(problems(5), "val"),
        "warning: 2 more such problems in val; problems.txt in the run folder lists all",
    ]


def test_strict_raises_the_first_problem_without_its_consequence(tmp_path: Path) -> None:
    image = write_image(tmp_path / "images/a.png", None, "0 .5 .5 .5 .5")
    file = write_yaml(tmp_path / "data.yaml", {"train": "images", "names": ["cat"]})
    data = data_source(str(file), "data.detection:DetectionData").open(32, 32, DataOptions(strict=True))
    assert len(data.split("train").images) == 1
    write_image(tmp_path / "images/small.png", plain(4, 4))
    label_file(image).write_text("0 .5 .5 .5 .5\n0 .5")
    with pytest.raises(UserError, match=r"a\.txt, line 2: .* \(--strict; 2 such problems in train\)$") as caught:
        data.split("train")
    assert "left out" not in str(caught.value)
