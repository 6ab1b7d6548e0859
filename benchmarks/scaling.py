"""The cost of sharing gradients on 8 and on 64 GPUs, computed, not measured.

    python -m benchmarks.scaling

Prints the tables of docs/scaling.md, which lists the assumptions. Parameters, convolutions, BatchNorm layers and DDP's
buckets are those of this project's models; the rates of GPUs and links are the constants below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpus import COCO, PUBLISHED, clock
from models.yolo import build_model
from train import VALIDATION_BATCH
from utils.config.hyperparameters import Hyperparameters

SIZES = "nsmlx"
IMGSZ, PER_GPU, GPUS = 640, 16, 8  # pixels, images of a batch per GPU, GPUs per machine
IN_MACHINE = {"NVLink": 200e9, "PCIe": 12e9}  # NCCL's bytes per second through each GPU in each direction
GBIT, SLOW = (25, 100, 400), (25, 10)  # of a machine's link to the others
NEAR, FAR = 25e-6, 75e-6  # latency of a collective in seconds, in a machine and between machines
LATENCIES = {8: (20e-6, 30e-6), 64: (50e-6, 100e-6)}  # the same as a range, by number of GPUs
LOADER = {"window": 8.08, "any": 12.9, "cached": 2.95}  # CPU milliseconds per image, from docs/benchmarks.md
VALIDATED = 5000  # images of COCO's validation
WORKERS = 8  # loader processes per GPU, the default of --workers
FILE = 163e3  # bytes of a JPEG of COCO's train2017: 19.3 GB for 118,287
REQUESTS = 16  # at once, of a loader process
PHOTO = 108 / 128  # MiB of a decoded photo, from docs/benchmarks.md
SAVING, METRICS = 0.63, 0.62  # seconds to save yolov5l and to compute COCO's metrics, from docs/benchmarks.md
DDP_BUCKET_MB = 25
POWERSGD_RANK = 2  # of the approximation of each gradient matrix
MB, MS = 1e6, 1e-3


@dataclass(frozen=True)
class Layer:
    """A layer with parameters."""

    shapes: tuple[torch.Size, ...]  # of its parameters
    work: float  # operations of the forward pass for an image; 0 unless it is a convolution

    @property
    def bytes(self) -> int:
        return 4 * sum(shape.numel() for shape in self.shapes)


@dataclass(frozen=True)
class Model:
    """A model, with its layers in the order of the forward pass."""

    name: str
    layers: tuple[Layer, ...]
    norms: int  # BatchNorm layers

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def work(self) -> float:
        return sum(layer.work for layer in self.layers)

    @property
    def powersgd(self) -> int:
        """The bytes of the gradients under PowerSGD: two thin factors of each matrix, if they halve its size."""
        return sum(thin(shape) for layer in self.layers for shape in layer.shapes)


def thin(shape: torch.Size) -> int:
    """Return the bytes of a gradient under PowerSGD, by torch's rule."""
    rows, columns = shape[0], shape.numel() // shape[0]
    factors = POWERSGD_RANK * (rows + columns)
    return 4 * (factors if 2 * factors < rows * columns else rows * columns)


def read(size: str) -> Model:
    """Build a model on the meta device, and pass one image through it."""
    layers: list[Layer] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        shapes = tuple(parameter.shape for parameter in module.parameters(recurse=False))
        cells = output.shape[2] * output.shape[3]
        work = 2 * module.weight.numel() * cells if isinstance(module, nn.Conv2d) else 0
        layers.append(Layer(shapes, work))

    with torch.device("meta"):
        model = build_model(f"yolov5{size}.yaml")
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(record)
        model(torch.zeros(1, 3, IMGSZ, IMGSZ))
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    return Model(f"yolov5{size}", tuple(layers), norms)


