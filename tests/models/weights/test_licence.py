"""The licence of weights follows them through trainings, renaming and other formats."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from models.weights import Origin, read_weights, torchvision_checksums
from models.yolo import build_model
from tests.making import tiny_detector
from tests.models.weights.test_yolov5_pickle import Pickled, save_as_yolov5
from utils.checkpoint.weight_files import as_safetensors, serialised, weights_content
from utils.errors import UserError

NAMES = {0: "disc", 1: "ring", 2: "bar"}


def trained_from(origin: Origin, file: Path, **settings: Any) -> Path:
    """Write the weights of a training that began from weights of an origin."""
    content = weights_content(build_model(tiny_detector()), tiny_detector() | {"task": "detect"}, NAMES, settings)
    file.write_bytes(serialised({**content, **origin.content()}))
    return file


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_three_generations_from_yolov5(tmp_path: Path) -> None:
    """Whatever the files are called; a .safetensors file is one of the generations."""
    save_as_yolov5({"model": Pickled(1.0)}, tmp_path / "mine.pt", legacy=False)
    first = read_weights(tmp_path / "mine.pt").origin
    assert first == Origin("agpl-3.0", [{"file": "mine.pt", "sha256": sha256(tmp_path / "mine.pt")}])
    second = read_weights(trained_from(first, tmp_path / "cells.pt"))
    content = {"format": "lockstep-1", "task": "detect", "model": second.model, "names": second.names}
    content |= {"settings": {}, "state": second.state, **second.origin.content()}
    (tmp_path / "free.safetensors").write_bytes(as_safetensors(content))
    third = read_weights(tmp_path / "free.safetensors").origin
    last = read_weights(trained_from(third, tmp_path / "ours.pt")).origin
    assert last.licence == "agpl-3.0"
    assert [each["file"] for each in last.files] == ["mine.pt", "cells.pt", "free.safetensors", "ours.pt"]
    assert [each["sha256"] for each in last.files] == [sha256(tmp_path / each["file"]) for each in last.files]


def test_from_scratch(tmp_path: Path) -> None:
    assert read_weights(trained_from(Origin("yours"), tmp_path / "a.pt")).origin.licence == "yours"


@pytest.mark.parametrize(
    ("weights", "licence"),
    [("yolov5n.pt", "agpl-3.0"), ("a/yolov5s6.pt", "agpl-3.0"), ("", "yours"), ("best.pt", "unknown"), (3, "unknown")],
)
def test_files_that_record_no_licence(weights: Any, licence: str, tmp_path: Path) -> None:
    """Those of older versions have the settings of their run."""
    content = weights_content(
        build_model(tiny_detector()), tiny_detector() | {"task": "detect"}, NAMES, {"weights": weights}
    )
    (tmp_path / "a.pt").write_bytes(serialised(content))
    assert read_weights(tmp_path / "a.pt").origin.licence == licence


@pytest.mark.parametrize("origin", ["x", [3], {"file": "a"}, None])
def test_a_record_of_another_form(origin: Any) -> None:
    assert Origin.recorded({"licence": "mit", "origin": origin}) == Origin("mit", [])


def test_bare_tensors(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt")
    assert read_weights(tmp_path / "a.pt").origin.licence == "unknown"


def test_torchvision() -> None:
    """By the checksum of a file, whatever its name is; resnet18's is in its name, resnet18-f37072fd.pth."""
    assert "f37072fd" in torchvision_checksums()
    assert Origin.of_program("tensors", "f37072fd" + 56 * "0") == Origin("bsd-3-clause", [])
    assert Origin.of_program("tensors", 64 * "0").licence == "unknown"
    assert Origin.of_program("yolov9", 64 * "0").licence == "mit"


def test_allowed_licences() -> None:
    for licence in ("mit", "yours"):
        Origin(licence).require(("MIT", "apache-2.0"))
    Origin("agpl-3.0").require(())
    began = Origin("agpl-3.0").followed_by("yolov5n.pt", "4f180cf2" + 56 * "0").followed_by("best.pt", 64 * "1")
    message = r"is agpl-3\.0 \(began as yolov5n\.pt, SHA-256 4f180cf2\.\.\.\), which --allow-licence mit does not list"
    with pytest.raises(UserError, match=message):
        began.require(("mit",))
    with pytest.raises(UserError, match="is unknown, which"):
        Origin().require(("mit", "agpl-3.0"))
