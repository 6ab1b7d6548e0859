"""Models from YAML: sizes, agreement with YOLOv5's own outputs, options, and messages for YAMLs that make no model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor, nn

from models.layer_registry import LAYERS
from models.layers import Classify, Conv, Detect
from models.tasks import task_of
from models.tasks.detection.task import DetectionTask
from models.weights.reader import read_weights
from models.weights.transfer import transfer
from models.yolo import build_model
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import find_file

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared"
# Parameters with 80 classes: computed from the published architectures.
PARAMETERS = {
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
# Of those in models/hub.
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
SEGMENTERS = {"n": 1_991_549, "s": 7_621_277, "m": 21_990_397, "l": 47_924_957, "x": 88_819_517}
# Of classifiers, with 1000 classes.
CLASSIFIERS = {
    "yolov5n-cls": 2_493_000,
    "yolov5s-cls": 5_453_480,
    "yolov5m-cls": 12_957_640,
    "yolov5l-cls": 26_552_680,
    "yolov5x-cls": 48_097_160,
}


def small() -> dict[str, Any]:
    """A network of one level, quick to build."""
    return {
        "nc": 2,
        "depth_multiple": 0.33,
        "width_multiple": 0.25,
        "anchors": [[10, 13, 16, 30, 33, 23]],
        "backbone": [[-1, 1, "Conv", [64, 3, 2]], [-1, 3, "C3", [64]], [-1, 1, "Conv", [128, 3, 2]]],
        "head": [
            [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
            [[-1, 1], 1, "Concat", [1]],
            [[-1], 1, "Detect", ["nc", "anchors"]],
        ],
    }


def on_meta(source: dict[str, Any] | str, **options: Any) -> nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return build_model(source, **options)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    assert count(on_meta(f"models/{name}.yaml")) == PARAMETERS[name]


@pytest.mark.parametrize("name", HUB)
def test_parameter_count_of_the_hubs(name: str) -> None:
    model = on_meta(f"{name}.yaml")
    assert count(model) == HUB[name]
    anchors = model.yaml["anchors"]
    assert len(anchors) == model.detect.nl if isinstance(anchors, list) else anchors == 3


def test_every_model_of_the_hub_is_counted() -> None:
    assert sorted(path.stem for path in (REPOSITORY / "models" / "hub").iterdir()) == sorted(HUB)


@pytest.mark.parametrize("name", ["yolov5-p2.yaml", "yolov5-p2", "hub/yolov5-p2.yaml", "models/hub/yolov5-p2.yaml"])
def test_ways_to_name_a_model_of_the_hub(name: str) -> None:
    assert find_file(name, "model", ["models", "models/hub"]).resolve() == REPOSITORY / "models/hub/yolov5-p2.yaml"


def narrow(name: str) -> dict[str, Any]:
    """A shipped model an eighth as wide, and no deeper than it must be."""
    content = yaml.safe_load(find_file(name, "model", ["models", "models/hub"]).read_text())
    return {**content, "width_multiple": 0.125, "depth_multiple": 0.1}


@pytest.mark.parametrize(
    ("name", "strides"),
    [
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
def test_maps_of_the_hubs(name: str, strides: list[int]) -> None:
    model = build_model(narrow(name)).eval()
    assert model.detect.stride.tolist() == strides
    maps = model(torch.rand(1, 3, 128, 256))
    assert [m.shape for m in maps] == [(1, 3, 128 // s, 256 // s, 85) for s in strides]
    assert all(m.isfinite().all() for m in maps)


class Images(NamedTuple):
    """Two images with an object in one of them."""

    images: Tensor = torch.arange(2 * 3 * 64 * 64, dtype=torch.float32).remainder(251).byte().view(2, 3, 64, 64)
    targets: Tensor = torch.tensor([[1, 2, 0.4, 0.6, 0.3, 0.2]])
    infos: tuple[Any, ...] = ()


@pytest.mark.parametrize("name", ["yolov5s-ghost", "yolov5s-transformer", "yolov5-p2", "yolov5-bifpn"])
def test_a_training_step_reaches_every_parameter(name: str) -> None:
    task, batch = DetectionTask({0: "a", 1: "b", 2: "c"}, Hyperparameters()), Images()
    model = task.build_model(narrow(name), 64).train()
    criterion = task.criterion(model)
    terms = criterion(model(task.inputs(batch), *criterion.hints(batch)), batch)
    loss = criterion.objective(terms.means(terms.counts), 2)
    loss.backward()
    assert loss.isfinite()
    for name_of, parameter in model.named_parameters():
        assert parameter.grad is not None, name_of
        assert parameter.grad.isfinite().all(), name_of
    assert sum(bool(parameter.grad.any()) for parameter in model.parameters()) > 0.9 * len(list(model.parameters()))


def segmenter(size: str) -> dict[str, Any]:
    """What YOLOv5 has as yolov5?-seg: the detector with another head."""
    content = yaml.safe_load((REPOSITORY / "models" / f"yolov5{size}.yaml").read_text())
    head = [[17, 20, 23], 1, "Segment", ["nc", "anchors", 32, 256]]
    return {**content, "task": "segment", "head": [*content["head"][:-1], head]}


@pytest.mark.parametrize("size", SEGMENTERS)
def test_parameter_count_of_segmenters(size: str) -> None:
    assert count(on_meta(segmenter(size))) == SEGMENTERS[size]


def test_a_segmenters_maps_and_prototypes() -> None:
    model = build_model(segmenter("n"), nc=2)
    maps, prototypes = model(torch.rand(1, 3, 64, 96))
    assert [m.shape for m in maps] == [(1, 3, 64 // s, 96 // s, 2 + 5 + 32) for s in (8, 16, 32)]
    assert prototypes.shape == (1, 32, 16, 24)
    assert model.model[-1].proto.cv1.conv.out_channels == 64  # a quarter of 256


def test_a_detector_does_not_end_with_a_segmenters_head() -> None:
    with pytest.raises(UserError, match="the last row of `head` is no detection head"):
        build_model({**segmenter("n"), "task": "detect"}, head=Detect)


@pytest.mark.parametrize(("name", "strides"), [("yolov5n.yaml", [8, 16, 32]), ("yolov5n6", [8, 16, 32, 64])])
def test_strides_and_anchors(name: str, strides: list[int]) -> None:
    model = build_model(name)  # a shipped file, by its bare name
    assert model.detect.stride.tolist() == strides
    given = torch.tensor(yaml.safe_load((REPOSITORY / "models" / name).with_suffix(".yaml").read_text())["anchors"])
    pixels = model.detect.anchors * model.detect.stride.view(-1, 1, 1)
    torch.testing.assert_close(pixels.flatten(1), given.float())
    images = torch.rand(1, 3, 128, 192)
    assert [m.shape for m in model(images)] == [(1, 3, 128 // s, 192 // s, 85) for s in strides]


def decode(maps: list[Tensor], anchors: Tensor, stride: Tensor) -> Tensor:
    """YOLOv5's formula, written down cell by cell: xy = (2s - 0.5 + cell) stride, wh = (2s)^2 anchor."""
    levels = []
    for raw, level_anchors, s in zip(maps, anchors, stride, strict=True):
        y = raw.sigmoid()
        rows, columns = torch.meshgrid(torch.arange(y.shape[2]), torch.arange(y.shape[3]), indexing="ij")
        y[..., 0] = (y[..., 0] * 2 - 0.5 + columns) * s
        y[..., 1] = (y[..., 1] * 2 - 0.5 + rows) * s
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * (level_anchors * s).view(1, -1, 1, 1, 2)
        levels.append(y.flatten(1, 3))
    return torch.cat(levels, 1)


