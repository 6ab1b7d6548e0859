"""Where weights are looked for, what is said where they are not, and which files are downloaded."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models.tasks.classification import torchvision_models
from models.tasks.classification.torchvision_models import architectures, default_weights
from models.weights import releases
from models.weights.releases import CHECKSUM_IN_NAME, RELEASE_SHA256, find_weights
from tests.web import Server, sending, serving
from utils.errors import UserError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A mirror of the releases."""
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        monkeypatch.setenv("LOCKSTEP_RELEASES", f"{server.address}/v7.0")
        yield server


def weights() -> bytes:
    """A file as torch writes it."""
    file = io.BytesIO()
    torch.save({"model": torch.zeros(5000)}, file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, another folder as the repository, one where torch keeps what it downloads, and a cache. Nobody
    answers."""
    (tmp_path / "work").mkdir()
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(releases, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCKSTEP_RELEASES", "http://127.0.0.1:9/v7.0/")
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path


def test_as_given_first_then_in_the_repository(elsewhere: Path) -> None:
    (elsewhere / "repository" / "a.pt").touch()
    assert find_weights("a.pt") == elsewhere / "repository" / "a.pt"
    (elsewhere / "work" / "a.pt").touch()
    assert find_weights("a.pt").absolute() == elsewhere / "work" / "a.pt"
    assert find_weights(str(elsewhere / "work" / "a.pt")) == elsewhere / "work" / "a.pt"


@pytest.mark.parametrize("name", ["yolov5n.pt", "yolov5x6.pt", "yolov5s-cls.pt", "weights/yolov5s.pt"])
def test_official_weights_have_an_address(name: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network one sentence says where from and where to."""
    monkeypatch.setattr(releases, "RELEASE_ADDRESS", "http://127.0.0.1:9/release/")
    monkeypatch.setenv("LOCKSTEP_RELEASES", "")
    with pytest.raises(UserError) as caught:
        find_weights(name)
    file = name.rpartition("/")[2]
    said = str(caught.value)
    assert said.startswith(f"http://127.0.0.1:9/release/{file} cannot be downloaded (")
    assert f"put it at {elsewhere / 'work' / name} or {elsewhere / 'cache/lockstep/weights' / file}" in said
    assert "--weights ''" in said
    for place in (elsewhere / "cache/lockstep/weights" / file, elsewhere / "work" / name):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        assert find_weights(name).absolute() == place


def test_the_address_of_the_releases() -> None:
    assert releases.RELEASE_ADDRESS == "https://github.com/ultralytics/yolov5/releases/download/v7.0/"


def test_official_weights_are_downloaded_once(server: Server, elsewhere: Path) -> None:
    content = weights()
    server.give("v7.0/yolov5s.pt", sending(content))
    found = find_weights("yolov5s.pt")
    assert found == elsewhere / "cache/lockstep/weights/yolov5s.pt"
    assert found.read_bytes() == content
    assert find_weights("yolov5s.pt") == found
    assert server.asked == [("/v7.0/yolov5s.pt", 0)]


def test_official_weights_must_be_those(server: Server, elsewhere: Path) -> None:
    """Known by SHA-256, or at least whole: a page to log in is not taken for weights, nor are others of that name."""
    damaged = bytearray(weights())
    damaged[len(damaged) // 2] ^= 1
    for name, content, why in (
        ("yolov5n.pt", weights(), "its SHA-256 is not the expected one"),
        ("yolov5s.pt", b"<html>", "the content is not such a file"),
        ("yolov5s.pt", weights()[:-9], "the content is not such a file"),
        ("yolov5s.pt", bytes(damaged), "the content is not such a file"),
    ):
        server.give(f"v7.0/{name}", sending(content))
        with pytest.raises(UserError, match=why):
            find_weights(name)
    assert list((elsewhere / "cache/lockstep/weights").iterdir()) == []


def test_the_known_checksum(shared: Path, server: Server) -> None:
    content = (shared / "weights" / "yolov5n.pt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == RELEASE_SHA256["yolov5n.pt"]
    server.give("v7.0/yolov5n.pt", sending(content))
    assert find_weights("yolov5n.pt").read_bytes() == content


def test_official_weights_of_no_task_here() -> None:
    expected = r"^weights yolov5s-seg\.pt are for none of the tasks here, detect, classify; take yolov5s\.pt$"
    with pytest.raises(UserError, match=expected):
        find_weights("yolov5s-seg.pt")


@pytest.mark.parametrize("name", ["mine.pt", "yolov5q.pt", "yolov5n.pt.old", "xyolov5n.pt"])
def test_other_weights_have_none(name: str) -> None:
    with pytest.raises(UserError, match=f"^weights {name} are not a file; check the path") as caught:
        find_weights(name)
    assert "https" not in str(caught.value)


def test_a_folder_is_no_weight_file(elsewhere: Path) -> None:
    (elsewhere / "work" / "runs").mkdir()
    with pytest.raises(UserError, match="not a file"):
        find_weights("runs")


# torchvision's


def test_torchvisions_files_have_checksums() -> None:
    for name in architectures():
        address = default_weights(name)
        assert address.startswith("https://download.pytorch.org/models/")
        assert CHECKSUM_IN_NAME.search(address), address


def test_torchvisions_default_weights(server: Server, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first digits of SHA-256 stand at the end of their names."""
    content, asked = weights(), []
    digits = hashlib.sha256(content).hexdigest()[:8]
    assert digits != "0123abcd"

    def address(name: str) -> str:
        asked.append(name)
        return f"{server.address}/small-{digits if name == 'resnet34' else '0123abcd'}.pth"

    monkeypatch.setattr(torchvision_models, "default_weights", address)
    (elsewhere / "work" / "DEFAULT").touch()  # a file of that name is not meant
    for file in (digits, "0123abcd"):
        server.give(f"small-{file}.pth", sending(content))
    found = find_weights("DEFAULT", {"task": "classify", "architecture": "resnet34"}, "mine.yaml")
    assert found == elsewhere / "hub" / "checkpoints" / f"small-{digits}.pth"  # where torch itself looks for it
    assert found.read_bytes() == content
    assert asked == ["resnet34"]
    with pytest.raises(UserError, match="its SHA-256 is not the expected one"):
        find_weights("DEFAULT", {"task": "classify", "architecture": "resnet18"}, "mine.yaml")


@pytest.mark.parametrize("yaml", [None, {}, {"nc": 3, "backbone": [], "head": []}])
def test_default_weights_of_no_architecture(yaml: dict | None) -> None:
    with pytest.raises(UserError, match=r"^--weights DEFAULT goes with a --cfg that names an `architecture`"):
        find_weights("DEFAULT", yaml, "mine.yaml")


def test_default_weights_of_an_unknown_architecture() -> None:
    with pytest.raises(UserError, match=r"^mine\.yaml: `architecture` is 'resnet33'"):
        find_weights("DEFAULT", {"architecture": "resnet33"}, "mine.yaml")


# W&B artifacts: another program plays the one that asks W&B


def play(monkeypatch: pytest.MonkeyPatch, answer: str, *files: str) -> None:
    """It writes these files into the folder that it is given, and says that, or `answer`."""
    script = f"""
import json, pathlib, sys
folder = pathlib.Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
[(folder / name).write_text(sys.argv[1]) for name in {list(files)!r}]
print({answer!r} or json.dumps({{"files": [str(folder / name) for name in {list(files)!r}]}}))
"""
    monkeypatch.setattr(releases, "own_python", lambda *names: [sys.executable, "-c", script])


@pytest.mark.parametrize("files", [("epoch3.pt",), ("last.pt", "best.pt"), ("best.pt", "notes.txt")])
def test_an_artifact(files: tuple[str, ...], elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    play(monkeypatch, "", *files)
    path = find_weights("wandb:me/mine/run_1_model:best")
    assert path.name == ("best.pt" if "best.pt" in files else "epoch3.pt")
    assert path.read_text() == "me/mine/run_1_model:best"
    assert path.is_relative_to(elsewhere / "cache")


@pytest.mark.parametrize(
    ("answer", "files", "said"),
    [
        ('{"error": "no such artifact"}', (), r"cannot be fetched \(no such artifact\); check the key and the name"),
        ("", ("a.pt", "b.pt"), "holds 2 .pt files"),
        ("", ("a.txt",), "holds 0 .pt files"),
    ],
)
def test_no_artifact(
    answer: str, files: tuple[str, ...], said: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    play(monkeypatch, answer, *files)
    with pytest.raises(UserError, match=f"^--weights wandb:me/mine/model:best .*{said}"):
        find_weights("wandb:me/mine/model:best")


def test_the_real_program_ends_with_a_sentence(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, and with one where nobody answers. A child of it is asked, which alone imports wandb."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    with pytest.raises(UserError, match="there is no key for W&B: wandb login"):
        find_weights("wandb:me/mine/model:best")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(UserError, match="cannot be fetched"):
        find_weights("wandb:me/mine/model:best")
