"""From a segmenter's outputs to instances: YOLOv5's own numbers, ensembles, and the outputs of exported files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.heads.contract import HeadView
from models.tasks.contract import Thresholds
from models.tasks.detect import detect
from models.tasks.masks import DetectedMasks, PrototypeView, SegmentationPrediction, SegmentationView, cut_by_boxes
from models.tasks.segment import DecodedSegmenter, SegmentationPostprocess, SuppressedSegmenter
from models.weights.reader import read_weights
from models.weights.transfer import transfer
from models.yolo import YoloModel, build_model
from tests.making import CLASS_NAMES, image_info
from tests.models.tasks.segmentation.batches import SIDE, mask_batch, tiny_model
from utils.batch import SegmentationBatch
from utils.errors import UserError

THRESHOLDS = Thresholds(0.3, 0.45, 20)


def source_of(prediction: SegmentationPrediction) -> DetectedMasks:
    assert isinstance(prediction.source, DetectedMasks)
    return prediction.source


def view_of(model: YoloModel, images: Tensor) -> tuple[HeadView, Tensor]:
    """Return the raw maps and the prototypes of a model's view."""
    (view,) = SegmentationPostprocess(CLASS_NAMES, THRESHOLDS).views(model, images, augment=False)
    assert isinstance(view, PrototypeView)
    assert isinstance(view.boxes, HeadView)
    return view.boxes, view.prototypes


def at_map_size(prediction: SegmentationPrediction) -> Tensor:
    """Return the masks at the prototypes' size, bool (k, h, w)."""
    source = source_of(prediction)
    return cut_by_boxes(source.maps.inside(range(len(prediction.rows))), source.map_boxes)


def test_predictions_and_masks_are_those_of_yolov5(shared: Path) -> None:
    reference = torch.load(shared / "reference" / "yolov5n_seg.pt", weights_only=True)
    weights = read_weights(shared / "weights" / "yolov5n-seg-coco128.pt")
    assert (weights.task, weights.source) == ("segment", "yolov5")
    model = build_model("yolov5n-seg.yaml").eval()
    assert transfer(model, weights.state)[:2] == (367, 367)
    infos = [image_info(k, (320, 320)) for k in range(4)]
    batch = replace(mask_batch([], [], infos), images=reference["im_uint8"])
    postprocess = SegmentationPostprocess(weights.names, Thresholds(0.25, 0.45, one_class=True))
    with torch.no_grad():
        views = postprocess.views(model, batch.images.float() / 255, augment=False)
    (view,) = views
    assert isinstance(view, PrototypeView)
    assert isinstance(view.boxes, HeadView)
    boxes = view.boxes.head.decode(view.boxes.outputs, view.boxes.more)[:1]
    torch.testing.assert_close(boxes, reference["predictions"], rtol=0, atol=1e-3)
    torch.testing.assert_close(view.prototypes[:1], reference["prototypes"], rtol=0, atol=1e-3)
    for number, prediction in enumerate(postprocess(views, batch)):
        detections, on_map, in_file = (
            reference[name][number] for name in ("detections", "masks_at_prototype_size", "masks_at_image_size")
        )
        torch.testing.assert_close(source_of(prediction).boxes, detections[:, :6], rtol=0, atol=1e-3)
        assert (at_map_size(prediction) == on_map).float().mean() > 0.999
        assert (torch.from_numpy(prediction.masks) == in_file).float().mean() > 0.999


def run(
    model: YoloModel | list[YoloModel], images: Tensor, thresholds: Thresholds = THRESHOLDS
) -> list[SegmentationPrediction]:
    """Return the predictions of one or several models for square images."""
    postprocess, models = (
        SegmentationPostprocess(CLASS_NAMES, thresholds),
        model if isinstance(model, list) else [model],
    )
    views = [view for one in models for view in postprocess.views(one, images, augment=False)]
    return postprocess(views, batch_of(len(images)))


def batch_of(count: int) -> SegmentationBatch:
    return mask_batch([], [], [image_info(k, (SIDE, SIDE)) for k in range(count)])


def images_of(count: int) -> Tensor:
    return torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def expected_masks(model: YoloModel, image: Tensor, prediction: SegmentationPrediction) -> Tensor:
    """Return the masks of a prediction by the definition: sigmoid of the coefficients of the anchor with its box."""
    decoded, prototypes = DecodedSegmenter(model)(image[None])
    every, boxes = decoded[0], source_of(prediction).boxes
    centres = (boxes[:, :2] + boxes[:, 2:4]) / 2
    anchor = torch.cdist(torch.cat((centres, boxes[:, 2:4] - boxes[:, :2]), 1), every[:, :4]).argmin(1)
    probabilities = torch.einsum("km,mhw->khw", every[anchor, 8:], prototypes[0]).sigmoid()
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    left, top, right, bottom = (boxes[:, k, None, None] / 4 for k in range(4))
    inside = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    return (probabilities > 0.5) & inside


