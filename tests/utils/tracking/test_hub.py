"""Weights from the Hub and results of runs to it, with a Hub on loopback, and without one."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants, file_download

from tests.hub_server import READ_TOKEN, WRITE_TOKEN, Hub, serve_hub
from utils.background import Background
from utils.errors import UserError
from utils.tracking import hub as module
from utils.tracking.hub import fetch, login_problem, main, model_card, push, push_run, results


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
        ("me/mine", ("a.pt", "b.pt"), "has no best.pt and 2 weight files; it holds a.pt, b.pt: name a file, as in hf:"),
        ("me/mine", ("x.bin",), "has no best.pt and 0 weight files; it holds x.bin: name a file"),
        ("me/mine", (), "has no best.pt and 0 weight files; it is empty"),
        ("me/mine/c.pt", ("a.pt", "README.md"), "has no file c.pt; it holds a.pt: name a file"),
        ("me/mine", MANY, "has no best.pt and 12 weight files; it holds 00.pt, .*, 09.pt and 2 more: name"),
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


ASKING = "cannot be downloaded: "


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("me/none", "", "it does not exist, or needs a token: check the name, or log in with `hf auth login`, or set "),
        ("me/secret", "", "it does not exist, or needs a token"),
        ("me/none", READ_TOKEN, "there is no such repository, revision or file, or your token may not see it"),
        ("me/gated", READ_TOKEN, r"its owner must grant you access: request it at http://127.\S+/me/gated, and log in"),
        ("me/mine", "hf_wrong", r"the Hub refuses the token \(401\), which is invalid or lacks a permission: log in"),
        ("me/mine@v2", "", "there is no such repository, revision or file"),
        ("me/--", "", r"the transfer failed \("),
    ],
)
def test_refused_downloads(name: str, token: str, message: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {repository: {"best.pt": b"x"} for repository in ("me/mine", "me/secret", "me/gated")}
    hub.private, hub.gated = {"me/secret"}, {"me/gated"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=rf"^--weights hf:{name} cannot be downloaded: {message}") as caught:
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
        (nobody_answers, r"the transfer failed \(.*\); check the network, http://127.0.0.1:9 and the disk, and try"),
        (offline, "HF_HUB_OFFLINE is set, and the cache does not hold it; unset it once, or give the path of a file$"),
        (silent, r"the transfer failed \(.*timed out.*\); check the network"),
        (broken, r"the transfer failed \(.*503.*\); check the network"),
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
        with pytest.raises(UserError, match=rf"^--weights hf:{name} cannot be downloaded: {message}"):
            fetch(name)


# To the Hub


@pytest.fixture
def run(home: Path) -> Path:
    """Make the folder of a run."""
    folder = home / "runs" / "exp"
    files = ("weights/best.pt", "weights/last.pt", "results.csv", "results.png", "val_batch0_pred.jpg", "labels.csv")
    for name in (*files, "checkpoint/00000001-0.pt", "weights/best.onnx", "weights/best_openvino_model/best.xml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "weights" / "best.torchscript").write_text("of an earlier run")
    os.utime(folder / "weights" / "best.torchscript", (1, 1))
    return folder


UPLOADED = {
    *("best.pt", "best.onnx", "best_openvino_model/best.xml"),
    *("results.csv", "results.png", "val_batch0_pred.jpg", "README.md"),
}


def card(licence: str = "unknown", command: str = "python train.py", **values: float) -> str:
    kind = {"data": "my shapes", "tag": "object-detection", "licence": licence, "command": command}
    return model_card("me/mine", **kind, values=values, names=["a", "ü"])


CARD = card(precision=0.5)


def test_the_results_of_a_run(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository is private; a second push adds a commit."""
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    (run / "model_card.md").write_text(CARD)
    assert push(run, "me/mine") == f"{hub.address}/me/mine"
    assert hub.files["me/mine"].keys() == UPLOADED
    assert hub.files["me/mine"]["best.onnx"] == b"weights/best.onnx"
    assert hub.files["me/mine"]["README.md"] == CARD.encode()
    assert hub.private == {"me/mine"}
    push(run, "me/mine")
    assert [commit["summary"] for commit in hub.commits] == ["Results of exp", "Results of exp"]
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert fetch("me/mine").read_bytes() == b"weights/best.pt"


