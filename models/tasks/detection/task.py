"""Detection: the model, its loss, its decoding and its scores, as one object."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from models.fuse import fuse
from models.layers import Detect
from models.tasks.contract import Batch
from models.tasks.detection.anchors import ENOUGH, find_anchors, fit
from models.tasks.detection.export_module import Decoding, InGraph, Suppressing
from models.tasks.detection.loss import DetectionLoss, LossSettings, LossTerms
from models.tasks.detection.matching import Level, near_cells
from models.tasks.detection.metrics import (
    CONFIDENT,
    POINTS,
    ClassScores,
    ImageRecord,
    Shown,
    SizeScores,
    confusion_matrix,
    join,
    match_detections,
    pair_detections,
    score_classes,
    score_sizes,
)
from models.tasks.detection.postprocess import Decoded, Look, Suppressed, Suppression, cut, detect
from models.tasks.detection.tta import VIEWS
from models.yolo import Model, build_model
from utils.boxes import xywh_to_xyxy, xyxy_to_xywh
from utils.coco import Found
from utils.config.options import Hyperparameters, select
from utils.errors import UserError
from utils.files import csv_text
from utils.memory_format import layout
from utils.plots.drawing import Style, draw_predictions, draw_targets
from utils.summary import Box, Example, Summary, confusion_text, dense_counts, sparse_counts


class Placement(Protocol):
    """How an image's file lies in the batch: pixels of the batch = pixels of the file x scale + offset, by (x, y)."""

    @property
    def scale(self) -> tuple[float, float]: ...
    @property
    def offset(self) -> tuple[int, int]: ...


