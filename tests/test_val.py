"""val.py: YOLOv5's own scores, ensembles, speed, COCO's results."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from data.builtin import NAMES
from models.ensemble import Members
from models.tasks import TASKS
from models.tasks.detect import DetectionTask
from models.weights import Weights
from tests.conftest import OnProcesses, RunScript
from tests.curves import untouched
from tests.making import contents, noise, tiny_detector, write_image, write_yaml
from tests.processes import forking
from tests.whole_runs import opened_files
from utils.checkpoint import serialise, weights_content
from utils.config.flags import ValOptions
from utils.config.hyperparameters import Hyperparameters
from utils.config.parser import given_flags
from utils.errors import UserError
from utils.files import read_yaml
from val import main, run

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def coco128(shared: Path, tmp_path: Path) -> Path:
    """A data YAML for the 128 photos."""
    names = yaml.safe_load((ROOT / "data" / "coco128.yaml").read_text())["names"]
    file = tmp_path / "photos.yaml"
    content = {"path": str(shared / "data" / "coco128"), "train": "images/train", "val": "images/train", "names": names}
    file.write_text(yaml.safe_dump(content))
    return file


def test_official_weights(coco128: Path, shared: Path, tmp_path: Path, run_script: RunScript) -> None:
    """The official yolov5n on coco128 at 640 pixels, compared with YOLOv5's own val.py."""
    given = ("--data", str(coco128), "--weights", str(shared / "weights" / "yolov5n.pt"), "--project", str(tmp_path))
    exact = shared / "data" / "coco128" / "annotations" / "instances_train2017.json"
    flags = ("--device", "cpu", "--save-txt", "--save-conf", "--save-json", "--annotations", str(exact), "--quiet")
    with untouched(shared / "data" / "coco128"):
        printed = run_script("val.py", *given, *flags)
    overall = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["all"])
    assert overall[1:3] == ["128", "929"]
    assert [float(overall[5]), float(overall[6])] == pytest.approx([0.5597, 0.3608], abs=0.0035)
    texts = list((tmp_path / "exp" / "labels").glob("*.txt"))
    assert len(texts) == 128
    assert all(len(line.split()) == 6 for text in texts for line in text.read_text().splitlines())
    classes = read_csv(tmp_path / "exp" / "classes.csv")
    labelled = [row for row in classes if row["AP50"]]
    assert (len(classes), len(labelled)) == (80, 71)
    for column, value in zip(("precision", "recall", "AP50", "AP50-95"), overall[3:], strict=True):
        assert np.mean([float(row[column]) for row in labelled]) == pytest.approx(float(value), abs=6e-4)
    numbers = [float(row["value"]) for row in read_csv(tmp_path / "exp" / "coco.csv")]
    assert len(numbers) == 12
    assert numbers[:3] == pytest.approx([0.365, 0.567, 0.363], abs=0.003)  # pycocotools', of YOLOv5's own detections
    results = json.loads((tmp_path / "exp" / "yolov5n_predictions.json").read_text())
    assert len(results) == sum(len(text.read_text().splitlines()) for text in texts)
    assert {type(row["image_id"]) for row in results} == {int}
    assert sum(line.split()[0] in ("AP", "AR") for line in printed.splitlines()) == 12  # with --quiet too


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def weights(file: Path, yaml: dict[str, Any], names: Mapping[int, str], seed: int = 0, **settings: int) -> str:
    """Write random weights that detect something everywhere; return their path."""
    torch.manual_seed(seed)
    model = DetectionTask(names, Hyperparameters()).build_model(yaml, 64)
    with torch.no_grad():
        for convolve in model.head.m:
            convolve.bias.view(model.head.na, -1)[:, 4:] = 0.5
    file.write_bytes(serialise(weights_content(model, {**model.yaml, "task": "detect"}, names, settings)))
    return str(file)


@pytest.fixture
def two_models(tmp_path: Path) -> tuple[str, str]:
    """Weight files of two detectors, one of strides 4 and 8, and one of stride 16 with other anchors."""
    names = dict(enumerate(NAMES))
    tiny = tiny_detector()
    rows = [*tiny["backbone"], [-1, 1, "Conv", [12, 3, 2]]]
    coarse = {
        "nc": len(names), "anchors": [[20, 20]], "backbone": rows, "head": [[[3], 1, "Detect", ["nc", "anchors"]]],
    }  # fmt: skip
    fine = {**tiny, "nc": len(names)}
    return weights(tmp_path / "fine.pt", fine, names), weights(tmp_path / "coarse.pt", coarse, names, seed=1)


