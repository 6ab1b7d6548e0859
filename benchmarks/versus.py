"""CPU and wall time of loader, scan, start and step: this project, YOLOv5 and ultralytics in turn.

    python -m benchmarks.versus --data ../datasets/coco128 --yolov5 ../yolov5 [--python ../yolov5/.venv/bin/python]
        [--ultralytics ../ultralytics/.venv/bin/python] [--yolov9 ../YOLO]

`--data`: a folder with images/<split> and labels/<split> of photos, which are linked 16 times, or enlarged once.
Programs that are not named are not measured. Each measurement is a separate process with one thread, or two that share
the batches; medians of `--rounds`. The CPU time of loader processes is included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import cv2

from utils.files import ROOT

TIMES = 16  # number of links to each photo
STEPS = 4  # timed training steps, one optimizer step, after as many for warm-up
# The code of a child process: `begin()` and `end(images)` enclose the timed part. FOLDER contains images/ and labels/.
CLOCK = """
import json, os, sys, time
import psutil
import torch
torch.set_num_threads(1)
MODEL, SIZE, WORKERS, FOLDER = (os.environ[name] for name in ("MODEL", "SIZE", "WORKERS", "FOLDER"))
STEPS, BATCH, device = int(os.environ["STEPS"]), 16, "cpu"
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
def now():
    children = psutil.Process().children(recursive=True)
    ended = os.times()
    spent = ended.children_user + ended.children_system + sum(sum(child.cpu_times()[:2]) for child in children)
    return time.process_time() + spent, time.perf_counter()
def begin():
    global at
    at = now()
def end(images):
    spent = (after - before for after, before in zip(now(), at))
    print("RESULT", json.dumps([seconds / images * 1000 for seconds in spent]), flush=True)
def drain(loader):
    begin()
    images = 0
    for batch in loader:
        pixels = batch["img"] if isinstance(batch, dict) else getattr(batch, "images", None)
        images += len(batch[0] if pixels is None else pixels)
    end(images)  # before the loader's processes end
    os._exit(0)
def take_steps(loss, model, optimizer, ema):
    for number in range(2 * STEPS):
        if number == STEPS:
            begin()
        loss().backward()
        if number % 4 == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
    end(STEPS * BATCH)
def first(*given):
    end(1)
    os._exit(0)
FLAGS = ["train.py", "--data", FOLDER + "/data.yaml", "--weights", "", "--cfg", MODEL + ".yaml", "--imgsz", SIZE,
         "--batch-size", "16", "--workers", WORKERS, "--device", "cpu", "--project", FOLDER + "/../runs"]
"""
OURS = """
from pathlib import Path
from data.dataset import DataOptions
from data.detection import DetectionData
from data.data_yaml import read_spec
from utils.config.hyperparameters import Hyperparameters
if PROCESSES > 1:  # first: they share the memory for decoded images
    from utils.distributed.launch import start
    accelerator = start("cpu", "no", 60.0)[0]
spec = read_spec(Path(FOLDER) / "data.yaml")
def loader():
    data = DetectionData(spec, imgsz=640, stride=32, options=DataOptions(workers=int(WORKERS)))
    split = data.split("train")
    made = data.train_loader(split, batch_size=16, hyp=Hyperparameters(), seed=0)
    return accelerator.prepare(made) if PROCESSES > 1 else made
"""
THEIRS = """
import yaml
import cv2
from utils.dataloaders import create_dataloader
cv2.setNumThreads(0)
hyp = yaml.safe_load(open("data/hyps/hyp.scratch-low.yaml"))
def loader(side=640, shuffle=True):
    if PROCESSES > 1:
        torch.distributed.init_process_group("gloo")
    made, _ = create_dataloader(FOLDER + "/images/train", side, BATCH // PROCESSES, 32, hyp=hyp, augment=True,
                                rank=RANK if PROCESSES > 1 else -1, workers=int(WORKERS), shuffle=shuffle)
    return made
"""
# Ours is a step of the loop itself; YOLOv5's cannot be called alone, so it is assembled here from the same parts.
OUR_FLAGS = """
flags = [*FLAGS[1:], "--hyp", "low", "--mixed-precision", os.environ["PRECISION"]]
"""
OUR_STEP = """
from tests.whole_runs import within
def steps(parts):
    batch = next(iter(parts.loader))
    for number in range(2 * STEPS):
        if number == STEPS:
            begin()
        yield batch
    end(STEPS * 16)
    os._exit(0)
