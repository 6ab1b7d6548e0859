"""The metrics of a classifier, with numbers worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from models.tasks.classify import (
    ClassificationMetrics,
    ClassificationPrediction,
    ClassificationTask,
    ImageRecord,
    precision_and_recall,
)
from tests.making import grey_batch
from tests.models.tasks.classification.toy_batches import SEVEN, make
from utils.batch import Batch, ClassInfo
from utils.plots.drawing import draw_captioned
from utils.summary import Summary


@pytest.fixture
def metrics() -> ClassificationMetrics:
    return make().metrics()


def records(metrics: ClassificationMetrics, probabilities: Tensor, images: Batch) -> list[ImageRecord]:
    predictions = [
        ClassificationPrediction(info.image, info.path, metrics.names, image)
        for info, image in zip(images.infos, probabilities, strict=True)
    ]
    return metrics.update(predictions, images)


def test_records(metrics: ClassificationMetrics) -> None:
    probabilities = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.25, 0.5]])
    assert records(metrics, probabilities, grey_batch(ClassInfo(7, "", 1), ClassInfo(3, "", 0))) == [
        ImageRecord(7, 1, (1, 2, 0), 0.5),
        ImageRecord(3, 0, (2, 0, 1), 0.5),  # of equal ones the smaller number first
    ]


def test_records_have_the_five_most_probable_classes() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.1, 0.1, 0.3, 0.1, 0.1], [1 / 7] * 7])
    first, second = records(make(names=SEVEN).metrics(), probabilities, grey_batch(*[ClassInfo(0, "", 0)] * 2))
    assert first.best == (4, 1, 0, 2, 3)
    assert second.best == (0, 1, 2, 3, 4)
    assert (first.confidence, second.confidence) == (pytest.approx(0.3), pytest.approx(1 / 7))


# Summaries

FOUR = [
    ImageRecord(0, 0, (0, 1, 2, 3, 4), 0.9),
    ImageRecord(1, 1, (0, 2, 1, 3, 4), 0.6),  # wrong at first, right among five
    ImageRecord(2, 6, (0, 1, 2, 3, 4), 0.8),  # wrong among five
    ImageRecord(3, 1, (1, 0, 2, 3, 4), 0.5),
]


@pytest.fixture
def summary() -> Summary:
    return make(names=SEVEN).metrics().summarise(FOUR)


def test_metrics_and_fitness(summary: Summary) -> None:
    assert summary.metrics == {"accuracy_top1": 0.5, "accuracy_top5": 0.75}
    assert tuple(summary.metrics) == ClassificationTask.metric_names
    assert summary.fitness == 0.5


def test_top_5_of_fewer_classes(metrics: ClassificationMetrics) -> None:
    summary = metrics.summarise([ImageRecord(0, 2, (0, 1, 2), 0.9), ImageRecord(1, 0, (1, 0, 2), 0.4)])
    assert summary.metrics == {"accuracy_top1": 0, "accuracy_top5": 1}


def test_the_order_of_records_does_not_matter() -> None:
    metrics = make(names=SEVEN).metrics()
    records = [ImageRecord(n, n % 7, ((n * 5) % 7, n % 3, 4), n % 10 / 10) for n in range(40)]
    expected = metrics.summarise(records)
    assert metrics.summarise(records[::-1]) == expected
    assert metrics.summarise(records[17:] + records[:17]) == expected


def test_evidence(summary: Summary) -> None:
    assert summary.evidence == {
        "confusion": [[0, 0, 1], [1, 0, 1], [1, 1, 1], [6, 0, 1]],  # true, predicted, nonzero count
        "mistakes": [[2, 6, 0, 0.8], [1, 1, 0, 0.6]],  # image, true, predicted, confidence: most confident first
    }
    assert json.loads(json.dumps(summary.evidence)) == summary.evidence  # plain values


def test_the_most_confident_mistakes(metrics: ClassificationMetrics) -> None:
    records = [ImageRecord(number, 0, (1, 0, 2), 0.5) for number in range(30)]
    records[20:22] = [ImageRecord(20, 2, (0, 1, 2), 0.75), ImageRecord(21, 2, (2, 1, 0), 1.0)]
    mistakes = metrics.summarise(records).evidence["mistakes"]
    assert mistakes[0] == [20, 2, 0, 0.75]
    assert mistakes[1:] == [[number, 0, 1, 0.5] for number in range(15)]  # of equal confidence the first; 16 in all


def test_the_table(summary: Summary) -> None:
    head, overall, *details = summary.table()
    assert head.split() == ["Class", "Images", "P", "R", "top-1", "top-5"]
    # Precision of a is 1/3, of b 1; recall of a is 1, of b 1/2; means are over 7 classes.
    assert overall.split() == ["all", "4", "0.1905", "0.2143", "0.5000", "0.7500"]
    assert [line.split() for line in details] == [
        ["a", "1", "0.3333", "1.0000", "-", "-"],
        ["b", "2", "1.0000", "0.5000", "-", "-"],
        *([name, "0", "0.0000", "0.0000", "-", "-"] for name in "cdef"),
        ["g", "1", "0.0000", "0.0000", "-", "-"],
    ]
    assert len({len(line) for line in summary.table()}) == 1  # columns are aligned


def test_long_names_are_cut_in_the_table() -> None:
    metrics = make(names={0: "x" * 90, 1: "short"}).metrics()
    summary = metrics.summarise([ImageRecord(0, 1, (1, 0), 0.9)])
    assert 40 < len(summary.table()[2].split()[0]) < 60
    assert len({len(line) for line in summary.table()}) == 1


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
    metrics = make(names=names).metrics()
    documents = metrics.documents(metrics.summarise(records))
    assert set(documents) == {"classes.csv", "confusion_matrix.csv"}
    assert documents["classes.csv"] == (
        "class,images,precision,recall\n"
        "disc,3,0.666666667,0.666666667\n"  # two of three, either way
        '"a ""big"", red one",0,0,0\n'
        "bar,1,0,0\n"
    )
    assert documents["confusion_matrix.csv"] == (
        'true \\ predicted,disc,"a ""big"", red one",bar\n'  # quotes are doubled
        "disc,2,0,1\n"
        '"a ""big"", red one",0,0,0\n'
        "bar,1,0,0\n"
    )


class ColouredSplit:
    """A split whose images have one colour, their index."""

    def shown(self, index: int, side: int) -> np.ndarray:
        return np.full((side, side, 3), index, np.uint8)


@pytest.mark.parametrize(("imgsz", "side"), [(64, 160), (224, 224)])
def test_mistakes_are_drawn_the_most_confident_first(imgsz: int, side: int, summary: Summary) -> None:
    pictures = make(names=SEVEN).metrics().pictures(summary, ColouredSplit(), imgsz)
    images = [ColouredSplit().shown(index, side) for index in (2, 1)]
    assert list(pictures) == ["mistakes.jpg"]
    assert np.array_equal(pictures["mistakes.jpg"], draw_captioned(images, ["a 0.80\nis g", "a 0.60\nis b"]))


def test_no_picture_without_mistakes(metrics: ClassificationMetrics) -> None:
    summary = metrics.summarise([ImageRecord(0, 1, (1, 0, 2), 0.9), ImageRecord(1, 1, (1, 0, 2), 0.9)])
    assert metrics.pictures(summary, ColouredSplit(), 64) == {}


def test_scores_by_class(summary: Summary) -> None:
    """Of the classes that have images; see the table."""
    assert summary.by_class == {
        "precision": {"a": pytest.approx(1 / 3), "b": 1, "g": 0},
        "recall": {"a": 1, "b": 0.5, "g": 0},
    }
    assert {type(value) for values in summary.by_class.values() for value in values.values()} == {float}


def test_no_image_has_boxes_to_draw(summary: Summary) -> None:
    metrics = make(names=SEVEN).metrics(shown=frozenset([0, 2]))
    assert metrics.examples(metrics.summarise(FOUR)) == []
    assert metrics.summarise(FOUR) == summary
