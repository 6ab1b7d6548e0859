"""Weight files: those of train.py and of other programs, unusable ones, licences, and where files are found."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from torchvision.models import get_model_weights

from models.loading import transfer
from models.weights import RELEASE_SHA256, Origin, Weights, find_weights, read_weights, same_names
from models.yolo import build_model
from tests.models.test_yolov5_pickle import Call, Pickled, refused, save_as_yolov5, save_bytes, save_legacy, save_zip
from tests.web import Server, sending, serving
from utils.checkpoint import FORMAT, as_safetensors
from utils.errors import UserError
from utils.files import ROOT, read_yaml


def content(**changes: Any) -> dict[str, Any]:
    """Return the content of a file of train.py; None leaves a key out."""
    base = {
        "format": FORMAT,
        "task": "detect",
        "model": {"nc": 1},
        "names": {0: "a"},
        "state": {"w": torch.rand(2, 3), "n": torch.tensor(4)},
        "settings": {"epochs": 3},
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


# Usable files


def test_a_safetensors_file_holds_what_a_pt_holds(file: Path) -> None:
    """Its bytes depend on that alone."""
    shared = torch.rand(4, 3)
    state = {"w": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), "n": torch.tensor(4), "s": shared.t()}
    settings = {"imgsz": 64, "freeze": [0, 1], "hyp": None}
    values = content(state={**state, "v": shared}, names={0: "a", 2: "ü", 1: "b"}, settings=settings)
    torch.save(values, file)
    path = file.with_suffix(".safetensors")
    path.write_bytes(as_safetensors(values))
    assert as_safetensors(values) == path.read_bytes()
    expected, weights = read_weights(file), read_weights(path)
    torch.testing.assert_close(weights.state, expected.state, rtol=0, atol=0)
    assert {**vars(weights), "state": {}, "origin": None} == {**vars(expected), "state": {}, "origin": None}
    assert weights.image_sides == (64, 64)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_safetensors_of_other_programs(suffix: str, file: Path) -> None:
    state = {"fc.weight": torch.rand(2, 3).half(), "format": torch.rand(1)}
    file.with_suffix(suffix).write_bytes(save(state, {"format": "pt"}))
    weights = read_weights(file.with_suffix(suffix))
    torch.testing.assert_close(weights.state["fc.weight"], state["fc.weight"].float(), rtol=0, atol=0)
    assert (weights.model, weights.names, weights.task, weights.source) == (None, {}, "", "tensors")


def test_other_names_of_classes_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    weights = Weights({}, {"nc": 2}, {0: "cat", 1: "dog"}, "detect", {}, "lockstep")
    for same in ({0: "cat", 1: "dog"}, {0: "Cat", 1: "DOG"}, {0: "cow"}):  # another number: the head is another one
        weights.compare_names(same, "a.pt")
    assert capsys.readouterr().out == ""
    weights.compare_names({0: "dog", 1: "cat"}, "a.pt")
    assert capsys.readouterr().out.startswith("warning: the names of 2 of 2 classes differ in a.pt and in the data set")
    single = Weights({}, {"nc": 1}, {0: "cat"}, "detect", {}, "lockstep")
    single.compare_names({0: "item"}, "a.pt")  # of --single-cls
    assert capsys.readouterr().out == ""
    single.compare_names({0: "dog"}, "a.pt")
    assert "the names of 1 of 1 class differ in a.pt" in (out := capsys.readouterr().out)
    assert "class 0, 'cat' and here 'dog'" in out


def test_same_names() -> None:
    """Without case; the first of two classes with one name."""
    names = {0: "person", 1: "Traffic light ", 2: "dog", 3: "dog"}
    assert same_names(names, {0: "dog", 1: "cell", 2: "PERSON", 7: "traffic light"}) == {0: 2, 2: 0, 7: 1}


# YOLOv9 (MIT)


def yolov9_content(size: str, nc: int = 80, auxiliary: bool = True) -> dict[str, Tensor]:
    """Return a state dict as that implementation names it, of zeros in few bytes."""
    yaml = read_yaml(ROOT / "models" / f"yolov9{size}.yaml")
    with torch.device("meta"):
        state = build_model(yaml if auxiliary else {**yaml, "auxiliary": []}, nc=nc).state_dict()
    zeros = {name.removeprefix("model."): torch.zeros((), dtype=x.dtype).expand(x.shape) for name, x in state.items()}
    bins = torch.arange(16.0).view(1, 16, 1, 1, 1)
    return {**zeros, **{f"22.heads.{level}.anc2vec.anc2vec.weight": bins for level in range(3)}}


@pytest.mark.parametrize("size", ["t", "s", "m", "c"])
def test_yolov9s_state_dict(size: str, file: Path) -> None:
    """The model is recognised, and takes all tensors; the classes are COCO's."""
    torch.save(yolov9_content(size), file)
    weights = read_weights(file)
    assert (weights.source, weights.task, weights.origin.licence) == ("yolov9", "detect", "mit")
    assert (len(weights.names), weights.names[0], weights.names[79]) == (80, "person", "toothbrush")
    assert weights.model is not None
    with torch.device("meta"):
        expected = build_model(weights.model).state_dict()
        other = build_model(weights.model, nc=2).state_dict()
    assert {name: x.shape for name, x in weights.state.items()} == {name: x.shape for name, x in expected.items()}
    # A model for other classes takes all but the class rows.
    rows = {name for name in other if other[name].shape != expected[name].shape}
    assert len(rows) == 2 * 3 * 2
    assert all(".class_conv.2." in name for name in rows)


