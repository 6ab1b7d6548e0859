"""Detection by D-FINE and RT-DETRv2: the factory of the model, loss and predictions."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from models.heads.contract import UnavailableCriterion, row_sigmoids
from models.tasks.contract import Criterion, Model, Postprocess, Thresholds, View
from models.tasks.detect import BoxTask, box_predictions
from models.tasks.predictions import DetectionPrediction
from utils.batch import Batch
from utils.config.flags import NOT_NEGATIVE
from utils.config.hyperparameters import Augmentation, Recipes, number
from utils.errors import UserError, first_line

from .loss import LOSS_NAMES, DFineCriterion
from .network import CLASSES, DFine, Outputs, Scored, modules_of, pixel_boxes

# Of configs without these keys: a background class score, and BatchNorm that learns without trained statistics.
DEFAULTS = {"initializer_bias_prior_prob": 0.01, "freeze_backbone_batch_norms": False}
# Names in published files and what transformers 5 calls the same tensors: of both families, then of D-FINE.
RENAMED = (
    (r"\bout_proj\b", "o_proj"),
    (r"encoder\.encoder\.(\d+)\.layers", r"encoder.aifi.\1.layers"),
    (r"^(?=(class|bbox)_embed\.)", "model.decoder."),  # the heads, which transformers' outer class has twice
    (r"(layers\.\d+)\.(fc\d)\.", r"\1.mlp.\2."),
)
RENAMED_DFINE = ((r"\.mlp\.fc1\.", ".mlp.layers.0."), (r"\.mlp\.fc2\.", ".mlp.layers.1."))


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
        is_dfine = any("lqe_layers" in name for name in state)
        renamed, rules = {}, RENAMED + RENAMED_DFINE if is_dfine else RENAMED
        for name, tensor in state.items():
            for old, new in rules:
                name = re.sub(old, new, name)
            renamed[name] = tensor
        return renamed

    @classmethod
    def described(cls, folder: Path) -> tuple[dict[str, Any], dict[int, str], str] | None:
        """Return the model YAML and class names in config.json, and the licence in the header of README.md."""
        file, card = folder / "config.json", folder / "README.md"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if config.get("model_type") not in CLASSES:
            return None
        two = {0: "LABEL_0", 1: "LABEL_1"}  # which transformers does not write
        names = {int(number): str(name) for number, name in config.pop("id2label", two).items()}
        config.pop("label2id", None)
        header = card.read_text(encoding="utf-8") if card.is_file() else ""
        licence = re.search(r"^license: *(\S+)", header, re.MULTILINE)
        return {"task": "dfine", "config": config}, names, licence[1] if licence else ""

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> DFine:
        """Build the model of a YAML, whose `config` has keys of transformers' config.json. Raises `UserError`."""
        config: Any = yaml.get("config")
        kind = config.get("model_type") if isinstance(config, dict) else None
        if kind not in CLASSES:
            raise UserError(f"{source}: `config` must have the model_type {' or '.join(CLASSES)}")
        modeling = modules_of(kind)
        try:
            settings = getattr(modeling, f"{CLASSES[kind]}Config")
            settings = settings(**{**DEFAULTS, **copy.deepcopy(config), "num_labels": len(self.names)})
            settings._attn_implementation = "eager"  # CUDA's fused kernels add in any order in the backward pass
            network = getattr(modeling, f"{CLASSES[kind]}ForObjectDetection")(settings).model
        except Exception as error:  # transformers checks types and some of the sizes
            raise UserError(f"{source}: this `config` makes no network ({first_line(error)}); correct it") from error
        yaml = {**copy.deepcopy(dict(yaml)), "task": "dfine", "nc": len(self.names)}
        return DFine(network, yaml, self.names, imgsz)

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        """Return the names of the terms: RT-DETRv2 predicts no distributions of edges."""
        return LOSS_NAMES if model.yaml["config"]["model_type"] == "d_fine" else LOSS_NAMES[:3]

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`; for an exported file every term is NaN."""
        if isinstance(model, DFine):
            return DFineCriterion(model, self.gains[: len(self.loss_names_of(model))])
        return UnavailableCriterion()

    def postprocess(self, model: Model, thresholds: Thresholds) -> DFinePostprocess:
        """Return the conversion of outputs to boxes."""
        return DFinePostprocess(self.names, thresholds)

    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        """Return the module that maps images (b, 3, h, w), in 0 to 1, to boxes. Raises `UserError` with --nms."""
        if suppression:
            raise UserError("--nms is not for this model, whose boxes need no suppression; leave it out")
        return Scored(cast(DFine, model)).eval()


class DFineView(NamedTuple):
    """The outputs of a network, or of an exported file."""

    outputs: Outputs | None  # None of an exported file
    scored: Tensor  # float32 (b, q, 4 + classes): xyxy in pixels, confidences


class DFinePostprocess(Postprocess):
    """Take the most probable pairs of a query and a class; nothing is suppressed."""

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[DFineView]:
        """Run `model` on `inputs`."""
        outputs = model(inputs)
        if isinstance(outputs, Outputs):
            logits = outputs.logits[:, -1]
            scores = row_sigmoids([logits.flatten(0, 1)]).view_as(logits)
            return [DFineView(outputs, torch.cat((pixel_boxes(outputs, inputs), scores), 2))]
        return [DFineView(None, outputs.float())]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[DetectionPrediction]:
        """Return the detections of each image. Raises `UserError` for several models: nothing joins their boxes."""
        if len(views) > 1:
            raise UserError("--weights: models of this task suppress no boxes, so they make no ensemble; give one file")
        scored, limits = cast(DFineView, views[0]).scored, self.thresholds
        scores = scored[..., 4:].clone()
        if limits.classes:
            scores[..., [label for label in self.names if label not in limits.classes]] = 0
        best, pair = scores.flatten(1).topk(min(limits.max_det, scores[0].numel()))
        query, label = pair.div(scores.shape[2], rounding_mode="floor"), pair % scores.shape[2]
        boxes = scored.gather(1, query[..., None].expand(-1, -1, 4))
        rows = torch.cat((boxes, best[..., None], label[..., None]), 2).cpu()  # the only copy from the device
        detections = [image[image[:, 4] > limits.conf_thres] for image in rows]
        return box_predictions(detections, batch, self.names, limits)
