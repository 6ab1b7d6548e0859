"""Recorded kernels: which calls they serve, and on a GPU that they leave every byte of a run as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import train
from models.layers import Conv
from models.yolo import build_model
from tests.conftest import RunScript
from tests.curves import identical
from utils.files import ROOT
from utils.training import cuda_graph

IMAGES = torch.zeros(2, 3, 64, 64)


class StandIn:
    """In place of a `Recording`, on the CPU: runs the rows, and counts its calls."""

    def __init__(self, model: nn.Module, run_rows: Callable[..., Any], images: Tensor, until: int) -> None:
        self.run_rows, self.shape, self.until, self.calls = run_rows, images.shape, until, 0

    def fits(self, images: Tensor, until: int) -> bool:
        return (images.shape, until) == (self.shape, self.until)

    def __call__(self, images: Tensor) -> Any:
        self.calls += 1
        return self.run_rows({-1: images}, 0, self.until)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU's memory in bytes, as `torch.cuda` would tell it."""
    memory = SimpleNamespace(total_memory=100, used=10)
    monkeypatch.setattr(cuda_graph, "Recording", StandIn)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: memory.used)
    return memory


def recorded_model(warnings: list[str] | None = None) -> tuple[Any, cuda_graph.RecordedRows]:
    """Return a small detector in training, and its recording."""
    model = build_model("yolov5n.yaml", imgsz=64)
    together: list[cuda_graph.RecordedRows] = []
    together.append(cuda_graph.RecordedRows(model, (warnings if warnings is not None else []).append, together))
    return model, together[0]


def test_the_fourth_batch_of_a_shape_is_replayed(device: SimpleNamespace) -> None:
    model, rows = recorded_model()
    for _ in range(3):
        model(IMAGES)
    assert rows.recording is None
    for _ in range(2):
        outputs = model(IMAGES)
    assert isinstance(rows.recording, StandIn)
    assert rows.recording.calls == 2
    assert [tuple(each.shape[2:4]) for each in outputs] == [(8, 8), (4, 4), (2, 2)]
    model(IMAGES[:1])  # another shape
    model.eval()(IMAGES)
    with torch.no_grad():
        model.train()(IMAGES)
    assert rows.recording.calls == 3
    rows.drop()
    model(IMAGES)
    assert rows.recording is None


def test_a_heads_hints_are_not_recorded(device: SimpleNamespace) -> None:
    """The rows before the head are; its own depends on the targets."""
    model, rows = recorded_model()
    hints = torch.zeros(3, 3, 5, dtype=torch.int64)
    for _ in range(4):
        levels = model(IMAGES, hints)
    assert rows.recording.calls == 1  # type: ignore[union-attr]
    assert [len(level.rows) for level in levels] == [5, 5, 5]


def test_without_gradients_nothing_is_recorded(device: SimpleNamespace) -> None:
    model, rows = recorded_model()
    with torch.no_grad():
        for _ in range(5):
            model(IMAGES)
    assert rows.recording is None


def test_a_batch_that_fills_the_memory_is_not_recorded(device: SimpleNamespace) -> None:
    device.used = 41
    model, rows = recorded_model(warnings := [])
    for _ in range(5):
        model(IMAGES)
    assert rows.recording is None
    assert warnings == []


def test_a_network_that_cannot_be_recorded(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graph, "Recording", fails)
    model, rows = recorded_model(warnings := [])
    for _ in range(5):
        model(IMAGES)
    assert len(warnings) == 1
    assert warnings[0].endswith(": operation not permitted when stream is capturing")
    assert not rows.enabled


@pytest.mark.parametrize("recordable", [True, False])
def test_a_call_is_replayed_from_the_fourth_on(recordable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the values that it is then given; without a recording it is called as before."""
    calls: list[float] = []
    replays: list[float] = []
    graph = SimpleNamespace(replay=lambda: replays.append(float(recorded.given)))

    @contextmanager
    def recording(*given: object, **more: object) -> Iterator[None]:
        yield
        calls.pop()  # nothing is computed
        if not recordable:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    recorded = cuda_graph.RecordedCall(lambda given: calls.append(float(given)))
    for number in range(6):
        recorded(torch.tensor(float(number)))
    assert calls == ([0, 1, 2] if recordable else [0, 1, 2, 3, 4, 5])
    assert replays == ([3, 4, 5] if recordable else [])


class TestOnAGpu:
    """Runs with recorded kernels, and with --no-cuda-graph."""

    FLAGS = ("--epochs", "2", "--batch-size", "4", "--imgsz", "64", "--device", "0", "--workers", "1", "--noplots")

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("model", "more"),
        [
            ("yolov5n", ("--mixed-precision", "no")),
            ("yolov5n", ("--mixed-precision", "bf16", "--hyp.nbs", "8")),  # gradients of two batches
            ("yolov9t", ("--mixed-precision", "bf16")),
            ("yolov5n", ("--mixed-precision", "bf16", "--logical-processes", "2")),
            ("yolov5n-seg", ("--mixed-precision", "fp16")),
            ("yolov5n-cls", ("--mixed-precision", "bf16")),  # with dropout
        ],
    )
    def test_every_byte_is_the_same(
        self, model: str, more: tuple[str, ...], run_script: RunScript, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        data = {"yolov5n-seg": "drawn_outlines", "yolov5n-cls": "drawn_classes"}.get(model, "drawn")
        yaml = (ROOT / "models" / f"{model}.yaml").read_text()
        (tmp_path / "model.yaml").write_text(yaml.replace("Classify, [nc]", "Classify, [nc, 0.5]"))
        what = ("--data", str(request.getfixturevalue(data)), "--weights", "", "--cfg", str(tmp_path / "model.yaml"))
        for name, how in (("recorded", ()), ("launched", ("--no-cuda-graph",))):
            run_script("train.py", *what, *self.FLAGS, *more, "--project", str(tmp_path), "--name", name, *how)
        identical(tmp_path / "recorded", tmp_path / "launched")

    @pytest.mark.gpu
    def test_a_fault_costs_the_recording_only(
        self, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        """A layer that reads a value on the host cannot be recorded."""
        flags = {"data": str(drawn), "weights": "", "cfg": "yolov5n.yaml", "epochs": 2, "batch_size": 4, "imgsz": 64}
        flags |= {"device": "0", "workers": 0, "noplots": True, "project": str(tmp_path)}
        train.run(**flags, name="launched", no_cuda_graph=True)
        capsys.readouterr()
        forward = Conv.forward

        def waits(self: Conv, x: Tensor) -> Tensor:
            if x.is_cuda:
                x[0, 0, 0, 0].item()
            return forward(self, x)

        monkeypatch.setattr(Conv, "forward", waits)
        train.run(**flags, name="fault")
        assert capsys.readouterr().out.count("cannot be recorded as a CUDA graph") == 1
        identical(tmp_path / "fault", tmp_path / "launched")
