"""Time and memory to read a large COCO annotation file, which is generated.

    python -m benchmarks.coco_annotations [--gigabytes 1]

Each measurement is a separate process: the classes and images, the rows of all boxes, and those of all outlines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from data.coco_json import AnnotatedImages, read_contents

CLASSES, OBJECTS_PER_IMAGE = 80, 7  # about COCO's
POINTS = 27  # of an outline on average: 520 bytes of the file per object, as in COCO's train2017


def generate(file: Path, size: int) -> int:
    """Write a file of at least `size` bytes and return the number of its images."""
    rng = np.random.default_rng(0)
    names = [{"id": k + 1, "name": f"class {k}", "supercategory": "thing"} for k in range(CLASSES)]
    images = 0
    with file.open("w") as opened:
        opened.write('{"categories": ' + json.dumps(names) + ', "annotations": [')
        while opened.tell() < size * 0.97:
            outlines = rng.uniform(0, 480, (OBJECTS_PER_IMAGE, POINTS, 2)).round(2)
            low, high = outlines.min(1), outlines.max(1)
            for k, (outline, start, extent) in enumerate(zip(outlines, low, (high - low).round(2), strict=True)):
                item = {
                    "segmentation": [outline.ravel().tolist()],
                    "area": float(extent.prod()),
                    "iscrowd": 0,
                    "image_id": images,
                    "bbox": [*start.tolist(), *extent.tolist()],
                    "category_id": int(rng.integers(CLASSES)) + 1,
                    "id": images * OBJECTS_PER_IMAGE + k,
                }
                opened.write(f"{', ' if images or k else ''}{json.dumps(item)}")
            images += 1
        entries = [{"id": k, "file_name": f"{k:012}.jpg", "width": 640, "height": 480} for k in range(images)]
        opened.write('], "images": ' + json.dumps(entries) + "}")
    return images


def measure(file: Path, part: str) -> None:
    """Read a part of the file and print wall and CPU seconds, and the peak of this process's memory."""
    start, cpu = time.perf_counter(), time.process_time()
    contents = read_contents(file)
    if part != "classes and images":
        images = {name: name for name in contents.images}
        rows, _ = AnnotatedImages(file, tuple(contents.names), images).rows(polygons=part == "outlines")
        assert len(rows) == len(images)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    print(f"{part:20} {seconds:6.1f} s, {cpu_seconds:6.1f} s of CPU time, {peak:6.2f} GiB", flush=True)


def main() -> None:
    """Generate a file and measure each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "instances_train.json"
        images = generate(file, int(given.gigabytes * 1e9))
        print(f"{file.stat().st_size / 1e9:.2f} GB, {images} images, {images * OBJECTS_PER_IMAGE} objects")
        for part in ("classes and images", "boxes", "outlines"):
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(file, part))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
