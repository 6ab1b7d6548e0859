"""Models from YAML: sizes, agreement with YOLOv5's own outputs, options, and errors in a YAML."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from models.heads.anchors import Detect
from models.layers import Classify, Conv, Head
from models.loading import gflops, transfer
from models.tasks import TASKS, task_of
from models.tasks.classify import ClassificationRecipe, ClassificationTask
from models.tasks.detect import DetectionTask
from models.weights import read_weights
from models.yolo import LAYERS, LayerMaker, YoloModel, build_model
from tests.making import tiny_anchor_free, tiny_detector, write_yaml
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


@pytest.mark.parametrize("name", ["yolov5-p2.yaml", "yolov5-p2", "hub/yolov5-p2.yaml", "models/hub/yolov5-p2.yaml"])
def test_names_of_a_hub_model(name: str) -> None:
    assert find_file(name, "model", ["models", "models/hub"]).resolve() == ROOT / "models/hub/yolov5-p2.yaml"


def narrow(name: str) -> dict[str, Any]:
    """Return a shipped model at an eighth of its width and the smallest depth."""
    content = read_yaml(find_file(name, "model", ["models", "models/hub"]))
    return {**content, "width_multiple": 0.125, "depth_multiple": 0.1}


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("yolov5n", [8, 16, 32]),
        ("yolov5n6", [8, 16, 32, 64]),
        ("yolov3", [8, 16, 32]),
        ("yolov3-spp", [8, 16, 32]),
        ("yolov3-tiny", [16, 32]),
        ("yolov5-fpn", [8, 16, 32]),
        ("yolov5-bifpn", [8, 16, 32]),
        ("yolov5-p2", [4, 8, 16, 32]),
        ("yolov5-p34", [8, 16]),
        ("yolov5-p7", [8, 16, 32, 64, 128]),
        ("yolov5s-ghost", [8, 16, 32]),
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


def test_a_loss_at_a_stride_that_is_no_whole_number() -> None:
    """A map of 15 x 15 cells for 80 pixels, with a target in the last."""
    task = DetectionTask({0: "a", 1: "b", 2: "c"}, Hyperparameters())
    batch = Batch(torch.zeros(1, 3, 80, 80, dtype=torch.uint8), torch.tensor([[0, 0, 0.99, 0.99, 0.4, 0.3]]), ())
    model = task.build_model(with_rows([-1, 1, "nn.Upsample", [None, 1.5]]), 80)
    criterion = task.criterion(model)
    terms = criterion(model(task.inputs(batch), *criterion.hints(batch)), batch)
    assert terms.sums.isfinite().all()


def test_the_auxiliary_branch_runs_in_training_only() -> None:
    model = build_model(narrow("yolov9c"), nc=3)
    images = torch.rand(2, 3, 64, 96)
    main, auxiliary = model(images)
    shapes = [((2, 64, 64 // s, 96 // s), (2, 3, 64 // s, 96 // s)) for s in (8, 16, 32)]
    for levels in (main, auxiliary, model.eval()(images)):
        assert [(level.sides.shape, level.scores.shape) for level in levels] == shapes
    del model.model[-1].heads  # without which it could not run
    model(images)


@pytest.mark.parametrize(
    ("auxiliary", "message"),
    [
        ("none", "`auxiliary` is 'none'; give a list of rows"),
        ([[-2, 1, "Conv", [8]]], "`auxiliary` is for training with a second DetectDFL head; end both"),
        ([[[2, 3], 1, "Concat", []]], "row 5: Concat .*does not work"),
        ([[[2, 3], 1, "Detect", ["nc", 2]]], "`auxiliary` is for training with a second DetectDFL head; end both"),
        ([["pixels", 1, "Conv", [8]]], "`from` is 'pixels'; give a row's number, -1 for the row before, image, or a"),
    ],
)
def test_invalid_auxiliary_branch(auxiliary: Any, message: str) -> None:
    yaml = {**tiny_anchor_free(), "anchors": 2, "auxiliary": auxiliary}
    with pytest.raises(UserError, match=message):
        build_model(yaml)


def test_a_detector_with_anchors_has_no_auxiliary_branch() -> None:
    with pytest.raises(UserError, match="end both `head` and `auxiliary` with one"):
        build_model({**tiny_detector(), "auxiliary": [["image", 1, "Conv", [8, 3, 4]], [[-1], 1, "DetectDFL", ["nc"]]]})


def test_maps_and_prototypes_of_a_segmenter() -> None:
    model = build_model("yolov5n-seg.yaml", nc=2)
    maps, prototypes = model(torch.rand(1, 3, 64, 96))
    assert [m.shape for m in maps] == [(1, 3, 64 // s, 96 // s, 2 + 5 + 32) for s in (8, 16, 32)]
    assert prototypes.shape == (1, 32, 16, 24)
    assert model.model[-1].proto.cv1.conv.out_channels == 64  # a quarter of 256


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


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(build_model(tiny_detector()).state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert all(int(v) == 0 for k, v in states[0].items() if k.endswith("num_batches_tracked"))


def test_repetitions_and_widths_are_scaled() -> None:
    rows = [[-1, 2, "Conv", [64, 3, 2]], [-1, 6, "C3", [40]], [-1, 1, "Conv", [16, 3, 2]]]
    model = on_meta({**tiny_detector(), "backbone": rows, "depth_multiple": 0.5, "width_multiple": 0.25})
    chain, c3, conv, _ = model.model
    assert (chain.conv.out_channels, len(c3.m), c3.cv3.conv.out_channels) == (16, 3, 16)  # 10 rounded up to 16
    assert conv.conv.out_channels == 16  # of the head, 2 anchors * (3 classes + 5): not scaled
    chain = on_meta({**tiny_detector(), "backbone": rows}).model[0]
    assert [part.conv.in_channels for part in chain] == [3, 64]


def test_anchors_by_number() -> None:
    model = build_model({**tiny_detector(), "anchors": 2})
    assert (model.head.anchors * model.head.stride.view(-1, 1, 1)).tolist() == [[[1, 2], [3, 4]]] * 2
    build_model({**small_classifier(), "anchors": 5.5})  # a classifier ignores them


def test_only_inputs_of_later_rows_stay_alive() -> None:
    model, outputs, alive = build_model(tiny_detector()), [], []
    for layer in model.model[:-1]:
        layer.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)))
    model.model[-1].register_forward_pre_hook(lambda *_: alive.extend(output() is not None for output in outputs))
    with torch.no_grad():
        model(torch.rand(1, 3, 16, 16))
    assert alive == [False, True, True]


def test_gradients_of_a_copy() -> None:
    model = copy.deepcopy(build_model(tiny_detector()))
    sum(m.sum() for m in model(torch.rand(2, 3, 16, 16))).backward()
    assert all(p.grad is not None for p in model.parameters())


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
    ("text", "message"),
    [
        ("nn.LeakyRelu(0.1)", r"'LeakyRelu', which is not an activation of torch.nn \(did you mean 'LeakyReLU'\?\)"),
        ("nn.Linear(3, 3)", "'Linear', which is not an activation"),
        ("__import__('os').system('touch x')", "write it like nn.LeakyReLU"),
        ("nn.ReLU(__import__('os').system('touch x'))", "write it like nn.LeakyReLU"),
        ("nn.ReLU(", "write it like nn.LeakyReLU"),
        (5, "write it like nn.LeakyReLU"),
        ("nn.ReLU(1, 2, 3)", "does not work .*fix its arguments"),
        ("nn.MultiheadAttention(8, 2)", "row 0: Conv .* does not work"),
    ],
)
def test_invalid_activation(text: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        on_meta({**tiny_detector(), "activation": text})
    assert not list(tmp_path.iterdir())


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


class Corners(Head):
    """A head of no shipped kind: it joins its maps, the second of half the size of the first."""

    description = "corner head"
    example = "[[0, 1], 1, Corners, [nc]]"

    def __init__(self, nc: int, channels: list[int]) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(sum(channels), nc, 1)
        self.strides: list[float] = []

    def placed(self, strides: Sequence[float]) -> None:
        self.strides += strides

    def forward(self, maps: list[Tensor]) -> Tensor:
        first, second, vector = maps
        doubled = nn.functional.interpolate(second, scale_factor=2.0)
        corners: Tensor = self.convolve(torch.cat((first, doubled, vector[..., None, None].expand_as(first)), 1))
        return corners


def test_a_head_is_told_where_it_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever kind it is, once, when the model is built; an input that is no map has the stride 1."""
    monkeypatch.setitem(LAYERS, "Corners", LayerMaker(Corners, lambda p: Corners(*p.args, list(p.channels))))
    description = {
        "task": "detect",
        "nc": 3,
        "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "nn.AdaptiveMaxPool2d", [1]]],
        "head": [[-1, 1, "nn.Flatten", []], [[0, 1, 3], 1, "Corners", ["nc"]]],
    }
    model = build_model(description, head=Corners, imgsz=60)
    assert (model.stride, model.imgsz) == (8, 64)
    assert isinstance(model.head, Corners)
    assert model.head.strides == [4, 8, 1]
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 3, 16, 16)


