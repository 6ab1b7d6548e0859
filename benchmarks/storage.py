"""Images per second of the loader from files, shards and object stores.

    python -m benchmarks.storage --data /work/shared/data/coco128/images [--copies 8] [--workers 0 4] [--rounds 3]

Each image of a folder is decoded once at 640 px, as in a validation, in each round from each place in turn. The object
store is moto's server on loopback, which takes CPU time of the same machine. Cold: with an empty cache of remote files.
Files, shards and the cache are in memory, as after an earlier epoch; `files` again shows the noise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from data import remote
from data.dataset import DataOptions, data_source
from data.pack import pack

IMGSZ, BATCH = 640, 16
SHARD_SIZE = "8M"


def serve(ready: Connection) -> None:
    """Run an S3 server until this process is ended, and send its address."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    ready.send("http://{}:{}".format(*server.get_host_and_port()))
    ready.recv()


def copied(images: Path, folder: Path, copies: int) -> Path:
    """Link the images of a folder several times into a data set without labels, and return its YAML."""
    (folder / "images").mkdir(parents=True)
    for file in sorted(path for path in images.rglob("*") if path.is_file()):
        for k in range(copies):
            shutil.copy(file, folder / f"images/{k}-{file.name}")
    return yaml(folder / "loose.yaml", str(folder), "images")


def yaml(file: Path, path: str, split: str) -> Path:
    """Write a data YAML with one split."""
    file.write_text(f"path: {path}\ntrain: {split}\nval: {split}\nnames: [thing]\n")
    return file


def epoch(data: Path, workers: int) -> tuple[float, float, int]:
    """Return wall seconds and this process's CPU seconds of an epoch over a loader, and the number of images."""
    opened = data_source(str(data), "data.detection:DetectionData").open(IMGSZ, 32, DataOptions(workers=workers))
    split = opened.split("val")
    loader = opened.evaluation_loader(split, opened.evaluation_batches(split, BATCH, square=False))
    start, cpu = time.perf_counter(), time.process_time()
    images = sum(len(batch.images) for batch in loader)
    return time.perf_counter() - start, time.process_time() - cpu, images


def measure(places: dict[str, tuple[Path, Callable[[], object]]], workers: int, rounds: int) -> None:
    """Print images per second from each place, medians, and their ratio to files."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in places}
    images = 0
    for _ in range(rounds):
        for name, (data, prepare) in places.items():
            prepare()
            wall, cpu, images = epoch(data, workers)
            times[name].append((wall, cpu))
    for name, spent in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*spent, strict=True))
        pairs = zip(times["files"], spent, strict=True)
        ratio = statistics.median(one[0] / other[0] for one, other in pairs)
        own = "" if workers else f", {1e3 * cpu / images:.2f} ms of CPU time each"
        print(f"{workers} workers, {name:20} {images / wall:6.1f} images/s, {ratio:.2f} of files{own}", flush=True)


def main() -> None:
    """Pack and upload the images, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of photos")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1")
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        os.environ["AWS_ENDPOINT_URL"] = here.recv()
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")
        files = copied(given.data, folder / "loose", given.copies)
        pack(str(files), str(folder / "pack"), SHARD_SIZE)
        pack(str(files), "s3://bucket/pack", SHARD_SIZE)
        remote_yaml = yaml(folder / "remote.yaml", "s3://bucket/pack", "val")

        def empty() -> None:
            shutil.rmtree(remote.cache_path(), ignore_errors=True)

        def nothing() -> None:
            pass

        places: dict[str, tuple[Path, Callable[[], object]]] = {
            "files": (files, nothing),
            "local shards": (yaml(folder / "packed.yaml", str(folder / "pack"), "val"), nothing),
            "shards in S3, cold": (remote_yaml, empty),
            "shards in S3, warm": (remote_yaml, nothing),
            "files again": (files, nothing),
        }
        for workers in given.workers:
            measure(places, workers, given.rounds)
    here.send("end")
    server.join()


if __name__ == "__main__":
    main()
