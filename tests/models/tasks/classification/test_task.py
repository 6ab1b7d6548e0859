"""The verbs of the classification task, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models.tasks import TASKS, task_of
from models.tasks.classification import task as classification
from models.tasks.classification.task import (
    ClassificationRecipe,
    ClassificationTask,
    ImageRecord,
    Look,
    precision_and_recall,
)
from models.yolo import Model
from utils.config.hyperparameters import from_mapping
from utils.config.options import ExportOptions, TrainOptions, ValOptions, flags_of
from utils.errors import UserError
from utils.files import ROOT
from utils.summary import Summary

NAMES = {0: "disc", 1: "traffic light", 2: "bar"}
SEVEN = dict(enumerate("abcdefg"))


class Info(NamedTuple):
    image: int = 0
    label: int = 0


class Images(NamedTuple):
    images: Tensor
    targets: Tensor
    infos: tuple[Info, ...]


def batch(*infos: Info, targets: list[list[float]] | None = None) -> Images:
    """Grey images; without `targets` of the classes that the infos tell."""
    pixels = torch.full((len(infos), 3, 8, 8), 51, dtype=torch.uint8)
    shares = torch.eye(3)[[info.label for info in infos]] if targets is None else torch.tensor(targets)
    return Images(pixels, shares, infos)


def of_classes(*labels: int) -> Images:
    return batch(*(Info(number, label) for number, label in enumerate(labels)))


def make(label_smoothing: float = 0.0, names: dict[int, str] = NAMES) -> ClassificationTask:
    return ClassificationTask(names, ClassificationRecipe(), label_smoothing)


@pytest.fixture
def task() -> ClassificationTask:
    return make()


# The name in a YAML


def test_the_name_in_a_yaml() -> None:
    assert TASKS["classify"] is ClassificationTask
    assert task_of({"task": "classify", "nc": 3}, "mine.yaml") == "classify"
    assert task_of({"nc": 3}, "mine.yaml") == "detect"
    with pytest.raises(UserError, match=r"^mine\.yaml is a model for the task 'segment'; give one for detect or class"):
        task_of({"task": "segment"}, "mine.yaml")


def test_defaults_are_flags() -> None:
    known = {field.name: type(field.default) for field in fields(TrainOptions)}
    assert {name: type(value) for name, value in ClassificationTask.defaults.items()}.items() <= known.items()
    assert (ROOT / ClassificationTask.defaults["hyp"]).is_file()
    assert TASKS["detect"].defaults == {}  # what the flags themselves say


# The recipe


@pytest.mark.parametrize(
    ("key", "fits", "refused"),
    [
        ("crop_scale", [0.001, 1], [0, 1.01, -0.1]),
        ("fliplr", [0, 1], [-0.1, 1.1]),
        ("flipud", [0, 1], [-0.1, 1.1]),
        ("brightness", [0, 3], [-0.1]),
        ("contrast", [0, 3], [-0.1]),
        ("saturation", [0, 3], [-0.1]),
        ("hue", [0, 0.5], [-0.1, 0.51]),
        ("randaugment", [0, 16], [-1, 17, 1.5]),
        ("randaugment_magnitude", [0, 30], [-1, 31, 0.5]),
        ("erasing", [0, 1], [-0.1, 1.1]),
        ("mixup", [0, 1], [-0.1, 1.1]),
        ("cutmix", [0, 1], [-0.1, 1.1]),
        ("mixup_alpha", [0.01, 9], [0, -1]),
        ("cutmix_alpha", [0.01, 9], [0, -1]),
        ("nbs", [0, 64], [-1]),
        ("momentum", [0, 0.99], [1]),
        ("weight_decay", [0, 1], [-0.1]),
        ("warmup_epochs", [0, 5], [-1]),
        ("lr0", [0.001, 2], [0]),
    ],
)
def test_ranges_of_the_recipe(key: str, fits: list[float], refused: list[float]) -> None:
    for value in fits:
        assert getattr(from_mapping(ClassificationRecipe, {key: value}, Path("a.yaml")), key) == value
    for value in refused:
        with pytest.raises(UserError, match=rf"^a\.yaml: {key} "):
            from_mapping(ClassificationRecipe, {key: value}, Path("a.yaml"))


def test_a_detectors_keys_are_unknown() -> None:
    with pytest.raises(UserError, match="unknown key 'mosaic'"):
        from_mapping(ClassificationRecipe, {"mosaic": 1}, Path("a.yaml"))


# The model


@pytest.mark.parametrize(("names", "said"), [({0: "disc"}, "disc"), ({}, "")])
def test_one_class_is_none(names: dict[int, str], said: str) -> None:
    with pytest.raises(UserError, match=f"at least two classes apart, and the data has {said}$"):
        make(names=names)
    assert make(names={0: "disc", 1: "bar"}).names == {0: "disc", 1: "bar"}


ROWS = {
    "task": "classify",
    "nc": 1000,
    "backbone": [[-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "Classify", ["nc"]]],
}


@pytest.mark.parametrize("yaml", [ROWS, {"architecture": "squeezenet1_1", "nc": 1000}])
def test_the_model_has_the_tasks_classes(task: ClassificationTask, yaml: dict[str, Any]) -> None:
    model: Any = task.build_model(yaml, 50)
    assert isinstance(model, Model) == ("backbone" in yaml)
    assert (task.imgsz, task.stride) == (50, 1)  # images of any size will do
    assert model.names == NAMES
    assert (model.yaml["task"], model.yaml["nc"], yaml["nc"]) == ("classify", 3, 1000)
    given = Images(torch.zeros(2, 3, 50, 50, dtype=torch.uint8), torch.eye(3)[:2], (Info(), Info()))
    assert model(task.inputs(given)).shape == (2, 3)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ({"task": "classify"}, "`architecture` is None; give a classification model"),
        ({"architecture": "resnet99"}, "`architecture` is 'resnet99'"),
        ({**ROWS, "head": []}, "no classification head"),
        ({**ROWS, "architecture": "resnet18"}, "unknown key 'backbone'"),
    ],
)
def test_messages_name_where_the_model_is_from(task: ClassificationTask, yaml: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^mine.yaml.*{message}"):
        task.build_model(yaml, 64, "mine.yaml")


def test_nothing_is_fitted_to_the_data(task: ClassificationTask) -> None:
    yaml = {"architecture": "resnet18"}
    described = task.describe(yaml)
    assert described == yaml
    assert described is not yaml
    assert (task.not_taken(True), task.not_taken(False)) == ((), ())
    assert task.adapt(nn.Identity(), None) == []


def test_inputs_are_normalised_by_imagenets_statistics(task: ClassificationTask) -> None:
    given = of_classes(0, 1)
    given.images[1] = torch.tensor([0, 255, 102], dtype=torch.uint8).view(3, 1, 1)
    inputs = task.inputs(given)
    assert inputs.dtype == torch.float32
    assert inputs.shape == (2, 3, 8, 8)
    grey = [(0.2 - 0.485) / 0.229, (0.2 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]  # 51 is 0.2 of 255
    assert inputs[0, :, 3, 5].tolist() == pytest.approx(grey, abs=1e-6)
    assert inputs[1, :, 0, 0].tolist() == pytest.approx(
        [-0.485 / 0.229, (1 - 0.456) / 0.224, (0.4 - 0.406) / 0.225], abs=1e-6
    )
    assert given.images.dtype == torch.uint8  # what was given stays


# Losses: probabilities 1/3 each, and 1/2, 1/4, 1/4

LOGITS = torch.tensor([[5.0, 5.0, 5.0], [math.log(2), 0.0, 0.0]])
LN2, LN3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("smoothing", "targets", "expected"),
    [
        (0.0, [[1, 0, 0], [1, 0, 0]], LN3 + LN2),
        (0.0, [[0, 0, 1], [0, 1, 0]], LN3 + 2 * LN2),
        (0.3, [[0, 0, 1], [0, 1, 0]], LN3 + 0.1 * LN2 + 0.9 * 2 * LN2),  # 0.7 of the class, and 0.1 of each
        (0.0, [[0.5, 0, 0.5], [0.25, 0.75, 0]], LN3 + 0.25 * LN2 + 0.75 * 2 * LN2),
        (0.3, [[0.5, 0, 0.5], [0.25, 0.75, 0]], LN3 + 0.275 * LN2 + 0.725 * 2 * LN2),  # 0.7 x 0.25 + 0.1, the others
    ],
)
def test_losses_by_hand(smoothing: float, targets: list[list[float]], expected: float) -> None:
    terms = make(smoothing).losses(LOGITS, batch(Info(), Info(), targets=targets))
    assert terms.sums.tolist() == [[pytest.approx(expected)]]
    assert terms.counts.tolist() == [[2]]
    assert terms.means(terms.counts).tolist() == [pytest.approx(expected / 2)]
    assert len(make().loss_names) == 1


def test_losses_are_torchs_cross_entropy() -> None:
    logits, labels = torch.randn(16, 3, dtype=torch.float64, requires_grad=True), torch.randint(3, (16,))
    terms = make(0.1).losses(logits, of_classes(*labels.tolist()))
    expected = cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(terms.means(terms.counts), expected.view(1))
    (found,) = torch.autograd.grad(make().objective(terms.means(terms.counts), images=16), logits)
    torch.testing.assert_close(found, torch.autograd.grad(expected, logits)[0])


def test_shares_of_the_loss_add_up(task: ClassificationTask) -> None:
    """Of processes with different numbers of images."""
    logits, labels = torch.randn(5, 3), [0, 2, 1, 1, 0]
    whole = task.losses(logits, of_classes(*labels))
    parts = [task.losses(logits[cut], of_classes(*labels[cut])) for cut in (slice(0, 3), slice(3, 5))]
    counts = sum(part.counts for part in parts)
    assert isinstance(counts, Tensor)
    torch.testing.assert_close(sum(part.means(counts) for part in parts), whole.means(whole.counts))


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_arithmetic_is_in_fp32(task: ClassificationTask, precision: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 0.125, -2.0]], dtype=precision, requires_grad=True)
    given = of_classes(2)
    terms = task.losses(logits, given)
    assert terms.sums.dtype == torch.float32
    assert torch.equal(terms.sums, task.losses(logits.float(), given).sums)
    assert terms.sums.item() == pytest.approx(math.log(math.exp(3) + math.exp(0.125) + math.exp(-2)) + 2, rel=1e-6)
    terms.sums.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == precision
    assert torch.equal(task.predict([Look(logits)], given), logits.detach().float().softmax(1))


def test_the_objective_is_the_mean_over_images(task: ClassificationTask) -> None:
    """Where a detector's is the sum."""
    means = torch.tensor([0.75])
    assert task.objective(means, 64).item() == task.objective(means, 8).item() == 0.75


