"""Run the model and the loss of a checkout of the MIT implementation of YOLOv9, MultimediaTechLab/YOLO.

It needs torch, torchvision and einops: what its modules
import for other purposes (trainers, loggers, metrics) is replaced by empty modules.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor, nn

REPLACED = {
    "omegaconf": {"ListConfig": list, "OmegaConf": object},
    "torchmetrics": {},
    "torchmetrics.detection": {"MeanAveragePrecision": object},
    "yolo.utils.logger": {"logger": logging.getLogger("yolo")},
    "yolo.tools.dataset_preparation": {"prepare_weight": None},
}


class Attributes(dict):
    """A dict whose items are attributes too, as in the configurations of that implementation."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class MITModel:
    """A model of the checkout, v9-t, v9-s, v9-m or v9-c, for square images of `side` pixels."""

    def __init__(self, checkout: Path, name: str, side: int, classes: int = 80) -> None:
        package = ModuleType("yolo")
        package.__path__ = [str(checkout / "yolo")]  # its own __init__ imports the trainer
        sys.modules["yolo"] = package
        for module, content in REPLACED.items():
            sys.modules[module] = ModuleType(module)
            vars(sys.modules[module]).update(content)
        file = checkout / "yolo" / "config" / "model" / f"{name}.yaml"
        config = _with_attributes(yaml.safe_load(file.read_text()))
        self.network: nn.Module = importlib.import_module("yolo.model.yolo").YOLO(config, classes)
        boxes = importlib.import_module("yolo.utils.bounding_box_utils")
        self.decode: Callable[[Any], tuple[Tensor, Tensor, Tensor]] = boxes.Vec2Box(
            self.network, config.anchor, [side, side], "cpu"
        )
        losses = importlib.import_module("yolo.tools.loss_functions")
        matcher = Attributes(iou="CIoU", topk=10, factor={"iou": 6.0, "cls": 0.5})
        loss = losses.YOLOLoss(SimpleNamespace(matcher=matcher), self.decode, classes, 16)
        self._loss, self._side = loss, side

    def terms(self, images: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return box, distribution and class loss of the main and of the auxiliary head.

        targets: (n, 6), image, class, normalised xywh.
        """
        outputs, padded = self.network(images), self._padded(targets, len(images))
        return self._loss(self.decode(outputs["Main"]), padded), self._loss(self.decode(outputs["AUX"]), padded)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that training differentiates, with the default gains."""
        gains = (7.5, 1.5, 0.5)
        main, auxiliary = self.terms(images, targets)
        parts = [gain * (a + 0.25 * b) for gain, a, b in zip(gains, main, auxiliary, strict=True)]
        return torch.stack(parts).sum() * len(images)

    def _padded(self, targets: Tensor, images: int) -> Tensor:
        """Return targets (b, most of an image, 5): class, -1 for none, and corners in pixels."""
        of_images = [targets[targets[:, 0] == image] for image in range(images)]
        padded = torch.zeros(images, max(map(len, of_images)), 5)
        padded[..., 0] = -1
        for rows, image in zip(padded, of_images, strict=True):
            centre, half = image[:, 2:4], image[:, 4:6] / 2
            corners = torch.cat((centre - half, centre + half), 1) * self._side
            rows[: len(image)] = torch.cat((image[:, 1:2], corners), 1)
        return padded


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return Attributes({key: _with_attributes(one) for key, one in value.items()})
    return [_with_attributes(one) for one in value] if isinstance(value, list) else value
