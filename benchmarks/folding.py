"""Agreement and speed of models with folded BatchNorm, in full and half precision, on photos.

    python -m benchmarks.folding --weights yolov5n.pt --photos ../datasets/coco128/images/train2017 [--count 32]

Raw maps are compared, and the detections at confidence 0.25. Half precision runs on CUDA if available, else on the CPU,
whose slow kernels are not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.images import read_image
from data.media import find_media
from detect import Predictor
from models.ensemble import halve, load_model
from models.fuse import fuse
from models.tasks import TASKS
from models.tasks.contract import Thresholds
from models.weights.reader import read_weights
from utils.distributed.devices import one_device
from utils.memory_format import layout

ROUNDS = 5


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(model: nn.Module, inputs: list[Tensor]) -> float:
    synchronise(inputs[0].device)
    since = time.perf_counter()
    for images in inputs:
        model(images)
    synchronise(inputs[0].device)
    return time.perf_counter() - since


def gap(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of raw maps, relative to their largest number."""
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(outputs, expected, strict=True))


def paired(rows: np.ndarray, expected: np.ndarray) -> tuple[int, float, float]:
    """Return the number of detections without a partner of their class within 3 pixels, and the largest differences of
    the others' confidences and corners (pixels)."""
    unused, unpaired, confidences, corners = list(range(len(expected))), 0, [0.0], [0.0]
    for row in rows:
        near = [k for k in unused if expected[k, 5] == row[5] and np.abs(expected[k, :4] - row[:4]).max() < 3]
        if not near:
            unpaired += 1
            continue
        best = min(near, key=lambda k: np.abs(expected[k, :5] - row[:5]).max())
        unused.remove(best)
        confidences.append(abs(float(expected[best, 4] - row[4])))
        corners.append(float(np.abs(expected[best, :4] - row[:4]).max()))
    return unpaired + len(unused), max(confidences), max(corners)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="yolov5n.pt")
    parser.add_argument("--photos", required=True)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--device", default="")
    options = parser.parse_args()
    device = one_device(options.device)
    predictor = Predictor(options.weights, device=options.device)
    content = read_weights(Path(options.weights))
    kind = TASKS["detect"].load()
    task = kind(predictor.names, kind.recipe())
    plain = load_model(task, content, 640, options.weights, options.weights)
    postprocess = task.postprocess(plain, Thresholds(0.25, 0.45, 1000, one_class=True))
    plain = plain.to(device, memory_format=layout(device)).eval()
    forms = {"folded": fuse(plain), "folded, half": halve(fuse(plain))}
    paths = [Path(item.name) for item in find_media(options.photos)][: options.count]
    batches = [predictor.data.collate([predictor.item(read_image(path), str(path))]).to(device) for path in paths]
    inputs = [task.inputs(batch) for batch in batches]
    views = [postprocess.views(plain, images, False) for images in inputs]
    expected = [view[0].outputs for view in views]
    detections = {"plain": [postprocess(view, batch)[0].array for view, batch in zip(views, batches, strict=True)]}
    for name, model in forms.items():
        typed_inputs = [images.half() if "half" in name else images for images in inputs]
        views = [postprocess.views(model, images, False) for images in typed_inputs]
        outputs = [view[0].outputs for view in views]
        largest = max(gap(o, e) for o, e in zip(outputs, expected, strict=True))
        detections[name] = [postprocess(view, batch)[0].array for view, batch in zip(views, batches, strict=True)]
        unpaired, confidence, corner = zip(*map(paired, detections[name], detections["plain"]), strict=True)
        count = sum(map(len, detections[name]))
        print(
            f"{name}: raw maps within {largest:.1e} of the largest number; {count} detections of {len(paths)} photos, "
            f"{sum(unpaired)} without a partner, confidences within {max(confidence):.1e}, "
            f"corners within {max(corner):.2g} pixels"
        )
        if "half" in name and device.type != "cuda":
            continue
        ratios = [seconds(plain, inputs) / seconds(model, typed_inputs) for _ in range(ROUNDS)]
        print(f"{name}: {statistics.median(ratios):.2f} times as fast as plain (median of {ROUNDS} rounds)")


if __name__ == "__main__":
    main()
