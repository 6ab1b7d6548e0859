"""Where weight files are searched, which are downloaded, and the errors for the others."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models as zoo

from models import weights as releases
from models.tasks import classify
from models.tasks.classify import default_weights
from models.weights import CHECKSUM_IN_NAME, RELEASE_ADDRESS, RELEASE_SHA256, YOLOV9_ADDRESS, find_weights
from tests.web import Server, sending, serving
from utils.errors import UserError


@pytest.fixture(autouse=True)
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


def test_weights_are_not_looked_for_in_the_repository(folder: Path) -> None:
    file = folder / "work" / "LICENSE"  # the repository has such a file
    with pytest.raises(UserError, match=rf"^weights LICENSE are not a file; .* \(looked for {file}\)$"):
        find_weights("LICENSE")
    file.touch()
    for name in ("LICENSE", str(file)):
        assert find_weights(name).absolute() == file


def test_a_run_folder_gives_its_best_weights_or_its_last(folder: Path) -> None:
    run = folder / "work" / "runs" / "exp"
    (run / "weights").mkdir(parents=True)
    tried = rf"looked for {run}/weights/best.pt and {run}/weights/last.pt"
    with pytest.raises(UserError, match=rf"^--weights runs/exp is a folder without weights; .* \({tried}\)$"):
        find_weights("runs/exp")
    for name in ("last.pt", "best.pt"):
        (run / "weights" / name).touch()
        for training in (True, False):
            assert find_weights("runs/exp", training=training) == Path("runs/exp/weights") / name


@pytest.mark.parametrize(
    "name", ["yolov5n.pt", "yolov5x6.pt", "yolov5s-cls.pt", "yolov5m-seg.pt", "weights/yolov5s.pt", "v9-t.pt"]
)
def test_the_error_for_official_weights_names_address_and_paths(name: str, folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_weights(name)
    file, message = Path(name).name, str(caught.value)
    assert message.startswith(f"http://127.0.0.1:9/v7.0/{file} cannot be downloaded (")
    paths = [folder / "cache/lockstep/weights" / file, folder / "work" / name]
    assert f"download it yourself to {paths[1]} or {paths[0]}, or start from scratch with --weights ''" in message
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert find_weights(name).absolute() == path


def test_the_address_of_the_releases() -> None:
    assert RELEASE_ADDRESS == "https://github.com/ultralytics/yolov5/releases/download/v7.0/"
    assert YOLOV9_ADDRESS == "https://github.com/MultimediaTechLab/YOLO/releases/download/v1.0-alpha/"


@pytest.mark.parametrize(
    ("name", "address", "licence"), [("v9-c.pt", YOLOV9_ADDRESS, "MIT"), ("yolov5s.pt", RELEASE_ADDRESS, "AGPL-3.0")]
)
def test_each_release_has_its_address_and_licence(
    name: str, address: str, licence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def download(url: str, path: Path, **more: Any) -> Path:
        asked.append((url, more["licence"]))
        return path

    monkeypatch.delenv("LOCKSTEP_RELEASES")
    monkeypatch.setattr(releases, "download", download)
    find_weights(name)
    ((url, of_file),) = asked
    assert url == f"{address}{name}"
    assert of_file.startswith(licence)


def test_official_weights_are_downloaded_once(server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = weights()
    server.give("v7.0/yolov5s.pt", sending(content))
    path = find_weights("yolov5s.pt")
    assert path == folder / "cache/lockstep/weights/yolov5s.pt"
    assert path.read_bytes() == content
    assert find_weights("yolov5s.pt") == path
    assert server.asked == [("/v7.0/yolov5s.pt", 0)]
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == f"downloading {server.address}/v7.0/yolov5s.pt (licence: AGPL-3.0, published by Ultralytics)"


def test_official_weights_are_checked(server: Server, folder: Path) -> None:
    """By their SHA-256 if it is known, else as a whole zip archive."""
    damaged = bytearray(weights())
    damaged[len(damaged) // 2] ^= 1
    for name, content, why in (
        ("yolov5n.pt", weights(), "its SHA-256 is not the expected one"),
        ("yolov5s.pt", b"<html>", "the content is of another kind, or damaged"),
        ("yolov5s.pt", weights()[:-9], "the content is of another kind, or damaged"),
        ("yolov5s.pt", bytes(damaged), "the content is of another kind, or damaged"),
    ):
        server.give(f"v7.0/{name}", sending(content))
        with pytest.raises(UserError, match=why):
            find_weights(name)
    assert list((folder / "cache/lockstep/weights").iterdir()) == []


def test_the_checksum_of_yolov5n(shared: Path, server: Server) -> None:
    content = (shared / "weights" / "yolov5n.pt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == RELEASE_SHA256["yolov5n.pt"]
    server.give("v7.0/yolov5n.pt", sending(content))
    assert find_weights("yolov5n.pt").read_bytes() == content


@pytest.mark.parametrize("name", ["mine.pt", "yolov5q.pt", "yolov5n-pose.pt", "yolov5n.pt.old", "xyolov5n.pt"])
def test_other_names_are_not_downloaded(name: str) -> None:
    with pytest.raises(UserError, match=f"^weights {name} are not a file; check the path, or start from scratch with"):
        find_weights(name)


def test_only_a_training_can_start_from_scratch() -> None:
    for name in ("mine.pt", "yolov5s.pt", "DEFAULT"):
        with pytest.raises(UserError) as caught:
            find_weights(name, training=False)
        assert "scratch" not in str(caught.value)
        assert "--" not in str(caught.value)


# torchvision's


def test_torchvisions_files_have_checksums() -> None:
    for name in zoo.list_models(module=zoo):
        address = default_weights(name)
        assert address.startswith("https://download.pytorch.org/models/")
        assert CHECKSUM_IN_NAME.search(address), address


def test_torchvisions_default_weights(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names end with the first digits of the SHA-256."""
    content, asked = weights(), []
    digits = hashlib.sha256(content).hexdigest()[:8]
    assert digits != "0123abcd"

    def address(name: str) -> str:
        asked.append(name)
        return f"{server.address}/small-{digits if name == 'resnet34' else '0123abcd'}.pth"

    monkeypatch.setattr(classify, "default_weights", address)
    (folder / "work" / "DEFAULT").touch()  # no file is meant
    for file in (digits, "0123abcd"):
        server.give(f"small-{file}.pth", sending(content))
    path = find_weights("DEFAULT", {"task": "classify", "architecture": "resnet34"}, "mine.yaml")
    assert path == folder / "torch/hub/checkpoints" / f"small-{digits}.pth"  # torch's own cache
    assert path.read_bytes() == content
    assert asked == ["resnet34"]
    with pytest.raises(UserError, match="its SHA-256 is not the expected one"):
        find_weights("DEFAULT", {"task": "classify", "architecture": "resnet18"}, "mine.yaml")


