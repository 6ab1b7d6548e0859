"""Whole training runs, started as a user starts them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import val
from models.weights import read_weights
from tests.conftest import CallMain, RunScript
from tests.curves import refused
from tests.making import write_yaml
from train import StopTraining, run
from utils.errors import UserError
from utils.files import read_yaml
from utils.user_code import Hooks

COLUMNS = [
    *("epoch", "train/box_loss", "train/obj_loss", "train/cls_loss"),
    *("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"),
    *("val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2"),
]


def train(run_script: RunScript, project: Path, data: Path, *flags: str, **how: Any) -> str:
    """Train for a short time on the small set; return what was printed."""
    own = ("--data", str(data), "--project", str(project), "--device", "cpu")
    scratch = ("--weights", "", "--cfg", "yolov5n.yaml", "--hyp", "data/hyps/shapes.yaml")
    rest = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--workers", "0")
    return run_script("train.py", *own, *scratch, *rest, *flags, **how)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, run_script: RunScript, small_data: Path) -> tuple[Path, str]:
    """A run of two epochs, whose image size is rounded to 64, and what it printed."""
    project = tmp_path_factory.mktemp("runs")
    return project / "exp", train(run_script, project, small_data, "--imgsz", "60", plots=True)


def test_run_folder(first: tuple[Path, str], small_data: Path) -> None:
    folder, printed = first
    assert f"\ndata: {small_data}\n" in printed
    assert "--imgsz 60 is rounded up to 64" in printed
    settings = read_yaml(folder / "settings.yaml")
    assert settings["batch_size"] == 8
    assert settings["hyperparameters"]["mosaic"] == 0
    assert [row["epoch"] for row in rows(folder)] == ["0", "1"]
    assert list(rows(folder)[0]) == COLUMNS
    assert all(float(value) >= 0 for row in rows(folder) for value in row.values())
    assert (folder / "train_batch0.jpg").is_file()
    for name in ("last.pt", "best.pt"):
        weights = read_weights(folder / "weights" / name)
        assert weights.source == "lockstep"
        assert (weights.names[0], weights.image_sides) == ("disc", (64, 64))
        assert all(torch.isfinite(tensor).all() for tensor in weights.state.values())


def test_prints_the_table_and_the_folder(first: tuple[Path, str]) -> None:
    folder, printed = first
    overall = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["all"])
    fitness = [0.1 * float(row["metrics/mAP_0.5"]) + 0.9 * float(row["metrics/mAP_0.5:0.95"]) for row in rows(folder)]
    best = rows(folder)[fitness.index(max(fitness))]
    assert (overall[1], overall[3:]) == ("8", [f"{float(best[name]):.3f}" for name in COLUMNS[4:8]])
    assert str(folder) in printed.splitlines()[-1]
    assert "\r" not in printed  # no bar where the output is not a terminal


def test_val_equals_training(
    first: tuple[Path, str], tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    how = {"imgsz": 64, "batch_size": 16, "workers": 0, "device": "cpu", "noplots": True, "project": tmp_path}
    val.run(weights=first[0] / "weights" / "last.pt", data=small_data, **how)
    overall = next(line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["all"])
    assert overall[3:] == [f"{float(rows(first[0])[-1][name]):.3f}" for name in COLUMNS[4:8]]


@pytest.mark.long
def test_early_stop_and_nosave(tmp_path: Path, run_script: RunScript, small_data: Path) -> None:
    """With next to no learning rate no epoch beats the first: `--patience 1` stops after the second."""
    hyp = tmp_path / "still.yaml"
    hyp.write_text("lr0: 1e-30\nwarmup_epochs: 0\nmosaic: 0.0\n")
    printed = train(run_script, tmp_path, small_data, "--hyp", str(hyp), "--epochs", "5", "--patience", "1", "--nosave")
    assert len(rows(tmp_path / "exp")) == 2
    assert "stopped" in printed
    assert (tmp_path / "exp" / "weights" / "last.pt").is_file()


@pytest.mark.long
def test_the_fitness_chooses_the_best_epoch(
    fine_tune: Callable[..., str], call_main: CallMain, single: Path, tmp_path: Path
) -> None:
    """The curve stays; --resume keeps the weights of the fitness, and refuses others."""
    column, result = "mAP_0.5:0.95", tmp_path / "result.json"
    fine_tune(tmp_path, "--fitness", f"{column}=-1", "--save-period", "1", LOCKSTEP_RESULT=str(result))
    folder = tmp_path / "exp"
    assert (folder / "results.csv").read_bytes() == (single / "results.csv").read_bytes()
    values = [-float(row[f"metrics/{column}"]) for row in rows(folder)]
    assert json.loads(result.read_text())["fitness"] == pytest.approx(max(values), abs=1e-6)
    names = ("best.pt", f"epoch{values.index(max(values))}.pt")
    chosen, of_epoch = (read_weights(folder / "weights" / name).state for name in names)
    assert all(torch.equal(chosen[name], of_epoch[name]) for name in of_epoch)
    refused(call_main("train.py", "--resume", str(folder), "--fitness", "recall=1")[1], "--fitness is 'recall=1'")


@pytest.mark.long
def test_twenty_photos_of_two_classes_give_something_useful(
    run_script: RunScript, shared: Path, tmp_path: Path
) -> None:
    """Without a flag for the recipe. YOLOv5's would still be warming up at the end."""
    cells = shared / "data" / "bccd"
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for photo in sorted((cells / "images" / "train").iterdir())[:20]:
        (tmp_path / "images" / photo.name).symlink_to(photo)
        labels = (cells / "labels" / "train" / f"{photo.stem}.txt").read_text().splitlines()
        two = [row for row in labels if row.split()[0] in ("0", "1")]
        (tmp_path / "labels" / f"{photo.stem}.txt").write_text("\n".join(two))
    content = {"path": str(tmp_path), "train": "images", "val": "images", "names": ["first", "second"]}
    data = write_yaml(tmp_path / "few.yaml", content)
    what = ("--data", str(data), "--weights", str(shared / "weights" / "yolov5n.pt"), "--imgsz", "192")
    run_script("train.py", *what, "--epochs", "40", "--noval", "--workers", "1", "--project", str(tmp_path / "runs"))
    assert float(rows(tmp_path / "runs" / "exp")[-1]["metrics/mAP_0.5"]) > 0.2


