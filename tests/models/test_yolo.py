"""Models from YAML: sizes, agreement with YOLOv5's own outputs, options, and errors in a YAML."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from models.heads.anchors import Detect
from models.heads.contract import require_head
from models.layers import Classify, Conv
from models.loading import count_gflops, transfer
from models.tasks.detect import DetectionTask
from models.weights import read_weights
from models.yolo import LAYERS, YoloModel, add_layers, build_model
from tests.making import tiny_detector
from utils.batch import Batch
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import ROOT, find_file, read_yaml

DOCUMENTED = (ROOT / "docs" / "models.md").read_text()
STRIDES = {"yolov5-p7": 128, "yolov5-p6": 64, **{f"yolov5{size}6": 64 for size in "nsmlx"}}  # others: 32
# Published GFLOPs at 640 px, without the auxiliary branch.
PUBLISHED = {"yolov9t": None, "yolov9s": 26.4, "yolov9m": 76.3, "yolov9c": 102.1}


def documented() -> dict[str, int]:
    """Return the parameters of all shipped models as docs/models.md has them, computed from the published networks:
    with 80 classes (a classifier with 1000), and with the auxiliary branch."""
    models = {}
    for line in DOCUMENTED.splitlines():
        names = re.findall(r"`(yolo[\w?-]+)`", line.partition(" | ")[0])
        names = [name.replace("?", size) for name in names for size in ("nsmlx" if "?" in name else "x")]
        numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{8,}", line)]
        models.update(zip(names, numbers[-len(names) :] if numbers else (), strict=False))
    return models


def small_classifier() -> dict[str, Any]:
    return {
        "task": "classify",
        "nc": 5,
        "width_multiple": 0.5,
        "backbone": [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [32, 3, 2]]],
        "head": [[-1, 1, "Classify", ["nc"]]],
    }


def with_rows(*rows: list[Any]) -> dict[str, Any]:
    """Return a detector with rows from number 3 on, the last of which leads to its second level instead of row 2."""
    return {**tiny_detector(), "head": [*rows, [[1, 2 + len(rows)], 1, "Detect", ["nc", "anchors"]]]}


COARSER = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "nn.Upsample", [None, 2]]]  # a map of half the size, and enlarged again
ONE_SIZE = with_rows([-1, 1, "nn.Upsample", [[32, 32]]])


def on_meta(source: dict[str, Any] | str, **options: Any) -> YoloModel:
    """Build a model without memory for its weights."""
    with torch.device("meta"):
        return build_model(source, **options)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


# Shipped models


def test_every_shipped_model_is_documented() -> None:
    files = {file.stem for folder in ("models", "models/hub") for file in (ROOT / folder).glob("*.yaml")}
    assert {name for name in files if not name.startswith("resnet")} == set(documented())
    assert [name for name in LAYERS if f"`{name}`" not in DOCUMENTED] == []


@pytest.mark.parametrize(("name", "parameters"), documented().items())
def test_parameters_and_stride(name: str, parameters: int) -> None:
    model = on_meta(f"{name}.yaml")
    assert (count(model), model.stride) == (parameters, 1 if "cls" in name else STRIDES.get(name, 32))


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters_and_work_of_a_model_without_its_auxiliary_branch(name: str, published: float | None) -> None:
    yaml = read_yaml(ROOT / "models" / f"{name}.yaml")
    del yaml["auxiliary"]
    model = on_meta(yaml)
    work = count_gflops(model, 640)
    assert not published or work == pytest.approx(published, rel=0.015)
    assert f"| `{name}` | {count(model):,} | {documented()[name]:,} | {work:.1f} |" in DOCUMENTED


def narrow(name: str) -> dict[str, Any]:
    """Return a shipped model at an eighth of its width and the smallest depth."""
    content = read_yaml(find_file(name, "model", ["models", "models/hub"]))
    return {**content, "width_multiple": 0.125, "depth_multiple": 0.1}


@pytest.mark.parametrize("name", ["yolov5s-ghost", "yolov5s-transformer", "yolov5-bifpn", "yolov9t", "yolov9c"])
def test_a_training_step_reaches_every_parameter(name: str) -> None:
    """Without labels too every one has a gradient: DDP waits for it."""
    task = DetectionTask({0: "a", 1: "b", 2: "c"}, Hyperparameters())
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    batch = Batch(images, torch.tensor([[1, 2, 0.4, 0.6, 0.3, 0.2]]), ())
    model = task.build_model(narrow(name), 64).train()
    criterion = task.criterion(model)
    for targets in (torch.zeros(0, 6), batch.targets):
        model.zero_grad()
        batch = replace(batch, targets=targets)
        terms = criterion(model(task.inputs(batch), *criterion.hints(batch)), batch)
        loss = criterion.objective(terms.local_means(), 2)
        loss.backward()
        assert loss.isfinite()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert [name for name, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()] == []
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > 0.9 * len(gradients)


def test_the_auxiliary_branch_runs_in_training_only() -> None:
    model = build_model(narrow("yolov9c"), nc=3)
    images = torch.rand(2, 3, 64, 96)
    main, auxiliary = model(images)
    shapes = [((2, 64, 64 // s, 96 // s), (2, 3, 64 // s, 96 // s)) for s in (8, 16, 32)]
    for levels in (main, auxiliary, model.eval()(images)):
        assert [(level.sides.shape, level.scores.shape) for level in levels] == shapes
    del model.model[-1].heads  # without which it could not run
    model(images)


@torch.no_grad()
def test_official_weights_predict_as_in_yolov5(shared: Path) -> None:
    reference = torch.load(shared / "reference" / "yolov5n_forward.pt", weights_only=True)
    official = read_weights(shared / "weights" / "yolov5n.pt")
    assert official.model is not None
    model = build_model(official.model).eval()
    assert shapes(model.state_dict()) == shapes(official.state) == shapes(on_meta("yolov5n.yaml").state_dict())
    transfer(model, official.state)
    predictions = require_head(model).decode(model(reference["image"]))
    torch.testing.assert_close(predictions, reference["predictions"], rtol=0, atol=1e-3)


# Options of a YAML


@pytest.mark.parametrize(
    "description", [tiny_detector(), {**small_classifier(), "head": [[-1, 1, "Classify", [5, 0.2]]]}]
)
def test_the_yaml_of_a_model_builds_it_again(description: dict[str, Any]) -> None:
    before = copy.deepcopy(description)
    model = on_meta(description, nc=5)
    assert description == before
    again = on_meta(model.yaml)
    assert (shapes(again.state_dict()), repr(again)) == (shapes(model.state_dict()), repr(model))
    assert yaml.safe_load(yaml.safe_dump(model.yaml)) == model.yaml == again.yaml


def test_repetitions_and_widths_are_scaled() -> None:
    rows = [[-1, 2, "Conv", [64, 3, 2]], [-1, 6, "C3", [40]], [-1, 1, "Conv", [16, 3, 2]]]
    model = on_meta({**tiny_detector(), "backbone": rows, "depth_multiple": 0.5, "width_multiple": 0.25})
    chain, c3, conv, _ = model.model
    assert (chain.conv.out_channels, len(c3.m), c3.cv3.conv.out_channels) == (16, 3, 16)  # 10 rounded up to 16
    assert conv.conv.out_channels == 16  # of the head, 2 anchors * (3 classes + 5): not scaled
    chain = on_meta({**tiny_detector(), "backbone": rows}).model[0]
    assert [part.conv.in_channels for part in chain] == [3, 64]


def test_activation() -> None:
    names = {"nn.LeakyReLU(0.1)": "LeakyReLU(negative_slope=0.1)", "nn.ReLU(inplace=True)": "ReLU(inplace=True)"}
    for text, expected in {**names, "torch.nn.ReLU": "ReLU()", None: "SiLU()"}.items():
        model = on_meta({**tiny_detector(), "activation": text})
        assert {repr(layer.act) for layer in model.modules() if isinstance(layer, Conv)} == {expected}


@pytest.mark.parametrize(
    ("description", "imgsz", "expected"),
    [
        (tiny_detector(), 15, (8, 16)),
        (tiny_detector(), 1, (8, 16)),
        (small_classifier(), 50, (1, 50)),
        ("yolov5n6.yaml", 600, (64, 640)),
        ("yolov5-p34.yaml", 400, (32, 416)),
        (with_rows(*COARSER, [[-1, 2], 1, "Concat", [1]]), 72, (16, 80)),
        (with_rows(*COARSER), 72, (16, 80)),
        (with_rows([-1, 1, "nn.Upsample", [None, 1.5]]), 72, (16, 80)),
        (ONE_SIZE, 128, (4, 128)),
    ],
)
def test_stride_and_image_size(description: Any, imgsz: int, expected: tuple[int, int]) -> None:
    """The network's stride, which may be larger than its head's; the size in whole strides, at least two."""
    model = on_meta(description, imgsz=imgsz)
    assert (model.stride, model.imgsz) == expected


# Errors in a YAML


def with_row(index: int, row: Any) -> dict[str, Any]:
    rows = [*tiny_detector()["backbone"], *tiny_detector()["head"]]
    rows[index] = row
    return {**tiny_detector(), "backbone": rows[:3], "head": rows[3:]}


@pytest.mark.parametrize(
    ("index", "row"),
    [
        (1, [-1, 3, "C3Gost", [64]]),
        (2, [-1, 1, "nn.Upsampel", [None, 2]]),
        (2, [-1, 1, "nn.functional.relu", []]),
        *((2, [-1, 1, f"nn.{name}", []]) for name in ("Parameter", "MSELoss", "Module", "MaxPool2d")),
        *((2, [-1, 1, f"nn.{name}", [8, 8]]) for name in ("LazyConv2d", "LSTM", "MultiheadAttention")),
        (1, [-1, "C3", [64]]),
        (1, [-1, 0, "C3", [64]]),
        (1, [-1, 1, "C3", 64]),
        *((3, [[-1, number], 1, "Concat", [1]]) for number in (7, 3)),
        *((1, [source, 1, "C3", [64]]) for source in (-9, "-1", [], True, 1.0)),
        *((1, [-1, 1, "C3", args]) for args in ([], ["wide"])),
        *((0, [-1, 1, "Conv", args]) for args in ([64, 3, 2, 1, 1, 1, True, 9, 9], [64, "three"], [64, 10**9])),
        (2, [[-1, 0], 1, "Concat", [1]]),
        (2, [-1, 1, "nn.Linear", [32, 16]]),
        (2, [[-1, 1], 1, "Conv", [64]]),
        (3, [[2], 1, "Detect", ["nc", "anchors"]]),
    ],
)
def test_invalid_row(index: int, row: Any) -> None:
    with pytest.raises(UserError, match=rf"^mine\.yaml, row {index}: "):
        build_model(with_row(index, row), source="mine.yaml", head=Detect)


def test_rows_that_do_not_lead_to_the_head() -> None:
    """They may be frozen, and an auxiliary branch is a second head."""
    branch = [-1, 1, "Conv", [8]], [-1, 1, "nn.Upsample", [None, 2]], [2, 1, "Conv", [8]]
    model = build_model(with_rows(*branch))  # rows 3 to 5; the head reads row 5
    with pytest.raises(UserError, match=r"^mine\.yaml: no row that leads to the head reads row 3, 4 "):
        model.check_rows("mine.yaml")
    build_model(narrow("yolov9t"), nc=3).check_rows("")
    model.model[3:5].requires_grad_(False)
    model.check_rows("mine.yaml")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(({"head": head}, "head") for head in ([[-1, 1, "Conv", [64]]], [], None)),
        ({"head": [[[1, 2], 1, "Segment", ["nc", "anchors", 2, 16]]]}, "head"),
        *(({key: value}, key) for key, value in (("backbone", None), ("nc", 0), ("ch", 17))),
        *(({key: "wide"}, key) for key in ("width_multiple", "widht_multiple")),
        *(({"anchors": anchors}, "anchors") for anchors in ([], [1, "a"], None, [[1, 2, 3], [1, 2, 3]])),
        *(({"task": task}, "task") for task in (["detect"], "detekt")),
        *(
            ({"auxiliary": rows}, "auxiliary")
            for rows in ("none", [[-2, 1, "Conv", [8]]], [[[2], 1, "DetectDFL", [3]]])
        ),
        *(
            ({"activation": text}, "activation")
            for text in (3, "nn.Conv2d(3, 3, 1)", "__import__('os').mkdir('made')", "nn.LeakyReLU(open('a', 'w'))")
        ),
    ],
)
def test_invalid_key(changes: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a YAML is evaluated."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"^mine\.yaml.*\b{key}\b"):
        build_model({**tiny_detector(), **changes}, source="mine.yaml", head=Detect)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("head", [[[1], 1, "Detect", ["nc", 2]], [-1, 1, "Classify", []], [-1, 1, "Classify", [2.0]]])
def test_invalid_head_of_a_classifier(head: list[Any]) -> None:
    with pytest.raises(UserError, match=r"^mine\.yaml"):
        build_model({**small_classifier(), "head": [head]}, source="mine.yaml", head=Classify)


def test_a_network_for_one_size_is_refused_at_another() -> None:
    with pytest.raises(UserError, match="row 4: Detect"):
        on_meta(ONE_SIZE, imgsz=64)
    fused = {**ONE_SIZE, "head": [ONE_SIZE["head"][0], [[-1, 1], 1, "Concat", []], [[1, 4], 1, "Detect", ["nc", 2]]]}
    with pytest.raises(UserError, match="row 4: Concat"):
        on_meta(fused, imgsz=64)


# Layers of torch.nn, and of a user's file


@pytest.mark.parametrize(
    ("module", "args", "expected"),
    [
        ("nn.Identity", [], nn.Identity()),
        ("torch.nn.Identity", [], nn.Identity()),
        ("nn.Dropout2d", [0.3], nn.Dropout2d(0.3)),
        ("nn.ZeroPad2d", [[0, 1, 0, 1]], nn.ZeroPad2d((0, 1, 0, 1))),
        ("nn.MaxPool2d", [3, 1, 1], nn.MaxPool2d(3, 1, 1)),
        ("nn.MaxPool2d", [3, 1, 1, 1, "False", "False"], nn.MaxPool2d(3, 1, 1)),
        ("nn.BatchNorm2d", [], nn.BatchNorm2d(8, 1e-3, 0.03)),
        ("nn.BatchNorm2d", [1e-5], nn.BatchNorm2d(8)),
        ("nn.Conv2d", [16, 3, 1, 1], nn.Conv2d(8, 16, 3, 1, 1)),
        ("nn.ConvTranspose2d", [16, 4, 2, 1], nn.ConvTranspose2d(8, 16, 4, 2, 1)),
    ],
)
def test_layers_of_torch(module: str, args: list[Any], expected: nn.Module) -> None:
    layer = on_meta({**tiny_detector(), "head": [[-1, 1, module, args], *tiny_detector()["head"]]}).model[3]
    assert (type(layer), repr(layer)) == (type(expected), repr(expected))


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path for the user's file; its layers and modules are removed after the test."""
    before = dict(LAYERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("")
    yield tmp_path / "mine.py"
    LAYERS.clear()
    LAYERS.update(before)
    for name in ("mine", "beside"):
        sys.modules.pop(name, None)


MORE_LAYERS = """
import beside

class Gate(Conv):
    def __init__(self, c1, c2, kernel=1):
        super().__init__(c1, c2, kernel)

class Scale(nn.Identity):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

class Wide(Scale):
    def __init__(self, factor, channels):
        super().__init__((factor, channels))
"""


def test_the_layers_of_the_docs_are_called_as_their_parameters_are_named(user_file: Path) -> None:
    python, description = (DOCUMENTED.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "yaml"))
    user_file.write_text(python + MORE_LAYERS)
    names = ["Squeeze", "Stack", "Weighted", "Gate", "Scale", "Wide"]
    assert add_layers(user_file) == add_layers(str(user_file)) == names
    model = build_model(yaml.safe_load(description))
    assert [m.shape for m in model(torch.rand(1, 3, 32, 32))] == [(1, 3, 4, 4, 85)]
    rows = [[-1, 1, "Conv", [64, 3, 2]], [-1, 1, "Squeeze", [8]], [-1, 3, "Stack", [128, 5]]]
    rows += [[-1, 2, "Gate", [256, 3]], [-1, 1, "Scale", [7]], [-1, 1, "Wide", [2]]]
    head = [[[-1, -1], 1, "Weighted", []], [[-1], 1, "Detect", ["nc", 2]]]
    model = build_model({**tiny_detector(), "anchors": 2, "width_multiple": 0.25, "backbone": rows, "head": head})
    squeezed, stack, gates, scale, wide, weighted, _ = model.model[1:]
    assert squeezed.weigh[0].out_features == 2  # 16 channels by 8
    kernels = [(conv.conv.out_channels, conv.conv.kernel_size[0]) for conv in stack.m]
    assert [(gate.conv.in_channels, gate.conv.out_channels) for gate in gates] == [(32, 64), (64, 64)]
    assert (gates[0].conv.kernel_size, scale.factor, wide.factor) == ((3, 3), 7, (2, [64]))
    assert (kernels, len(weighted.weight)) == ([(32, 1), *[(32, 5)] * 3], 2)


@pytest.mark.parametrize(
    "content",
    [
        "import sys\nsys.exit('no')\n",
        "from torch.nn import Conv2d\n",
        "from torch import nn\n\n\nclass New(nn.Module): ...\n\n\nclass C3(nn.Module): ...\n",
    ],
)
def test_files_that_define_no_layers(content: str, user_file: Path) -> None:
    user_file.write_text(content)
    layers = dict(LAYERS)
    with pytest.raises(UserError, match=r"mine\.py"):
        add_layers(user_file)
    assert layers == LAYERS


def test_a_file_that_only_the_settings_of_a_run_name_is_not_run(user_file: Path) -> None:
    """A run folder may be somebody else's."""
    mark = user_file.with_name("mark")
    code = f"class First(nn.Identity):\n    Path({str(mark)!r}).touch()\n"
    user_file.write_text(f"from pathlib import Path\nfrom torch import nn\n\n\n{code}")
    with pytest.raises(UserError, match=f"--layers {user_file}"):
        add_layers(user_file, named_by_user=False)
    assert not mark.exists()
    assert add_layers(user_file) == ["First"]
