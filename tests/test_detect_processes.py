"""detect.py on several processes and after a kill: the same bytes; and its results as a data set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

import detect
import train
import val
from data.data_yaml import read_data
from data.labels import load_labels
from models.yolo import build_model
from tests.making import contents, tiny_detector, write_yaml
from tests.processes import forking
from utils.checkpoint import serialise, weights_content
from utils.errors import UserError
from utils.files import ROOT
from utils.python_api import command_words

NAMES = {0: "disc", 1: "square"}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random weights that detect something, and images of two shapes in two folders, with equal stems and a bad one."""
    torch.manual_seed(0)
    model = build_model({**tiny_detector(), "nc": 2})
    for level in model.head.m:
        nn.init.normal_(level.weight)
        nn.init.normal_(level.bias)
    folder = tmp_path_factory.mktemp("detect")
    content = weights_content(model, {**model.yaml, "task": "detect"}, NAMES, {"imgsz": 64})
    (folder / "last.pt").write_bytes(serialise(content))
    generator = np.random.default_rng(0)
    for number in range(24):
        image = generator.integers(0, 255, (6, 8, 3)).astype(np.uint8)
        file = folder / "ab"[number % 2] / f"{number // 2:03}.jpg"
        file.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(file), cv2.resize(image, (80, (64, 64, 40)[number % 3]), interpolation=cv2.INTER_NEAREST))
    (folder / "a" / "004b.jpg").write_bytes(b"no image")
    cv2.imwrite(str(folder / "b" / "black.png"), np.zeros((64, 64, 3), np.uint8))
    saved = dict.fromkeys(("save_txt", "save_csv", "save_json", "save_crop", "quiet"), True)
    return {
        "weights": folder / "last.pt",
        "source": [folder / "a", folder / "b"],
        "device": "cpu",
        "conf": 0.2,
        "max_det": 5,
        **saved,
    }


def files(folder: Path) -> dict[str, Any]:
    return {name: content for name, content in contents(folder).items() if name not in ("settings.yaml", ".lock")}


