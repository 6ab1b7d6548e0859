"""Proportional memory of 2 processes with 4 loader processes each, with and without `--cache ram`.

    python -m benchmarks.memory --data ../datasets/coco128 [--processes 2] [--workers 4] [--imgsz 640]

Each process reads all photos once; then the proportional set sizes of all processes are summed. The difference should
be the size of the decoded images.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path

import psutil
import yaml

from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from utils.config.hyperparameters import Hyperparameters
from utils.distributed.accelerator import start
from utils.distributed.collectives import Collectives
from utils.distributed.ranks import ranks
from utils.distributed.spawn import spawn

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with images/ and labels/ of photos")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--imgsz", type=int, default=640)
    arguments = parser.parse_args()
    for cache in ("", "ram"):
        if not spawn(functools.partial(measure, arguments, cache), arguments.processes):
            measure(arguments, cache)


def measure(arguments: argparse.Namespace, cache: str) -> None:
    """Measure on each process; the main one prints."""
    collectives = Collectives(start("cpu", "no", 300.0)[0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.yaml"
        file.write_text(yaml.safe_dump({"path": str(arguments.data.resolve()), "train": "images", "nc": 80}))
        options = DataOptions(workers=arguments.workers, cache=cache)
        data = DetectionData(read_spec(file), imgsz=arguments.imgsz, stride=32, options=options)
        split = data.split("train")
    hyp = Hyperparameters(mosaic=0.0)
    loader = data.train_loader(split, batch_size=8, hyp=hyp, seed=0)
    for _ in loader:
        pass
    here = psutil.Process()
    process_bytes = sum(process.memory_full_info().pss for process in [here, *here.children(recursive=True)])
    total = sum(collectives.gather([process_bytes]))
    images = sum(loader.dataset.images.read(k).nbytes for k in range(len(split.images)))
    if ranks().rank == 0:
        print(f"cache {cache or '-':4} {total / MIB:8.0f} MiB in total; decoded images: {images / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
