"""Remote files, from real servers on loopback: requested once, whole or not at all, with sentences for failures."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data import remote, storage
from data.data_yaml import read_spec
from data.dataset import DataOptions, DataSet, data_source
from data.pack import pack
from tests.data.test_pack import check_equal, loose
from tests.hub_server import serve_hub
from tests.making import noise, write_image, write_yaml
from tests.object_server import ObjectServer, serving_objects
from tests.web import serving
from utils.config.hyperparameters import Hyperparameters
from utils.errors import StorageError, UserError

UTF8_NAME = "café 1.jpg"  # stores have no other names
DETECT = "data.detection:DetectionData"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts follow each other at once, and know nothing of other servers."""
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    storage.forget()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    """A web server for the folder `served`."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    (tmp_path / "served").mkdir()
    with serving_objects(tmp_path / "served") as running:
        yield running


def path_in(server: ObjectServer, name: str) -> str:
    return server.address.replace("://", ":/") + "/" + name


def yaml_of(folder: Path, address: str, train: str = "images/train", val: str = "images/val", **more: Any) -> Path:
    return write_yaml(folder / "remote.yaml", {"path": address, "train": train, "val": val, **more})


def cached_files() -> list[Path]:
    return [path for path in remote.cache_path().rglob("*") if path.is_file()]


# Objects


def test_an_object_is_requested_once_and_again_if_it_changes(server: ObjectServer) -> None:
    file = server.folder / "a.bin"
    file.write_bytes(b"first")
    for _ in range(3):
        assert storage.read_bytes(path_in(server, "a.bin")) == b"first"
        storage.forget()
    assert len(server.gets()) == 1
    file.write_bytes(b"other")
    assert storage.read_bytes(path_in(server, "a.bin")) == b"other"
    assert len(server.gets()) == 2


def read_span(path: str) -> bytes:
    return remote.read_span(path, 1, 3, 77)


def test_a_part_is_requested_once_by_all_processes(server: ObjectServer) -> None:
    (server.folder / "a.bin").write_bytes(b"abcdefgh")
    with multiprocessing.Pool(4) as pool:
        assert pool.map(read_span, [path_in(server, "a.bin")] * 8) == [b"bcd"] * 8
    assert server.gets() == [("/a.bin", "bytes=1-3")]


def test_busy_servers_and_broken_connections_are_tried_again(server: ObjectServer) -> None:
    (server.folder / "a.bin").write_bytes(bytes(10_000))
    server.errors, server.cuts = [503, 500, 429], 2
    assert storage.read_bytes(path_in(server, "a.bin")) == bytes(10_000)
    assert len(server.gets()) == 6


def test_a_truncated_object_is_never_cached(server: ObjectServer) -> None:
    (server.folder / "a.bin").write_bytes(bytes(10_000))
    server.cuts = 100
    with pytest.raises(UserError, match=rf"{server.address}/a.bin cannot be read \(.+\); check the address"):
        storage.read_bytes(path_in(server, "a.bin"))
    assert len(server.gets()) == remote.ATTEMPTS
    assert cached_files() == []
    server.cuts = 0
    assert len(storage.read_bytes(path_in(server, "a.bin"))) == 10_000


def test_a_damaged_cache_is_replaced(server: ObjectServer) -> None:
    (server.folder / "a.bin").write_bytes(b"content")
    storage.read_bytes(path_in(server, "a.bin"))
    (file,) = cached_files()
    status = file.stat()
    file.write_bytes(b"cont")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert storage.read_bytes(path_in(server, "a.bin")) == b"content"


@pytest.mark.parametrize(("status", "requests"), [(403, 1), (503, remote.ATTEMPTS)])
def test_a_refusal_names_the_object_without_secrets(server: ObjectServer, status: int, requests: int) -> None:
    (server.folder / "a.bin").write_bytes(b"content")
    server.errors = [status] * remote.ATTEMPTS
    address = server.address.replace("://", "://me:secret@") + "/a.bin"
    with pytest.raises(UserError, match=rf"{server.address}/a.bin cannot be read \(HTTP status {status}\)"):
        storage.read_bytes(address)
    assert len(server.gets()) == requests


def test_a_failure_is_no_absence(tmp_path: Path, server: ObjectServer) -> None:
    data = loose(server.folder, UTF8_NAME)
    yaml = yaml_of(tmp_path, server.address, names=["disc", "bar"])
    server.errors, server.errors_to_head = [503, 503, *[0] * 6] * 50, True
    check_equal(data, yaml, "detect", Hyperparameters())  # a label file that fails once is not background
    server.errors = [503] * 1000
    storage.forget()
    with pytest.raises(UserError, match=r"cannot be read \(HTTP status 503\)"):
        storage.read_bytes(path_in(server, "images/train/0/0.png"))


@pytest.mark.parametrize(
    "address",
    [
        *(
            "nosuch://bucket/a",
            "memory://a",
            "ftp://127.0.0.1/a",
            "sftp://127.0.0.1/a",
            "github://a:b@c/d",
            "data://a,b",
        ),
        *("http://127.0.0.1:9/a::b", "file:///etc/passwd::zip://a"),
    ],
)
def test_other_kinds_of_addresses_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has an unsupported URL scheme; give a path, or"):
        storage.read_bytes(address)
    with pytest.raises(UserError, match=r"has an unsupported URL scheme; give a path, or"):
        data_source(str(yaml_of(tmp_path, address, names=["disc"])), DETECT).open(64, 32, DataOptions()).split("train")


@pytest.mark.parametrize("entry", ["reference://::/{}", "reference:///{}", "filecache::file://{}"])
def test_a_data_yaml_runs_no_code(entry: str, tmp_path: Path) -> None:
    """Descriptions of fsspec's references are templates of Jinja, which may run commands."""
    mark = tmp_path / "mark"
    template = "{{ cycler.__init__.__globals__.os.system('touch MARK') }}".replace("MARK", str(mark))
    description = {"version": 1, "templates": {"u": template}, "refs": {"a.jpg": ["{{u}}"]}, "gen": []}
    (tmp_path / "x.json").write_text(json.dumps(description))
    yaml = write_yaml(tmp_path / "my.yaml", {"train": entry.format(tmp_path / "x.json"), "val": "b", "names": ["a"]})
    with pytest.raises(UserError):
        data_source(str(yaml), DETECT).open(64, 32, DataOptions()).split("train")
    assert not mark.exists()