def test_all_at_once_on_two_processes(
    two_models: tuple[str, str], small_data: Path, tmp_path: Path, run_script: RunScript
) -> None:
    """An ensemble with --augment, label files and COCO's results: two processes write the same files as one."""
    how = ("--imgsz", "60", "--batch-size", "3", "--workers", "0", "--device", "cpu", "--project", str(tmp_path))
    save = ("--save-json", "--save-hybrid", "--save-conf", "--max-det", "40", "--conf-thres", "0.2")
    printed = {
        count: run_script(
            "val.py", "--weights", *two_models, "--data", str(small_data), "--name", f"on{count}", "--augment", *how,
            *save, "--processes", str(count), OMP_NUM_THREADS="1",
        )
        for count in (1, 2)
    }  # fmt: skip
    files = {path.name: path.read_bytes() for path in (tmp_path / "on1").rglob("*") if path.is_file()}
    again = {path.name: path.read_bytes() for path in (tmp_path / "on2").rglob("*") if path.is_file()}
    assert {"fine_predictions.json", "classes.csv"} < set(files)
    assert len([name for name in files if name.endswith(".txt")]) == 8
    for content in (files, again):
        del content["settings.yaml"], content["receipt.yaml"]  # have the run's name, the number of processes
    assert files == again
    for named in ("--imgsz 60 is rounded up to 64", two_models[0], "instances_val.json"):
        assert named in printed[1]

    rows = json.loads(files["fine_predictions.json"])
    assert len(rows) > 100
    assert [row["image_id"] for row in rows] == sorted(row["image_id"] for row in rows)
    labels = Path(str(read_yaml(small_data)["path"])) / "labels" / "val"
    for file in labels.glob("*.txt"):
        truth = file.read_text().splitlines()
        written = files[file.name].decode().splitlines()
        assert all(line.endswith(" 1") for line in written[: len(truth)])
        assert [line.split()[0] for line in written[: len(truth)]] == [line.split()[0] for line in truth]


def test_a_review_on_two_processes(
    two_models: tuple[str, str], small_data: Path, tmp_path: Path, run_script: RunScript
) -> None:
    """Two processes write the same rows and pictures as one."""
    what = ("--weights", two_models[0], "--data", str(small_data), "--task", "train", "--review", "3", "--imgsz", "64")
    how = ("--batch-size", "3", "--workers", "0", "--device", "cpu", "--project", str(tmp_path), "--quiet")
    for count in ("1", "2"):
        printed = run_script(
            "val.py", *what, *how, "--name", count, "--processes", count, plots=True, OMP_NUM_THREADS="1"
        )
    files, again = (contents(tmp_path / count / "review") for count in ("1", "2"))
    assert sorted(files) == ["0001.jpg", "0002.jpg", "0003.jpg", "review.csv"]
    assert files == again
    rows = read_csv(tmp_path / "1" / "review" / "review.csv")
    assert list(rows[0]) == ["image", "kind", "class", "predicted class", "confidence", "overlap", "box", "rank"]
    assert f"{len(rows)} contradictions (" in printed
    run_script("val.py", *what, *how, "--review", "1", "--name", "1", "--exist-ok", plots=True, OMP_NUM_THREADS="1")
    assert sorted(contents(tmp_path / "1" / "review")) == ["0001.jpg", "review.csv"]