def test_yolov9s_file_without_auxiliary_branch_and_with_other_classes(file: Path) -> None:
    torch.save(yolov9_content("t", nc=5, auxiliary=False), file)
    weights = read_weights(file)
    assert weights.model is not None
    assert (weights.model["nc"], weights.names, set(weights.class_names)) == (5, {}, set(range(5)))
    model = build_model({key: rows for key, rows in weights.model.items() if key != "auxiliary"})
    assert transfer(model, weights.state)[:2] == (len(model.state_dict()),) * 2


def test_a_lightning_checkpoint(file: Path) -> None:
    """Its EMA counts; what else it has is not run."""
    tensors = yolov9_content("t")
    state = {f"model.model.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"epoch": 3, "state_dict": state, "hyper_parameters": {"path": Path("x")}}, file)
    weights = read_weights(file)
    assert weights.model is not None
    assert transfer(model := build_model(weights.model), weights.state)[:2] == (len(model.state_dict()),) * 2
    state |= {f"ema.model.{name}": tensor + 1 for name, tensor in tensors.items()}
    torch.save({"state_dict": {**state, "metric.count": torch.ones(1)}}, file)
    assert read_weights(file).state["model.0.conv.weight"].eq(1).all()
    torch.save({"state_dict": state, "callbacks": Call(print, "run")}, file)
    refused(file, "it names 'builtins.print'")


# Unusable files


def safetensors_with(text: str) -> bytes:
    return save({"w": -torch.ones(3)}, {"lockstep": text})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        safetensors_with("{}")[:-1],
        safetensors_with("{"),
        safetensors_with("[1]"),
        safetensors_with('{"format": "lockstep-9"}'),
        save({}),
        b"<!DOCTYPE html><html></html>",
        b"\x40" + bytes(7) + b'{"w": {}}'.ljust(100),
        b"\x80\x02}q\x00.",
        b"PK\x03\x04 and no more \xff",
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_other_files(data: bytes, suffix: str, file: Path) -> None:
    file = file.with_suffix(suffix)
    file.write_bytes(data)
    refused(file, file.name)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        *((value, "no model") for value in ({}, {"model": None}, {"epoch": 1, "optimizer": {}}, [1, 2], torch.rand(3))),
        *((content(state=state), "`state`") for state in ([1], {"w": 1}, {3: torch.rand(2)}, None)),
        *((content(settings=settings), "`settings`") for settings in ("x", {1: "x"})),
        *((content(**{key: 3}), f"`{key}`") for key in ("model", "names", "task")),
        (content(format="lockstep-9"), "lockstep-9"),
        (content(licence="mit", origin=[3]), ""),
    ],
)
def test_content_without_a_model(value: Any, names: str, file: Path) -> None:
    torch.save(value, file)
    refused(file, f"weights.pt .*{names}")


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_a_truncated_file_and_a_changed_byte(save: Callable[[Any, Path], None], file: Path) -> None:
    save(content(state={"w": torch.rand(1000)}), file)
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-20])
    refused(file)
    if save is save_zip:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        refused(file, "data/0")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite(value: float, file: Path) -> None:
    mask = {"mask": torch.tensor([-math.inf])}
    save_zip(content(state=mask), file)
    assert list(read_weights(file).state) == ["mask"]
    save_zip(content(state={**mask, "bad": torch.tensor([1, value], dtype=torch.float16)}), file)
    refused(file, "values in bad")


