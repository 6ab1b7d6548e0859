"""Loading tensors into a model: which fit, and which do not."""

from __future__ import annotations

import torch

from models.loading import known_share, transfer
from models.weights import Weights
from models.yolo import build_model


def test_tensors_of_equal_name_and_shape_are_loaded() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "anchors": torch.nn.Linear(2, 3)})
    given = {
        "a.weight": torch.ones(3, 2),
        "a.bias": torch.ones(4),  # another shape
        "b.weight": torch.ones(3, 2),  # another name
        "anchors.bias": torch.ones(3),
    }
    misfits = [("a.bias", (4,), (3,))]
    assert transfer(model, given, exclude=("anchor",)) == (1, 4, misfits)
    assert (model["a"].weight == 1).all()
    assert not (model["anchors"].bias == 1).any()
    assert transfer(model, given) == (2, 4, misfits)
    assert transfer(model, given, exclude=("bias",)) == (1, 4, [])  # excluded tensors are no misfits


def test_transfer_to_another_number_of_classes() -> None:
    state = build_model("yolov5n.yaml").state_dict()
    model = build_model("yolov5n.yaml", nc=3)
    result = transfer(model, state)
    assert (result.loaded, result.total) == (349 - 6, 349)
    heads = [f"model.24.m.{level}.{part}" for level in range(3) for part in ("weight", "bias")]
    assert [name for name, _, _ in result.misfits] == heads
    assert result.misfits[0][1:] == ((255, 64, 1, 1), (24, 64, 1, 1))  # 3 anchors x (5 + 80 or 3 classes)


def test_the_share_of_the_classes_that_weights_know() -> None:
    """By name; for a segmenter a detector's file, without masks, knows half."""
    names = {0: "person", 1: "Car ", 2: "cell", 3: "dog"}
    new = {0: "car", 1: "tree"}
    weights = Weights(build_model("yolov5n.yaml", nc=4).state_dict(), None, names, "", {}, "tensors")
    assert known_share(build_model("yolov5n.yaml", nc=2), weights, new) == 0.5
    assert known_share(build_model("yolov5n.yaml", nc=4), weights, names) == 1.0
    assert known_share(build_model("yolov5n-seg.yaml", nc=4), weights, names) == 0.5
    outlines = Weights(build_model("yolov5n-seg.yaml", nc=4).state_dict(), None, names, "", {}, "tensors")
    assert known_share(build_model("yolov5n-seg.yaml", nc=2), outlines, new) == 0.5
    assert known_share(build_model("yolov5n.yaml", nc=2), outlines, new) == 0.5
    assert known_share(build_model("yolov5s.yaml", nc=2), weights, new) is None