def test_no_server(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    yaml = yaml_of(tmp_path, "http://127.0.0.1:9/pack", "train", "val")
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/pack/\S+ cannot be read \(ClientConnector"):
        data_source(str(yaml), DETECT).spec.images("train")


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html")
    handler.end_headers()
    with suppress(OSError):
        while handler.command == "GET":
            handler.wfile.write(b'<a href="1.png">1</a>' * 100)
            time.sleep(0.01)


def test_a_listing_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.setattr(remote, "LISTING_SECONDS", 0.5)
    with serving() as server:
        server.answers = {f"/set/{name}": endless for name in ("", "train", "train/")}
        yaml = write_yaml(tmp_path / "my.yaml", {"path": f"{server.address}/set", "train": "train", "names": ["a"]})
        with pytest.raises(UserError, match=r"/set/train cannot be listed within 0.5 s"):
            read_spec(yaml).images("train")


def test_an_absent_object(server: ObjectServer) -> None:
    requests = []
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            storage.read_bytes(path_in(server, "none.txt"))
        requests.append(len(server.asked))
    assert requests[0] == requests[1]


def test_a_server_without_parts(server: ObjectServer) -> None:
    (server.folder / "a.bin").write_bytes(b"abcdefgh")
    server.ranges = False
    with pytest.raises(UserError, match="does not answer requests for a part"):
        read_span(path_in(server, "a.bin"))


def test_a_full_disk_stops_the_cache_only(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (server.folder / "a.bin").write_bytes(b"content")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100, total=1000))
    for _ in range(2):
        with pytest.warns(UserWarning, match="remote files are not kept .* 10% of the disk"):
            assert storage.read_bytes(path_in(server, "a.bin")) == b"content"
    assert cached_files() == []


@pytest.mark.parametrize(
    ("address", "module", "message"),
    [
        ("s3://bucket/a", "s3fs", "pip install s3fs"),
        ("gs://bucket/a", "gcsfs", "pip install gcsfs"),
        ("https://127.0.0.1:9/a", "aiohttp", "pip install aiohttp"),
    ],
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, address: str, module: str, message: str) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, module, None)
    for protocol in ("s3", "gs", "https"):
        monkeypatch.delitem(_registry, protocol, raising=False)
    with pytest.raises(UserError, match=message):
        storage.read_bytes(address)


