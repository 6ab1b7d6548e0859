"""Models from YAML: sizes, agreement with YOLOv5's own outputs, options, and errors in a YAML."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from models.heads.anchors import Detect
from models.layers import Classify, Conv
from models.loading import gflops, transfer
from models.tasks.classify import ClassificationRecipe, ClassificationTask
from models.tasks.detect import DetectionTask
from models.weights import read_weights
from models.yolo import LAYERS, YoloModel, add_layers, build_model
from tests.making import tiny_detector, write_yaml
from utils.batch import Batch
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import ROOT, find_file, read_yaml

# Parameters with 80 classes: computed from the published architectures.
DETECTORS = {
    "yolov5n": 1_872_157,
    "yolov5s": 7_235_389,
    "yolov5m": 21_190_557,
    "yolov5l": 46_563_709,
    "yolov5x": 86_749_405,
    "yolov5n6": 3_246_940,
    "yolov5s6": 12_626_620,
    "yolov5m6": 35_731_932,
    "yolov5l6": 76_770_172,
    "yolov5x6": 140_794_780,
}
HUB = {
    "yolov3": 61_949_149,
    "yolov3-spp": 62_998_749,
    "yolov3-tiny": 8_852_366,
    "yolov5-bifpn": 46_825_853,
    "yolov5-fpn": 41_117_565,
    "yolov5-p2": 47_493_372,
    "yolov5-p34": 5_331_518,
    "yolov5-p6": 76_770_172,
    "yolov5-p7": 144_281_723,
    "yolov5-panet": 46_563_709,
    "yolov5s-LeakyReLU": 7_235_389,
    "yolov5s-ghost": 3_897_605,
    "yolov5s-transformer": 7_235_645,
}
# With 1000 classes.
CLASSIFIERS = {
    "yolov5n-cls": 2_493_000,
    "yolov5s-cls": 5_453_480,
    "yolov5m-cls": 12_957_640,
    "yolov5l-cls": 26_552_680,
    "yolov5x-cls": 48_097_160,
}
SEGMENTERS = {
    "yolov5n-seg": 1_991_549,
    "yolov5s-seg": 7_621_277,
    "yolov5m-seg": 21_990_397,
    "yolov5l-seg": 47_924_957,
    "yolov5x-seg": 88_819_517,
}
ANCHOR_FREE = {"yolov9t": 3_717_648, "yolov9s": 9_804_480, "yolov9m": 32_878_400, "yolov9c": 51_182_048}
SHIPPED = {**DETECTORS, **HUB, **CLASSIFIERS, **SEGMENTERS, **ANCHOR_FREE}
# Strides that are not 32.
STRIDES = {
    **{name: 64 for name in (*DETECTORS, "yolov5-p6") if name.endswith("6")},
    "yolov5-p7": 128,
    **dict.fromkeys(CLASSIFIERS, 1),
}
# Without the auxiliary branch, and published GFLOPs of such models at 640 px.
WITHOUT_AUXILIARY = {
    "yolov9t": (2_442_624, None),
    "yolov9s": (7_226_192, 26.4),
    "yolov9m": (20_123_984, 76.3),
    "yolov9c": (25_498_736, 102.1),
}


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


@pytest.mark.parametrize(("name", "parameters"), SHIPPED.items())
def test_parameters_and_stride(name: str, parameters: int) -> None:
    model = on_meta(f"{name}.yaml")
    assert (count(model), model.stride) == (parameters, STRIDES.get(name, 32))


@pytest.mark.parametrize(("name", "numbers"), WITHOUT_AUXILIARY.items())
def test_parameters_and_work_of_a_model_without_its_auxiliary_branch(
    name: str, numbers: tuple[int, float | None]
) -> None:
    yaml = read_yaml(ROOT / "models" / f"{name}.yaml")
    del yaml["auxiliary"]
    model = on_meta(yaml)
    parameters, published = numbers
    assert count(model) == parameters
    work = gflops(model, 640)
    assert not published or work == pytest.approx(published, rel=0.015)
    row = next(line for line in (ROOT / "docs" / "models.md").read_text().splitlines() if f"| `{name}`" in line)
    assert f"| {parameters:,} | {ANCHOR_FREE[name]:,} | {work:.1f} |" in row


def test_every_shipped_model_is_counted_and_documented() -> None:
    files = {file.stem for folder in ("models", "models/hub") for file in (ROOT / folder).glob("*.yaml")}
    assert {name for name in files if not name.startswith("resnet")} == set(SHIPPED)
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in (*LAYERS, *HUB) if f"`{name}`" not in text.replace("`-p", "`yolov5-p")] == []
    assert [number for number in SHIPPED.values() if f"{number:,}" not in text] == []


def narrow(name: str) -> dict[str, Any]:
    """Return a shipped model at an eighth of its width and the smallest depth."""
    content = read_yaml(find_file(name, "model", ["models", "models/hub"]))
    return {**content, "width_multiple": 0.125, "depth_multiple": 0.1}


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("yolov5n", [8, 16, 32]),
        ("yolov3-tiny", [16, 32]),
        ("yolov5-bifpn", [8, 16, 32]),
        ("yolov5-p2", [4, 8, 16, 32]),
        ("yolov5-p34", [8, 16]),
        ("yolov5-p7", [8, 16, 32, 64, 128]),
        ("yolov5s-transformer", [8, 16, 32]),
    ],
)
@torch.no_grad()
def test_strides_anchors_and_maps(name: str, strides: list[int]) -> None:
    model = build_model(narrow(name)).eval()
    assert model.head.stride.tolist() == strides
    anchors = narrow(name)["anchors"]
    if isinstance(anchors, list):
        pixels = model.head.anchors * model.head.stride.view(-1, 1, 1)
        torch.testing.assert_close(pixels.flatten(1), torch.tensor(anchors).float())
    maps = model(torch.rand(1, 3, 128, 256))
    assert [m.shape for m in maps] == [(1, 3, 128 // s, 256 // s, 85) for s in strides]
    assert all(m.isfinite().all() for m in maps)


@pytest.mark.parametrize(
    "name", ["yolov5s-ghost", "yolov5s-transformer", "yolov5-p2", "yolov5-bifpn", "yolov9t", "yolov9c"]
)
def test_a_training_step_reaches_every_parameter(name: str) -> None:
    task = DetectionTask({0: "a", 1: "b", 2: "c"}, Hyperparameters())
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    batch = Batch(images, torch.tensor([[1, 2, 0.4, 0.6, 0.3, 0.2]]), ())
    model = task.build_model(narrow(name), 64).train()
    criterion = task.criterion(model)
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


def decode(maps: list[Tensor], anchors: Tensor, stride: Tensor) -> Tensor:
    """Decode raw maps by YOLOv5's formula, cell by cell: xy = (2s - 0.5 + cell) stride, wh = (2s)^2 anchor."""
    levels = []
    for raw, level_anchors, s in zip(maps, anchors, stride, strict=True):
        y = raw.sigmoid()
        rows, columns = torch.meshgrid(torch.arange(y.shape[2]), torch.arange(y.shape[3]), indexing="ij")
        y[..., 0] = (y[..., 0] * 2 - 0.5 + columns) * s
        y[..., 1] = (y[..., 1] * 2 - 0.5 + rows) * s
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * (level_anchors * s).view(1, -1, 1, 1, 2)
        levels.append(y.flatten(1, 3))
    return torch.cat(levels, 1)