def test_torchscript_tar_archives_and_no_files(file: Path) -> None:
    save_bytes(pickle.dumps({}, 2), file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps((), 2))
    refused(file, "TorchScript")
    with tarfile.open(file, "w") as archive:
        member = tarfile.TarInfo("storages")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"abcd"))
    refused(file)
    for path in (file.with_name("none.pt"), file.parent, file.with_name("best.onnx")):
        with pytest.raises(UserError, match=path.name):
            read_weights(path)


# Licences


def test_three_generations_from_yolov5(tmp_path: Path) -> None:
    """Whatever the files are called; a .safetensors file is one of the generations."""
    save_as_yolov5({"model": Pickled(1.0)}, tmp_path / "mine.pt")
    origin = read_weights(tmp_path / "mine.pt").origin
    for name in ("cells.pt", "free.safetensors", "ours.pt"):
        values = content(**origin.content())
        (tmp_path / name).write_bytes(as_safetensors(values)) if "safe" in name else torch.save(values, tmp_path / name)
        origin = read_weights(tmp_path / name).origin
    assert origin.licence == "agpl-3.0"
    files = ["mine.pt", "cells.pt", "free.safetensors", "ours.pt"]
    digests = {file: hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() for file in files}
    assert [*origin.files] == [{"file": file, "sha256": digests[file]} for file in files]


def test_allowed_licences(file: Path) -> None:
    torch.save({"weight": torch.ones(2)}, file)
    for licence in ("mit", "yours"):
        Origin(licence).require(("MIT", "apache-2.0"))
    Origin("agpl-3.0").require(())
    read_weights(file, "bsd-3-clause").origin.require(("bsd-3-clause",))
    for origin in (
        Origin("agpl-3.0", [{"file": "yolov5n.pt", "sha256": "4f180cf2" + 56 * "0"}]),
        read_weights(file).origin,
    ):
        with pytest.raises(UserError, match=r"yolov5n\.pt|unknown"):
            origin.require(("mit",))