class ImageInfo(Protocol):
    """What this task needs to know of an image beside its pixels."""

    @property
    def image(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def rows(self) -> np.ndarray: ...


class Labels(Protocol):
    """The labels of a split."""

    def side_lengths(self, imgsz: int) -> np.ndarray: ...


class Split(Protocol):
    """A split of the data set."""

    @property
    def labels(self) -> Labels: ...


class DetectionTask:
    """The verbs that the training loop calls. `names` are the classes; `hyp` has the loss's gains."""

    recipe = Hyperparameters
    defaults: Mapping[str, Any] = {}  # what flags are where the command line says nothing: what config.py says
    refused: Mapping[str, str] = {}  # flags that mean nothing to this task, and why
    # columns of results.csv, after train/ or val/, and after metrics/
    loss_names = ("box_loss", "obj_loss", "cls_loss")
    metric_names = ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")

    def __init__(self, names: Mapping[int, str], hyp: Hyperparameters, label_smoothing: float = 0.0) -> None:
        self.names, self.anchors = dict(names), round(hyp.anchors)
        self.loss_settings = select(LossSettings, hyp, label_smoothing=label_smoothing)
        self.suppression = Suppression()
        self.shown: frozenset[int] = frozenset()  # images, by their index in the split, whose boxes the evidence keeps
        self.augment = False  # show the images in several sizes and mirrored: `VIEWS`

    def describe(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """A model's YAML with what the recipe asks for: another number of anchors, that are yet to be found."""
        return {**yaml, "anchors": self.anchors} if self.anchors else dict(yaml)

    def not_taken(self, from_yaml: bool) -> tuple[str, ...]:
        """Parts of the names of tensors that are not taken from a weight file: anchors, where a YAML or the recipe asks
        for others."""
        return ("anchors",) if from_yaml or self.anchors else ()

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        """The model of a YAML for this task's classes and images of about `imgsz` pixels. `source`: where it is from.

        The task keeps hold of its head, for the anchors, of `self.imgsz`, rounded up to whole strides, at least 2, and
        of `self.stride`, the largest.
        """
        model = build_model(dict(yaml), nc=len(self.names), source=source)
        model.names = self.names
        self.head: Detect = model.detect
        self.strides = [int(stride) for stride in self.head.stride]
        self.stride = max(self.strides)
        self.imgsz = max(math.ceil(imgsz / self.stride), 2) * self.stride
        settings = self.loss_settings.scaled(self.head.nl, self.head.nc, self.imgsz)
        self.criterion = DetectionLoss(settings, self.head.nc)
        return model

    def adopt(self, stride: int, imgsz: int) -> None:
        """Take on a model that this task has not built, an exported one, for images of about `imgsz` pixels. It gives
        boxes, no maps: there are no losses."""
        self.strides, self.stride = [stride], stride
        self.imgsz = max(math.ceil(imgsz / stride), 2) * stride

    def exportable(self, model: Model, options: Any) -> tuple[nn.Module, dict[str, Any] | None]:
        """What an exported file computes of images (b, 3, h, w) in 0 to 1, with fewer layers: boxes (b, n, 5 + classes)
        as in `Decoded`, or with `nms` among the options detections as in `Suppressed`; and the settings of these."""
        decoding = Decoding(fuse(model)).eval()
        if not options.nms:
            return decoding, None
        per_class = min(options.topk_per_class, options.topk_all)
        thresholds = (options.conf_thres, options.iou_thres)
        limits = InGraph(*thresholds, options.topk_all, per_class, options.agnostic_nms)
        return Suppressing(decoding, limits).eval(), limits._asdict()

    def adapt(self, model: Model, split: Split) -> list[str]:
        """AutoAnchor: new anchors where the model's suit too few boxes of the training images.

        Returns a sentence that says what was found and done.
        """
        return [self._fit_anchors(model, split)]

    def _fit_anchors(self, model: Model, split: Split) -> str:
        sides = split.labels.side_lengths(self.imgsz)
        if not len(sides):
            return "AutoAnchor: the training images have no boxes, so the anchors stay"
        threshold = self.loss_settings.anchor_t
        strides = self.head.stride[:, None, None].to(self.head.anchors)
        current = (self.head.anchors * strides).reshape(-1, 2).numpy()
        before = fit(sides, current, threshold)
        told = (
            f"AutoAnchor: {before.recall:.4f} of the boxes fit an anchor, {before.anchors_per_box:.2f} anchors per box"
        )
        if before.recall > ENOUGH:
            return told
        found = find_anchors(sides, len(current), threshold)
        after = fit(sides, found, threshold)
        if after.recall <= before.recall:
            return f"{told}; none better were found"
        anchors = torch.from_numpy(found).to(self.head.anchors).view_as(self.head.anchors)
        if strides[0] > strides[-1]:  # small anchors belong to the level of the small stride
            anchors = anchors.flip(0)
        self.head.anchors.copy_(anchors / strides)
        model.yaml["anchors"] = anchors.reshape(self.head.nl, -1).tolist()
        return f"{told}; new anchors: {after.recall:.4f}, {after.anchors_per_box:.2f}"

    def inputs(self, batch: Batch[ImageInfo]) -> Tensor:
        """What the model is called with: float (b, 3, h, w) in 0 to 1."""
        return batch.images.float(memory_format=layout(batch.images.device)).div_(255)  # type: ignore[call-arg]

    def hints(self, batch: Batch[ImageInfo]) -> tuple[Tensor, ...]:
        """What the model is told beside the images when only its losses are wanted: the cells about the targets."""
        height, width = batch.images.shape[2:]
        sizes = tuple((height // stride, width // stride) for stride in self.strides)
        return (near_cells(sizes, batch.targets).places,)

    def losses(self, outputs: Sequence[Tensor | Level], batch: Batch[ImageInfo]) -> LossTerms:
        """The loss of what the model says, as sums and counts."""
        return self.criterion(outputs, batch.targets, self.head.anchors.to(batch.targets.device))

    def objective(self, means: Tensor, images: int) -> Tensor:
        """What is differentiated, of the means of the loss terms: YOLOv5's sum over the `images` of a step."""
        return means.sum() * images

    def weight(self, batch: Batch[ImageInfo]) -> int:
        """The weight of a batch's losses in those of a validation: all alike, as in YOLOv5."""
        return 1

    def looks(self, model: Model, inputs: Tensor) -> list[Any]:
        """What the model that this task has built makes of `inputs`: the first look is at these as they are, others
        follow with `augment`.

        Of the first look the boxes of the coarsest level are not taken, of the last those of the finest: such objects
        are of better size in the other.
        """
        if not self.augment:
            return [self.look(model(inputs))]
        looks = []
        for view in VIEWS:
            images, scale = view.of(inputs, self.stride)
            mirrored = inputs.shape[3] if view.mirrored else 0
            looks.append(self._raw(model(images))._replace(scale=scale, mirrored=mirrored))
        if len(self.strides) > 1:
            coarsest, finest = (self.strides.index(choose(self.strides)) for choose in (max, min))
            looks[0], looks[-1] = looks[0]._replace(left_out=coarsest), looks[-1]._replace(left_out=finest)
        return looks

    def look(self, outputs: list[Tensor] | Tensor | tuple[Tensor, Tensor]) -> Look | Decoded | Suppressed:
        """Raw maps of the model that this task has built, with what their boxes are relative to; or what a model says
        that was exported."""
        if isinstance(outputs, Tensor):
            return Decoded(outputs)
        if isinstance(outputs, tuple):
            return Suppressed(*outputs)
        return self._raw(outputs)

    def _raw(self, outputs: list[Tensor]) -> Look:
        device = outputs[0].device
        return Look(outputs, self.head.anchors.to(device), self.head.stride.to(device))

    def predict(self, looks: Sequence[Any], batch: Batch[ImageInfo]) -> list[Tensor]:
        """Detections per image, (k, 6): xyxy in pixels of the image's file, cut at its edges, confidence, class. The
        boxes of all looks, which may be of several models, suppress each other."""
        if isinstance(looks[0], Suppressed):
            return _to_file(cut(looks[0], self.suppression), batch.infos)
        return _to_file(detect(looks, self.suppression), batch.infos)

    def set_thresholds(
        self,
        conf_thres: float,
        iou_thres: float,
        max_det: int,
        classes: Collection[int] = (),
        agnostic: bool = False,
        one_class: bool = False,
    ) -> None:
        """What `predict` takes for a detection: least confidence, overlap that suppresses, most per image; of these
        `classes` alone, if any are given. `agnostic`: boxes of different classes suppress each other too; `one_class`:
        of a box its likeliest class alone counts.

        Raises `UserError` for a class that there is not.
        """
        if unknown := sorted(set(classes) - set(self.names)):
            raise UserError(f"--classes {unknown[0]}: the model has classes 0 to {len(self.names) - 1}")
        self.suppression = Suppression(conf_thres, iou_thres, max_det, tuple(classes), agnostic, one_class)

    def plain(self, prediction: Tensor) -> np.ndarray:
        """An image's detections as float32 (k, 6): x1, y1, x2, y2 in its pixels, confidence, class."""
        return prediction.numpy().astype(np.float32)

    def findings(self, prediction: Tensor) -> list[tuple[str, float]]:
        """Class and confidence of each detection of an image, the most confident first."""
        return [(self.names[int(label)], confidence) for *_, confidence, label in prediction.tolist()]

    def told(self, prediction: Tensor) -> str:
        """What was found in an image, in words: how many of each class."""
        counts = Counter(int(label) for label in prediction[:, 5].tolist())
        found = [f"{count} {self.names[label]}{'s' * (count > 1)}" for label, count in sorted(counts.items())]
        return ", ".join(found) or "nothing"

    def drawn(self, image: np.ndarray, prediction: Tensor, style: Style) -> np.ndarray:
        """An image, uint8 (h, w, 3) BGR, with its detections, the most confident on top."""
        rows = prediction.flip(0)
        classes = [int(label) for label in rows[:, 5].tolist()]
        texts = [style.text(self.names[k], value) for k, value in zip(classes, rows[:, 4].tolist(), strict=True)]
        return draw_predictions(image, rows[:, :4].numpy(), classes, texts, style)

    def crops(self, image: np.ndarray, prediction: Tensor) -> list[tuple[str, np.ndarray]]:
        """What each box of an image holds, with the name of its class; none is empty."""
        found = []
        for left, top, right, bottom, _, label in prediction.tolist():
            part = image[math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)]
            if part.size:
                found.append((self.names[int(label)], part))
        return found

    def text_rows(
        self,
        predictions: Sequence[Tensor],
        batch: Batch[ImageInfo],
        with_confidence: bool,
        hybrid: bool = False,
        corners: bool = False,
    ) -> list[list[str]]:
        """Each image's detections as label rows: class, normalised xywh, and the confidence if it is wanted; with
        `corners` xyxy in pixels instead of xywh.

        hybrid: its labels, of confidence 1, and the detections that no label of their class overlaps by more than the
        threshold of the suppression.
        """
        if hybrid:
            most = self.suppression.iou_thres
            images = zip(predictions, batch.infos, strict=True)
            predictions = [_with_labels(found, info, most) for found, info in images]
        return [
            _text_rows(found, info.size, with_confidence, corners)
            for found, info in zip(predictions, batch.infos, strict=True)
        ]

    def results(self, predictions: Sequence[Tensor], batch: Batch[ImageInfo]) -> list[Found]:
        """What was found in each image, for COCO's results."""
        return [
            Found(info.image, info.path, found.numpy()) for found, info in zip(predictions, batch.infos, strict=True)
        ]

    def picture(self, batch: Batch[ImageInfo]) -> np.ndarray:
        """The batch's images with their targets drawn on, uint8 (h, w, 3) BGR."""
        return draw_targets(batch.images.cpu().numpy(), batch.targets.cpu().numpy(), self.names)

    def score(self, predictions: Sequence[Tensor], batch: Batch[ImageInfo]) -> list[ImageRecord]:
        """What each image adds to the metrics, and what is kept of it where it is to be shown."""
        return _records(predictions, batch.infos, self.shown)

    def summarise(self, records: Sequence[ImageRecord]) -> Summary:
        """The metrics of a whole set, its table, and `fitness`."""
        joined = join(records)
        scores = score_classes(joined)
        means = scores.means()
        metrics = dict(zip(self.metric_names, means.values(), strict=True))
        fitness = 0.1 * means["mAP50"] + 0.9 * means["mAP50-95"]
        overall, details = table(self.names, len(records), scores, score_sizes(joined))
        by_class = {
            name: {self.names[int(k)]: float(value) for k, value in zip(scores.classes, values, strict=True)}
            for name, values in (("AP50", scores.ap[:, 0]), ("AP", scores.ap.mean(1)))
        }
        evidence = _evidence(records, scores, len(self.names))
        return Summary(metrics, fitness, overall, details, evidence, by_class=by_class)

    def documents(self, summary: Summary) -> dict[str, str]:
        """Text files for the run folder, by name: scores and counts by class, curves, and the boxes that are shown."""
        evidence, names = summary.evidence, list(self.names.values())
        if not evidence:  # that of a run which began before there was any
            return {}
        classes, curves = evidence["classes"], evidence["curves"]
        confusion = dense_counts(evidence["confusion"], len(names) + 1)
        by_confidence = _curve_rows(names, classes, curves["precision"], curves["recall"])
        head = ("class", "images", "instances", "precision", "recall", "AP50", "AP50-95")
        return {
            "classes.csv": csv_text(head, _class_rows(names, classes)),
            "confusion_matrix.csv": confusion_text(confusion, [*names, "background"]),
            "curves.csv": csv_text(("class", "confidence", "precision", "recall"), by_confidence),
            "PR_curve.csv": csv_text(("class", "recall", "precision"), _curve_rows(names, classes, curves["envelope"])),
            "val_boxes.csv": csv_text(
                ("image", "kind", "class", "confidence", "x1", "y1", "x2", "y2"), _box_rows(names, evidence["shown"])
            ),
        }

    def examples(self, summary: Summary) -> list[Example]:
        """The images that are shown with their boxes, in the order of their indices."""
        return [
            Example(
                Path(one["path"]).name,
                one["image"],
                tuple(one["size"]),
                [_share(int(label), None, xyxy, one["size"]) for label, *xyxy in one["labels"]],
                [_share(int(label), score, xyxy, one["size"]) for *xyxy, score, label in one["predictions"]],
            )
            for one in summary.evidence.get("shown", [])
        ]

    def pictures(self, summary: Summary, split: Split) -> dict[str, np.ndarray]:
        """Pictures for the run folder, by name, uint8 (h, w, 3) BGR."""
        return {}


def _to_file(found: Sequence[Tensor], infos: Sequence[ImageInfo]) -> list[Tensor]:
    """Detections (k, 6) of each image from the batch's pixels into those of its file, in fp64 on the CPU."""
    if not found:
        return []
    counts = [len(image) for image in found]
    image = torch.repeat_interleave(torch.tensor(counts))
    offset, scale, limit = (
        torch.tensor([pair * 2 for pair in pairs], dtype=torch.float64)[image]
        for pairs in zip(*((info.placement.offset, info.placement.scale, info.size) for info in infos), strict=True)
    )
    detections = torch.cat(list(found)).cpu()
    corners = ((detections[:, :4] - offset.float()) / scale).clamp(min=torch.zeros(4), max=limit)
    return list(torch.cat((corners, detections[:, 4:]), 1).split(counts))


def _text_rows(found: Tensor, size: tuple[int, int], with_confidence: bool, corners: bool = False) -> list[str]:
    boxes = found[:, :4] if corners else xyxy_to_xywh(found[:, :4]) / torch.tensor(size * 2)
    rows = torch.cat((boxes, found[:, 4:5]) if with_confidence else (boxes,), 1)
    return [
        f"{int(c)} {' '.join(f'{value:.6g}' for value in row)}"
        for c, row in zip(found[:, 5], rows.tolist(), strict=True)
    ]


def _with_labels(found: Tensor, info: ImageInfo, most: float) -> Tensor:
    """An image's labels and, behind them, its detections (k, 6) that no label of their class overlaps by more than
    `most`."""
    label = torch.from_numpy(info.rows).double()
    truth = xywh_to_xyxy(label[:, 1:5]) * torch.tensor(info.size * 2)
    matched = match_detections(
        found[:, :4].numpy(), found[:, 5].long().numpy(), truth.numpy(), label[:, 0].long().numpy()
    )
    labels = torch.cat((truth, torch.ones(len(label), 1), label[:, :1]), 1)
    return torch.cat((labels, found[torch.from_numpy(matched.overlap <= most)]))


def _shown(found: Tensor, info: ImageInfo) -> Shown:
    """What is kept of an image to show it; of its detections (k, 6) those that are confident."""
    limit = np.array(info.size * 2, np.float32)
    corners = xywh_to_xyxy(torch.tensor(info.rows[:, 1:5])).numpy() * limit
    labels = np.concatenate((info.rows[:, :1], corners.clip(0, limit)), 1)
    sure = found.numpy().astype(np.float32)
    sure = sure[sure[:, 4] >= CONFIDENT]
    return Shown(info.path, info.size, labels, sure[np.argsort(-sure[:, 4], kind="stable")])


def _evidence(records: Sequence[ImageRecord], scores: ClassScores, classes: int) -> dict[str, Any]:
    """Plain values of which documents and pictures are made, the same in whatever order the records come."""
    columns = (scores.precision, scores.recall, scores.ap[:, 0], scores.ap.mean(1))
    counts = (scores.classes, scores.images, scores.instances)
    shown = sorted(((record.image, record.shown) for record in records if record.shown), key=lambda pair: pair[0])
    return {
        "classes": [list(row) for row in zip(*(values.tolist() for values in (*counts, *columns)), strict=True)],
        "confusion": sparse_counts(confusion_matrix(records, classes)),
        "curves": {
            name: torch.from_numpy(values.astype(np.float32)) for name, values in scores.curves._asdict().items()
        },
        "shown": [
            {
                "image": image,
                "path": kept.path,
                "size": list(kept.size),
                "labels": kept.labels.tolist(),
                "predictions": kept.predictions.tolist(),
            }
            for image, kept in shown
        ],
    }


def _class_rows(names: Sequence[str], classes: Sequence[Sequence[float]]) -> Iterator[list[Any]]:
    """Rows of classes.csv: one for every class. `classes`: number, images, labels and scores of those with labels."""
    known = {row[0]: row for row in classes}
    for number, name in enumerate(names):
        if number in known:
            _, images, instances, *scores = known[number]
            yield [name, images, instances, *(f"{score:.9g}" for score in scores)]
        else:
            yield [name, 0, 0, *[""] * 4]


def _curve_rows(names: Sequence[str], classes: Sequence[Sequence[float]], *curves: Tensor) -> Iterator[list[str]]:
    """Rows of a curve's file: class, place and values, for every class that has labels. `curves`: (c, 201) each."""
    places = [f"{place:.4g}" for place in POINTS]
    for (number, *_), *values in zip(classes, *(curve.tolist() for curve in curves), strict=True):
        for place, *row in zip(places, *values, strict=True):
            yield [names[int(number)], place, *(f"{value:.6g}" for value in row)]


def _box_rows(names: Sequence[str], shown: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Rows of val_boxes.csv: labels and predictions of each image, or a row that says that there are none."""
    for one in shown:
        for label, *xyxy in one["labels"]:
            yield [one["path"], "label", names[int(label)], "", *(f"{value:.6g}" for value in xyxy)]
        for *xyxy, confidence, label in one["predictions"]:
            row = (f"{value:.6g}" for value in (confidence, *xyxy))
            yield [one["path"], "prediction", names[int(label)], *row]
        if not one["labels"] and not one["predictions"]:
            yield [one["path"], "image", *[""] * 6]


def _share(label: int, confidence: float | None, xyxy: Sequence[float], size: Sequence[int]) -> Box:
    """A box of the file's pixels as shares of its width and height."""
    (left, top, right, bottom), (width, height) = xyxy, size
    return Box(label, confidence, (left / width, top / height, right / width, bottom / height))


def _records(
    predictions: Sequence[Tensor], infos: Sequence[ImageInfo], shown: Collection[int] = ()
) -> list[ImageRecord]:
    """What each image adds to the metrics; of its detections (k, 6), xyxy in pixels of its file, confidence, class.

    `shown`: the images of which more is kept.
    """
    if not infos:
        return []
    counts, true_counts = [len(found) for found in predictions], [len(info.rows) for info in infos]
    image, true_image = (np.repeat(np.arange(len(infos)), each) for each in (counts, true_counts))
    found = torch.cat(list(predictions)).numpy()
    rows = np.concatenate([info.rows for info in infos])
    boxes, (confidence, label) = found[:, :4], found[:, 4:].astype(np.float32).T.copy()
    sizes = np.array([info.size * 2 for info in infos], np.float32)
    truth, true_label = xywh_to_xyxy(torch.from_numpy(rows[:, 1:5])).numpy() * sizes[true_image], rows[:, 0]
    classes = int(max(label.max(initial=0), true_label.max(initial=0))) + 1
    group, true_group = (image * classes + label).astype(np.int64), (true_image * classes + true_label).astype(np.int64)
    overlap, partner, beaten = match_detections(boxes, group, truth, true_group)
    true_side = _side(truth)
    partner_side = np.where(overlap > 0, np.append(true_side, np.float32(0))[partner], np.float32(0))
    sure = np.flatnonzero(confidence > CONFIDENT)
    taken, taken_for = pair_detections(boxes[sure], image[sure], truth, true_image)
    pairs = np.stack((true_label[taken_for], label[sure[taken]]), 1).astype(np.int32)
    per_image = zip(
        infos,
        predictions,
        _cut(counts, overlap, beaten, partner_side, confidence, label, _side(boxes)),
        _cut(true_counts, true_label, true_side),
        _cut(np.bincount(true_image[taken_for], minlength=len(infos)), pairs),
        strict=True,
    )
    return [
        ImageRecord._make((info.image, *own, *true, *both, _shown(found, info) if info.image in shown else None))
        for info, found, own, true, both in per_image
    ]


def _cut(counts: Sequence[int] | np.ndarray, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Each image's part of columns that hold all images' rows, `counts` of each."""
    return zip(*(np.split(column, np.cumsum(counts)[:-1]) for column in columns), strict=True)


def _side(boxes: np.ndarray) -> np.ndarray:
    """Square root of the area of xyxy boxes, (n,)."""
    width, height = (boxes[:, 2:4] - boxes[:, :2]).clip(min=0).T
    return np.sqrt(width * height)


def table(
    names: Mapping[int, str], images: int, scores: ClassScores, sizes: Sequence[SizeScores]
) -> tuple[list[str], list[str]]:
    """The table's head with the row of all classes, and a row per class and per object size."""
    row = "{:>22} {:>9} {:>9} {:>10} {:>10} {:>10} {:>10}"
    number = "{:.4f}".format
    means = [number(value) for value in scores.means().values()]
    head = row.format("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")
    overall = row.format("all", images, int(scores.instances.sum()), *means)
    columns = (scores.classes, scores.images, scores.instances, scores.precision, scores.recall, scores.ap)
    details = [
        row.format(names[int(c)][:22], seen, count, *map(number, (precision, recall, ap[0], ap.mean())))
        for c, seen, count, precision, recall, ap in zip(*columns, strict=True)
    ]
    for size in sizes:
        span = f"{size.low:g}-{size.high:g} px" if size.high < float("inf") else f"{size.low:g}+ px"
        details.append(row.format(span, images, size.instances, "-", "-", number(size.ap50), number(size.ap)))
    return [head, overall], details
