"""The MIT implementation itself, if a checkout is at hand: all tensors, scores, boxes, losses and gradients."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from models.heads.contract import xywh_to_xyxy
from models.tasks.detect import DetectionTask
from models.weights import read_weights
from tests.conftest import not_here
from tests.making import grey_batch
from tests.models.heads.mit_yolov9 import MITModel
from tests.models.heads.test_dfl import random_targets
from utils.config.hyperparameters import Hyperparameters
from utils.files import ROOT

SIDE = 160


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(os.environ.get("MIT_YOLO") or ROOT.parent / "peers" / "YOLO")
    if not (folder / "yolo" / "model" / "module.py").is_file():
        not_here(f"a checkout of MultimediaTechLab/YOLO in {folder}")
    if not importlib.util.find_spec("einops"):
        not_here("einops, which MultimediaTechLab/YOLO imports")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", ["eval", "train"])  # of BatchNorm
@pytest.mark.parametrize("size", ["t", "s", *(pytest.param(size, marks=pytest.mark.long) for size in "mc")])
def test_its_numbers(size: str, mode: str, checkout: Path, tmp_path: Path) -> None:
    theirs = MITModel(checkout, f"v9-{size}", SIDE)
    for name, tensor in theirs.network.model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.8, 1.2)
        elif name.endswith(("running_mean", "bn.bias")):
            tensor.normal_(0, 0.1)
        elif "class_conv.2.bias" in name:
            tensor.fill_(-4)
    torch.save(theirs.network.model.state_dict(), tmp_path / "weights.pt")
    weights = read_weights(tmp_path / "weights.pt")
    assert weights.model is not None
    task = DetectionTask(weights.names, Hyperparameters())
    ours = task.build_model(weights.model, SIDE)
    ours.load_state_dict(weights.state)

    images, targets = torch.rand(2, 3, SIDE, SIDE), random_targets(3, 9, classes=80)
    with torch.no_grad():
        decoded = ours.eval().head.decode(ours(images))
        scores, _, boxes = theirs.decode(theirs.network.eval()(images)["Main"])
    torch.testing.assert_close(decoded[..., 4:], scores.sigmoid(), rtol=0, atol=1e-5)
    torch.testing.assert_close(xywh_to_xyxy(decoded[..., :4]), boxes, rtol=0, atol=1e-2)

    for network in (ours.train(), theirs.network.train()):
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train(mode == "train")
    main, auxiliary = theirs.terms(images, targets)
    loss, batch = task.criterion(ours), grey_batch(targets=targets, side=SIDE, count=2)
    terms = loss(ours(images), batch)
    expected = torch.stack([torch.stack(list(head))[[0, 2, 1]] for head in (main, auxiliary)], 1)
    torch.testing.assert_close(terms.sums / terms.counts.clamp(min=1), expected, rtol=1e-5, atol=1e-6)
    loss.objective(terms.local_means(), 2).backward()
    theirs.loss(images, targets).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.network.model.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected, gradient = gradients[name.removeprefix("model.")], parameter.grad
        assert gradient is not None
        # A bias before BatchNorm has none: rounding alone.
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-7, name