def test_losses_of_a_validation_are_weighed_by_images(task: ClassificationTask) -> None:
    assert task.weight(of_classes(0, 1, 2)) == 3
    assert task.weight(of_classes(0)) == 1


# Predictions


def test_predictions_are_probabilities(task: ClassificationTask) -> None:
    found = task.predict([Look(LOGITS)], of_classes(0, 1))
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.25]]))
    task.set_thresholds(0.9, 0.9, 1)
    assert torch.equal(task.predict([Look(LOGITS)], of_classes(0, 1)), found)  # thresholds are a detector's


def test_looks_are_averaged(task: ClassificationTask) -> None:
    """The mean of the probabilities, as [1/3, 1/3, 1/3] and [1/2, 1/4, 1/4]."""
    found = task.predict([Look(LOGITS), Look(LOGITS.flip(0))], of_classes(0, 1))
    torch.testing.assert_close(found, torch.tensor([[5 / 12, 7 / 24, 7 / 24]] * 2))


def test_augmented_looks_see_the_mirror_image(task: ClassificationTask) -> None:
    images = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert [look.outputs is images for look in task.looks(nn.Identity(), images)] == [True]
    task.augment = True
    plain, mirrored = task.looks(nn.Identity(), images)
    assert plain.outputs is images
    assert torch.equal(mirrored.outputs[..., 0], images[..., -1])


