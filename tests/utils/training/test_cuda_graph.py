"""CapturedFunction kernels: which calls they serve, and on a GPU that they leave every byte of a run as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

import train
from models.heads.anchors import DetectionCriterion
from models.layers import Conv
from models.tasks.contract import Criterion, LossTerms
from models.yolo import build_model
from tests.conftest import RunScript
from tests.curves import identical
from utils.batch import Batch
from utils.config.hyperparameters import Hyperparameters
from utils.distributed.model import DistributedModel, replicate
from utils.distributed.tree import LogicalProcesses
from utils.files import ROOT
from utils.training import cuda_graph

IMAGES = torch.rand(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)  # as on a GPU
BOXES = torch.tensor([[0, 1, 0.4, 0.4, 0.3, 0.2], [1, 0, 0.7, 0.6, 0.5, 0.6], [1, 2, 0.2, 0.8, 0.1, 0.1]])


class OnTheCpu(cuda_graph.Capture):
    """A capture whose replays call the function, on the tensors that a graph would read and write."""

    def __init__(self, part: nn.Module, parameters: Any, inputs: Any, structure: Any, *more: Any) -> None:
        super().__init__(part, parameters, inputs, structure, *more)
        self.replays, sources = 0, [each for each in inputs if each.requires_grad] + [*parameters.values()]
        live: list[Tensor] = []

        def forward() -> None:
            self.replays += 1
            with torch.enable_grad():
                live[:] = tree_leaves(part(*tree_unflatten(inputs, structure)))
            for kept, each in zip(self.outputs, live, strict=True):
                kept.copy_(each.detach())

        def backward() -> None:
            trained = [each for each in live if each.requires_grad]
            found = torch.autograd.grad(trained, sources, self.upstream, allow_unused=True)
            targets = [grad for grad, tensor in zip(self.input_gradients, inputs, strict=True) if tensor.requires_grad]
            for target, source in zip([*targets, *self.parameter_gradients], found, strict=True):
                assert (target is None) == (source is None)
                if target is not None and source is not None:
                    target.copy_(source)

        self.forward.replay, self.backward.replay = forward, backward  # type: ignore[method-assign]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU's memory in bytes, as `torch.cuda` would tell it."""
    memory = SimpleNamespace(total_memory=100, used=10)
    for name, value in {
        "get_device_properties": lambda _: memory,
        "max_memory_allocated": lambda _: memory.used,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": SimpleNamespace,
        "graph": lambda *given, **named: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "Capture", OnTheCpu)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # here something is computed with these
    return memory


def captured(model: Any) -> cuda_graph.Capturer:
    """Let a model replay its rows."""
    capturer = cuda_graph.Capturer()
    model.capturer = cuda_graph.CapturedRows(model, capturer)
    return capturer


def replays(model: Any) -> dict[tuple[int, int], list[int]]:
    """Return how often each capture was replayed, by first row and end."""
    return {part: [each.replays for each in of.captures.values()] for part, of in model.capturer.parts.items()}


def test_network_head_and_loss_are_replayed_with_the_same_gradients(device: SimpleNamespace) -> None:
    """The rows before the head for every batch, the head and the loss for the same number of targets."""
    model: Any = build_model("yolov5n.yaml", nc=3, imgsz=64).to(memory_format=torch.channels_last)
    inner, plain = criterion_of(model), criterion_of(model).for_gpu(lambda function: function)
    batches = [Batch(IMAGES, boxes, ()) for boxes in (BOXES, BOXES[:1], BOXES[1:], BOXES, BOXES.repeat(6, 1), BOXES)]
    expected = [gradients(model, plain, batch) for batch in batches]
    capturer = captured(model)
    fast = inner.for_gpu(capturer.captured)
    for batch, (sums, of_parameters) in zip(batches, expected, strict=True):
        got, of_these = gradients(model, fast, batch)
        assert torch.equal(got, sums)
        assert all(map(torch.equal, of_these, of_parameters))
    assert replays(model) == {(0, 24): [3], (24, 25): [2]}


