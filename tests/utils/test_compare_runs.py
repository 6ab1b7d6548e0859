"""Pairs of whole runs with --hashes that differ in one thing, and what is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from utils.compare_runs import BY_PARAMETER, HASHES, compare, described, main, weights_hash
from utils.training.steps import OptimizerSteps

Train = Callable[..., Path]
FLIPPED = "model.4.cv1.conv.weight"


@pytest.fixture(scope="module")
def trained(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains with flags, by name, in this process, and returns the run folder."""
    project = tmp_path_factory.mktemp("compared")
    how = {"imgsz": 64, "epochs": 2, "batch_size": 8, "workers": 0, "device": "cpu", "hashes": True, "noplots": True}
    model = {"data": str(small_data), "weights": "", "cfg": "yolov5n.yaml", "noautoanchor": True, "noval": True}

    def run(name: str, **flags: Any) -> Path:
        train.run(project=str(project), name=name, **{**how, **model, **flags})
        return project / name

    return run


@pytest.fixture(scope="module")
def usual(trained: Train) -> Path:
    return trained("usual")


def test_equal_runs(trained: Train, usual: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = [weights_hash(run) for run in (usual, trained("without", hashes=False))]
    assert weights[0] == weights[1]  # the hashes change nothing
    again = trained("again")
    assert (again / HASHES).read_bytes() == (usual / HASHES).read_bytes()
    assert compare(usual, again) == {"same": True, "steps": [8, 8], "causes": {}}
    with pytest.raises(SystemExit) as end:
        main([str(usual), str(again), "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["weights"] == weights[0]
    codes = [end.value.code]
    for expected in (weights[0], "0" * 64):
        with pytest.raises(SystemExit) as end:
            main([str(again), "--expect", expected])
        codes.append(end.value.code)
    (again / "weights" / "last.pt").unlink()
    with pytest.raises(SystemExit) as end:
        main([str(again), str(usual)])
    assert [*codes, end.value.code] == [0, 0, 1, 0]


def test_a_flipped_bit_of_a_gradient(trained: Train, usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = OptimizerSteps.step

    def flipping(self: OptimizerSteps) -> torch.Tensor:
        if self.progress.step == 6:
            gradient = dict(self.model.model.named_parameters())[FLIPPED].grad
            assert gradient is not None
            gradient.view(torch.int32)[3, 2] ^= 1
        return step(self)

    monkeypatch.setattr(OptimizerSteps, "step", flipping)
    found = compare(usual, trained("flipped"))
    assert (found["step"], found["epoch"], found["batch"], found["causes"]) == (7, 2, 3, {})
    assert found["equal"][:5] == ["pixels", "targets", "box_loss", "obj_loss", "cls_loss"]
    assert found["parameters"]["gradients"] == [FLIPPED]


def test_another_seed(trained: Train, usual: Path) -> None:
    found = compare(usual, trained("seed", seed=1))
    assert (found["step"], found["causes"]["seed"]) == (1, [0, 1])
    assert {"pixels", "targets", *BY_PARAMETER} <= {*found["different"]}


def test_more_threads(trained: Train, usual: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        found = compare(usual, trained("threads"))
    finally:
        torch.set_num_threads(threads)
    assert found["causes"] == {"device": [f"{threads} thread{'s' * (threads > 1)}", f"{threads + 1} threads"]}
    assert "device" in "".join(described(found))


def test_a_resumed_run_goes_on(trained: Train, usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: OptimizerSteps) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OptimizerSteps, "next_epoch", leave)
        with pytest.raises(KeyboardInterrupt):
            trained("resumed", save_steps=3)
    folder = usual.with_name("resumed")
    train.run(resume=str(folder))
    assert (folder / HASHES).read_bytes() == (usual / HASHES).read_bytes()


def test_a_run_without_hashes(usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.yaml").write_text("{}")
    with pytest.raises(SystemExit) as end:
        main([str(usual), str(tmp_path)])
    assert end.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err