def test_flags_of_detectors_are_refused() -> None:
    assert set(ClassificationTask.refused) == {"nms", "save_hybrid", "save_json"}
    known = {option.name for kind in (ValOptions, ExportOptions) for option in flags_of(kind)}
    assert set(ClassificationTask.refused) < known


def test_score(task: ClassificationTask) -> None:
    found = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.25, 0.5]])
    assert task.score(found, batch(Info(image=7, label=1), Info(image=3, label=0))) == [
        ImageRecord(7, 1, (1, 2, 0), 0.5),
        ImageRecord(3, 0, (2, 0, 1), 0.5),  # of equal ones the smaller number first
    ]


def test_score_keeps_the_five_likeliest() -> None:
    task = make(names=SEVEN)
    found = torch.tensor([[0.1, 0.2, 0.1, 0.1, 0.3, 0.1, 0.1], [1 / 7] * 7])
    first, second = task.score(found, batch(Info(0, 5), Info(1, 6), targets=[[0.0] * 7] * 2))
    assert first.best == (4, 1, 0, 2, 3)
    assert second.best == (0, 1, 2, 3, 4)
    assert (first.confidence, second.confidence) == (pytest.approx(0.3), pytest.approx(1 / 7))


def test_text_rows(task: ClassificationTask) -> None:
    found = torch.tensor([[0.125, 0.5, 0.375], [1 / 3, 1 / 3, 1 / 3]])
    assert task.text_rows(found, of_classes(0, 1), False) == [
        ["traffic light", "bar", "disc"],
        ["disc", "traffic light", "bar"],
    ]
    assert task.text_rows(found, of_classes(0, 1), True) == [
        ["0.5 traffic light", "0.375 bar", "0.125 disc"],
        ["0.333333 disc", "0.333333 traffic light", "0.333333 bar"],
    ]
    assert [len(rows) for rows in make(names=SEVEN).text_rows(torch.eye(7)[:2], of_classes(0, 1), True)] == [5, 5]