def test_a_network_for_one_size_is_refused_at_another() -> None:
    with pytest.raises(UserError, match=r"row 3: nn.Upsample .*does not work .*fix that row"):
        on_meta(ONE_SIZE, imgsz=64)
    fused = {**ONE_SIZE, "head": [ONE_SIZE["head"][0], [[-1, 1], 1, "Concat", []], [[1, 4], 1, "Detect", ["nc", 2]]]}
    with pytest.raises(UserError, match=r"row 4: Concat .*does not work .*fix that row"):
        on_meta(fused, imgsz=64)


# Classifiers


def test_a_classifier_starts_from_a_detector() -> None:
    """Its backbone, layers 0 to 8, has the same tensors."""
    detector, classifier = build_model("yolov5n.yaml").state_dict(), build_model("yolov5n-cls.yaml", nc=3)
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    result = transfer(classifier, detector)
    after = classifier.state_dict()
    backbone = [key for key in after if not key.startswith("model.9.")]
    assert (result.loaded, result.total, result.misfits) == (len(backbone), len(backbone) + 8, [])
    assert all(torch.equal(after[key], (detector if key in backbone else before)[key]) for key in after)
    batch_norm = [f"model.9.conv.bn.{key}" for key in nn.BatchNorm2d(1).state_dict()]
    head = ["model.9.conv.conv.weight", *batch_norm, "model.9.linear.weight", "model.9.linear.bias"]
    assert list(after)[len(backbone) :] == head