# Data sets


def read_epoch(data: DataSet[Any], workers: int) -> None:
    split = data.split("train")
    batches = data.evaluation_batches(split, 4, square=False)
    assert sum(len(batch.images) for batch in data.evaluation_loader(split, batches)) == len(split.images)


@pytest.mark.parametrize("workers", [0, 2])
def test_loose_files_are_requested_once(tmp_path: Path, server: ObjectServer, workers: int) -> None:
    data = loose(server.folder, UTF8_NAME)
    address = yaml_of(tmp_path, server.address, names=["disc", "bar"])
    check_equal(data, address, "detect", Hyperparameters())
    for _ in range(2):
        read_epoch(data_source(str(address), DETECT).open(32, 32, DataOptions(workers=workers)), workers)
    paths = [path for path, _ in server.gets() if (server.folder / path[1:]).is_file()]
    assert len(set(paths)) == len(paths) == 13 + 11  # images and label files


def test_shards_are_read_by_parts(tmp_path: Path, server: ObjectServer) -> None:
    data = loose(tmp_path / "loose", UTF8_NAME)
    pack(str(data), str(server.folder / "pack"), "8K")
    address = yaml_of(tmp_path, f"{server.address}/pack", "train", "val")
    check_equal(data, address, "detect", Hyperparameters())
    spans = [(path, span) for path, span in server.gets() if path.endswith(".tar")]
    assert all(span for _, span in spans)
    assert len(set(spans)) == len(spans) == 12
    assert not [path for path, _ in server.gets() if path.endswith((".png", ".txt"))]


def test_lists_and_annotation_files(tmp_path: Path, server: ObjectServer) -> None:
    data = loose(server.folder, UTF8_NAME)
    listed = [f"./images/train/0/{k}.png" for k in (0, 2, 4)]
    (server.folder / "train.txt").write_text("\n".join([*listed, f"{server.address}/images/val/a.jpg"]))
    for yaml in (data, yaml_of(tmp_path, server.address)):
        spec = data_source(str(write_yaml(yaml, {**_content(yaml), "train": "train.txt", "names": ["a", "b"]})), DETECT)
        expected = ["0.png", "2.png", "4.png", "a.jpg"]
        assert sorted(path.name for path in spec.spec.images("train")) == expected


def _content(yaml: Path) -> dict[str, Any]:
    return {"path": next(line[6:] for line in yaml.read_text().splitlines() if line.startswith("path: "))}


def test_an_absent_folder_is_named_by_its_address(tmp_path: Path, server: ObjectServer) -> None:
    address = yaml_of(tmp_path, server.address, names=["disc"])
    with pytest.raises(UserError, match=rf"does not exist; looked for {server.address}/images/train"):
        data_source(str(address), DETECT).spec.images("train")


# The Hub


