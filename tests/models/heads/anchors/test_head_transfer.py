"""Rows of a trained head for a model with other classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.heads.anchors import Detect, keep_head
from models.yolo import YoloModel, build_model

OLD = {0: "person", 1: "car", 2: "Dog", 3: "bowl"}
NEW = {0: "dog", 1: "cell", 2: "person"}
HEAD = "model.24"  # of the tensors' names
SAME = "from its head the boxes and "


def model_of(names: dict[int, str], yaml: str = "yolov5n.yaml", seed: int = 0) -> YoloModel:
    torch.manual_seed(seed)
    return build_model(yaml, nc=len(names))


def anchor_rows(tensor: Tensor, head: Detect) -> Tensor:
    """Return a head's weight or bias as (anchors, rows, ...)."""
    return tensor.view(head.na, -1, *tensor.shape[1:])


def test_boxes_objectness_and_classes_of_the_same_name() -> None:
    old, new = model_of(OLD), model_of(NEW, seed=1)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    printed = keep_head(new.head, HEAD, old.state_dict(), OLD, NEW)
    assert printed == f"{SAME}2 of 3 classes"
    heads = [name for name in before if name.startswith("model.24.m.")]
    assert len(heads) == 6
    for name, tensor in new.state_dict().items():
        if name not in heads:
            assert torch.equal(tensor, before[name])
            continue
        of_old, of_new = anchor_rows(old.state_dict()[name], old.head), anchor_rows(tensor, new.head)
        assert torch.equal(of_new[:, :5], of_old[:, :5])
        assert torch.equal(of_new[:, 5], of_old[:, 5 + 2])
        assert torch.equal(of_new[:, 6], anchor_rows(before[name], new.head)[:, 6])  # a class that the file lacks
        assert torch.equal(of_new[:, 7], of_old[:, 5])


def test_as_many_classes_in_another_order() -> None:
    old, new = model_of(OLD), model_of(OLD, seed=1)
    new.load_state_dict(old.state_dict())
    names = {0: "car", 1: "person", 2: "dog", 3: "bowl"}
    assert keep_head(new.head, HEAD, old.state_dict(), OLD, names) == f"{SAME}4 of 4 classes"
    of_old, of_new = (anchor_rows(model.state_dict()["model.24.m.0.bias"], model.head) for model in (old, new))
    assert torch.equal(of_new[:, 5:], of_old[:, [6, 5, 7, 8]])


@pytest.mark.parametrize("names", [{0: "cat"}, {}])
def test_no_class_of_the_same_name(names: dict[int, str]) -> None:
    """The file may have no names at all."""
    old, new = model_of({0: "cat"}), model_of(NEW, seed=1)
    assert keep_head(new.head, HEAD, old.state_dict(), names, NEW) == f"{SAME}none of 3 classes"
    assert torch.equal(new.head.m[1].bias.view(3, -1)[:, :5], old.head.m[1].bias.view(3, -1)[:, :5])


def test_masks_of_a_segmenter() -> None:
    old, new = model_of(OLD, "yolov5n-seg.yaml"), model_of(NEW, "yolov5n-seg.yaml", seed=1)
    assert "2 of 3 classes" in keep_head(new.head, HEAD, old.state_dict(), OLD, NEW)
    of_old, of_new = (model.head.m[0].weight.view(3, -1, 64) for model in (old, new))
    assert torch.equal(of_new[:, 5 + 3 :], of_old[:, 5 + 4 :])
    detector = model_of(OLD)
    new = model_of(NEW, "yolov5n-seg.yaml", seed=1)
    masks = new.head.m[0].weight.view(3, -1, 64)[:, 5 + 3 :].clone()
    assert "2 of 3 classes" in keep_head(new.head, HEAD, detector.state_dict(), OLD, NEW)
    assert torch.equal(new.head.m[0].weight.view(3, -1, 64)[:, 5 + 3 :], masks)


def test_a_head_for_other_anchors_or_of_other_widths_is_not_taken() -> None:
    old, new = model_of(OLD), model_of(NEW, seed=1)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    other = {**old.state_dict(), "model.24.anchors": old.head.anchors * 1.1}
    assert keep_head(new.head, HEAD, other, OLD, NEW) == "not its head: it has other anchors"
    assert keep_head(new.head, HEAD, {}, OLD, NEW) == "not its head: it has other anchors"
    wider = model_of(OLD, "yolov5s.yaml").state_dict()
    assert keep_head(new.head, HEAD, wider, OLD, NEW) == "not its head: its layers differ"
    broken = {**old.state_dict(), "model.24.m.0.bias": torch.tensor(1.0)}
    broken |= {f"model.24.m.{level}.bias": torch.zeros(15) for level in (1, 2)}  # fewer rows than classes
    assert keep_head(new.head, HEAD, broken, OLD, NEW) == "not its head: its layers differ"
    assert all(torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())