@pytest.fixture(scope="module")
def official() -> Any:
    """The official yolov5n checkpoint."""
    path = SHARED / "weights" / "yolov5n.pt"
    if not path.exists():
        pytest.skip(f"needs the official checkpoint {path}")
    return read_weights(path)


@torch.no_grad()
def test_official_weights_predict_what_yolov5_predicts(official: Any) -> None:
    path = SHARED / "reference" / "yolov5n_forward.pt"
    if not path.exists():
        pytest.skip(f"needs YOLOv5's own predictions {path}")
    reference = torch.load(path, weights_only=True)
    model = build_model("yolov5n.yaml").eval()
    transfer(model, official.state)
    predictions = decode(model(reference["image"]), model.detect.anchors, model.detect.stride)
    torch.testing.assert_close(predictions, reference["predictions"], rtol=0, atol=1e-3)


def test_official_yaml_builds_the_same_network(official: Any) -> None:
    model = on_meta(official.model)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in official.state.items()}


def test_number_of_classes() -> None:
    model = on_meta("yolov5n.yaml", nc=3)
    assert count(model) == PARAMETERS["yolov5n"] - 3 * 77 * (64 + 128 + 256 + 3)
    assert model.names == {0: "0", 1: "1", 2: "2"}
    assert model.yaml["nc"] == 3