def test_picture_shows_the_batch(task: ClassificationTask, monkeypatch: pytest.MonkeyPatch) -> None:
    given = of_classes(0, 1)
    given.images[1] = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)
    picture = task.picture(given)
    assert (picture.dtype, picture.shape) == (np.uint8, (40, 300, 3))  # captions are wider than the images
    assert picture[4, 75].tolist() == [51, 51, 51]
    assert picture[4, 225].tolist() == [3, 2, 1]  # blue comes first
    monkeypatch.setattr(classification, "draw_captioned", lambda images, captions: captions)
    assert list(task.picture(given)) == ["disc", "traffic light"]
    mixed = batch(Info(), Info(), targets=[[0.25, 0.75, 0], [0.2, 0.5, 0.3]])
    assert list(task.picture(mixed)) == ["traffic light 0.75\ndisc 0.25", "traffic light 0.50\nbar 0.30"]


# Summaries

FOUR = [
    ImageRecord(0, 0, (0, 1, 2, 3, 4), 0.9),
    ImageRecord(1, 1, (0, 2, 1, 3, 4), 0.6),  # the likeliest is wrong, one of five is right
    ImageRecord(2, 6, (0, 1, 2, 3, 4), 0.8),  # all are wrong
    ImageRecord(3, 1, (1, 0, 2, 3, 4), 0.5),
]


@pytest.fixture
def summary() -> Summary:
    return make(names=SEVEN).summarise(FOUR)


def test_metrics_and_fitness(summary: Summary) -> None:
    assert summary.metrics == {"accuracy_top1": 0.5, "accuracy_top5": 0.75}
    assert tuple(summary.metrics) == ClassificationTask.metric_names
    assert summary.fitness == 0.5


def test_top_5_of_fewer_classes(task: ClassificationTask) -> None:
    found = task.summarise([ImageRecord(0, 2, (0, 1, 2), 0.9), ImageRecord(1, 0, (1, 0, 2), 0.4)])
    assert found.metrics == {"accuracy_top1": 0, "accuracy_top5": 1}


def test_the_order_of_records_does_not_matter() -> None:
    task = make(names=SEVEN)
    records = [ImageRecord(n, n % 7, ((n * 5) % 7, n % 3, 4), n % 10 / 10) for n in range(40)]
    expected = task.summarise(records)
    assert task.summarise(records[::-1]) == expected
    assert task.summarise(records[17:] + records[:17]) == expected


def test_evidence(summary: Summary) -> None:
    assert summary.evidence == {
        "confusion": [[0, 0, 1], [1, 0, 1], [1, 1, 1], [6, 0, 1]],  # true, predicted, count: only what there is
        "mistakes": [[2, 6, 0, 0.8], [1, 1, 0, 0.6]],  # image, true, predicted, confidence: most confident first
    }
    assert json.loads(json.dumps(summary.evidence)) == summary.evidence  # plain values


def test_the_most_confident_mistakes(task: ClassificationTask) -> None:
    records = [ImageRecord(number, 0, (1, 0, 2), 0.5) for number in range(30)]
    records[20:22] = [ImageRecord(20, 2, (0, 1, 2), 0.75), ImageRecord(21, 2, (2, 1, 0), 1.0)]
    mistakes = task.summarise(records).evidence["mistakes"]
    assert mistakes[0] == [20, 2, 0, 0.75]
    assert mistakes[1:] == [[number, 0, 1, 0.5] for number in range(15)]  # of equal ones the first, 16 in all