def test_a_licence_that_is_not_allowed(learned: Path, tmp_path: Path, call_main: CallMain, small_data: Path) -> None:
    """A run from scratch is yours; weights of the run say what they began from."""
    content = torch.load(learned, weights_only=True)
    content |= {"licence": "agpl-3.0", "origin": [{"file": "yolov5n.pt", "sha256": "4f180cf2" + 56 * "0"}]}
    torch.save(content, tmp_path / "cells.pt")
    what = ("--data", str(small_data), "--imgsz", "64", "--device", "cpu", "--project", str(tmp_path))
    cells = (*what, "--weights", str(tmp_path / "cells.pt"))
    code, printed = call_main("train.py", *cells, "--allow-licence", "mit,apache-2.0")
    assert code in (1, 2)
    refused(printed, "is agpl-3.0 (began as yolov5n.pt, SHA-256 4f180cf2...), which --allow-licence mit,apache-2.0")
    assert not (tmp_path / "exp").exists()
    code, printed = call_main("train.py", *cells, "--allow-licence", "mit", "AGPL-3.0")
    assert code == 0, printed
    assert "licence of these weights: agpl-3.0 (began as yolov5n.pt" in printed
    assert call_main("train.py", *what, "--weights", str(learned), "--allow-licence", "mit")[0] == 0


@pytest.mark.long
def test_built_in_job_reaches_its_promise(tmp_path: Path, run_script: RunScript) -> None:
    """`python train.py` alone, as `make train` calls it."""
    printed = run_script("train.py", "--project", str(tmp_path))
    overall = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["all"])
    assert float(overall[5]) >= 0.80


@pytest.mark.gpu
def test_trains_on_a_gpu(tmp_path: Path, run_script: RunScript, small_data: Path) -> None:
    """Two epochs each in bf16, fp16 and fp32; two fp32 runs write the same bytes."""
    for number, precision in enumerate(("bf16", "fp16", "no", "no")):
        flags = ("--device", "0", "--mixed-precision", precision, "--name", f"{precision}{number}", "--workers", "2")
        train(run_script, tmp_path, small_data, *flags)
    assert (tmp_path / "no2" / "results.csv").read_bytes() == (tmp_path / "no3" / "results.csv").read_bytes()


def test_hooks_of_a_call(tmp_path: Path) -> None:
    """A function that other processes cannot import is refused; an error names its file and line."""
    with pytest.raises(UserError, match=r"<lambda>.*--hooks"):
        run(on_epoch=lambda *_: None, processes=2, device="cpu")

    def on_epoch(epoch: int, *_: object) -> object:
        if epoch == 1:
            raise StopTraining
        return [None, None, "stop"][epoch]

    hooks = Hooks(on_epoch)
    assert [hooks.call(list, "on_epoch", epoch) for epoch in range(3)] == [False, True, True]
    assert not hooks.call(list, "on_end", tmp_path)
    with pytest.raises(UserError, match=rf"{__file__}, line \d+: IndexError: .*, in on_epoch; fix it"):
        hooks.call(list, "on_epoch", 3)
