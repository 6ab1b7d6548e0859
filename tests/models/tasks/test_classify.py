"""The classifier's task: its models, loss, predictions and metrics, with numbers worked out by hand."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision import models as zoo
from torchvision.ops import StochasticDepth

from models.loading import transfer
from models.tasks import task_name
from models.tasks.classify import (
    ClassificationCriterion,
    ClassificationPrediction,
    ClassificationRecipe,
    ClassificationTask,
    ClassificationView,
    ImageRecord,
    build_classifier,
)
from models.tasks.contract import Model, Thresholds
from models.yolo import YoloModel
from tests.making import CLASS_NAMES, grey_batch
from utils.batch import Batch, ClassInfo
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import find_hyperparameters, from_mapping
from utils.distributed.dropout import synchronise_dropout
from utils.errors import UserError
from utils.plots.drawing import Style, draw_captioned, draw_text_lines
from utils.summary import Summary
from utils.training.optimizer import ModelEMA

SEVEN = dict(enumerate("abcdefg"))
LOGITS = torch.tensor([[5.0, 5.0, 5.0], [math.log(2), 0.0, 0.0]])  # probabilities 1/3 each, and 1/2, 1/4, 1/4
LN2, LN3 = math.log(2), math.log(3)


def of_classes(*labels: int, targets: list[list[float]] | None = None) -> Batch:
    """Return a batch of an image for each of `labels`; targets: shares of three classes, by default the labels."""
    infos = [ClassInfo(number, f"{number}.png", label) for number, label in enumerate(labels)]
    shares = torch.eye(3)[list(labels)] if targets is None else torch.tensor(targets)
    return grey_batch(*infos, targets=shares, side=8)


def make(label_smoothing: float = 0.0, names: dict[int, str] = CLASS_NAMES) -> ClassificationTask:
    return ClassificationTask(names, ClassificationRecipe(), label_smoothing)


class Identity(Model):
    forward = staticmethod(lambda images: images)


# The task


def test_the_task() -> None:
    assert task_name({"nc": 3, "head": [[-1, 1, "Classify", ["nc"]]]}, "mine.yaml") == "classify"
    with pytest.raises(UserError, match=r"mine\.yaml .* 'pose'"):
        task_name({"task": "pose"}, "mine.yaml")
    known = {field.name: type(field.default) for field in fields(TrainOptions)}
    assert {name: type(value) for name, value in ClassificationTask.defaults.items()}.items() <= known.items()
    assert find_hyperparameters(ClassificationTask.recipes.trained).is_file()
    names = ("yolov5s-cls.pt", "yolov5x-cls.pt", "yolov5s.pt")
    assert [bool(re.fullmatch(ClassificationTask.official_weights, name)) for name in names] == [True, True, False]


REFUSED = {"crop_scale": 0, "hue": 0.51, "randaugment": 1.5, "momentum": 1, "nbs": -1, "weight_decay": -1, "mixup": 1.1}


@pytest.mark.parametrize("key", REFUSED)
def test_ranges_of_the_recipe(key: str) -> None:
    from_mapping(ClassificationRecipe, {key: 0.5 if key == "crop_scale" else 0}, Path("a.yaml"))
    with pytest.raises(UserError, match=rf"^a\.yaml: {key} "):
        from_mapping(ClassificationRecipe, {key: REFUSED[key]}, Path("a.yaml"))


def test_refused_tasks() -> None:
    """At least two classes; mixup and cutmix are shares of the images."""
    for names in ({0: "disc"}, {}):
        with pytest.raises(UserError):
            make(names=names)
    ClassificationTask(CLASS_NAMES, ClassificationRecipe(mixup=0.5, cutmix=0.5))
    with pytest.raises(UserError, match="mixup"):
        ClassificationTask(CLASS_NAMES, ClassificationRecipe(mixup=0.75, cutmix=0.5))


def test_inputs_are_normalised_by_imagenets_statistics() -> None:
    given = of_classes(0, 1)
    given.images[1] = torch.tensor([0, 255, 102], dtype=torch.uint8).view(3, 1, 1)
    inputs = make().inputs(given)
    assert (inputs.dtype, inputs.shape, given.images.dtype) == (torch.float32, (2, 3, 8, 8), torch.uint8)
    for pixel, rgb in ((inputs[0, :, 3, 5], (0.2, 0.2, 0.2)), (inputs[1, :, 0, 0], (0, 1, 0.4))):  # 51 is 0.2 of 255
        expected = [(x - m) / d for x, m, d in zip(rgb, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]
        assert pixel.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_batch_is_drawn_with_classes_and_shares() -> None:
    batch = of_classes(0, 1, 0, targets=[[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.5, 0.3]])
    batch.images[1] = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)
    grey, colour = np.full((8, 8, 3), 51, np.uint8), np.full((8, 8, 3), (3, 2, 1), np.uint8)  # blue first
    captions = ["disc", "traffic light 0.75\ndisc 0.25", "traffic light 0.50\nbar 0.30"]
    assert np.array_equal(make().draw_batch(batch), draw_captioned([grey, colour, grey], captions))


# Models

ROWS = {"task": "classify", "nc": 1000, "backbone": [[-1, 1, "Conv", [8, 3, 2]]], "head": [[-1, 1, "Classify", ["nc"]]]}
# Too many parameters for a small machine.
NOT_BUILT = "regnet_y_128gf"  # 2.6 GB, and not possible on the meta device
LARGE = ("vit_h_14", "vit_l_16", "vit_l_32", "convnext_large", "efficientnet_v2_l", "vgg")


def test_a_review_scores_the_margin_of_the_most_probable_class() -> None:
    prediction = ClassificationPrediction(4, "a.jpg", CLASS_NAMES, torch.tensor([0.25, 0.125, 0.625]))
    (found,) = prediction.review(ClassInfo(4, "a.jpg", 1)).found
    assert found == ("wrong class", 0.5, 1, 2, 0.625, None, ())
    assert prediction.review(ClassInfo(4, "a.jpg", 2)).found == []


def on_meta(name: str, nc: int = 3, imgsz: int = 64, **yaml: Any) -> Any:
    """Build the model without memory for its weights."""
    with torch.device("meta"):
        return build_classifier({"architecture": name, **yaml}, nc, imgsz)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize("yaml", [ROWS, {"architecture": "squeezenet1_1", "nc": 1000}])
def test_the_model_has_the_tasks_classes(yaml: dict[str, Any]) -> None:
    task = make()
    model: Any = task.build_model(yaml, 50)
    assert isinstance(model, YoloModel) == ("backbone" in yaml)
    assert (model.imgsz, model.stride, model.names) == (50, 1, CLASS_NAMES)  # any size
    assert (model.yaml["task"], model.yaml["nc"], yaml["nc"]) == ("classify", 3, 1000)
    inputs = task.inputs(grey_batch(count=2, side=50))
    assert model(inputs).shape == (2, 3)
    torch.testing.assert_close(task.export_module(model.eval(), None)(inputs), model(inputs))


def test_weights_are_torchvisions_own() -> None:
    """Under the same seed; the check of the image size draws no random numbers, in spite of dropout."""
    torch.manual_seed(3)
    theirs = zoo.mobilenet_v3_small(num_classes=5)
    number = torch.rand(1)
    torch.manual_seed(3)
    ours = build_classifier({"architecture": "mobilenet_v3_small"}, 5, 64)
    assert torch.equal(torch.rand(1), number)
    assert ours.training
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    assert all(torch.equal(state[key], value) for key, value in theirs.state_dict().items())  # statistics too
    # Weights with a version are loaded; those for other classes but for the last layer.
    assert transfer(ours, {key: value + 1 for key, value in state.items()})[2] == []
    assert transfer(ours, zoo.mobilenet_v3_small().state_dict())[2] == ["classifier.3.weight", "classifier.3.bias"]


def test_the_yaml_builds_it_again() -> None:
    yaml = {"architecture": "mobilenet_v3_small", "nc": 1000, "args": {"dropout": 0.35}}
    given = copy.deepcopy(yaml)
    with torch.device("meta"):
        model: Any = build_classifier(yaml, 4, 64)
        again: Any = build_classifier(model.yaml, 4, 64)
    assert model.yaml == again.yaml == {**yaml, "task": "classify", "nc": 4}
    assert shapes(again) == shapes(model)
    assert again.classifier[2].p == 0.35
    model.yaml["args"]["dropout"] = 0.9
    assert yaml == given  # the model has a copy
    assert on_meta("mobilenet_v3_small", args=None).classifier[2].p == 0.2  # an empty `args:`
    transformer = on_meta("vit_b_32", imgsz=96, args={"image_size": 96})
    assert transformer.encoder.pos_embedding.shape == (1, 3 * 3 + 1, 768)


@pytest.mark.parametrize(
    ("yaml", "named"),
    [
        ({"architecture": "resnt18"}, "'resnt18'.*'resnet18'"),
        ({"architecture": ["resnet18"]}, "architecture"),
        ({"architecture": "fcn_resnet50"}, "fcn_resnet50"),  # not a classifier
        ({**ROWS, "head": []}, "`head`"),
        ({**ROWS, "architecture": "resnet18"}, "'backbone'"),
        ({"architecture": "resnet18", "arg": {}}, r"'arg'.*'args'"),
        ({"architecture": "resnet18", "args": {"droput": 0.3}}, "droput"),
        ({"architecture": "googlenet", "args": {"aux_logits": True}}, "aux_logits"),
        ({"architecture": "mobilenet_v3_small", "args": {"dropout": 7}}, "dropout"),
        ({"architecture": "convnext_tiny", "args": {"droput": 0.3}}, "'droput'"),  # torchvision ignores it
        ({"architecture": "vit_b_32", "imgsz": 96}, "--imgsz 64"),
        ({"architecture": "inception_v3"}, "--imgsz 64"),
    ],
)
def test_yaml_that_describes_no_classifier(yaml: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"^mine\.yaml.*{named}") as caught, torch.device("meta"):
        make().build_model(yaml, 64, "mine.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in zoo.list_models(module=zoo) if name != NOT_BUILT])
def test_every_architecture(name: str) -> None:
    """It is built, its average returns logits, and every dropout layer is synchronised."""
    model: Any = (
        on_meta(name, imgsz=224) if name.startswith(LARGE) else build_classifier({"architecture": name}, 3, 224)
    )
    before = shapes(model)
    synchronise_dropout(model)
    assert shapes(model) == before
    dropping = (nn.modules.dropout._DropoutNd, StochasticDepth)
    assert not [part for part in model.modules() if isinstance(part, dropping) and part.p]
    ema = ModelEMA(model)
    assert ema.model.yaml == {"architecture": name, "task": "classify", "nc": 3}
    ema.model.to("meta")
    assert ema.model.eval()(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 3)


# The loss


def criterion(label_smoothing: float = 0.0) -> ClassificationCriterion:
    return make(label_smoothing).criterion(Identity())


def test_the_loss_equals_torchs_cross_entropy() -> None:
    """Of shares of classes too. The objective is the mean over the images, not the sum as a detector's. Processes'
    parts add up."""
    logits, labels = torch.randn(16, 3, dtype=torch.float64, requires_grad=True), torch.randint(3, (16,))
    shares = torch.rand(16, 3, dtype=torch.float64).softmax(1)
    mixed = criterion(0.1)(logits, of_classes(*labels.tolist(), targets=shares.tolist()))
    torch.testing.assert_close(mixed.local_means(), cross_entropy(logits, shares, label_smoothing=0.1).view(1))
    terms = criterion(0.1)(logits, of_classes(*labels.tolist()))
    assert terms.counts.tolist() == [[16]]
    expected = cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(terms.local_means(), expected.view(1))
    (gradient,) = torch.autograd.grad(criterion().objective(terms.local_means(), images=16), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    parts = [criterion(0.1)(logits[cut], of_classes(*labels[cut].tolist())) for cut in (slice(0, 5), slice(5, 16))]
    counts = parts[0].counts + parts[1].counts
    torch.testing.assert_close(parts[0].share_of_mean(counts) + parts[1].share_of_mean(counts), terms.local_means())
    assert criterion().weight(of_classes(0, 1, 2)) == 3


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_arithmetic_is_in_fp32(precision: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 0.125, -2.0]], dtype=precision)
    terms = criterion()(logits, of_classes(2))
    assert terms.sums.dtype == torch.float32
    assert torch.equal(terms.sums, criterion()(logits.float(), of_classes(2)).sums)
    assert torch.equal(probabilities([ClassificationView(logits)]), logits.float().softmax(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_are_duplicated_images(smoothing: float) -> None:
    logits, labels = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.arange(7) % 3
    repeats = torch.tensor([1, 4, 2])[labels]
    weighted, plain = ClassificationCriterion(3, smoothing, (1.0, 4.0, 2.0)), ClassificationCriterion(3, smoothing)
    terms = weighted(logits, of_classes(*labels.tolist()))
    again = labels.repeat_interleave(repeats).tolist()
    expected = plain(logits.repeat_interleave(repeats, 0), of_classes(*again))
    assert terms.counts.item() == expected.counts.item()
    torch.testing.assert_close(terms.sums, expected.sums, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(each.local_means().sum(), logits)[0] for each in (terms, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_the_shares_of_a_mixture_are_weighted_by_their_classes() -> None:
    """As an image of each class would be, with its share as its weight."""
    batch = of_classes(0, 0, targets=[[0.5, 0.5, 0], [0, 0, 1]])
    terms = ClassificationCriterion(3, 0.0, (2.0, 0.5, 1.0))(LOGITS, batch)
    assert terms.sums.item() == pytest.approx(1.25 * LN3 + 2 * LN2)
    assert terms.counts.item() == pytest.approx(2.25)


# Predictions


def probabilities(views: list[ClassificationView]) -> Tensor:
    postprocess = make().postprocess(Identity(), Thresholds(conf_thres=0.9, max_det=1))  # thresholds are for detectors
    predictions = postprocess(views, of_classes(*range(len(views[0].outputs))))
    assert [(one.image, one.path) for one in predictions] == [(k, f"{k}.png") for k in range(len(predictions))]
    return torch.stack([prediction.probabilities for prediction in predictions])


def of(*shares: float, names: dict[int, str] = CLASS_NAMES) -> ClassificationPrediction:
    return ClassificationPrediction(3, "a/b.png", names, torch.tensor(shares))


def test_predictions_are_probabilities() -> None:
    """Those of views are averaged."""
    predicted = probabilities([ClassificationView(LOGITS)])
    torch.testing.assert_close(predicted, torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25]]))
    predicted = probabilities([ClassificationView(LOGITS), ClassificationView(LOGITS.flip(0))])
    torch.testing.assert_close(predicted, torch.tensor([[5 / 12, 7 / 24, 7 / 24]] * 2))


def test_augmented_views_are_of_the_mirror_image() -> None:
    images, postprocess = torch.rand(2, 3, 4, 5), make().postprocess(Identity(), Thresholds())
    assert [view.outputs is images for view in postprocess.views(Identity(), images, False)] == [True]
    plain, mirrored = postprocess.views(Identity(), images, True)
    assert plain.outputs is images
    assert torch.equal(mirrored.outputs[..., 0], images[..., -1])


def test_a_prediction() -> None:
    given, image = of(0.125, 0.5, 0.375), np.zeros((60, 160, 3), np.uint8)
    assert (given.array.dtype, given.probs.tolist()) == (np.float32, [0.125, 0.5, 0.375])
    assert given.items == given.top5 == [("traffic light", 0.5), ("bar", 0.375), ("disc", 0.125)]
    assert given.describe() == "traffic light 0.50, bar 0.38, disc 0.12"
    assert given.label_rows(False) == ["traffic light", "bar", "disc"]
    assert given.label_rows(True, corners=True) == ["0.5 traffic light", "0.375 bar", "0.125 disc"]
    assert of(1 / 3, 1 / 3, 1 / 3).label_rows(True) == ["0.333333 disc", "0.333333 traffic light", "0.333333 bar"]
    assert len(of(*torch.eye(7)[1].tolist(), names=SEVEN).label_rows(True)) == 5
    ((name, crop),) = given.crops(image)
    assert (name, crop is image) == ("traffic light", True)
    for names, confidences, expected in (
        (True, True, ["traffic light 0.50", "bar 0.38", "disc 0.12"]),
        (True, False, ["traffic light", "bar", "disc"]),
        (False, False, []),
    ):
        assert np.array_equal(given.draw(image, Style(2, names, confidences)), draw_text_lines(image, expected))
    assert not image.any()  # a copy is drawn on


# Metrics

FOUR = [
    ImageRecord(0, 0, (0, 1, 2, 3, 4), 0.9),
    ImageRecord(1, 1, (0, 2, 1, 3, 4), 0.6),  # wrong at first, right among five
    ImageRecord(2, 6, (0, 1, 2, 3, 4), 0.8),  # wrong among five
    ImageRecord(3, 1, (1, 0, 2, 3, 4), 0.5),
]


@pytest.fixture
def summary() -> Summary:
    return make(names=SEVEN).metrics().summarise(FOUR)


def test_records() -> None:
    """The five most probable classes; of equal ones those with smaller numbers first."""
    predictions = [of(0.1, 0.2, 0.1, 0.1, 0.3, 0.1, 0.1, names=SEVEN), of(*[1 / 7] * 7, names=SEVEN)]
    batch = grey_batch(ClassInfo(7, "", 1), ClassInfo(3, "", 0))
    records = make(names=SEVEN).metrics().update(predictions, batch)
    assert [record[:3] for record in records] == [(7, 1, (4, 1, 0, 2, 3)), (3, 0, (0, 1, 2, 3, 4))]
    assert [record.confidence for record in records] == pytest.approx([0.3, 1 / 7])


def test_a_summary(summary: Summary) -> None:
    assert summary.metrics == {"accuracy_top1": 0.5, "accuracy_top5": 0.75}
    assert (tuple(summary.metrics), summary.fitness) == (ClassificationTask.metric_names, 0.5)
    assert summary.evidence == {
        "confusion": [[0, 0, 1], [1, 0, 1], [1, 1, 1], [6, 0, 1]],  # true, predicted, nonzero count
        "mistakes": [[2, 6, 0, 0.8], [1, 1, 0, 0.6]],  # image, true, predicted, confidence: most confident first
    }
    assert json.loads(json.dumps(summary.evidence)) == summary.evidence  # plain values
    assert summary.by_class == {  # of the classes that have images
        "precision": {"a": pytest.approx(1 / 3), "b": 1, "g": 0},
        "recall": {"a": 1, "b": 0.5, "g": 0},
    }
    assert [line.split() for line in summary.table()] == [
        ["Class", "Images", "P", "R", "top-1", "top-5"],
        ["all", "4", "0.190", "0.214", "0.500", "0.750"],
        ["a", "1", "0.333", "1.000", "-", "-"],
        ["b", "2", "1.000", "0.500", "-", "-"],
        *([name, "0", "0.000", "0.000", "-", "-"] for name in "cdef"),
        ["g", "1", "0.000", "0.000", "-", "-"],
    ]
    few = make().metrics().summarise([ImageRecord(0, 2, (0, 1, 2), 0.9), ImageRecord(1, 0, (1, 0, 2), 0.4)])
    assert few.metrics == {"accuracy_top1": 0, "accuracy_top5": 1}
    assert few.table()[0].split() == ["Class", "Images", "P", "R", "top-1"]
    assert make().metrics().examples(few) == []


def test_the_most_confident_mistakes() -> None:
    records = [ImageRecord(number, 0, (1, 0, 2), 0.5) for number in range(30)]
    records[20:22] = [ImageRecord(20, 2, (0, 1, 2), 0.75), ImageRecord(21, 2, (2, 1, 0), 1.0)]
    metrics = make().metrics()
    mistakes = metrics.summarise(records).evidence["mistakes"]
    assert metrics.summarise(records[17:] + records[:17]) == metrics.summarise(records)  # the order does not matter
    assert mistakes[0] == [20, 2, 0, 0.75]
    assert mistakes[1:] == [[number, 0, 1, 0.5] for number in range(15)]  # of equal confidence the first; 16 in all
