"""What exported segmenters compute, as modules and in files of all formats."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from models.export.formats import ExportJob, write
from models.export.runtime import read_exported
from models.tasks.contract import Thresholds
from models.tasks.segment import DecodedSegmenter, SuppressedSegmenter
from models.weights.content import ExportMetadata
from tests.making import CLASS_NAMES
from tests.models.tasks.segmentation.batches import tiny_model, tiny_segmenter

FORMATS = ("torchscript", "onnx", "openvino")
LIMITS = Thresholds(0.3, 0.45, 20)
METADATA = {
    **{"task": "segment", "names": CLASS_NAMES, "stride": 16, "model": tiny_segmenter(), "settings": {"imgsz": 64}},
    **{"imgsz": (64, 64), "batch": 1, "half": False, "device": "cpu"},
}


def images_of(count: int, height: int, width: int) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


def test_boxes_and_prototypes() -> None:
    model, images = tiny_model(), images_of(2, 32, 64)
    boxes, prototypes = DecodedSegmenter(model)(images)
    maps, expected = model(images)
    assert boxes.shape == (2, 2 * (4 * 8 + 2 * 4), 5 + 3 + 4)
    assert prototypes.shape == (2, 4, 8, 16)
    assert torch.equal(prototypes, expected)
    assert torch.equal(boxes[1, 2 * 4 * 8 :, 8:], maps[1][1, ..., 8:].flatten(0, 2))  # as they are
    assert torch.equal(boxes[1, 2 * 4 * 8 :, 4:8], maps[1][1, ..., 4:8].sigmoid().flatten(0, 2))


def test_padding_of_detections_has_empty_masks() -> None:
    module = SuppressedSegmenter(DecodedSegmenter(tiny_model()), LIMITS._replace(most=200, iou_thres=0.05))
    detections, counts, masks = module(images_of(2, 64, 64))
    assert masks.shape == (2, 200, 16, 16)
    for rows, count, of_image in zip(detections, counts.tolist(), masks, strict=True):
        assert 0 < count < 200
        assert not rows[count:].any()
        assert not of_image[count:].any()
        assert of_image[:count].any()
    assert set(masks.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("suppressed", [False, True])
def test_files_of_all_formats(suppressed: bool, tmp_path: Path) -> None:
    """Without suppression for images of any size."""
    decoding = DecodedSegmenter(tiny_model()).eval()
    module = SuppressedSegmenter(decoding, LIMITS).eval() if suppressed else decoding
    metadata = ExportMetadata(**METADATA, dynamic=not suppressed, suppression=LIMITS._asdict() if suppressed else None)
    job = ExportJob(module, metadata)
    graph = onnx.load_from_string(job.onnx).graph
    names = [output.name for output in graph.output]
    assert names == (["output0", "count", "masks"] if suppressed else ["output0", "output1"])
    dims = [dim.dim_param for dim in graph.output[1].type.tensor_type.shape.dim]
    assert dims == ([""] if suppressed else ["batch", "", "mask_height", "mask_width"])
    sizes = [(1, 64, 64)] if suppressed else [(1, 64, 64), (3, 32, 96)]
    for name in FORMATS:
        exported = read_exported(write(job, name, tmp_path / "best"))
        for size in sizes:
            outputs, expected = exported(images_of(*size)), module(images_of(*size))
            assert len(outputs) == len(expected)
            for number, (one, other) in enumerate(zip(outputs, expected, strict=True)):
                assert one.shape == other.shape
                if number == 2:  # masks: a logit near 0 may have either sign
                    assert (one != other).float().mean() < 1e-3
                else:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3, check_dtype=False)
