"""Weight files of train.py, bare tensors, and files without usable weights."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.weights.reader import read_weights
from tests.models.weights.files import save_bytes, save_legacy, save_zip
from utils.checkpoint.weight_files import FORMAT
from utils.errors import UserError


def content(**changes: Any) -> dict[str, Any]:
    """Return the content of a file of train.py."""
    base = {
        "format": FORMAT,
        "task": "detect",
        "model": {"nc": 1},
        "names": {0: "a"},
        "state": {"w": torch.rand(2, 3), "n": torch.tensor(4)},
        "settings": {"epochs": 3},
    }
    return {**base, **changes}


# Usable files


def test_a_file_of_train_py(file: Path) -> None:
    state = {"w": torch.rand(2, 3), "n": torch.tensor(4), "h": torch.ones(2, dtype=torch.float16)}
    torch.save(content(state=state), file)
    weights = read_weights(str(file))
    expected = {**state, "h": torch.ones(2)}
    torch.testing.assert_close(weights.state, expected, rtol=0, atol=0, check_dtype=True)
    assert (weights.model, weights.names, weights.task) == ({"nc": 1}, {0: "a"}, "detect")
    assert (weights.settings, weights.source) == ({"epochs": 3}, "lockstep")


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_bare_tensors(save: Callable[[Any, Path], None], file: Path) -> None:
    state = OrderedDict({"model.0.conv.weight": torch.rand(2, 3)})
    save(state, file)
    weights = read_weights(file)
    torch.testing.assert_close(weights.state, dict(state), rtol=0, atol=0)
    assert (weights.model, weights.names, weights.task, weights.source) == (None, {}, "", "tensors")


# Unusable files


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "contains no model"),
        ({"model": None}, "contains no model"),
        ({"epoch": 1, "optimizer": {}}, "contains no model"),
        ([1, 2], "contains no model"),
        (torch.rand(3), "contains no model; give weights that train.py or YOLOv5 wrote"),
        (content(state=[1]), "is not a whole PyTorch weight file"),
        (content(format="lockstep-9"), "has the unknown format lockstep-9; update this program"),
        ({key: value for key, value in content().items() if key != "state"}, "lacks state and is incomplete"),
    ],
)
def test_content_without_a_model(value: Any, message: str, file: Path) -> None:
    torch.save(value, file)
    with pytest.raises(UserError, match=f"weights.pt {message}"):
        read_weights(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is text, not a weight file"),
        (b"<!DOCTYPE html><html></html>", "is text, not a weight file"),
        (b"\x80\x02}q\x00.", "is not a whole PyTorch weight file"),
        (b"\x93NUMPY\x01\x00", "is not a whole PyTorch weight file"),
        (b"PK\x03\x04 and no more \xff", "is not a whole PyTorch weight file"),
    ],
)
def test_other_files(data: bytes, message: str, file: Path) -> None:
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"weights.pt {message}"):
        read_weights(file)


@pytest.mark.parametrize("save", [save_zip, save_legacy])
@pytest.mark.parametrize("share", [0.1, 0.99])
def test_truncated_files(save: Callable[[Any, Path], None], share: float, file: Path) -> None:
    save(content(state={"w": torch.rand(1000)}), file)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=r"weights.pt is not a whole PyTorch weight file .*copy or download it again"):
        read_weights(file)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.pt do not exist"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_weights(tmp_path)


def test_torchscript(file: Path) -> None:
    save_bytes(pickle.dumps({}, 2), file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps((), 2))
    with pytest.raises(UserError, match=r"weights.pt is a TorchScript export, which cannot be trained"):
        read_weights(file)


def test_tar_archives_are_not_unpacked(file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        member = tarfile.TarInfo("storages")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"abcd"))
    with pytest.raises(UserError, match=r"weights.pt "):
        read_weights(file)