def test_logits() -> None:
    model = build_model(small_classifier())
    assert [model(torch.rand(2, 3, *size)).shape for size in ((32, 32), (50, 21))] == [(2, 5), (2, 5)]
    assert (model.model[0].conv.out_channels, model.model[1].conv.out_channels) == (8, 16)
    assert model.model[2].linear.out_features == 5  # the width does not scale classes


def test_a_classifier_with_maps_joined_from_below() -> None:
    rows = [*small_classifier()["backbone"], [-1, 1, "nn.Upsample", [None, 2]], [[-1, 0], 1, "Concat", [1]]]
    yaml = {**small_classifier(), "backbone": rows}
    model = ClassificationTask({k: str(k) for k in range(5)}, ClassificationRecipe()).build_model(yaml, 50)
    assert (model.stride, model.imgsz) == (4, 52)
    with pytest.raises(UserError, match=r"row 2: Concat .*does not work"):
        build_model({**yaml, "backbone": [*rows[:2], [[-1, -1], 1, "Concat", [0]]]})


def test_task_of_a_yaml() -> None:
    """`task:` passes unchanged into the model's YAML; without it the head decides."""
    assert build_model({**small_classifier(), "task": "pose"}).yaml["task"] == "pose"
    tasks = " or ".join(TASKS)
    named = "or name the Python file of that task with --task-file"
    with pytest.raises(UserError, match=rf"^mine.yaml is a model for the task 'pose'; give one for {tasks}, {named}$"):
        task_of({**small_classifier(), "task": "pose"}, "mine.yaml")
    without = {key: value for key, value in small_classifier().items() if key != "task"}
    assert build_model(without).yaml == build_model(small_classifier()).yaml
    assert build_model(tiny_detector()).yaml["task"] == "detect"