within([*flags, "--noplots"], lambda parts: parts.take_steps(steps(parts)))
"""
THEIR_STEP = """
import torch
from models.yolo import Model
from utils.loss import ComputeLoss
from utils.torch_utils import ModelEMA, smart_optimizer
images, targets, *_ = next(iter(loader(int(SIZE), shuffle=False)))
images, targets = images.to(device), targets.to(device)
model = Model("models/" + MODEL + ".yaml", ch=3, nc=80).to(device)
hyp["obj"] *= (int(SIZE) / 640) ** 2
model.hyp = {**hyp, "label_smoothing": 0.0}
optimizer = smart_optimizer(model, "SGD", hyp["lr0"], hyp["momentum"], hyp["weight_decay"])
ema, loss = ModelEMA(model), ComputeLoss(model)
take_steps(lambda: loss(model(images.float() / 255), targets)[0].sum(), model, optimizer, ema)
"""
# From the command to the first batch's loss; torch and torchvision are imported before.
OUR_START = """
import runpy, sys, torchvision
begin()
torch.Tensor.backward = first
sys.argv = ["train.py", *flags]
runpy.run_path("train.py", run_name="__main__")
"""
THEIR_START = """
import sys, torchvision
begin()
import train, utils.general
utils.general.check_font = lambda *given, **more: None  # it would download one
torch.Tensor.backward = first
sys.argv = FLAGS
train.main(train.parse_opt())
"""
OUR_SCAN = """
from pathlib import Path
from data.labels import load_labels
from data.data_yaml import read_spec
spec = read_spec(Path(FOLDER) / "data.yaml")
begin()
images = spec.images("train")
load_labels(images, "labels", 0)
end(len(images))
"""
THEIR_SCAN = """
from utils.dataloaders import LoadImagesAndLabels
begin()
end(len(LoadImagesAndLabels(FOLDER + "/images/train", 640, 16)))
"""
# ultralytics takes mosaic partners from the images that it has read last.
ULTRALYTICS = """
import cv2
cv2.setNumThreads(0)
from ultralytics.cfg import get_cfg
from ultralytics.data.build import build_dataloader, build_yolo_dataset
from ultralytics.data.utils import check_det_dataset
from ultralytics.utils import DEFAULT_CFG
def dataset():
    settings = get_cfg(DEFAULT_CFG, overrides={"imgsz": int(SIZE), "task": "detect"})
    data = check_det_dataset(FOLDER + "/data.yaml", autodownload=False)
    return build_yolo_dataset(settings, FOLDER + "/images/train", BATCH // PROCESSES, data, mode="train")
def loader():
    if PROCESSES > 1:
        torch.distributed.init_process_group("gloo")
    rank = RANK if PROCESSES > 1 else -1
    return build_dataloader(dataset(), BATCH // PROCESSES, workers=int(WORKERS), shuffle=True, rank=rank)
"""
ULTRALYTICS_STEP = """
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.torch_utils import ModelEMA
batch = next(iter(loader()))
batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
model = DetectionModel(MODEL + ".yaml", nc=80, verbose=False).to(device)
model.args = get_cfg(DEFAULT_CFG)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True, weight_decay=0.0005)
ema = ModelEMA(model)
take_steps(lambda: model({**batch, "img": batch["img"].float() / 255})[0].sum(), model, optimizer, ema)
"""


# Segmentation, with mosaic and overlapping masks at a quarter of the size; FOLDER has outlines.
OUR_SEGMENTER = (
    OURS.replace("data.detection import DetectionData", "data.segmentation import SegmentationData")
    .replace("DetectionData(", "SegmentationData(")
    .replace("imgsz=640", "imgsz=int(SIZE)")
)
THEIR_SEGMENTER = """
import yaml
import cv2
from utils.segment.dataloaders import create_dataloader
cv2.setNumThreads(0)
hyp = yaml.safe_load(open("data/hyps/hyp.scratch-low.yaml"))
def loader():
    made, _ = create_dataloader(FOLDER + "/images/train", int(SIZE), 16, 32, hyp=hyp, augment=True, shuffle=True,
                                workers=0, mask_downsample_ratio=4, overlap_mask=True)
    return made
"""
THEIR_SEGMENTER_STEP = """
from models.yolo import SegmentationModel
from utils.segment.loss import ComputeLoss
from utils.torch_utils import ModelEMA, smart_optimizer
images, targets, _, _, masks = next(iter(loader()))
model = SegmentationModel("models/segment/" + MODEL + ".yaml", ch=3, nc=80)
hyp["obj"] *= (int(SIZE) / 640) ** 2
model.hyp = {**hyp, "label_smoothing": 0.0}
optimizer = smart_optimizer(model, "SGD", hyp["lr0"], hyp["momentum"], hyp["weight_decay"])
ema, loss = ModelEMA(model), ComputeLoss(model, overlap=True)
take_steps(lambda: loss(model(images.float() / 255), targets, masks=masks.float())[0], model, optimizer, ema)
"""


# The MIT implementation of YOLOv9, on a batch of our loader: its steps as its trainer takes them, with its EMA.
YOLOV9_STEP = """
from benchmarks.mit_yolov9 import MITModel
batch = next(iter(loader()))
images, targets = batch.images.float() / 255, batch.targets
model = MITModel(Path(os.environ["YOLOV9"]), "v9-" + MODEL[-1], int(SIZE))
optimizer = torch.optim.SGD(model.network.parameters(), lr=0.01, momentum=0.937, nesterov=True, weight_decay=0.0005)
class EMA:
    state = {key: value.clone() for key, value in model.network.state_dict().items()}
    @torch.no_grad()
    def update(self, network):
        for key, value in network.state_dict().items():
            self.state[key] = value + (self.state[key] - value) * 0.999
take_steps(lambda: model.loss(images, targets), model.network, optimizer, EMA())
"""


@dataclass(frozen=True)
class Part:
    """A measured part: the code of each program, '' if it is not measured, and the environment variables of all."""

    ours: str
    yolov5: str = ""
    ultralytics: str = ""
    _: KW_ONLY
    yolov9: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    outlined: bool = False  # needs labels with outlines


def step(model: str, size: int, precision: str = "no") -> Part:
    """Training steps on one batch of 16; YOLOv5's are in float32 on a CPU."""
    variables = {"MODEL": model, "SIZE": str(size), "PRECISION": precision}
    return Part(OUR_FLAGS + OUR_STEP, THEIRS + THEIR_STEP, ULTRALYTICS + ULTRALYTICS_STEP, variables=variables)


def loaded(workers: int = 0, processes: int = 1, **variables: str) -> Part:
    """Loading one epoch, of 2048 items or 128 large ones."""
    variables |= {"WORKERS": str(workers), "WORLD_SIZE": str(processes)}
    drain = "drain(loader())"
    return Part(OURS + drain, THEIRS + drain, ULTRALYTICS + drain, variables=variables)


PARTS = {
    "loader": loaded(),
    "loader, 2 workers": loaded(workers=2),
    "loader, 2 processes of 1 worker": loaded(workers=1, processes=2),
    "loader, photos of 2048x1371": loaded(PHOTOS="2048x1371"),
    "loader, photos of 4000x3000": loaded(PHOTOS="4000x3000"),
    "label scan, cold": Part(OUR_SCAN, THEIR_SCAN, ULTRALYTICS + "begin()\nend(len(dataset()))"),
    "start, to the first loss": Part(OUR_FLAGS + OUR_START, THEIR_START, variables={"WORKERS": "2"}),
    "step, yolov5n at 320": step("yolov5n", 320),
    "step, yolov5s at 640": step("yolov5s", 640),
    "step in bf16, yolov5n at 320": step("yolov5n", 320, "bf16"),
    "step in bf16, yolov5s at 640": step("yolov5s", 640, "bf16"),
    "step, yolov9t at 320": Part(
        OUR_FLAGS + OUR_STEP,
        yolov9=OURS.replace("imgsz=640", "imgsz=int(SIZE)") + YOLOV9_STEP,
        variables={"MODEL": "yolov9t", "SIZE": "320", "PRECISION": "no"},
    ),
    "segmentation: loader": Part(OUR_SEGMENTER + "drain(loader())", THEIR_SEGMENTER + "drain(loader())", outlined=True),
    "segmentation: step, yolov5n-seg at 320": Part(
        OUR_FLAGS + OUR_STEP,
        THEIR_SEGMENTER + THEIR_SEGMENTER_STEP,
        variables={"MODEL": "yolov5n-seg", "SIZE": "320", "PRECISION": "no"},
        outlined=True,
    ),
}


def main() -> None:
    """Measure each part in all programs in turn, and print the medians and their ratios to ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with images/ and labels/ of photos")
    parser.add_argument("--yolov5", type=Path, help="a YOLOv5 checkout")
    parser.add_argument("--python", default=sys.executable, help="the Python that YOLOv5's packages are installed for")
    parser.add_argument("--ultralytics", help="a Python that ultralytics is installed for")
    parser.add_argument("--yolov9", type=Path, help="a checkout of MultimediaTechLab/YOLO; needs einops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", default="", help="only the part of this name, or those that contain it")
    parser.add_argument("--outlines", type=Path, help="such a folder whose labels are outlines, for segmentation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {"": linked(options.data, Path(temporary) / "set")}
        folder = folders[""]
        sides = {"ours": (sys.executable, ROOT)}
        if options.yolov5:
            sides["yolov5"] = (options.python, options.yolov5)
        if options.ultralytics:
            sides["ultralytics"] = (options.ultralytics, folder)
        if options.yolov9:
            sides["yolov9"] = (sys.executable, ROOT)
            os.environ["YOLOV9"] = str(options.yolov9.resolve())
        print(f"{'milliseconds per image':40} {'':11} {'CPU':>8} {'wall':>8}")
        named = [options.part] if options.part in PARTS else [name for name in PARTS if options.part in name]
        for name in named:
            part = PARTS[name]
            if options.outlines or not part.outlined:
                able = {side: how for side, how in sides.items() if getattr(part, side)}
                photos = "outlines" if part.outlined else part.variables.get("PHOTOS", "")
                if photos not in folders:
                    made = Path(temporary) / photos
                    folders[photos] = (
                        linked(options.outlines, made) if part.outlined else enlarged(options.data, made, photos)
                    )
                report(name, able, part, folders[photos], options.rounds)


def report(name: str, sides: dict[str, tuple[str, Path]], part: Part, folder: Path, rounds: int) -> None:
    """Measure one part `rounds` times and print the medians."""
    measurements: dict[str, list[list[float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, (python, checkout) in sides.items():
            measurements[side].append(measured(python, checkout, getattr(part, side), part.variables, folder))
    columns = {side: zip(*rows, strict=True) for side, rows in measurements.items()}
    medians = {side: [statistics.median(column) for column in both] for side, both in columns.items()}
    for side, (cpu, wall) in medians.items():
        ratios = [f"{theirs / ours:8.2f}x" for ours, theirs in zip(medians["ours"], (cpu, wall), strict=True)]
        print(f"{name:40} {side:11} {cpu:8.2f} {wall:8.2f} {' '.join(ratios)}", flush=True)


def measured(python: str, checkout: Path, snippet: str, variables: Mapping[str, str], folder: Path) -> list[float]:
    """Return CPU and wall milliseconds per image of one run in a separate process, or in WORLD_SIZE of them."""
    cache = folder.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    for leftover in folder.rglob("*.cache"):  # YOLOv5's label cache
        leftover.unlink()
    numbers = {"FOLDER": str(folder), "OMP_NUM_THREADS": "1", "STEPS": str(STEPS), "MODEL": "yolov5n", "SIZE": "640"}
    numbers |= {"WANDB_MODE": "disabled", "WORKERS": "0", "PRECISION": "no", "XDG_CACHE_HOME": str(cache), **variables}
    numbers["PYTHONDONTWRITEBYTECODE"] = ""  # modules are compiled once, as in any start of a user but the first
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = int(variables.get("WORLD_SIZE", 1))
    started = []
    for rank in range(processes):
        if processes > 1:
            numbers |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            numbers |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command, environment = [python, "-c", CLOCK + snippet], {**os.environ, **numbers}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=checkout, env=environment, stdout=pipe, stderr=pipe, text=True))
    results = []
    for process in started:
        printed, errors = process.communicate()
        lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"{checkout}: {errors[-2000:]}")
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return [statistics.mean(column) for column in zip(*results, strict=True)]


def linked(source: Path, folder: Path) -> Path:
    """Make a data set of the photos in `source`, each linked `TIMES` times, and return its folder."""
    for photo, label, place in _photos(source, folder):
        for number in range(TIMES):
            name = f"{photo.stem}_{number:02d}"
            (place / f"{name}.jpg").symlink_to(photo.resolve())
            if label.is_file():
                shutil.copy(label, folder / "labels" / "train" / f"{name}.txt")
    return folder


def enlarged(source: Path, folder: Path, size: str) -> Path:
    """Make a data set of the photos in `source`, enlarged to `size`, such as 4000x3000, and return its folder."""
    for photo, label, place in _photos(source, folder):
        width, height = map(int, size.split("x"))
        image = cv2.resize(cv2.imread(str(photo)), (width, height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(place / photo.name), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        if label.is_file():
            shutil.copy(label, folder / "labels" / "train" / label.name)
    return folder


def _photos(source: Path, folder: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Make the folders and the YAML of a data set; yield each photo of `source`, its label file, and its new folder."""
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for photo in sorted((source / "images").rglob("*.jpg")):
        label = Path(str(photo).replace("/images/", "/labels/")).with_suffix(".txt")
        yield photo, label, folder / "images" / "train"
    (folder / "data.yaml").write_text(
        f"path: {folder}\ntrain: images/train\nval: images/train\nnc: 80\nnames: {list(map(str, range(80)))}\n"
    )


if __name__ == "__main__":
    main()
