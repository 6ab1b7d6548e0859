"""Pairs of whole runs with --hashes that differ in one thing, and what is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import train
from utils.checkpoint import serialise
from utils.compare_runs import COUNTERS, FORMAT, FORMAT_FILE, HASHES, RECEIPT, compare, main, weights_hash
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


def test_a_resumed_run_goes_on(trained: Train, usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receipt says with what it was resumed."""

    def leave(self: OptimizerSteps) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OptimizerSteps, "next_epoch", leave)
        with pytest.raises(KeyboardInterrupt):
            trained("resumed", save_steps=3)
    folder = usual.with_name("resumed")
    monkeypatch.setattr("cv2.__version__", "another")
    train.run(resume=str(folder))
    assert (folder / HASHES).read_bytes() == (usual / HASHES).read_bytes()
    one, two = (yaml.safe_load((run / RECEIPT).read_text()) for run in (usual, folder))
    assert two == {**one, "resumed": [f"opencv another, was {one['environment']['opencv']}"]}


HEAD = ",".join([*COUNTERS, "pixels", "weights", "weights a"]) + "\n"
ROWS = [f"{step},1,{step}{f',{step:016x}' * 3}\n" for step in (1, 2, 3)]
WEIGHTS = serialise({"state": {"a": torch.arange(4.0)}}).tobytes()


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """Two equal run folders."""
    for name in "AB":
        (tmp_path / name / "weights").mkdir(parents=True)
        files = {HASHES: HEAD + "".join(ROWS), FORMAT_FILE: f"format: {FORMAT}"}
        files[RECEIPT] = "inputs: {hyperparameters: {lr0: 1}}"
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        (tmp_path / name / "weights" / "last.pt").write_bytes(WEIGHTS)
    return [tmp_path / "A", tmp_path / "B"]


def compared(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    return int(end.value.code or 0)


@pytest.mark.parametrize("file", [HASHES, FORMAT_FILE, RECEIPT, "weights/last.pt"])
@pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256)), WEIGHTS[:500], None, "pipe"])
def test_a_file_that_cannot_be_compared(
    file: str, content: bytes | str | None, pair: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (path := pair[0] / file).unlink()
    if content == "pipe":
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert compared(*pair, "--expect", "0") == 2
    assert capsys.readouterr().err.startswith(f"error: {path}")


@pytest.mark.parametrize(
    ("file", "text", "code", "said"),
    [
        (HASHES, HEAD, 2, "it is damaged, or has no optimizer steps"),
        (HASHES, HEAD + "".join(ROWS).replace("2,", ""), 2, "it is damaged, or has no optimizer steps"),
        (HASHES, HEAD + "".join(ROWS[1:]), 1, "step 1 (epoch 1, batch 1): these differ: step, batch, pixels"),
        (HASHES, HEAD + "".join(ROWS).replace("02\n", "03\n"), 1, "pixels are equal; these differ: weights of a\n"),
        (HASHES, HEAD + "".join(ROWS)[:-3], 1, "the same: 2 steps, then one run goes on to step 3\n"),
        (HASHES, HEAD.replace("\n", ",x\n") + "".join(ROWS).replace("\n", f",{0:016x}\n"), 1, "these differ: x\n"),
        (FORMAT_FILE, f"format: {FORMAT - 1}", 2, f"format {FORMAT - 1} cannot be compared"),
        (RECEIPT, "inputs: {hyperparameters: {lr0: 2}}", 0, "hyperparameters lr0 2, was 1\nthe same: 3 steps\n"),
        (RECEIPT, "environment: {torch: 2}", 0, "torch 2, was none\nthe same: 3 steps\n"),
    ],
)
def test_what_is_said(
    file: str, text: str, code: int, said: str, pair: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (pair[1] / file).write_text(text)
    assert compared(*pair) == code
    assert said in "".join(capsys.readouterr())