@torch.no_grad()
def test_official_weights_predict_as_in_yolov5(shared: Path) -> None:
    reference = torch.load(shared / "reference" / "yolov5n_forward.pt", weights_only=True)
    official = read_weights(shared / "weights" / "yolov5n.pt")
    assert official.model is not None
    model = build_model(official.model).eval()
    assert shapes(model.state_dict()) == shapes(official.state) == shapes(on_meta("yolov5n.yaml").state_dict())
    transfer(model, official.state)
    predictions = decode(model(reference["image"]), model.head.anchors, model.head.stride)
    torch.testing.assert_close(predictions, reference["predictions"], rtol=0, atol=1e-3)


# Options of a YAML


def test_number_of_classes() -> None:
    model = on_meta("yolov5n.yaml", nc=3)
    assert count(model) == DETECTORS["yolov5n"] - 3 * 77 * (64 + 128 + 256 + 3)
    assert (model.names, model.yaml["nc"]) == ({0: "0", 1: "1", 2: "2"}, 3)
    assert all(m.isfinite().all() for m in build_model(tiny_detector(), nc=1)(torch.rand(1, 3, 16, 16)))


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


def test_only_inputs_of_later_rows_stay_alive() -> None:
    model, outputs, alive = build_model(tiny_detector()), [], []
    for layer in model.model[:-1]:
        layer.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)))
    model.model[-1].register_forward_pre_hook(lambda *_: alive.extend(output() is not None for output in outputs))
    with torch.no_grad():
        model(torch.rand(1, 3, 16, 16))
    assert alive == [False, True, True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nn.LeakyReLU(0.1)", "LeakyReLU(negative_slope=0.1)"),
        ("torch.nn.ReLU", "ReLU()"),
        ("nn.ReLU(inplace=True)", "ReLU(inplace=True)"),
        (None, "SiLU()"),
    ],
)
def test_activation(text: str | None, expected: str) -> None:
    model = on_meta({**tiny_detector(), "activation": text})
    assert {repr(part.act) for part in model.modules() if isinstance(part, Conv)} == {expected}


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