def test_one_class_is_possible() -> None:
    assert build_model(small(), nc=1)(torch.rand(1, 3, 8, 8))[0].isfinite().all()


def test_yaml_rebuilds_the_network_and_the_argument_stays_as_it_was() -> None:
    given = small()
    model = on_meta(given, nc=5, channels=4)
    assert given == small()
    again = on_meta(model.yaml)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in again.state_dict().items()}
    assert yaml.safe_load(yaml.safe_dump(model.yaml)) == model.yaml == again.yaml


def test_same_seed_same_weights_and_statistics_untouched() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(build_model(small()).state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert all(int(v) == 0 for k, v in states[0].items() if k.endswith("num_batches_tracked"))


def test_repetitions() -> None:
    description = small()
    description["depth_multiple"] = 1.0
    description["backbone"][0] = [-1, 2, "Conv", [64, 3]]
    model = on_meta(description)
    assert len(model.model[1].m) == 3
    assert isinstance(model.model[0], nn.Sequential)
    assert [part.conv.in_channels for part in model.model[0]] == [3, 16]


def test_a_row_as_wide_as_the_head_is_not_scaled() -> None:
    description = small()
    description["backbone"][2] = [-1, 1, "Conv", [21, 3, 2]]  # 3 anchors * (2 classes + 5)
    assert on_meta(description).model[2].conv.out_channels == 21


def test_anchors_by_number() -> None:
    model = build_model({**small(), "anchors": 2})
    assert (model.detect.anchors * model.detect.stride).tolist() == [[[1, 2], [3, 4]]]


def test_only_later_inputs_stay_alive() -> None:
    assert on_meta(small())._later_inputs == {1}


def test_gradients_and_copies() -> None:
    model = copy.deepcopy(build_model(small()))
    sum(m.sum() for m in model(torch.rand(2, 3, 16, 16))).backward()
    assert all(p.grad is not None for p in model.parameters())


def activations(model: nn.Module) -> set[str]:
    return {repr(part.act) for part in model.modules() if isinstance(part, Conv)}


def test_activation_is_this_models_alone() -> None:
    model = on_meta({**small(), "activation": "nn.LeakyReLU(0.1)"})
    assert activations(model) == {"LeakyReLU(negative_slope=0.1)"}
    assert activations(on_meta(small())) == {"SiLU()"}
    assert activations(on_meta({**small(), "activation": "torch.nn.ReLU"})) == {"ReLU()"}
    assert activations(on_meta({**small(), "activation": "nn.ReLU(inplace=True)"})) == {"ReLU(inplace=True)"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nn.LeakyRelu(0.1)", r"'LeakyRelu', which is no activation of torch.nn \(did you mean 'LeakyReLU'\?\)"),
        ("nn.Linear(3, 3)", "'Linear', which is no activation"),
        ("__import__('os').system('touch x')", "write it like nn.LeakyReLU"),
        ("nn.ReLU(__import__('os').system('touch x'))", "write it like nn.LeakyReLU"),
        ("nn.ReLU(", "write it like nn.LeakyReLU"),
        (5, "write it like nn.LeakyReLU"),
        ("nn.ReLU(1, 2, 3)", "does not work .*fix its arguments"),
        ("nn.MultiheadAttention(8, 2)", "row 0: Conv .* does not work"),
    ],
)
def test_activations_that_are_none(text: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        on_meta({**small(), "activation": text})
    assert not list(tmp_path.iterdir())


def row(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one row, counted through backbone and head."""

    def change(description: dict[str, Any]) -> None:
        part, first = ("backbone", 0) if index < 3 else ("head", 3)
        description[part][index - first] = value

    return change


def key(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            row(1, [-1, 3, "C3Gost", [64]]),
            r"row 1: unknown module 'C3Gost' \(did you mean 'C3Ghost'\?\); known are Conv, .* goes to --layers$",
        ),
        (row(3, [-1, 1, "nn.Upsampel", [None, 2]]), r"row 3: .*torch.nn does not have \(did you mean 'Upsample'\?\)$"),
        (row(3, [-1, 1, "nn.functional.relu", []]), r"row 3: unknown module 'nn.functional.relu'"),
        (row(3, [-1, 1, "nn.init", []]), r"row 3: unknown module 'nn.init', which torch.nn does not have"),
        (row(3, [-1, 1, "nn.Parameter", [1]]), r"row 3: unknown module 'nn.Parameter', which torch.nn does not have"),
        (row(3, [-1, 1, "nn.MSELoss", []]), "row 3: nn.MSELoss cannot be a row, for it is a loss, a container"),
        (row(3, [-1, 1, "nn.Sequential", []]), "row 3: nn.Sequential cannot be a row"),
        (row(3, [-1, 1, "nn.Module", []]), "row 3: nn.Module cannot be a row"),
        (row(3, [-1, 1, "nn.LazyConv2d", [4, 1]]), "row 3: nn.LazyConv2d cannot be a row"),
        (row(3, [-1, 1, "nn.MaxPool2d", []]), "row 3: nn.MaxPool2d .*does not work .*fix that row"),
        (row(3, [-1, 1, "nn.LSTM", [1, 1]]), "row 3: nn.LSTM .*does not work .*fix that row"),
        (row(1, [-1, 3, ["C3"], [64]]), r"row 1: unknown module '\['C3'\]'"),
        (row(1, [-1, "C3", [64]]), r"row 1: \[-1, 'C3', \[64\]\] is no row; write \[from, number, module, args\]"),
        (row(4, None), "row 4: None is no row"),
        (row(1, [-1, 0, "C3", [64]]), "row 1: the number of repetitions is 0"),
        (row(1, [-1, 1, "C3", 64]), "row 1: the arguments are 64; write them as a list"),
        (row(4, [[-1, 7], 1, "Concat", [1]]), "row 4: `from` is 7, but only rows before .*: 0 to 3, or -1"),
        (row(4, [[-1, 4], 1, "Concat", [1]]), "row 4: `from` is 4, but"),
        (row(1, [-9, 1, "C3", [64]]), "row 1: `from` is -9, but"),
        (row(0, [0, 1, "Conv", [64]]), "row 0: `from` is 0, but .*: -1, the image"),
        (row(1, ["-1", 1, "C3", [64]]), "row 1: `from` is '-1'; give a row's number"),
        (row(1, [[], 1, "C3", [64]]), r"row 1: `from` is \[\]; give a row's number"),
        (row(1, [-1, 1, "C3", []]), "row 1: C3 .*the number of output channels, is missing.*fix that row"),
        (row(1, [-1, 1, "C3", ["wide"]]), "row 1: C3 .*number of output channels, 1 to 4096, not 'wide'"),
        (row(0, [-1, 1, "Conv", [64, 3, 2, 1, 1, 1, True, 9, 9]]), "row 0: Conv .*positional arguments"),
        (row(0, [-1, 1, "Conv", [64, "three"]]), "row 0: Conv .*does not work"),
        (row(0, [-1, 1, "Conv", [64, 3, 0]]), "row 0: Conv .*does not work"),
        (row(4, [[-1, 2], 1, "Concat", [1]]), "row 4: Concat .*does not work"),
        (row(4, [[-1, 1], 1, "Conv", [64]]), "row 4: Conv .*it takes one input, not 2"),
        (row(3, [-1, 1, "nn.Upsample", [None, 2, "neerest"]]), "row 3: nn.Upsample .*does not work"),
        (row(5, [-1, 1, "Conv", [64]]), "the last row of `head` is no detection head"),
        (row(5, [[1, 4], 1, "Detect", ["nc", "anchors"]]), "row 5: Detect .*2 input maps, but `anchors` has 1 rows"),
        (key("head", []), "the last row of `head` is no detection head"),
        (key("head", None), "`head` is None; give a list of rows"),
        (key("nc", 0), "`nc` is 0; give a whole number from 1 to 4096"),
        (key("width_multiple", "wide"), "`width_multiple` is 'wide'; give a number above 0"),
        (key("widht_multiple", 1), r"unknown key 'widht_multiple' \(did you mean 'width_multiple'\?\)"),
        (key("anchors", []), r"`anchors` is \[\]; give a list of width"),
        (key("anchors", [[1, "a"]]), "`anchors` is "),
        (key("anchors", [[1, 2, 3]]), "row 5: Detect .*same number of width, height pairs"),
    ],
)
def test_yaml_that_describes_no_model(change: Callable[[dict[str, Any]], None], message: str) -> None:
    description = small()
    change(description)
    with pytest.raises(UserError, match=f"(?s)^the model YAML.*{message}"):
        build_model(description, head=Detect)


def test_the_docs_name_every_layer_and_model() -> None:
    text = (REPOSITORY / "docs" / "models.md").read_text()
    assert [name for name in (*LAYERS, *HUB) if f"`{name}`" not in text.replace("`-p", "`yolov5-p")] == []
    counts = [*PARAMETERS.values(), *CLASSIFIERS.values(), *HUB.values()]
    assert [number for number in counts if f"{number:,}" not in text] == []


def test_missing_key() -> None:
    description = small()
    del description["anchors"]
    with pytest.raises(UserError, match="`anchors` is missing; give"):
        build_model(description)


def test_messages_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**small(), "head": [[-1, 1, "Detekt", []]]}))
    with pytest.raises(UserError, match=r"mine.yaml, row 3: unknown module 'Detekt' \(did you mean 'Detect'\?\)"):
        build_model(path)


def test_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"'yolov5q.yaml' is not a file.*yolov5n.yaml"):
        build_model("yolov5q.yaml")


# Classifiers


def small_classifier() -> dict[str, Any]:
    return {
        "task": "classify",
        "nc": 5,
        "width_multiple": 0.5,
        "backbone": [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [32, 3, 2]]],
        "head": [[-1, 1, "Classify", ["nc"]]],
    }


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_parameter_count_of_classifiers(name: str) -> None:
    model = on_meta(f"{name}.yaml")
    assert model.yaml["nc"] == 1000
    assert count(model) == CLASSIFIERS[name]
    head = [key for key in model.state_dict() if key.startswith("model.9.")]
    batch_norm = [f"model.9.conv.bn.{key}" for key in nn.BatchNorm2d(1).state_dict()]
    assert head == ["model.9.conv.conv.weight", *batch_norm, "model.9.linear.weight", "model.9.linear.bias"]


def backbone(model: nn.Module) -> dict[str, Tensor]:
    """Layers 0 to 8."""
    return {key: value for key, value in model.state_dict().items() if int(key.split(".")[1]) < 9}


@pytest.mark.parametrize("size", "nsmlx")
def test_a_classifier_has_the_detectors_backbone(size: str) -> None:
    detector, classifier = (backbone(on_meta(f"yolov5{size}{kind}.yaml")) for kind in ("", "-cls"))
    assert {key: value.shape for key, value in classifier.items()} == {k: v.shape for k, v in detector.items()}


def test_a_detectors_weights_in_a_classifier() -> None:
    detector, classifier = build_model("yolov5n.yaml"), build_model("yolov5n-cls.yaml", nc=3)
    before = {key: value.clone() for key, value in classifier.state_dict().items()}
    found = transfer(classifier, detector.state_dict())
    taken = backbone(detector)
    assert (found.loaded, found.total, found.misfits) == (len(taken), len(taken) + 8, [])  # 6 of Conv, 2 of the linear
    after = classifier.state_dict()
    assert all(torch.equal(after[key], value) for key, value in taken.items())
    assert all(torch.equal(after[key], before[key]) for key in after.keys() - taken)


def test_logits() -> None:
    model = build_model(small_classifier())
    assert [model(torch.rand(2, 3, *size)).shape for size in ((32, 32), (50, 21))] == [(2, 5), (2, 5)]
    assert (model.model[0].conv.out_channels, model.model[1].conv.out_channels) == (8, 16)
    assert model.model[2].linear.out_features == 5  # classes are not scaled by the width
    assert build_model(small_classifier(), nc=3)(torch.rand(2, 3, 8, 8)).shape == (2, 3)


def test_a_classifiers_yaml_builds_it_again() -> None:
    model = on_meta({**small_classifier(), "head": [[-1, 1, "Classify", ["nc", 0.2]]]}, nc=7)
    again = on_meta(model.yaml)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert again.model[2].drop.p == 0.2
    assert again.yaml == model.yaml
    assert (model.yaml["task"], model.yaml["nc"]) == ("classify", 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"head": [[-1, 1, "Conv", [64]]]},
            r"the last row of `head` is no classification head; end it with one, such as \[-1, 1, Classify, \[nc\]\]$",
        ),
        ({"head": []}, "the last row of `head` is no classification head"),
        ({"head": [[[1], 1, "Detect", ["nc", 2]]]}, "the last row of `head` is no classification head"),
        ({"head": [[-1, 1, "Classify", []]]}, "row 2: Classify .*does not work .*fix that row"),
        ({"head": [[[0, 1], 1, "Classify", ["nc"]]]}, "row 2: Classify .*it takes one input, not 2"),
        ({"head": [[-1, 1, "Classify", ["nc", 2.0]]]}, "row 2: Classify .*dropout probability"),
        ({"head": [[-1, 1, "Classify", ["nc"]]] * 2}, "row 3: Classify .*does not work"),
        ({"head": [[-1, 1, "Clasify", ["nc"]]]}, r"row 2: unknown module 'Clasify' \(did you mean 'Classify'\?\)"),
        ({"task": "detect", "anchors": 2}, "the last row of `head` is no detection head"),
        ({"task": "detect"}, "`anchors` is missing"),
        ({"task": ["classify"]}, r"`task` is \['classify'\]; give one of"),
        ({"task": None}, "`task` is None; give one of detect, classify$"),
    ],
)
def test_yaml_that_describes_no_classifier(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)^the model YAML.*{message}"):
        build_model({**small_classifier(), **changes}, head=Detect if changes.get("task") == "detect" else Classify)


def test_task_of_a_yaml() -> None:
    """`task:` passes unchanged into the model's YAML; without it the head decides."""
    assert build_model({**small_classifier(), "task": "pose"}).yaml["task"] == "pose"
    with pytest.raises(UserError, match=r"^mine.yaml is a model for the task 'pose'; give one for detect or classify$"):
        task_of({**small_classifier(), "task": "pose"}, "mine.yaml")
    without = {key: value for key, value in small_classifier().items() if key != "task"}
    assert build_model(without).yaml == build_model(small_classifier()).yaml
    assert build_model(small()).yaml["task"] == "detect"


def test_a_yaml_without_rows() -> None:
    with pytest.raises(UserError, match="the model YAML: `backbone` and `head` have no rows"):
        build_model({**small(), "backbone": [], "head": []})


@pytest.mark.parametrize(
    ("description", "imgsz", "expected"),
    [(small(), 7, (2, 8)), (small(), 1, (2, 4)), (small_classifier(), 50, (1, 50)), ("yolov5n6.yaml", 600, (64, 640))],
)
def test_stride_and_image_size(description: Any, imgsz: int, expected: tuple[int, int]) -> None:
    """The largest stride; the size in whole strides, at least two."""
    model = on_meta(description, imgsz=imgsz)
    assert (model.stride, model.imgsz) == expected


def test_anchors_of_a_classifier() -> None:
    """It has none, and does not ask for them."""
    build_model({**small_classifier(), "anchors": 5.5})
