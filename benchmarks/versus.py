"""CPU and wall time of loader, scan, start and step: this project, YOLOv5 and ultralytics in turn.

    python -m benchmarks.versus --data ../datasets/coco128 --yolov5 ../yolov5 [--python ../yolov5/.venv/bin/python]
        [--ultralytics ../ultralytics/.venv/bin/python]

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
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
OUR_FLAGS = [*FLAGS, "--hyp", "low", "--mixed-precision", os.environ["PRECISION"]]
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
    data = DetectionData(spec, imgsz=int(SIZE), stride=32, options=DataOptions(workers=int(WORKERS)))
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
within([*OUR_FLAGS[1:], "--noplots"], lambda parts: parts.take_steps(steps(parts)))
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
sys.argv = OUR_FLAGS
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


class Part(NamedTuple):
    """A measured part: the code of each program, '' if it is not measured, and environment variables of all."""

    variables: Mapping[str, str]
    ours: str
    yolov5: str = ""
    ultralytics: str = ""


def step(model: str, size: int, precision: str = "no") -> Part:
    """Training steps on one batch of 16; YOLOv5's are in float32 on a CPU."""
    variables = {"MODEL": model, "SIZE": str(size), "PRECISION": precision}
    return Part(variables, OUR_STEP, THEIRS + THEIR_STEP, ULTRALYTICS + ULTRALYTICS_STEP)


def loaded(workers: int = 0, processes: int = 1, photos: str = "") -> Part:
    """Loading one epoch, of 2048 items or 128 large ones."""
    variables = {"WORKERS": str(workers), "WORLD_SIZE": str(processes), "PHOTOS": photos}
    return Part(variables, *(code + "drain(loader())" for code in (OURS, THEIRS, ULTRALYTICS)))


PARTS = {
    "loader": loaded(),
    "loader, 2 workers": loaded(workers=2),
    "loader, 2 processes of 1 worker": loaded(workers=1, processes=2),
    "loader, photos of 2048x1371": loaded(photos="2048x1371"),
    "loader, photos of 4000x3000": loaded(photos="4000x3000"),
    "label scan, cold": Part({}, OUR_SCAN, THEIR_SCAN, ULTRALYTICS + "begin()\nend(len(dataset()))"),
    "start, to the first loss": Part({"WORKERS": "2"}, OUR_START, THEIR_START),
    "step, yolov5n at 320": step("yolov5n", 320),
    "step, yolov5s at 640": step("yolov5s", 640),
    "step in bf16, yolov5n at 320": step("yolov5n", 320, "bf16"),
    "step in bf16, yolov5s at 640": step("yolov5s", 640, "bf16"),
}


def main() -> None:
    """Measure each part in all programs in turn, and print the medians and their ratios to ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with images/ and labels/ of photos")
    parser.add_argument("--yolov5", type=Path, help="a YOLOv5 checkout")
    parser.add_argument("--python", default=sys.executable, help="the Python that YOLOv5's packages are installed for")
    parser.add_argument("--ultralytics", help="a Python that ultralytics is installed for")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", default="", help="only the part of this name, or those that contain it")
    options = parser.parse_args()
    names = [options.part] if options.part in PARTS else [name for name in PARTS if options.part in name]
    with tempfile.TemporaryDirectory() as temporary:
        programs = {"ours": (sys.executable, ROOT)}
        if options.yolov5:
            programs["yolov5"] = (options.python, options.yolov5)
        if options.ultralytics:
            programs["ultralytics"] = (options.ultralytics, Path(temporary))
        print(f"{'milliseconds per image':40} {'':11} {'CPU':>8} {'wall':>8}")
        for name in names:
            photos = PARTS[name].variables.get("PHOTOS", "")
            folder = Path(temporary) / f"photos{photos}"
            if not folder.is_dir():
                linked(options.data, folder, 1 if photos else TIMES, photos)
            report(name, programs, folder, options.rounds)


def report(name: str, programs: Mapping[str, tuple[str, Path]], folder: Path, rounds: int) -> None:
    """Measure one part `rounds` times and print the medians."""
    part, measured = PARTS[name], defaultdict(list)
    for _ in range(rounds):
        for program, (python, checkout) in programs.items():
            if code := getattr(part, program):
                measured[program].append(measure(python, checkout, code, part.variables, folder))
    ours = [statistics.median(column) for column in zip(*measured["ours"], strict=True)]
    for program, rows in measured.items():
        cpu, wall = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:40} {program:11} {cpu:8.2f} {wall:8.2f} {cpu / ours[0]:8.2f}x {wall / ours[1]:8.2f}x", flush=True)


def measure(python: str, checkout: Path, code: str, variables: Mapping[str, str], folder: Path) -> list[float]:
    """Return CPU and wall milliseconds per image of one run in a separate process, or in WORLD_SIZE of them."""
    cache = folder.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    for leftover in folder.rglob("*.cache"):  # YOLOv5's label cache
        leftover.unlink()
    numbers = {"FOLDER": str(folder), "OMP_NUM_THREADS": "1", "STEPS": str(STEPS), "MODEL": "yolov5n", "SIZE": "640"}
    numbers |= {"WANDB_MODE": "disabled", "WORKERS": "0", "PRECISION": "no", "XDG_CACHE_HOME": str(cache)}
    numbers["PYTHONDONTWRITEBYTECODE"] = ""  # modules are compiled once, as in any start of a user but the first
    processes = int(variables.get("WORLD_SIZE", 1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        environment = {**os.environ, **numbers, **variables}
        if processes > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command, pipe = [python, "-c", CLOCK + code], subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=checkout, env=environment, stdout=pipe, stderr=pipe, text=True))
    results = []
    for process in started:
        printed, errors = process.communicate()
        lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"error: {checkout}: {errors[-2000:]}")
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return [statistics.mean(column) for column in zip(*results, strict=True)]


def linked(source: Path, folder: Path, times: int = TIMES, size: str = "") -> None:
    """Make a data set of the photos in `source`, each linked several times, or enlarged to a size such as 4000x3000."""
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for photo in sorted((source / "images").rglob("*.jpg")):
        label = Path(str(photo).replace("/images/", "/labels/")).with_suffix(".txt")
        for number in range(times):
            name = f"{photo.stem}_{number:02d}"
            image = folder / "images" / "train" / f"{name}.jpg"
            if size:
                width, height = map(int, size.split("x"))
                pixels = cv2.resize(cv2.imread(str(photo)), (width, height), interpolation=cv2.INTER_CUBIC)
                cv2.imwrite(str(image), pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])
            else:
                image.symlink_to(photo.resolve())
            if label.is_file():
                shutil.copy(label, folder / "labels" / "train" / f"{name}.txt")
    (folder / "data.yaml").write_text(
        f"path: {folder}\ntrain: images/train\nval: images/train\nnc: 80\nnames: {list(map(str, range(80)))}\n"
    )


if __name__ == "__main__":
    main()
