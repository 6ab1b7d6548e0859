"""Weight files of train.py, bare tensors, and files without usable weights."""

from __future__ import annotations

import io
import json
import math
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from models.weights import Weights, read_weights
from tests.models.weights.files import save_bytes, save_legacy, save_zip
from utils.checkpoint.weight_files import FORMAT, as_safetensors
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


def test_a_safetensors_file(file: Path) -> None:
    """It holds what a file of train.py holds; its bytes depend on that alone."""
    shared = torch.rand(4, 3)
    state = {"w": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), "n": torch.tensor(4), "s": shared.t()}
    settings = {"imgsz": 64, "freeze": [0, 1], "hyp": None}
    values = content(state={**state, "v": shared}, names={0: "a", 10: "ü", 2: "b"}, settings=settings)
    torch.save(values, file)
    path = file.with_suffix(".safetensors")
    path.write_bytes(as_safetensors(values))
    assert as_safetensors(values) == path.read_bytes()
    expected, weights = read_weights(file), read_weights(path)
    torch.testing.assert_close(weights.state, expected.state, rtol=0, atol=0)
    assert {key: value.dtype for key, value in weights.state.items()}["n"] == torch.int64
    assert {**vars(weights), "state": {}, "origin": None} == {**vars(expected), "state": {}, "origin": None}
    assert weights.image_sides == (64, 64)


def test_safetensors_of_other_programs(file: Path) -> None:
    state = {"fc.weight": torch.rand(2, 3).half(), "format": torch.rand(1)}
    named = file.with_suffix(".safetensors")
    for path, metadata in ((named, {"format": "pt"}), (named, None), (file, None)):  # also with the suffix .pt
        path.write_bytes(save(state, metadata))
        weights = read_weights(path)
        torch.testing.assert_close(weights.state["fc.weight"], state["fc.weight"].float(), rtol=0, atol=0)
        assert (weights.model, weights.names, weights.task, weights.source) == (None, {}, "", "tensors")


# Unusable files


def safetensors_with(text: str) -> bytes:
    return save({"w": -torch.ones(3)}, {"lockstep": text})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (safetensors_with("{}")[:-1], "is not a complete .safetensors file .*; copy or download it again"),
        (safetensors_with("{}")[:50], "is not a complete .safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1", "is not a complete .safetensors file"),
        (pickle.dumps({"w": 1}), "is not a complete .safetensors file"),
        (safetensors_with("{"), "is not a complete .safetensors file"),
        (safetensors_with("[1]"), "is not a complete"),
        (safetensors_with('{"format": "lockstep-9"}'), "has the unknown format lockstep-9; update this program"),
        (safetensors_with(json.dumps({"format": FORMAT, "task": "detect"})), "lacks model, names, settings and is inc"),
        (save({}), "contains no model"),
    ],
)
def test_unusable_safetensors(data: bytes, message: str, file: Path) -> None:
    path = file.with_suffix(".safetensors")
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"^{path} {message}"):
        read_weights(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "contains no model"),
        ({"model": None}, "contains no model"),
        ({"epoch": 1, "optimizer": {}}, "contains no model"),
        ([1, 2], "contains no model"),
        (torch.rand(3), "contains no model; give weights that train.py or YOLOv5 wrote"),
        (content(state=[1]), "has a malformed `state`; copy or download it again"),
        (content(state={"w": 1}), "has a malformed `state`"),
        (content(state={3: torch.rand(2)}), "has a malformed `state`"),
        (content(settings="x"), "has a malformed `settings`"),
        (content(settings={1: "x"}), "has a malformed `settings`"),
        (content(model=[1]), "has a malformed `model`"),
        (content(names=3), "has a malformed `names`"),
        (content(task=None), "has a malformed `task`"),
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
        (b"\x40" + bytes(7) + b'{"w": {}}'.ljust(100), "is not a complete .safetensors file"),
        (b"\x80\x02}q\x00.", "is not a complete PyTorch weight file"),
        (b"\x93NUMPY\x01\x00", "is not a complete PyTorch weight file"),
        (b"PK\x03\x04 and no more \xff", "is not a complete PyTorch weight file"),
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
    with pytest.raises(
        UserError, match=r"weights.pt is not a complete PyTorch weight file .*copy or download it again"
    ):
        read_weights(file)


def test_a_changed_byte(file: Path) -> None:
    save_zip(content(state={"w": torch.rand(1000)}), file)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"weights.pt is damaged \(the checksum of .*/data/0 does not match\); copy or"):
        read_weights(file)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_values_that_are_not_finite(kind: torch.dtype, value: float, file: Path) -> None:
    bad = torch.tensor([1, value], dtype=kind)
    save_zip(content(state={"fine": torch.rand(3), "mask": torch.tensor([-math.inf]), "bad": bad}), file)
    with pytest.raises(UserError, match=r"weights.pt has values in bad that are not finite"):
        read_weights(file)
    save_zip(content(state={"mask": torch.tensor([-math.inf])}), file)
    assert list(read_weights(file).state) == ["mask"]


@pytest.mark.parametrize(
    ("names", "warnings"),
    [
        ({0: "cat", 1: "dog"}, []),
        ({0: "Cat", 1: "DOG"}, []),
        ({0: "cat"}, []),  # another number of classes: the head is another one
        (
            {0: "dog", 1: "cat"},
            [
                "warning: 2 of 2 classes have other names in a.pt than in the data set, such as class 0, 'cat' and "
                "here 'dog'; check the order"
            ],
        ),
    ],
)
def test_other_names_of_classes(names: dict[int, str], warnings: list[str]) -> None:
    weights = Weights({}, {"nc": 2}, {0: "cat", 1: "dog"}, "detect", {}, "lockstep")
    assert weights.class_warnings(names, "a.pt") == warnings


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.pt do not exist"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(UserError, match="cannot be read: it is not a regular file"):
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
