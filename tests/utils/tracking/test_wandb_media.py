"""W&B's tables and charts, made of the text files of a run."""

from __future__ import annotations

import numpy as np
import pytest

from utils.files import csv_text
from utils.summary import Box, Example
from utils.tracking.wandb_media import MAX_ROWS, charts, image_with_boxes, thinned

wandb = pytest.importorskip("wandb")


def test_the_table_of_the_classes() -> None:
    text = 'class,images,instances,AP\n"a, b",3,4,0.25\nc,0,0,\n'
    (made,) = charts(wandb, {"classes.csv": text, "val_boxes.csv": "image\n"}).items()
    assert made[0] == "tables/classes"
    assert made[1].columns == ["class", "images", "instances", "AP"]
    assert made[1].data == [["a, b", 3, 4, 0.25], ["c", 0, 0, None]]


def test_curves() -> None:
    documents = {
        "PR_curve.csv": csv_text(("class", "recall", "precision"), [("cat", 0.0, 1.0), ("cat", 1.0, 0.5)]),
        "mask_curves.csv": csv_text(("class", "confidence", "precision", "recall"), [("cat", 0.5, 1.0, 0.5)]),
        "curves.csv": csv_text(("class", "confidence", "precision", "recall"), [("cat", 0.5, 0.0, 0.0)]),
    }
    made = charts(wandb, documents)
    assert list(made) == ["charts/PR_curve", "charts/F1_curve", "charts/mask_F1_curve"]
    curve = made["charts/PR_curve"]
    assert curve.table.data == [["cat", 0.0, 1.0], ["cat", 1.0, 0.5]]
    assert curve.spec.fields == {"x": "recall", "y": "precision", "class": "class"}
    assert made["charts/mask_F1_curve"].table.data == [["cat", 0.5, pytest.approx(2 / 3, rel=1e-3)]]
    assert made["charts/F1_curve"].table.data == [["cat", 0.5, 0.0]]


def test_a_confusion_matrix() -> None:
    text = csv_text(("true \\ predicted", "cat", "background"), [("cat", 3, 1), ("background", 2, 0)])
    chart = charts(wandb, {"confusion_matrix.csv": text})["charts/confusion_matrix"]
    expected = [["cat", "cat", 3], ["cat", "background", 1], ["background", "cat", 2], ["background", "background", 0]]
    assert chart.table.data == expected
    assert chart.table.columns == ["Actual", "Predicted", "nPredictions"]


def test_large_tables_are_thinned() -> None:
    """W&B cuts longer ones off, so that the last classes would be missing."""
    rows = [(f"class {k}", x / 1000, 0.123456) for k in range(80) for x in range(1001)]
    kept = thinned(rows)
    assert MAX_ROWS * 0.9 < len(kept) <= MAX_ROWS
    assert len({name for name, *_ in kept}) == 80
    assert {y for *_, y in kept} == {0.1235}
    side = 101
    names = [f"class {k}" for k in range(side)]
    counts = [(name, *(int(j == k) for j in range(side))) for k, name in enumerate(names)]
    chart = charts(wandb, {"confusion_matrix.csv": csv_text(("", *names), counts)})["charts/confusion_matrix"]
    assert len(chart.table.data) == MAX_ROWS
    assert sum(count for *_, count in chart.table.data) == side


# Examples


def masks_of(*boxes: Box, masks: tuple[tuple[float, ...], ...] = ()) -> dict[str, np.ndarray]:
    """Return the masks of an example of 100 x 100 pixels with these labels, and with masks of them if there are any."""
    example = Example("a.png", 0, (100, 100), [*boxes], [], masks)
    image = image_with_boxes(wandb, example, np.zeros((100, 100, 3), np.uint8), ["disc", "ring"], (100, 100))
    return {title: np.asarray(mask._val["mask_data"]) for title, mask in (image._masks or {}).items()}


def test_lines_of_outlines_are_a_mask() -> None:
    tilted = (0.5, 0.1, 0.9, 0.5, 0.5, 0.9, 0.1, 0.5)
    (classes,) = masks_of(Box(1, None, (0.1, 0.1, 0.9, 0.9), tilted), Box(0, None, (0, 0, 1, 1))).values()
    assert classes[30, 70] == classes[50, 10] == 2  # its number plus one
    assert set(classes[50, 20:80].tolist()) == {0}  # nothing inside
    assert set(np.unique(classes).tolist()) == {0, 2}  # an upright box has no line


def test_masks_are_filled() -> None:
    square = (0.2, 0.2, 0.8, 0.2, 0.8, 0.8, 0.2, 0.8)
    (classes,) = masks_of(Box(0, None, (0.2, 0.2, 0.8, 0.8)), masks=(square,)).values()
    assert classes[50, 50] == 1
    assert classes[10, 10] == 0
    assert masks_of(Box(0, None, (0.2, 0.2, 0.8, 0.8))) == {}


def test_colours_and_boxes() -> None:
    """Pixels are BGR as everywhere; W&B takes RGB."""
    pixels = np.full((10, 20, 3), (255, 0, 0), np.uint8)  # blue
    example = Example("a.png", 0, (20, 10), [Box(1, None, (0, 0, 1, 1))], [Box(0, 0.5, (0, 0, 0.5, 1))])
    image = image_with_boxes(wandb, example, pixels, ["disc", "ring"], (10, 20))
    red, green, blue = np.asarray(image.image)[5, 5].tolist()
    assert blue > 200 > 50 > max(red, green)
    truth, predicted = (image._boxes[title]._val for title in ("ground_truth", "predictions"))
    assert (truth[0]["box_caption"], predicted[0]["box_caption"]) == ("ring", "disc 0.50")
    assert predicted[0]["scores"] == {"confidence": 0.5}


def test_an_image_is_padded() -> None:
    """To the size of the largest one beside it; boxes and masks stay where they were."""
    pixels = np.full((10, 20, 3), 255, np.uint8)
    box, outline = Box(0, None, (0, 0, 1, 1)), (0, 0, 1, 0, 1, 1, 0, 1)
    image = image_with_boxes(wandb, Example("a.png", 0, (20, 10), [box], [], [outline]), pixels, ["disc"], (40, 25))
    bright = np.asarray(image.image)[..., 0] > 128
    mask = np.asarray(image._masks["ground_truth"]._val["mask_data"]) == 1
    assert mask.shape == bright.shape == (40, 25)
    assert mask[:10, :20].all()
    assert bright[:10, :20].all()
    assert mask.sum() == bright.sum() == 200
    position = image._boxes["ground_truth"]._val[0]["position"]
    assert position == {"minX": 0, "minY": 0, "maxX": 0.8, "maxY": 0.25}