# Finding and downloading


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty working folder, with caches beside it and a mirror that does not answer."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCKSTEP_RELEASES", "http://127.0.0.1:9/v7.0/")
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve a mirror of the releases."""
    with serving() as server:
        monkeypatch.setenv("LOCKSTEP_RELEASES", f"{server.address}/v7.0")
        yield server


def weights() -> bytes:
    """Return a file as torch writes it."""
    file = io.BytesIO()
    torch.save({"model": torch.zeros(5000)}, file)
    return file.getvalue()


def test_files_and_run_folders(folder: Path) -> None:
    """The repository, which has a file LICENSE, is not searched; a run folder means its best weights, or its last."""
    run = folder / "work" / "runs" / "exp"
    (run / "weights").mkdir(parents=True)
    for name in ("LICENSE", "runs/exp"):
        with pytest.raises(UserError, match=name):
            find_weights(name)
    (folder / "work" / "LICENSE").touch()
    assert find_weights("LICENSE") == Path("LICENSE")
    for name in ("last.pt", "best.pt"):
        (run / "weights" / name).touch()
        assert find_weights("runs/exp") == Path("runs/exp/weights") / name


@pytest.mark.parametrize("name", ["yolov5x6.pt", "weights/yolov5m-seg.pt", "v9-t.pt"])
def test_official_weights_that_cannot_be_downloaded(name: str, folder: Path) -> None:
    """The error names the address and both places for the file."""
    with pytest.raises(UserError, match=Path(name).name) as caught:
        find_weights(name)
    paths = [folder / "cache/lockstep/weights" / Path(name).name, folder / "work" / name]
    assert all(str(place) in str(caught.value) for place in ("127.0.0.1:9/v7.0", *paths))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert find_weights(name).absolute() == path


def test_address_and_licence_of_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.delenv("LOCKSTEP_RELEASES", raising=False)
    monkeypatch.setattr("models.weights.download", lambda url, path, **more: asked.append((url, more["licence"][:4])))
    for name in ("v9-c.pt", "yolov5s.pt"):
        find_weights(name)
    assert asked == [
        ("https://github.com/MultimediaTechLab/YOLO/releases/download/v1.0-alpha/v9-c.pt", "MIT,"),
        ("https://github.com/ultralytics/yolov5/releases/download/v7.0/yolov5s.pt", "AGPL"),
    ]


def test_official_weights_are_checked_and_downloaded_once(server: Server, folder: Path, shared: Path) -> None:
    """By their SHA-256 if it is known, else as a whole zip archive."""
    unusable = [("yolov5s.pt", data) for data in (b"<html>", weights()[:-9])]
    for name, data in [*unusable, ("yolov5n.pt", weights())]:
        server.give(f"v7.0/{name}", sending(data))
        with pytest.raises(UserError, match=name):
            find_weights(name)
    assert list((folder / "cache/lockstep/weights").iterdir()) == []
    official = (shared / "weights" / "yolov5n.pt").read_bytes()
    assert hashlib.sha256(official).hexdigest() == RELEASE_SHA256["yolov5n.pt"]
    for name, data in (("yolov5n.pt", official), ("yolov5s.pt", weights())):
        server.give(f"v7.0/{name}", sending(data))
        assert find_weights(name).read_bytes() == find_weights(name).read_bytes() == data
    assert len(server.asked) == 3 + 2


@pytest.mark.parametrize("name", ["yolov5q.pt", "yolov5n-pose.pt", "xyolov5n.pt", "DEFAULT"])
def test_other_names_are_not_downloaded(name: str, folder: Path) -> None:
    for training in (True, False):
        with pytest.raises(UserError, match=name):
            find_weights(name, training=training)


def test_torchvisions_default_weights(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names end with the first digits of the SHA-256."""
    digits = hashlib.sha256(weights()).hexdigest()[:8]
    files = {"resnet34": f"small-{digits}.pth", "resnet18": "small-0123abcd.pth"}
    for name, file in files.items():
        monkeypatch.setattr(get_model_weights(name).DEFAULT.value, "url", f"{server.address}/{file}")
        server.give(file, sending(weights()))
    path = find_weights("DEFAULT", {"task": "classify", "architecture": "resnet34"}, "mine.yaml")
    assert path == folder / "torch/hub/checkpoints" / files["resnet34"]  # torch's own cache
    assert path.read_bytes() == weights()
    for yaml in ({"architecture": "resnet18"}, {"architecture": "resnet33"}, {}):
        with pytest.raises(UserError, match=r"0123abcd|mine\.yaml|--cfg"):
            find_weights("DEFAULT", yaml, "mine.yaml")


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        *((("epoch3.pt",), "epoch3.pt"), (("last.pt", "best.pt"), "best.pt")),
        *((("a.pt", "b.pt"), ""), (("a.txt",), ""), ((), "")),
    ],
)
def test_artifacts_of_wandb(files: tuple[str, ...], chosen: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, folder: Path) -> list[Path]:
        if not files:
            raise UserError("no such artifact")
        return [folder / file for file in files]

    monkeypatch.setattr("utils.tracking.wandb.download_artifact", download)
    if chosen:
        path = find_weights("wandb:me/mine/run_1_model:best")
        assert path.name == chosen
        assert path.is_relative_to(folder / "cache")
    else:
        with pytest.raises(UserError, match="wandb:me/mine/model:best"):
            find_weights("wandb:me/mine/model:best")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *(("yolov8n.pt", "v9-t.pt"), ("yolo11n.pt", "v9-t.pt"), ("rf-detr-nano.pth", "v9-t.pt")),
        ("rtdetr-l.pt", "examples/dfine"),
        *(("yolov5n", "'yolov5n.pt'"), ("yolov9t.pt", "'v9-t.pt'"), ("yolov9-c.pt", "'v9-c.pt'")),
    ],
)
def test_other_families_and_near_names(name: str, named: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*{named}"):
        find_weights(name)