@dataclass(frozen=True)
class Cluster:
    """Machines and the links between their GPUs. `gbit`: of each machine's link; `flat`: one ring through all GPUs."""

    gpus: int
    inside: str = "NVLink"
    gbit: float = math.inf
    flat: bool = False

    @property
    def machines(self) -> int:
        return math.ceil(self.gpus / GPUS)

    @property
    def latency(self) -> float:
        return NEAR if self.machines == 1 else FAR

    def seconds(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes."""
        link, bus = self.gbit * 1e9 / 8, IN_MACHINE[self.inside]
        if self.flat:
            return ring(self.gpus) * size / min(link, bus) + self.latency
        local = ring(min(self.gpus, GPUS)) * size / bus
        return local + ring(self.machines) * size / link + self.latency


def ring(count: int) -> float:
    """Return the share of its bytes that each of `count` processes sends in a ring all-reduce."""
    return 2 * (count - 1) / count


@dataclass(frozen=True)
class Job:
    """A training job. `share`: of the gradients' bytes that are sent (bf16: half)."""

    model: Model
    rate: float  # operations a second of a GPU
    per_gpu: int = PER_GPU
    share: float = 1.0
    nbs: int = Hyperparameters().nbs

    def batches(self, gpus: int) -> int:
        """Return the number of batches per optimizer step."""
        return Hyperparameters(nbs=self.nbs).accumulation(self.per_gpu * gpus)

    @property
    def batch(self) -> float:
        """The seconds that a GPU computes for its part of a batch: the backward pass takes twice the forward pass."""
        return 3 * self.model.work * self.per_gpu / self.rate

    def waiting(self, cluster: Cluster) -> float:
        """Return the seconds by which the gradients arrive after the backward pass.

        A bucket is sent once its last gradient is computed and the bucket before it has arrived; gradients come in the
        reverse order of the layers.
        """
        done, sent, bucket, clock = 0.0, 0, 0, 0.0
        for layer in reversed(self.model.layers):
            done += 2 * layer.work * self.per_gpu / self.rate
            bucket, sent = bucket + layer.bytes, sent + layer.bytes
            if bucket >= DDP_BUCKET_MB * 2**20 or sent == self.model.bytes:
                clock = max(clock, done) + cluster.seconds(bucket * self.share)
                bucket = 0
        return max(clock - done, 0.0)

    def efficiency(self, cluster: Cluster) -> float:
        """Return the images per second of each GPU in the cluster over those of a single GPU."""
        if cluster.gpus == 1:
            return 1.0
        batches = self.batches(cluster.gpus)
        alone = batches * self.batch
        # Each batch has one small collective: the counts that the loss divides by.
        return alone / (alone + batches * cluster.latency + self.waiting(cluster))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    print("", *(f"| {' | '.join(line)} |" for line in lines), sep="\n")


def main() -> None:
    """Print all tables."""
    models = [read(size) for size in SIZES]
    large = models[SIZES.index("l")]
    fast = COCO / PUBLISHED[1].training  # images a second of a GPU alone
    rate = fast * 3 * large.work
    print(f"assumed: {fast:.1f} images/s of yolov5l on a GPU, which is {rate / 1e12:.1f} TFLOP/s")
    jobs = [Job(model, rate) for model in models]
    steps(jobs)
    clusters(jobs)
    slow([jobs[SIZES.index(size)] for size in "sl"])
    together(jobs)
    published(jobs[SIZES.index("l")])
    epoch(fast)
    loading(jobs)
    store(jobs)


def steps(jobs: Sequence[Job]) -> None:
    """Print the computation and traffic of a step."""
    head = ["model", "parameters, M", "GFLOP forward", "BatchNorms", "computing, ms"]
    head += ["gradients, MB", "bf16", "powersgd", "1 of 8 sends"]
    rows = []
    for job in jobs:
        model, size = job.model, job.model.bytes
        counts = [f"{size / 4 / 1e6:.2f}", f"{model.work / 1e9:.1f}", f"{model.norms}", f"{job.batch / MS:.1f}"]
        traffic = [f"{size / MB:.1f}", f"{size / 2 / MB:.1f}", f"{model.powersgd / MB:.1f}"]
        rows.append([model.name, *counts, *traffic, f"{ring(GPUS) * size / MB:.1f}"])
    table(head, rows)


def clusters(jobs: Sequence[Job]) -> None:
    """Print the efficiency on 8 and on 64 GPUs."""
    rows = []
    for job in jobs:
        half, fast = replace(job, share=0.5), replace(job, rate=2 * job.rate)
        efficiencies = [job.efficiency(Cluster(GPUS)), job.efficiency(Cluster(GPUS, "PCIe"))]
        efficiencies += [half.efficiency(Cluster(GPUS, "PCIe"))]
        efficiencies += [job.efficiency(Cluster(64, gbit=gbit)) for gbit in GBIT]
        efficiencies += [half.efficiency(Cluster(64, gbit=gbit)) for gbit in GBIT[:2]]
        efficiencies += [job.efficiency(Cluster(64, gbit=gbit, flat=True)) for gbit in GBIT[:2]]
        efficiencies += [fast.efficiency(Cluster(64, gbit=gbit)) for gbit in GBIT[:2]]
        rows.append([job.model.name, *(f"{value:.2f}" for value in efficiencies)])
    head = ["", "NVLink", "PCIe", "PCIe, bf16", *(f"{gbit}" for gbit in GBIT)]
    table([*head, *(f"{gbit}, {what}" for what in ("bf16", "flat", "fast") for gbit in GBIT[:2])], rows)
    print(f"\na flat ring through 64 GPUs sends {ring(64) / ring(64 // GPUS) - 1:.1%} more through a machine's link")


def slow(jobs: Sequence[Job]) -> None:
    """Print the remedies for slow links."""
    ways: dict[str, dict[str, Any]] = {
        "nothing": {},
        "`--comm-hook bf16`": {"share": 0.5},
        "32 images per GPU": {"per_gpu": 32},
        "`nbs: 4096`": {"nbs": 4096},
        "bf16 and 32 images": {"share": 0.5, "per_gpu": 32},
        "bf16 and `nbs: 4096`": {"share": 0.5, "nbs": 4096},
    }
    rows = []
    for what, changes in ways.items():
        changed = [replace(job, **changes) for job in jobs]
        efficiencies = [job.efficiency(Cluster(64, gbit=gbit)) for gbit in SLOW for job in changed]
        images = 64 * changed[0].per_gpu * changed[0].batches(64)
        rows.append([what, f"{images}", *(f"{value:.2f}" for value in efficiencies)])
    head = ["64 GPUs", "images per step"]
    table([*head, *(f"{job.model.name}, {gbit}" for gbit in SLOW for job in jobs)], rows)


def together(jobs: Sequence[Job]) -> None:
    """Print the cost of SyncBatchNorm's two collectives per layer."""
    head = ["`--sync-bn`", "collectives per batch"]
    head += [f"{gpus} GPUs, {part}" for gpus in LATENCIES for part in ("ms", "% of a batch")]
    rows = []
    for job in jobs:
        row = [job.model.name, f"{2 * job.model.norms}"]
        for ends in LATENCIES.values():
            low, high = (2 * job.model.norms * latency for latency in ends)  # one forward, one backward
            row += [
                f"{low / MS:.1f} to {high / MS:.1f}",
                f"{100 * low / job.batch:.1f} to {100 * high / job.batch:.1f}",
            ]
        rows.append(row)
    table(head, rows)


def published(job: Job) -> None:
    """Print the arithmetic beside the published figures."""
    first, rows = PUBLISHED[1].training, []
    for count, row in PUBLISHED.items():
        expected = job.efficiency(Cluster(count))
        computed = first / count / expected
        speed_up = first / row.training
        missing = row.training - computed
        line = [f"{count}", clock(row.training), f"{speed_up:.2f}", f"{speed_up / count:.2f}", clock(computed)]
        rows.append([*line, f"{expected:.3f}", f"{missing:.0f}", f"{missing / row.training:.0%}"])
    head = ["GPUs", "published", "speed-up", "efficiency", "computed", "efficiency", "missing, s", "of it"]
    table(head, rows)
    share = first / PUBLISHED[GPUS].training / GPUS / job.efficiency(Cluster(GPUS))
    by_link = {gbit: share * job.efficiency(Cluster(64, gbit=gbit)) for gbit in GBIT}
    links = ", ".join(f"{gbit} Gbit/s {efficiency:.2f}" for gbit, efficiency in by_link.items())
    print(f"\n64 GPUs with what is missing on 8: {links}")


def epoch(fast: float) -> None:
    """Print the cost of the end of an epoch."""
    head = [
        "GPUs",
        "batches",
        "steps",
        "filled up",
        "training, s",
        "saving and metrics",
        "validation, s",
        "YOLOv5's, s",
    ]
    rows, batches = [], math.ceil(VALIDATED / VALIDATION_BATCH)
    for gpus in (1, GPUS, 64):
        size = gpus * PER_GPU
        images = math.ceil(COCO / size) * size
        seconds = images / fast / gpus
        shared = PUBLISHED[1].validation * math.ceil(batches / gpus) / batches  # dealt out whole
        steps = math.ceil(images / size / Hyperparameters().accumulation(size))
        row = [f"{gpus}", f"{images // size}", f"{steps}", f"{images / COCO - 1:.2%}", f"{seconds:.1f}"]
        theirs = f"{PUBLISHED[gpus].validation}" if gpus in PUBLISHED else "-"
        rows.append([*row, f"{(SAVING + METRICS) / seconds:.1%}", f"{shared:.1f}", theirs])
    table(head, rows)


def loading(jobs: Sequence[Job]) -> None:
    """Print the required speed of the loader."""
    head = ["model", "images/s per GPU", "of 8", *(f"cores, {kind}" for kind in LOADER), "for 8, window"]
    rows = []
    for job in jobs:
        fast = job.per_gpu / job.batch
        cores = [f"{fast * milliseconds * MS:.1f}" for milliseconds in LOADER.values()]
        cores.append(f"{GPUS * fast * LOADER['window'] * MS:.0f}")
        rows.append([job.model.name, f"{fast:.0f}", f"{GPUS * fast:.0f}", *cores])
    table(head, rows)
    most = ", ".join(f"{kind} {WORKERS / milliseconds / MS:.0f}" for kind, milliseconds in LOADER.items())
    print(f"\nat most, with {WORKERS} loader processes of a core each: {most} images/s per GPU")
    print(f"COCO decoded, in the memory of a machine: {COCO * PHOTO / 1024:.0f} GiB")


def store(jobs: Sequence[Job]) -> None:
    """Print what machines request of an object store in their first epoch, before their caches have anything."""
    head = ["model", "GPUs", "times per image", "requests/s", "of a machine", "GB/s", "Gbit/s of one", "longest, ms"]
    rows = []
    for job in jobs:
        fast = job.per_gpu / job.batch
        for gpus in (GPUS, 64):
            machines = gpus // GPUS
            times = machines * (1 - math.exp(-4 / machines))  # an image is in four mosaics, each on some machine
            times = max(times, 1.0)
            requests = gpus * fast * times
            longest = REQUESTS * WORKERS * GPUS / (requests / machines) / MS
            row = [job.model.name, f"{gpus}", f"{times:.2f}", f"{requests:.0f}", f"{requests / machines:.0f}"]
            bytes_per_second = requests * FILE
            row += [f"{bytes_per_second / 1e9:.2f}", f"{bytes_per_second * 8 / machines / 1e9:.1f}", f"{longest:.0f}"]
            rows.append(row)
    table(head, rows)


if __name__ == "__main__":
    main()