def test_networks_of_logical_processes_are_replayed_together(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each network has captures of its own for the head and the loss."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    logical = LogicalProcesses(2)
    network: Any = build_model("yolov5n.yaml", nc=3, imgsz=64).to(memory_format=torch.channels_last)
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), num_processes=1, scaler=None)
    accelerator.gradient_accumulation_steps, accelerator.sync_gradients = 1, True
    task: Any = SimpleNamespace(inputs=lambda batch: batch.images)
    copied = replicate(network, 2)
    monkeypatch.setattr(torch, "Generator", lambda device: torch.default_generator)
    models = [DistributedModel(accelerator, logical, each, each) for each in (copied, copy.deepcopy(copied))]
    fast = cuda_graph.capture_kernels(models[0], task, criterion_of(copied[0]), True)
    plain = criterion_of(models[1].model).for_gpu(lambda function: function)
    for number, boxes in enumerate((BOXES, BOXES[:1], BOXES, BOXES[1:], BOXES.repeat(6, 1), BOXES)):
        batches = [Batch(IMAGES + number, boxes, ()), Batch(IMAGES - number, boxes[:1], ())]
        for model, criterion in zip(models, (fast, plain), strict=True):
            terms = model.each(partial(terms_of, task, criterion), batches, number)
            model.backward([criterion.objective(each, 2) for each in model.over_global_counts(terms)])
        assert all(torch.equal(*pair) for pair in zip(*([p.grad for p in m.parameters] for m in models), strict=True))
    rows: Any = copied[0].capturer
    assert [each.replays for each in rows.together.captured.captures.values()] == [3]


def terms_of(task: Any, criterion: Criterion, module: nn.Module, batch: Any) -> Any:
    return criterion(module(task.inputs(batch), *criterion.hints(batch)), batch)


def criterion_of(model: Any) -> Criterion:
    criterion = model.head.criterion(Hyperparameters(), 0.0, 64)
    assert isinstance(criterion, DetectionCriterion)
    return criterion


def gradients(model: Any, criterion: Criterion, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the sums of a loss, and the gradients of all parameters."""
    terms: LossTerms = criterion(model(batch.images, *criterion.hints(batch)), batch)
    objective = criterion.objective(terms.local_means(), 2)
    return terms.sums.detach().clone(), torch.autograd.grad(objective, [*model.parameters()])


@pytest.mark.parametrize("cfg", ["yolov5n.yaml", "yolov9t.yaml"])
def test_targets_that_pad_a_batch_change_nothing(cfg: str) -> None:
    model: Any = build_model(cfg, nc=3, imgsz=64)
    inner = model.head.criterion(Hyperparameters(), 0.0, 64)
    padded = inner.for_gpu(lambda function: function)
    for boxes in (BOXES, BOXES[:0]):
        batch = Batch(IMAGES, boxes, ())
        (sums, of_parameters), (expected, of_plain) = gradients(model, padded, batch), gradients(model, inner, batch)
        assert torch.allclose(sums, expected, rtol=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(of_parameters, of_plain, strict=True))


@pytest.mark.parametrize(("used", "fails"), [(41, False), (10, True)])
def test_what_cannot_be_captured_is_called(
    used: int, fails: bool, device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that fills the memory, silently; a network whose capture fails, with one warning."""

    def fail(*given: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    device.used = used
    if fails:
        monkeypatch.setattr(cuda_graph, "Capture", fail)
    model: Any = build_model("yolov5n.yaml", imgsz=64)
    warnings: list[str] = []
    monkeypatch.setattr(cuda_graph, "log", warnings.append)
    capturer = captured(model)
    for _ in range(5):
        model(IMAGES)
    assert replays(model) == {(0, 25): []}
    assert len(warnings) == fails
    assert all("operation not permitted" in warning and "\n" not in warning for warning in warnings)
    assert capturer.enabled != fails


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_call_is_replayed_from_the_fourth_on(can_capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the values that it is then given; without a capture it is called as before."""
    calls: list[float] = []
    replays: list[float] = []
    graph = SimpleNamespace(replay=lambda: replays.append(float(captured.input)))

    @contextmanager
    def capture(*given: object, **more: object) -> Iterator[None]:
        yield
        calls.pop()  # nothing is computed
        if not can_capture:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    captured = cuda_graph.CapturedCall(lambda given: calls.append(float(given)))
    for number in range(6):
        captured(torch.tensor(float(number)))
    assert calls == ([0, 1, 2] if can_capture else [0, 1, 2, 3, 4, 5])
    assert replays == ([3, 4, 5] if can_capture else [])


class TestOnAGpu:
    """Runs with captured kernels, and with --no-cuda-graph."""

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
        for name, how in (("captured", ()), ("launched", ("--no-cuda-graph",))):
            run_script("train.py", *what, *self.FLAGS, *more, "--project", str(tmp_path), "--name", name, *how)
        identical(tmp_path / "captured", tmp_path / "launched")

    @pytest.mark.gpu
    def test_a_fault_costs_the_capture_only(
        self, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        """A layer that reads a value on the host cannot be captured."""
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
        assert capsys.readouterr().out.count("cannot be captured as a CUDA graph") == 1
        identical(tmp_path / "fault", tmp_path / "launched")