# Classifiers


def test_a_classifier_with_maps_joined_from_below() -> None:
    rows = [*small_classifier()["backbone"], [-1, 1, "nn.Upsample", [None, 2]], [[-1, 0], 1, "Concat", [1]]]
    yaml = {**small_classifier(), "backbone": rows}
    model = ClassificationTask({k: str(k) for k in range(5)}, ClassificationRecipe()).build_model(yaml, 50)
    assert (model.stride, model.imgsz) == (4, 52)
    with pytest.raises(UserError, match="row 2: Concat"):
        build_model({**yaml, "backbone": [*rows[:2], [[-1, -1], 1, "Concat", [0]]]})


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
        *((2, [-1, 1, f"nn.{name}", []]) for name in ("Parameter", "MSELoss", "Sequential", "Module", "MaxPool2d")),
        *((2, [-1, 1, f"nn.{name}", [8, 8]]) for name in ("LazyConv2d", "LSTM", "Embedding", "MultiheadAttention")),
        (1, [-1, 3, ["C3"], [64]]),
        (1, [-1, "C3", [64]]),
        (1, [-1, 0, "C3", [64]]),
        (1, [-1, 1, "C3", 64]),
        *((3, [[-1, number], 1, "Concat", [1]]) for number in (7, 3)),
        *((1, [source, 1, "C3", [64]]) for source in (-9, "-1", [], True, 1.0)),
        (0, [0, 1, "Conv", [64]]),
        (1, [-1, 1, "C3", []]),
        (1, [-1, 1, "C3", ["wide"]]),
        (0, [-1, 1, "Conv", [64, 3, 2, 1, 1, 1, True, 9, 9]]),
        (0, [-1, 1, "Conv", [64, "three"]]),
        (0, [-1, 1, "Conv", [64, 10**9]]),
        (2, [-1, 1, "nn.Upsample", [None, 10**4]]),
        (2, [[-1, 0], 1, "Concat", [1]]),
        (2, [-1, 1, "nn.Linear", [32, 16]]),
        (2, [[-1, 1], 1, "Conv", [64]]),
        (3, [[2], 1, "Detect", ["nc", "anchors"]]),
    ],
)
def test_invalid_row(index: int, row: Any) -> None:
    with pytest.raises(UserError, match=rf"^mine\.yaml, row {index}: "):
        build_model(with_row(index, row), source="mine.yaml", head=Detect)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(({"head": head}, "head") for head in ([[-1, 1, "Conv", [64]]], [], None)),
        ({"head": [[[1, 2], 1, "Segment", ["nc", "anchors", 2, 16]]]}, "head"),
        ({"backbone": None}, "backbone"),
        ({"nc": 0}, "nc"),
        *(({"ch": channels}, "ch") for channels in (4, "3")),
        ({"width_multiple": "wide"}, "width_multiple"),
        ({"widht_multiple": 1}, "widht_multiple"),
        *(({"anchors": anchors}, "anchors") for anchors in ([], [[1, "a"]], None, [[1, 2, 3], [1, 2, 3]])),
        *(({"task": task}, "task") for task in (["detect"], None)),
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


@pytest.mark.parametrize(
    "head",
    [
        [[-1, 1, "Conv", [64]]],
        [[[1], 1, "Detect", ["nc", 2]]],
        [[-1, 1, "Classify", []]],
        [[[0, 1], 1, "Classify", ["nc"]]],
        [[-1, 1, "Classify", ["nc", 2.0]]],
        [[-1, 1, "Classify", ["nc"]]] * 2,
    ],
)
def test_invalid_head_of_a_classifier(head: list[Any]) -> None:
    with pytest.raises(UserError, match=r"^mine\.yaml"):
        build_model({**small_classifier(), "head": head}, source="mine.yaml", head=Classify)


def test_a_network_for_one_size_is_refused_at_another() -> None:
    with pytest.raises(UserError, match=r"row 3: nn\.Upsample"):
        on_meta(ONE_SIZE, imgsz=64)
    fused = {**ONE_SIZE, "head": [ONE_SIZE["head"][0], [[-1, 1], 1, "Concat", []], [[1, 4], 1, "Detect", ["nc", 2]]]}
    with pytest.raises(UserError, match="row 4: Concat"):
        on_meta(fused, imgsz=64)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "mine.yaml", {**tiny_detector(), "head": [[-1, 1, "Detekt", []]]})
    for name in (path, "yolov5q.yaml"):
        with pytest.raises(UserError, match=Path(name).name):
            build_model(name)


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