def test_a_pack_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    data = loose(tmp_path / "loose", UTF8_NAME)
    pack(str(data), str(tmp_path / "pack"), "8K")
    with serve_hub() as hub:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.address})
        hub.files["me/data"] = {path.name: path.read_bytes() for path in (tmp_path / "pack").iterdir()}
        check_equal(data, yaml_of(tmp_path, "hf://datasets/me/data", "train", "val"), "detect", Hyperparameters())
        assert sum(request.endswith(".tar") for request in hub.asked) == 12  # one for each image


# S3


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a bucket on a server on loopback."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
        running.stop()


def test_packs_and_loose_files_in_s3(tmp_path: Path, s3: str) -> None:
    data = loose(tmp_path / "loose", UTF8_NAME)
    for _ in range(2):  # the second finds all shards
        assert f"`path: {s3}/pack`" in pack(str(data), f"{s3}/pack", "8K")[-1]
    check_equal(data, yaml_of(tmp_path, f"{s3}/pack", "train", "val"), "segment", Hyperparameters())
    import fsspec

    fsspec.filesystem("s3").put(str(tmp_path / "loose"), f"{s3}/loose", recursive=True)
    files = yaml_of(tmp_path, f"{s3}/loose", names=["disc", "bar"])
    check_equal(data, files, "detect", Hyperparameters())
    read_epoch(data_source(str(files), DETECT).open(32, 32, DataOptions(workers=2)), 2)


def test_a_changed_object_in_s3_changes_the_labels(tmp_path: Path, s3: str) -> None:
    import fsspec

    store, image = fsspec.filesystem("s3"), write_image(tmp_path / "a.png", noise(20, 20))
    store.put_file(str(image), f"{s3}/changed/images/a.png")
    yaml = yaml_of(tmp_path, f"{s3}/changed", "images", "images", names=["disc"])
    for rows in ("", "0 .5 .5 .1 .1", "0 .5 .5 .2 .2\n0 .5 .5 .3 .3"):
        if rows:
            store.pipe_file(f"{s3}/changed/labels/a.txt", rows.encode())
        labels = data_source(str(yaml), DETECT).open(32, 32, DataOptions()).split("val").labels
        assert labels.counts.tolist() == [len(rows.splitlines())]


def test_a_bucket_that_does_not_exist(tmp_path: Path, s3: str) -> None:
    with pytest.raises(UserError, match=r"s3://nowhere/pack/\S+ cannot be written"):
        pack(str(loose(tmp_path / "loose", UTF8_NAME)), "s3://nowhere/pack")


def test_an_absent_pack(tmp_path: Path, s3: str) -> None:
    yaml = yaml_of(tmp_path, f"{s3}/none", "train", "val")
    with pytest.raises(UserError, match=f"`train: train` does not exist; looked for {s3}/none/train"):
        data_source(str(yaml), DETECT).names()


def test_class_folders_in_s3(tmp_path: Path, s3: str) -> None:
    import fsspec

    from models.tasks.classification.task import ClassificationRecipe

    for k in range(8):
        write_image(tmp_path / f"loose/{('train', 'val')[k % 2]}/{'ab'[k // 4]}/{k}.png", noise(40, 40, k))
    data = write_yaml(tmp_path / "loose/my.yaml", {"path": ".", "train": "train", "val": "val"})
    fsspec.filesystem("s3").put(str(tmp_path / "loose"), f"{s3}/classes", recursive=True)
    check_equal(data, yaml_of(tmp_path, f"{s3}/classes", "train", "val"), "classify", ClassificationRecipe())


def test_a_broken_transfer_is_an_error_and_no_bad_image(tmp_path: Path, server: ObjectServer) -> None:
    """A training must not go on without an image that is there."""
    yaml = yaml_of(tmp_path, server.address, names=["disc", "bar"])
    loose(server.folder, UTF8_NAME)
    data = data_source(str(yaml), DETECT).open(64, 32, DataOptions())
    server.cuts = 10_000
    with pytest.raises(StorageError, match=rf"^{server.address}/images/train/\S+ cannot be read \(.+\); check the"):
        data.split("train")