@pytest.fixture(scope="module")
def runs(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `exp` of one process, in batches of 3."""
    result = detect.run(**flags, batch_size=3, project=tmp_path_factory.mktemp("runs"))
    return Path(result["folder"]).parent


def test_several_processes_write_the_same_bytes(flags: dict[str, Any], runs: Path) -> None:
    """Batches of mixed shapes, and single images; a bad image is named."""
    with forking(printing=True):
        result = detect.run(**flags, batch_size=3, project=runs, name="two", processes=2)
    assert (result["images"], "004b.jpg" in result["problems"][0]) == (25, True)
    assert files(runs / "two") == files(runs / "exp")
    with forking(printing=True), pytest.raises(UserError, match="exit code 1"):
        detect.run(**{**flags, "save_json": False}, view_img=True, processes=2, project=runs)


def test_a_second_run_into_a_folder_leaves_no_labels_of_the_first(flags: dict[str, Any], tmp_path: Path) -> None:
    """Of detect.py, where pictures without objects then are background, and of val.py."""
    source, folders = flags["source"][1], [tmp_path / name / "exp" / "labels" for name in ("detect", "val")]
    data = write_yaml(tmp_path / "data.yaml", {"train": str(source), "val": str(source), "names": NAMES})
    how = {"weights": flags["weights"], "save_txt": True, "exist_ok": True, "quiet": True, "device": "cpu"}
    for conf, written in ((0.2, True), (0.9999, False)):
        detect.run(**how, source=source, conf=conf, project=tmp_path / "detect")
        val.run(**how, data=data, imgsz=64, workers=0, conf=conf, project=tmp_path / "val")
        assert [any(folder.iterdir()) for folder in folders] == [written, written]
    assert len(read_data(str(tmp_path / "detect" / "exp"))._whole_listing("train").images) == 13
    with pytest.raises(UserError, match="is a run folder"):  # its tables list labels and predictions
        read_data(str(tmp_path / "val" / "exp"))


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 4])
def test_two_and_three_processes(flags: dict[str, Any], tmp_path: Path, batch_size: int) -> None:
    for processes in (1, 2, 3):
        detect.run(**flags, batch_size=batch_size, project=tmp_path, name=f"p{processes}", processes=processes)
    assert files(tmp_path / "p1") == files(tmp_path / "p2") == files(tmp_path / "p3")


def test_a_killed_run_is_resumed(flags: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    """On another number of processes, without the images that are done."""
    argv = command_words({**flags, "batch_size": 3, "project": tmp_path, "processes": 2})
    command, environment = [sys.executable, "detect.py", *argv], {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    progress = tmp_path / "exp" / "progress"
    while not any(file.stat().st_size for file in progress.glob("*.jsonl")):
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for journal in progress.glob("*.jsonl"):
        journal.write_text(2 * journal.read_text() + "[3, [[0, ")  # a line that is cut
    with pytest.raises(UserError, match="takes --conf-thres from "):
        detect.run(resume=tmp_path / "exp", conf=0.3)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "exp" / "labels").iterdir()}
    assert detect.run(project=tmp_path, resume="newest", device="cpu")["images"] == 25
    assert sum(path.stat().st_mtime_ns == before for path, before in done.items()) >= 1
    assert files(tmp_path / "exp") == files(runs / "exp")
    with pytest.raises(UserError, match="no unfinished run"):
        detect.run(resume=tmp_path / "exp")


def test_ids_of_annotations(flags: dict[str, Any], tmp_path: Path) -> None:
    images = [{"id": 100 + number, "file_name": f"{number:03}.jpg"} for number in range(12)]
    classes, coco = [{"id": 7, "name": "square"}, {"id": 9, "name": "disc"}], tmp_path / "coco.json"
    coco.write_text(json.dumps({"images": images, "categories": classes, "annotations": []}))
    detect.run(**{**flags, "source": flags["source"][1]}, annotations=coco, project=tmp_path)
    rows = json.loads((tmp_path / "exp" / "predictions.json").read_text())
    assert {row["image_id"] for row in rows} <= set(range(100, 112))
    assert {row["category_id"] for row in rows} == {9}
    assert read_data(str(tmp_path / "exp")).names == NAMES  # by the classes of the labels, not by id


def test_what_is_labelled_trains(flags: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    """Label files, with and without confidences, and COCO's results; the originals are trained on, not the drawings."""
    detect.run(**flags, save_conf=True, batch_size=3, nosave=True, project=tmp_path)
    images = sorted(path for source in flags["source"] for path in source.iterdir() if path.name != "004b.jpg")
    for data in (runs / "exp", tmp_path / "exp", tmp_path / "exp" / "predictions.json"):
        spec = read_data(str(data))
        listing = spec._whole_listing("train")
        assert (listing.images, spec.names) == (images, NAMES)
        labels = load_labels(listing.images, "", 0, annotated=listing.annotated)
        for number, image in enumerate(images):
            stem = f"{image.stem}-2" if image.parent.name == "b" and image.stem != "black" else image.stem
            file = data / "labels" / f"{stem}.txt" if data.is_dir() else runs / "exp" / "labels" / f"{stem}.txt"
            lines = file.read_text().splitlines() if file.exists() else []
            written = np.array([[*map(float, line.split()[:5])] for line in lines], np.float32)
            np.testing.assert_allclose(
                labels.image_rows(number), written.reshape(-1, 5), rtol=0, atol=0 if data.is_dir() else 1e-4
            )
    how: dict[str, Any] = {
        "cfg": write_yaml(tmp_path / "tiny.yaml", tiny_detector()),
        "weights": "",
        "epochs": 1,
        "imgsz": 64,
        "workers": 0,
        "device": "cpu",
    }
    for data in (tmp_path / "exp", tmp_path / "exp" / "predictions.json"):
        assert "fitness" in train.run(data=data, batch_size=4, noplots=True, project=tmp_path / "train", **how)
    file = tmp_path / "exp" / "labels" / "000.txt"
    file.write_text(f"{file.read_text()}2 0.5 0.5 0.2 0.2\n")
    with pytest.raises(UserError, match=f"{file}, line {len(file.read_text().splitlines())} has class 2"):
        train.run(data=tmp_path / "exp", batch_size=4, noplots=True, project=tmp_path / "train", **how)
