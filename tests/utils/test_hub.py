"""Weights from the Hub, with a Hub on loopback, and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from tests.hub_server import READ_TOKEN, Hub, serve_hub
from utils import hub as module
from utils.errors import UserError
from utils.hub import fetch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache, without a token. A process that is started has them too."""
    variables = {"HF_HOME": "hf", "HF_HUB_CACHE": "hf/hub", "HF_TOKEN_PATH": "hf/token", "XDG_CACHE_HOME": "cache"}
    for name, path in variables.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def use(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the address of the Hub, which huggingface_hub reads when it is imported."""
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)  # of older versions


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        use(hub.address, monkeypatch)
        yield hub


# From the Hub


def test_weights_are_downloaded_once(hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files["me/mine"] = {"best.pt": b"weights", "last.pt": b"others", "README.md": b""}
    hub.tags = ["pytorch", "license:agpl-3.0"]
    path = fetch("me/mine")
    assert (path.name, path.read_bytes()) == ("best.pt", b"weights")
    assert path.is_relative_to(home / "hf" / "hub")
    assert fetch("//me/mine/best.pt") == path
    assert fetch(f"me/mine@{hub.sha('me/mine')}") == path
    assert [line for line in hub.asked if line.startswith("GET /me/")] == ["GET /me/mine/resolve/main/best.pt"]
    assert capsys.readouterr().err.splitlines()[0] == "downloading hf:me/mine/best.pt (licence: agpl-3.0)"
    assert list((home / "cache").rglob("*.lock")) == []


def test_a_new_version_replaces_the_cached_one(hub: Hub) -> None:
    hub.files["me/mine"] = {"best.pt": b"1"}
    assert fetch("me/mine").read_bytes() == b"1"
    hub.files["me/mine"] = {"best.pt": b"2"}
    assert fetch("me/mine").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("name", "files", "chosen"),
    [
        ("me/mine", ("a.pt", "README.md"), "a.pt"),
        ("me/mine", ("model.safetensors", "config.json"), "model.safetensors"),
        ("me/mine", ("best.pt", "best.safetensors"), "best.pt"),
        ("me/mine/deep/b.pt", ("a.pt", "deep/b.pt"), "deep/b.pt"),
        ("me/mine/best.onnx", ("best.pt", "best.onnx"), "best.onnx"),
    ],
)
def test_the_file_of_a_repository(name: str, files: tuple[str, ...], chosen: str, hub: Hub) -> None:
    hub.files["me/mine"] = {file: file.encode() for file in files}
    assert fetch(name).read_bytes() == chosen.encode()


MANY = [f"{number:02}.pt" for number in range(12)]


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("me/mine", ("a.pt", "b.pt"), "has no best.pt; it holds a.pt, b.pt: "),
        ("me/mine", ("x.bin",), "has no best.pt; it holds x.bin: "),
        ("me/mine", (), "has no best.pt; it holds no files"),
        ("me/mine/c.pt", ("a.pt", "README.md"), "has no c.pt; it holds a.pt: "),
        ("me/mine", MANY, "has no best.pt; it holds 00.pt, .*, 09.pt and 2 more: "),
    ],
)
def test_repositories_without_that_file(name: str, files: tuple[str, ...], message: str, hub: Hub) -> None:
    hub.files["me/mine"] = dict.fromkeys(files, b"x")
    with pytest.raises(UserError, match=rf"^--weights hf:{name} {message}"):
        fetch(name)


@pytest.mark.parametrize("name", ["mine", "", "/", "me/", "me mine", "https://huggingface.co/me/mine"])
def test_names_of_no_repository(name: str) -> None:
    with pytest.raises(UserError, match=r"is not of the form hf:owner/name or hf:owner/name/file.pt$"):
        fetch(name)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        *(("me/none", ""), ("me/secret", ""), ("me/none", READ_TOKEN), ("me/gated", READ_TOKEN)),
        *(("me/mine", "hf_wrong"), ("me/mine", "hf_\x01"), ("me/mine@v2", ""), ("me/--", "")),
    ],
)
def test_refused_downloads(name: str, token: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, without the token."""
    hub.files = {repository: {"best.pt": b"x"} for repository in ("me/mine", "me/secret", "me/gated")}
    hub.private, hub.gated = {"me/secret"}, {"me/gated"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(
        UserError, match=rf"^--weights hf:{name} cannot be downloaded .*{name.partition('@')[0]}"
    ) as caught:
        fetch(name)
    assert "\n" not in str(caught.value)
    assert "hf_" not in str(caught.value)


def test_private_weights(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["me/secret"], hub.private = {"best.pt": b"x"}, {"me/secret"}
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert fetch("me/secret").read_bytes() == b"x"


def nobody_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", monkeypatch)


def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_answers(hub, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def silent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERVER_TIMEOUT_SECONDS", 0.2)
    hub.silent = True


def broken(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.error = 503


@pytest.mark.parametrize(
    ("break_hub", "message"),
    [
        (nobody_answers, "http://127.0.0.1:9"),
        (offline, "offline"),
        (silent, "timed out"),
        (broken, "503"),
    ],
)
def test_a_hub_that_cannot_be_reached(
    break_hub: Callable[[Hub, pytest.MonkeyPatch], None], message: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached weights are used."""
    hub.files["me/mine"] = {"best.pt": b"x", "last.pt": b"y"}
    path, commit = fetch("me/mine"), hub.sha("me/mine")
    break_hub(hub, monkeypatch)
    assert fetch("me/mine") == fetch("me/mine/best.pt") == fetch(f"me/mine@{commit}") == path
    for name in ("me/mine/last.pt", "me/mine@v2", "me/other"):
        with pytest.raises(UserError, match=rf"^--weights hf:{name} cannot be downloaded .*{message}"):
            fetch(name)