@pytest.mark.parametrize(("own", "expected"), [("unknown", "mit"), ("agpl-3.0", "agpl-3.0")])
def test_a_licence_on_the_hub_is_kept(
    own: str, expected: str, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the run has one."""
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    hub.files["me/mine"] = {"README.md": b"---\nlicense: mit\n---\nmine"}
    (run / "model_card.md").write_text(CARD.replace("license: unknown", f"license: {own}"))
    push(run, "me/mine")
    assert hub.files["me/mine"]["README.md"].decode() == CARD.replace("license: unknown", f"license: {expected}")


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN"),
        (READ_TOKEN, r"me/mine cannot be written to: the Hub refuses the token \(403\)"),
        ("hf_wrong", r"me/mine cannot be written to: the Hub refuses the token \(401\)"),
    ],
)
def test_refused_uploads(token: str, message: str, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=f"^{message}") as caught:
        push(run, "me/mine")
    assert "hf_" not in str(caught.value)
    assert hub.files == {}


@pytest.mark.parametrize("text", [WRITE_TOKEN, repr(f"Bearer {WRITE_TOKEN}".encode()), "Bearer hf_\\x01'"])
def test_the_token_is_not_shown(text: str, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(f"Illegal header value {text}")

    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(UserError, match=r"the transfer failed \(Illegal header value .*\.\.\.") as caught:
        push(run, "me/mine")
    assert "hf_" not in str(caught.value)


def test_a_push_offline(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    assert login_problem() == ""
    offline(hub, monkeypatch)
    with pytest.raises(UserError, match=r"^HF_HUB_OFFLINE is set; unset it$"):
        push(run, "me/mine")
    assert hub.asked == []


def test_a_token_that_cannot_be_read(home: Path) -> None:
    (home / "hf" / "token").mkdir(parents=True)
    assert login_problem().startswith("there is no token for the Hub")


def test_folders_without_weights(home: Path) -> None:
    with pytest.raises(UserError, match=r"runs/none has no weights/best.pt; name the folder of a run of train.py$"):
        results(home / "runs" / "none")


def test_the_command(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hub", str(run), "me/mine"])
    with pytest.raises(SystemExit, match=r"^error: there is no token for the Hub"):
        main()
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    main()
    assert capsys.readouterr().out == f"{hub.address}/me/mine\n"


def test_a_push_at_the_end_of_a_run(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is one warning that names the command for later."""
    warning = "warning: the results are not on the Hub: {}; to push them later: "
    command = f"python -m utils.tracking.hub {run} me/mine"
    problem = "there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN"
    assert push_run(run, "me/mine", CARD) == warning.format(problem) + command
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    assert push_run(run, "me/mine", CARD) == f"pushed to {hub.address}/me/mine"
    assert hub.files["me/mine"].keys() == UPLOADED
    problem = "No such file or directory"
    assert push_run(run / "none", "me/mine", CARD).startswith(warning.format(problem))
    ended = threading.Event()
    monkeypatch.setattr(module, "push", lambda *_: ended.wait(60))
    monkeypatch.setattr(module, "PUSH_SECONDS", 0.01)
    assert push_run(run, "me/mine", CARD) == warning.format("the upload has not ended after 0 s") + command
    assert Background.abandoned  # this process would not wait for it at its exit
    ended.set()


def test_a_push_shows_no_progress_bars(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    assert push_run(run, "me/mine", CARD).startswith("pushed to ")
    assert "".join(capfd.readouterr()) == ""


def test_the_model_card() -> None:
    command = shlex.join(["python", "train.py", "--data", "my shapes.yaml"])
    values = {"precision": 0.123456789, "mAP_0.5": float("nan")}
    written = card("agpl-3.0", command, **values)
    _, head, text = written.split("---\n", 2)
    metadata = SimpleNamespace(**yaml.safe_load(head.replace("model-index", "index")))
    assert (metadata.library_name, metadata.license) == ("lockstep", "agpl-3.0")
    assert (metadata.pipeline_tag, metadata.tags) == ("object-detection", ["object-detection", "lockstep"])
    (index,) = metadata.index
    (result,) = index["results"]
    assert (index["name"], result["dataset"]["name"], result["task"]) == (
        "mine",
        "my shapes",
        {"type": "object-detection"},
    )
    assert result["metrics"] == [{"type": "precision", "name": "precision", "value": 0.12346}]
    assert "| precision | 0.12346 |\n" in text
    assert "2 classes: a, ü." in text
    assert f"```bash\n{command}\n```" in text
    assert "python detect.py --weights hf:me/mine --source photos" in text
    assert huggingface_hub.ModelCard(written).data.license == "agpl-3.0"