def test_masks_by_their_definition() -> None:
    model, images = tiny_model(), images_of(2)
    for image, prediction in zip(images, run(model, images), strict=True):
        masks = at_map_size(prediction)
        assert len(masks) == 20
        assert masks.flatten(1).any(1).sum() > 10
        assert torch.equal(masks, expected_masks(model, image, prediction))


def test_boxes_are_those_of_a_detector() -> None:
    """With the same outputs of boxes, masks change nothing."""
    model, images = tiny_model(), images_of(2)
    view, _ = view_of(model, images)
    plain = view._replace(outputs=[raw[..., :8] for raw in view.outputs], more=0)
    for prediction, boxes in zip(run(model, images), detect([plain], THRESHOLDS), strict=True):
        assert torch.equal(source_of(prediction).boxes, boxes)


def test_every_detection_of_an_ensemble_has_the_prototypes_of_its_model() -> None:
    first, second, images = tiny_model(), tiny_model(1), images_of(2)
    assert not torch.equal(first(images)[1], second(images)[1])
    alone = [run(model, images, Thresholds(0.3, 1.0, 1000)) for model in (first, second)]
    for number, prediction in enumerate(run([first, second], images, Thresholds(0.3, 1.0, 2000))):
        both = torch.cat([one[number].rows for one in alone])
        masks = torch.cat([at_map_size(one[number]) for one in alone])
        order = both[:, 4].argsort(descending=True, stable=True)
        assert torch.equal(prediction.rows, both[order])
        assert torch.equal(at_map_size(prediction), masks[order])


def test_ensembles_of_models_with_different_numbers_of_prototypes() -> None:
    first, second, images = tiny_model(), tiny_model(1), images_of(1)
    view, prototypes = view_of(first, images)
    fewer = PrototypeView(view._replace(outputs=[raw[..., :-1] for raw in view.outputs], more=3), prototypes[:, :3])
    other = PrototypeView(*view_of(second, images))
    postprocess = SegmentationPostprocess(CLASS_NAMES, Thresholds(0.3, 1.0, 2000))
    parts = [postprocess([one], batch_of(1))[0] for one in (fewer, other)]
    (joined,) = postprocess([fewer, other], batch_of(1))
    order = torch.cat([part.rows for part in parts])[:, 4].argsort(descending=True, stable=True)
    assert torch.equal(at_map_size(joined), torch.cat([at_map_size(part) for part in parts])[order])


# Exported files


def exported(
    model: YoloModel, images: Tensor, suppressed: bool
) -> tuple[list[SegmentationView], SegmentationPostprocess]:
    """Return the views of an exported file's outputs."""
    decoding = DecodedSegmenter(model)
    limits = THRESHOLDS
    module = SuppressedSegmenter(decoding, limits) if suppressed else decoding
    postprocess = SegmentationPostprocess(CLASS_NAMES, THRESHOLDS)
    return postprocess.views(module, images, augment=False), postprocess  # type: ignore[arg-type]


@pytest.mark.parametrize("suppressed", [False, True])
def test_an_exported_file_has_the_instances_of_its_model(suppressed: bool) -> None:
    model, images = tiny_model(), images_of(3)
    views, postprocess = exported(model, images, suppressed)
    assert views[0].outputs is None
    for prediction, expected in zip(postprocess(views, batch_of(3)), run(model, images), strict=True):
        torch.testing.assert_close(prediction.rows, expected.rows, rtol=1e-4, atol=1e-3)
        assert (at_map_size(prediction) == at_map_size(expected)).float().mean() > 0.999
        assert (prediction.masks == expected.masks).mean() > (0.95 if suppressed else 0.999)


def test_thresholds_apply_to_the_detections_of_an_exported_file() -> None:
    model, images = tiny_model(), images_of(1)
    views, _ = exported(model, images, suppressed=True)
    (every,) = run(model, images)
    common = int(np.bincount(every.classes).argmax())
    (few,) = SegmentationPostprocess(CLASS_NAMES, Thresholds(0.3, classes=(common,), max_det=2))(views, batch_of(1))
    (rows,) = np.nonzero(every.classes == common)
    assert len(rows) > 2
    torch.testing.assert_close(few.rows, every.rows[rows[:2]], rtol=1e-4, atol=1e-3)
    assert (at_map_size(few) == at_map_size(every)[rows[:2]]).all()


def test_refusals() -> None:
    postprocess = SegmentationPostprocess(CLASS_NAMES, THRESHOLDS)
    with pytest.raises(UserError, match=r"^--augment is for detectors"):
        postprocess.views(tiny_model(), images_of(1), augment=True)
    with pytest.raises(UserError, match="--classes 3: the model has classes 0 to 2"):
        SegmentationPostprocess(CLASS_NAMES, Thresholds(classes=(3,)))