def test_the_table(summary: Summary) -> None:
    head, overall = summary.overall
    assert head.split() == ["Class", "Images", "P", "R", "top-1", "top-5"]
    # Precision 1/3 of a, of three that were taken for it, and 1 of b; recall 1 of a and 1/2 of b; means over 7 classes.
    assert overall.split() == ["all", "4", "0.1905", "0.2143", "0.5000", "0.7500"]
    assert [line.split() for line in summary.details] == [
        ["a", "1", "0.3333", "1.0000", "-", "-"],
        ["b", "2", "1.0000", "0.5000", "-", "-"],
        *([name, "0", "0.0000", "0.0000", "-", "-"] for name in "cdef"),
        ["g", "1", "0.0000", "0.0000", "-", "-"],
    ]
    assert len({len(line) for line in (head, overall, *summary.details)}) == 1  # columns


def test_long_names_are_cut_in_the_table() -> None:
    task = make(names={0: "x" * 30, 1: "short"})
    found = task.summarise([ImageRecord(0, 1, (1, 0), 0.9)])
    assert found.details[0].split()[0] == "x" * 22
    assert len({len(line) for line in (*found.overall, *found.details)}) == 1


def test_precision_and_recall() -> None:
    precision, recall = precision_and_recall(np.array([[3, 1, 0], [1, 0, 0], [0, 0, 0]]))
    assert precision.tolist() == [0.75, 0, 0]
    assert recall.tolist() == [0.75, 0, 0]


def test_documents() -> None:
    names = {0: "disc", 1: 'a "big", red one', 2: "bar"}
    records = [
        ImageRecord(0, 0, (0, 1, 2), 0.9),
        ImageRecord(1, 0, (0, 1, 2), 0.9),
        ImageRecord(2, 0, (2, 1, 0), 0.9),
        ImageRecord(3, 2, (0, 1, 2), 0.9),
    ]
    task = make(names=names)
    found = task.documents(task.summarise(records))
    assert set(found) == {"classes.csv", "confusion_matrix.csv"}
    assert found["classes.csv"] == (
        "class,images,precision,recall\n"
        "disc,3,0.666666667,0.666666667\n"  # two of three, either way
        '"a ""big"", red one",0,0,0\n'
        "bar,1,0,0\n"
    )
    assert found["confusion_matrix.csv"] == (
        'true \\ predicted,disc,"a ""big"", red one",bar\n'  # as csv writes quotes
        "disc,2,0,1\n"
        '"a ""big"", red one",0,0,0\n'
        "bar,1,0,0\n"
    )


class Shown:
    """A split whose images are of one colour, their number."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def shown(self, index: int, side: int) -> np.ndarray:
        self.asked.append((index, side))
        return np.full((side, side, 3), index, np.uint8)


@pytest.mark.parametrize(("imgsz", "side"), [(64, 160), (224, 224)])
def test_pictures(imgsz: int, side: int, summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    task, split, captions = make(names=SEVEN), Shown(), []
    task.imgsz = imgsz
    drawn = classification.draw_captioned

    def draw(images: list[np.ndarray], texts: list[str]) -> np.ndarray:
        captions.extend(texts)
        return drawn(images, texts)

    monkeypatch.setattr(classification, "draw_captioned", draw)
    found = task.pictures(summary, split)
    assert set(found) == {"mistakes.jpg"}  # the confusion matrix is drawn from its document
    assert split.asked == [(2, side), (1, side)]  # the most confident mistake first
    assert captions == ["a 0.80\nis g", "a 0.60\nis b"]
    picture = found["mistakes.jpg"]
    assert (picture[:side, :side] == 2).all()
    assert (picture[:side, side:] == 1).all()
    assert picture.dtype == np.uint8


def test_no_mistakes_no_picture_of_them(task: ClassificationTask) -> None:
    found = task.summarise([ImageRecord(0, 1, (1, 0, 2), 0.9), ImageRecord(1, 1, (1, 0, 2), 0.9)])
    assert task.pictures(found, Shown()) == {}


def test_scores_by_class(summary: Summary) -> None:
    """Of the classes that have images, of seven: see the table."""
    assert summary.by_class == {
        "precision": {"a": pytest.approx(1 / 3), "b": 1, "g": 0},
        "recall": {"a": 1, "b": 0.5, "g": 0},
    }
    assert {type(value) for values in summary.by_class.values() for value in values.values()} == {float}


def test_no_image_is_shown_with_boxes(summary: Summary) -> None:
    task = make(names=SEVEN)
    assert task.shown == frozenset()
    task.shown = frozenset([0, 2])
    assert task.examples(task.summarise(FOUR)) == []
    assert task.summarise(FOUR) == summary