def test_each_data_set_has_the_scores_of_a_validation_of_it_alone(
    learned: Path, small_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    images = sorted((small_data.with_suffix("") / "images" / "val").iterdir())
    for name, chosen in (("day", images[:5]), ("night", images[5:])):
        (tmp_path / f"{name}.txt").write_text("".join(f"{image}\n" for image in chosen))

    def scores(val: Any, **flags: Any) -> dict[str, Any]:
        data = write_yaml(tmp_path / "data.yaml", {**read_yaml(small_data), "val": val})
        return run(data=data, weights=learned, imgsz=96, workers=0, device="cpu", project=tmp_path, **flags)

    with forking(printing=True):
        both = scores([{"path": str(tmp_path / f"{name}.txt")} for name in ("day", "night")], processes=2, batch_size=2)
    assert [line.split()[:2] for line in capfd.readouterr().out.splitlines() if "night" in line][-1] == ["night", "3"]
    alone = scores(str(tmp_path / "night.txt"))
    for metric in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95"):
        assert both[f"metrics/{metric}(night)"] == pytest.approx(alone[f"metrics/{metric}"], abs=1e-4) != 0


def test_one_process_writes(
    two_models: tuple[str, str], small_data: Path, on_processes: OnProcesses, tmp_path: Path
) -> None:
    flags = ("--weights", two_models[0], "--data", str(small_data), "--workers", "0", "--device", "cpu", "--save-json")
    project = str(tmp_path / "runs")
    first, second = on_processes(2, opened_files, main, (*flags, "--project", project), project)
    assert any("fine_predictions.json" in name for name in first)
    assert second == []


def test_images_of_one_name_have_label_files_of_their_own(two_models: tuple[str, str], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_image(tmp_path / "images" / folder / "a+\u00e4.png", noise(60, 48), "0 0.5 0.5 0.3 0.3")
    split = ["images/a", "images/b"]
    data = {"path": str(tmp_path), "train": split, "val": split, "names": dict(enumerate(NAMES))}
    how = {"weights": two_models[0], "imgsz": 64, "workers": 0, "device": "cpu", "project": tmp_path}
    made = run(data=write_yaml(tmp_path / "data.yaml", data), save_txt=True, **how)
    first, second = sorted((Path(made["folder"]) / "labels").iterdir())
    assert (first.name, second.name) == ("a+\u00e4-2.txt", "a+\u00e4.txt")
    second.unlink()
    second.mkdir()
    with pytest.raises(UserError, match=f"{re.escape(str(second))} cannot be written"):
        run(data=tmp_path / "data.yaml", save_txt=True, exist_ok=True, **how)


def test_a_model_is_validated_at_the_size_of_its_training(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at that of the data YAML, nor at the task's default."""
    best = tmp_path / "run" / "weights" / "best.pt"
    best.parent.mkdir(parents=True)
    weights(best, tiny_detector(), dict(enumerate(NAMES)), imgsz=40)
    data = write_yaml(tmp_path / "data.yaml", {**read_yaml(small_data), "defaults": {"imgsz": 48}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(weights=tmp_path / "run", data=data, workers=0, device="cpu", noplots=True, project=tmp_path)
    printed = "".join(capsys.readouterr())
    assert f"weights: {best}; data: {data}\n" in printed
    assert read_yaml(tmp_path / "exp" / "settings.yaml")["imgsz"] == 40
    assert "image size 40 " in printed
    assert "warning: " not in printed


@pytest.mark.gpu
def test_half_on_cuda(shared: Path, coco128: Path, tmp_path: Path, run_script: RunScript) -> None:
    """Half precision has the mAP of full precision."""
    means = []
    for flags in (["--mixed-precision", "no"], ["--half"]):
        printed = run_script(
            "val.py", "--weights", str(shared / "weights" / "yolov5n.pt"), "--data", str(coco128), "--imgsz", "320",
            "--device", "0", "--project", str(tmp_path), *flags,
        )  # fmt: skip
        means.append(next(float(line.split()[6]) for line in printed.splitlines() if line.split()[:1] == ["all"]))
    assert "weights and images in half precision" in printed
    assert means[1] == pytest.approx(means[0], abs=0.01)


@pytest.mark.parametrize(("task", "flags"), [
    ("classify", ["--save-json"]), ("detect", ["--annotations", "no.json"]),
    ("detect", ["--review", "5", "--conf-thres", "0.25"]), ("classify", ["--review", "5", "--task", "speed"]),
])  # fmt: skip
def test_flags_that_a_task_refuses(task: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members({}, {"best.pt": Weights({}, {"nc": 2}, {}, task, {}, "lockstep")}, TASKS[task])
    monkeypatch.setattr("val.read_members", lambda *_: members)
    with pytest.raises(UserError, match=f"^{flags[0]} "):
        run(**given_flags(ValOptions, flags), device="cpu")
