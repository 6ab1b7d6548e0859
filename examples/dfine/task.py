"""Detection by D-FINE and RT-DETRv2: the factory of the model, loss and predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from models.heads.contract import UnavailableCriterion
from models.tasks.contract import Criterion, Model, Postprocess, Thresholds, View
from models.tasks.detect import BoxTask, box_predictions
from models.tasks.predictions import DetectionPrediction
from utils.batch import Batch
from utils.config.flags import NOT_NEGATIVE
from utils.config.hyperparameters import Augmentation, Recipes, number
from utils.errors import UserError

from .loss import LOSS_NAMES, DFineCriterion
from .network import DFine, Outputs, Scored, build, pixel_boxes

# Names in published files and what transformers 5 calls the same tensors: of both families, of each.
RENAMED = (
    (r"\bout_proj\b", "o_proj"),
    (r"encoder\.encoder\.(\d+)\.layers", r"encoder.aifi.\1.layers"),
    (r"^(?=(class|bbox)_embed\.)", "model.decoder."),  # the heads, which transformers' outer class has twice
)
RENAMED_DFINE = ((r"(layers\.\d+)\.fc1\.", r"\1.mlp.layers.0."), (r"(layers\.\d+)\.fc2\.", r"\1.mlp.layers.1."))
RENAMED_RTDETR = ((r"(layers\.\d+)\.(fc\d)\.", r"\1.mlp.\2."),)


@dataclass(frozen=True)
class DFineRecipe(Augmentation):
    """The keys of the hyperparameter YAML: gains of the loss terms, and the augmentation."""

    vfl: float = number(1.0, NOT_NEGATIVE)
    l1: float = number(5.0, NOT_NEGATIVE)
    giou: float = number(2.0, NOT_NEGATIVE)
    fgl: float = number(0.15, NOT_NEGATIVE)
    ddf: float = number(1.5, NOT_NEGATIVE)


class DFineTask(BoxTask):
    """Object detection by a fixed number of queries, each with at most one object."""

    loss_names: ClassVar[tuple[str, ...]] = LOSS_NAMES
    recipe = DFineRecipe
    recipes = Recipes(str(Path(__file__).with_name("hyp.yaml")))
    defaults: ClassVar[Mapping[str, Any]] = {"weights": "", "optimizer": "AdamW"}
    features = BoxTask.features - {"padding", "copies"}

    def __init__(self, names: Mapping[int, str], hyp: DFineRecipe, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
        self.gains = hyp.vfl, hyp.l1, hyp.giou, hyp.fgl, hyp.ddf

    @classmethod
    def renamed(cls, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a file of transformers by the names in `DFine`."""
        renamed, is_dfine = {}, any("lqe_layers" in name for name in state)
        for name, tensor in state.items():
            for old, new in RENAMED + (RENAMED_DFINE if is_dfine else RENAMED_RTDETR):
                name = re.sub(old, new, name)
            renamed[name] = tensor
        return renamed

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels."""
        return build(yaml, self.names, imgsz, source)

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        """Return the names of the terms: RT-DETRv2 predicts no distributions of edges."""
        return LOSS_NAMES if model.yaml["config"]["model_type"] == "d_fine" else LOSS_NAMES[:3]

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`; for an exported file every term is NaN."""
        if isinstance(model, DFine):
            return DFineCriterion(model, self.gains)
        return UnavailableCriterion(len(self.loss_names_of(model)))

    def postprocess(self, model: Model, thresholds: Thresholds) -> DFinePostprocess:
        """Return the conversion of outputs to boxes. Raises `UserError` for an unknown class in `thresholds`."""
        return DFinePostprocess(self.names, thresholds)

    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        """Return the module that maps images (b, 3, h, w), in 0 to 1, to boxes. Raises `UserError` with --nms."""
        if suppression:
            raise UserError("--nms is not for this model, whose boxes need no suppression; leave it out")
        return Scored(cast(DFine, model)).eval()


class DFineView(NamedTuple):
    """The outputs of a network, or of an exported file."""

    outputs: Outputs | None  # None of an exported file
    boxes: Tensor  # (b, q, 4): xyxy in pixels
    scores: Tensor  # (b, q, classes): logits, or confidences of an exported file


class DFinePostprocess(Postprocess):
    """Take the most probable pairs of a query and a class; nothing is suppressed."""

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        """Raise `UserError` if `thresholds` name an unknown class."""
        thresholds.refuse_unknown_classes(names)
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[DFineView]:
        """Run `model` on `inputs`."""
        outputs = model(inputs)
        if isinstance(outputs, Outputs):
            return [DFineView(outputs, pixel_boxes(outputs, inputs), outputs.logits[:, -1].float())]
        return [DFineView(None, outputs[..., :4], outputs[..., 4:].float())]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[DetectionPrediction]:
        """Return the detections of each image. Raises `UserError` for several models: nothing joins their boxes."""
        if len(views) > 1:
            raise UserError("--weights: models of this task suppress no boxes, so they make no ensemble; give one file")
        view, limits = cast(DFineView, views[0]), self.thresholds
        boxes, scores = view.boxes, view.scores
        if limits.classes:
            scores = scores[..., list(limits.classes)]
        best, pair = scores.flatten(1).topk(min(limits.max_det, scores[0].numel()))
        query, label = pair.div(scores.shape[2], rounding_mode="floor"), pair % scores.shape[2]
        rows = torch.cat((boxes.gather(1, query[..., None].expand(-1, -1, 4)), best[..., None], label[..., None]), 2)
        rows = rows.cpu()  # the only copy from the device
        if view.outputs is not None:  # float64: kernels of float32 round differently at the end of a tensor
            rows[..., 4] = rows[..., 4].double().sigmoid().float()
        if limits.classes:
            rows[..., 5] = torch.tensor(limits.classes)[rows[..., 5].long()].float()
        detections = [image[image[:, 4] > limits.conf_thres] for image in rows]
        return box_predictions(detections, batch, self.names, limits)