# Errors in a YAML


@pytest.mark.parametrize(
    ("index", "row", "message"),
    [
        (
            *(1, [-1, 3, "C3Gost", [64]]),
            r"unknown module 'C3Gost' \(did you mean 'C3Ghost'\?\); known are Conv, .* with --layers$",
        ),
        (2, [-1, 1, "nn.Upsampel", [None, 2]], r".*torch.nn does not have \(did you mean 'Upsample'\?\)$"),
        (2, [-1, 1, "nn.functional.relu", []], r"unknown module 'nn.functional.relu'"),
        (2, [-1, 1, "nn.Parameter", [1]], r"unknown module 'nn.Parameter', which torch.nn does not have"),
        (2, [-1, 1, "nn.MSELoss", []], "nn.MSELoss is a loss, a container or a lazy layer and cannot be a row"),
        (2, [-1, 1, "nn.Sequential", []], "nn.Sequential is a loss, a container"),
        (2, [-1, 1, "nn.Module", []], "nn.Module is a loss, a container"),
        (2, [-1, 1, "nn.LazyConv2d", [4, 1]], "nn.LazyConv2d is a loss, a container or a lazy layer"),
        (2, [-1, 1, "nn.MaxPool2d", []], "nn.MaxPool2d .*does not work .*fix that row"),
        (2, [-1, 1, "nn.LSTM", [1, 1]], "nn.LSTM .*does not work .*fix that row"),
        (1, [-1, 3, ["C3"], [64]], r"unknown module '\['C3'\]'"),
        (1, [-1, "C3", [64]], r"\[-1, 'C3', \[64\]\] is not a row; write \[from, number, module, args\]"),
        (1, [-1, 0, "C3", [64]], "the number of repetitions is 0"),
        (1, [-1, 1, "C3", 64], "the arguments are 64; write them as a list"),
        (3, [[-1, 7], 1, "Concat", [1]], "`from` is 7, but only rows before .*: 0 to 2, or -1"),
        (3, [[-1, 3], 1, "Concat", [1]], "`from` is 3, but"),
        (1, [-9, 1, "C3", [64]], "`from` is -9, but"),
        (0, [0, 1, "Conv", [64]], "`from` is 0, but .*: -1, the image"),
        (1, ["-1", 1, "C3", [64]], "`from` is '-1'; give a row's number"),
        (1, [[], 1, "C3", [64]], r"`from` is \[\]; give a row's number"),
        (1, [-1, 1, "C3", []], "C3 .*the number of output channels, is missing.*fix that row"),
        (1, [-1, 1, "C3", ["wide"]], "C3 .*number of output channels, 1 to 4096, not 'wide'"),
        (0, [-1, 1, "Conv", [64, 3, 2, 1, 1, 1, True, 9, 9]], "Conv .*positional arguments"),
        (0, [-1, 1, "Conv", [64, "three"]], "Conv .*does not work"),
        (2, [[-1, 0], 1, "Concat", [1]], "Concat .*does not work"),
        *((2, [[1, 1], 1, "Concat", [dimension]], "Concat .*does not work .*fix that row") for dimension in (0, 2, 3)),
        (2, [-1, 1, "Conv", [64, 3, 2, 0]], "Conv .*does not work .*fix that row"),
        (2, [-1, 1, "nn.Linear", [32, 16]], "nn.Linear .*does not work .*fix that row"),
        (2, [[-1, 1], 1, "Conv", [64]], "Conv .*it takes one input, not 2"),
        (3, [[2], 1, "Detect", ["nc", "anchors"]], "Detect .*1 input maps, but `anchors` has 2 rows"),
    ],
)
def test_invalid_row(index: int, row: Any, message: str) -> None:
    rows = [*tiny_detector()["backbone"], *tiny_detector()["head"]]
    rows[index] = row
    with pytest.raises(UserError, match=f"(?s)^the model YAML, row {index}: {message}"):
        build_model({**tiny_detector(), "backbone": rows[:3], "head": rows[3:]}, head=Detect)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": [[-1, 1, "Conv", [64]]]}, "the last row of `head` is not a detection head"),
        ({"head": []}, "the last row of `head` is not a detection head"),
        ({"head": None}, "`head` is None; give a list of rows"),
        (
            {"head": [[[1, 2], 1, "Segment", ["nc", "anchors", 2, 16]]]},
            "the last row of `head` is not a detection head",
        ),
        ({"nc": 0}, "`nc` is 0; give a whole number from 1 to 4096"),
        ({"ch": 4}, "`ch` is 4; give 3, as images are read as RGB, or leave it out$"),
        ({"ch": "3"}, "`ch` is '3'; give 3, "),
        ({"width_multiple": "wide"}, "`width_multiple` is 'wide'; give a number above 0"),
        ({"widht_multiple": 1}, r"unknown key 'widht_multiple' \(did you mean 'width_multiple'\?\)"),
        ({"anchors": []}, r"`anchors` is \[\]; give a list of width"),
        ({"anchors": [[1, "a"]]}, "`anchors` is "),
        ({"anchors": [[1, 2, 3], [1, 2, 3]]}, "row 3: Detect .*same number of width, height pairs"),
        ({"task": ["detect"]}, r"`task` is \['detect'\]; give one of"),
        ({"task": None}, f"`task` is None; give one of {', '.join(TASKS)}$"),
    ],
)
def test_invalid_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)^the model YAML.*{message}"):
        build_model({**tiny_detector(), **changes}, head=Detect)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"head": [[-1, 1, "Conv", [64]]]},
            r"the last row of `head` is not a classification head; end it with one, such as .*Classify, \[nc\]\]$",
        ),
        ({"head": [[[1], 1, "Detect", ["nc", 2]]]}, "the last row of `head` is not a classification head"),
        ({"head": [[-1, 1, "Classify", []]]}, "row 2: Classify .*does not work .*fix that row"),
        ({"head": [[[0, 1], 1, "Classify", ["nc"]]]}, "row 2: Classify .*it takes one input, not 2"),
        ({"head": [[-1, 1, "Classify", ["nc", 2.0]]]}, "row 2: Classify .*dropout probability"),
        ({"head": [[-1, 1, "Classify", ["nc"]]] * 2}, "row 3: Classify .*does not work"),
    ],
)
def test_invalid_head_of_a_classifier(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)^the model YAML.*{message}"):
        build_model({**small_classifier(), **changes}, head=Classify)


def test_a_detector_needs_anchors() -> None:
    description = tiny_detector()
    del description["anchors"]
    with pytest.raises(UserError, match="`anchors` is missing; give"):
        build_model(description)


def test_a_yaml_without_rows() -> None:
    with pytest.raises(UserError, match="the model YAML: `backbone` and `head` have no rows"):
        build_model({**tiny_detector(), "backbone": [], "head": []})


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "mine.yaml", {**tiny_detector(), "head": [[-1, 1, "Detekt", []]]})
    with pytest.raises(UserError, match=r"mine.yaml, row 3: unknown module 'Detekt' \(did you mean 'Detect'\?\)"):
        build_model(path)
    with pytest.raises(UserError, match=r"'yolov5q.yaml' is not a file.*yolov5n.yaml"):
        build_model("yolov5q.yaml")