USER_LAYERS = """
import torch
from torch import nn

import beside
from models.layers import Conv


class Gate(Conv):
    def __init__(self, c1, c2, kernel=1):
        super().__init__(c1, c2, kernel)


class Deep(nn.Sequential):
    def __init__(self, c1, c2, n, kernel=1):
        super().__init__(*(Gate(c1 if k == 0 else c2, c2, kernel) for k in range(n)))


class Squeeze(nn.Module):
    def __init__(self, c1, part):
        super().__init__()
        self.down, self.up = nn.Linear(c1, c1 // part), nn.Linear(c1 // part, c1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3)))).sigmoid()[..., None, None]


class Sum(nn.Module):
    def __init__(self, channels, factor=1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(list(channels))) * factor)

    def forward(self, maps):
        return sum(weight * x for weight, x in zip(self.weight, maps))


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor
"""


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


def test_layers_are_called_as_their_parameters_are_named(user_file: Path) -> None:
    user_file.write_text(USER_LAYERS)
    assert add_layers(user_file) == add_layers(str(user_file)) == ["Gate", "Deep", "Squeeze", "Sum", "Scale"]
    assert sorted(path.name for path in user_file.parent.iterdir()) == ["beside.py", "mine.py"]  # no __pycache__
    rows = [[-1, 1, "Conv", [64, 3, 2]], [-1, 2, "Gate", [128]], [-1, 3, "Deep", [128, 3]]]
    added = [[-1, 1, "Squeeze", [4]], [[-1, 1], 1, "Sum", [2]], [-1, 1, "Scale", [3]]]
    head = [*added, [[-1], 1, "Detect", ["nc", 2]]]
    model = build_model({**tiny_detector(), "anchors": 2, "width_multiple": 0.25, "backbone": rows, "head": head})
    gates, deep, squeeze, weighted_sum, scale, _ = model.model[1:]
    assert [(part.conv.in_channels, part.conv.out_channels) for part in gates] == [(16, 32), (32, 32)]
    assert [part.conv.kernel_size for part in deep] == [(3, 3)] * 3
    assert (squeeze.down.in_features, squeeze.down.out_features) == (32, 8)
    assert (weighted_sum.weight.tolist(), scale.factor) == ([2, 2], 3)
    sum(m.sum() for m in copy.deepcopy(model)(torch.rand(2, 3, 16, 16))).backward()


def test_the_example_of_the_docs(user_file: Path) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    python, description = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "yaml"))
    user_file.write_text(python)
    assert add_layers(user_file) == ["Squeeze", "Stack", "Weighted"]
    model = build_model(yaml.safe_load(description))
    assert len(model.model[2].m) == 1 + 2
    assert [m.shape for m in model(torch.rand(1, 3, 32, 32))] == [(1, 3, 4, 4, 85)]


@pytest.mark.parametrize(
    "content",
    [
        "class A:\n    x = = 1\n",
        "\n\nimport nothing_of_that_name\n",
        "import sys\nsys.exit('no')\n",
        "x = 1\n",
        "from torch.nn import Conv2d\n",
        "from torch import nn\n\n\nclass New(nn.Module): ...\n\n\nclass C3(nn.Module): ...\n",
    ],
)
def test_files_that_define_no_layers(content: str, user_file: Path) -> None:
    user_file.write_text(content)
    layers = dict(LAYERS)
    for _ in range(2):
        with pytest.raises(UserError, match=r"mine\.py"):
            add_layers(user_file)
    assert layers == LAYERS


def test_paths_of_no_python_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is one below the working folder, not below the repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("x = 1\n")
    for name in ("mine.py", "models/layers.py", "mine.txt"):
        with pytest.raises(UserError, match=Path(name).stem):
            add_layers(name)


def test_a_file_that_only_the_settings_of_a_run_name_is_not_run(user_file: Path) -> None:
    """A run folder may be somebody else's."""
    mark = user_file.with_name("mark")
    code = f"class First(nn.Identity):\n    Path({str(mark)!r}).touch()\n"
    user_file.write_text(f"from pathlib import Path\nfrom torch import nn\n\n\n{code}")
    with pytest.raises(UserError, match=f"--layers {user_file}"):
        add_layers(user_file, is_named=False)
    assert not mark.exists()
    assert add_layers(user_file) == ["First"]