@pytest.mark.parametrize("yaml", [None, {}, {"nc": 3, "backbone": [], "head": []}])
def test_default_weights_of_no_architecture(yaml: dict | None) -> None:
    with pytest.raises(UserError, match=r"^--weights DEFAULT needs a --cfg that names an `architecture`"):
        find_weights("DEFAULT", yaml, "mine.yaml")


def test_default_weights_of_an_unknown_architecture() -> None:
    with pytest.raises(UserError, match=r"^mine\.yaml: `architecture` is 'resnet33'"):
        find_weights("DEFAULT", {"architecture": "resnet33"}, "mine.yaml")


# The Hub


def test_weights_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "fetch_from_hub", lambda name: Path("cache", name))
    assert find_weights("hf:me/mine/best.pt") == Path("cache/me/mine/best.pt")


# W&B artifacts


def replace_wandb(monkeypatch: pytest.MonkeyPatch, error: str, *files: str) -> None:
    """Replace the download from W&B: it writes these files, or raises `error`."""

    def download(name: str, folder: Path) -> list[Path]:
        if error:
            raise UserError(error)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file).write_text(name)
        return [folder / file for file in files]

    monkeypatch.setattr("utils.tracking.wandb.download_artifact", download)


@pytest.mark.parametrize("files", [("epoch3.pt",), ("last.pt", "best.pt"), ("best.pt", "notes.txt")])
def test_an_artifact(files: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_wandb(monkeypatch, "", *files)
    path = find_weights("wandb:me/mine/run_1_model:best")
    assert path.name == ("best.pt" if "best.pt" in files else "epoch3.pt")
    assert path.read_text() == "me/mine/run_1_model:best"
    assert path.is_relative_to(folder / "cache")


@pytest.mark.parametrize(
    ("answer", "files", "message"),
    [
        ("no such artifact", (), r"cannot be downloaded \(no such artifact\); check the key and the name"),
        ("", ("a.pt", "b.pt"), "holds 2 .pt files"),
        ("", ("a.txt",), "holds 0 .pt files"),
    ],
)
def test_artifacts_without_usable_weights(
    answer: str, files: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_wandb(monkeypatch, answer, *files)
    with pytest.raises(UserError, match=f"^--weights wandb:me/mine/model:best .*{message}"):
        find_weights("wandb:me/mine/model:best")


def test_errors_of_wandb_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, and with a server that does not answer."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="there is no API key for W&B: wandb login"):
        find_weights("wandb:me/mine/model:best")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(UserError, match="cannot be downloaded"):
        find_weights("wandb:me/mine/model:best")
