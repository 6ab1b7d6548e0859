"""Whole runs of two epochs that must have the same results: repeated, resumed, on other processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from benchmarks.gpu_parts.measuring import Machine, rounded, row, run, script
from benchmarks.same_results import differences, kill_at
from tests.curves import floats, rows
from tests.machines import by_hand
from utils.files import ROOT

KILL_AT = 3  # optimizer step
SYNCHRONISED = {
    "DDP": (),
    "--sync-bn": ("--sync-bn",),
    "--logical-processes 4": ("--logical-processes", "4"),
}
WAYS = {"ring": ({"NCCL_ALGO": "Ring"}, 1), "tree": ({"NCCL_ALGO": "Tree"}, 1), "devices exchanged": ({}, -1)}
STAGES = ("zero1", "zero2", "zero3")
# NCCL refuses two processes on one GPU. As two machines of one GPU each, over gloo, they share it.
OVER_GLOO = """
import runpy, sys
import utils.distributed.launch as ours
class OverGloo(ours.PartialState):
    def __init__(self, **given):
        super().__init__(**{**given, "backend": "gloo"})
ours.PartialState = OverGloo
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_flags(here: Machine, name: str, precision: str, *more: str, model: str = "yolov5n") -> list[str]:
    """Return flags of train.py for a run whose results are compared."""
    size = (64, 8) if here.quick else (320, 32)
    how = ("--epochs", "2", "--workers", "1", "--mixed-precision", precision, "--name", name)
    return here.flags(model, *size, *how, *more)


def train(
    here: Machine, name: str, precision: str, *more: str, launcher: Sequence[str] = (), model: str = "yolov5n"
) -> Path:
    """Train, and return the run folder."""
    script("train.py", *run_flags(here, name, precision, *more, model=model), launcher=launcher)
    return here.scratch / "runs" / name


def train_over_gloo(here: Machine, name: str, precision: str, *more: str, count: int = 2) -> Path:
    """Train on `count` processes that share the device. Raises RuntimeError with the end of their output."""
    flags = run_flags(here, name, precision, *more)
    if here.on_gpu:  # the numbers of --device are those of a machine's devices
        del flags[(place := flags.index("--device")) : place + 2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OVER_GLOO, str(ROOT / "train.py"), *flags],
            cwd=ROOT,
            env={**os.environ, **by_hand(rank, port, count=count), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(" / ".join(each[-1000:] for each in printed))
    return here.scratch / "runs" / name


def train_killed(here: Machine, name: str, precision: str, *more: str, model: str = "yolov5n") -> Path:
    """Start a run that saves every step, kill it, and resume it."""
    folder = here.scratch / "runs" / name
    flags = run_flags(here, name, precision, "--save-steps", "1", *more, model=model)
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True, text=True)
    kill_at(process, folder, KILL_AT)
    script("train.py", "--resume", str(folder))
    return folder


def same(first: Path, second: Path) -> str:
    """Say whether two runs have the same results.csv and tensors of weights/last.pt."""
    different = differences(first, second)
    return f"{len(different)} differ: {', '.join(different[:3])}" if different else "identical"


def gap(first: Path, second: Path) -> dict[str, float]:
    """Return the largest relative difference of a loss and of the weights, and the largest difference of an mAP."""
    pairs = list(zip(rows(first), rows(second), strict=True))
    losses = [abs(one[name] / two[name] - 1) for one, two in pairs for name in one if "loss" in name and two[name]]
    scores = [abs(one[name] - two[name]) for one, two in pairs for name in one if "mAP" in name]
    weights = float((floats(first) - floats(second)).norm() / floats(first).norm())
    return {"losses": rounded(max(losses), 2), "mAP": rounded(max(scores), 2), "weights": rounded(weights, 2)}


def determinism(here: Machine) -> None:
    """Compare two runs with one seed, and one that is killed and resumed."""
    for precision in here.precisions:
        first, second = (train(here, f"{name}-{precision}", precision) for name in ("first", "second"))
        columns = {"a second run": same(first, second)}
        columns["killed and resumed"] = same(first, train_killed(here, f"killed-{precision}", precision))
        row("Results.csv and the tensors of weights/last.pt, two epochs of yolov5n", precision=precision, **columns)


def logical(here: Machine) -> None:
    """Compare four logical processes on one process with two, and with one, and eight on one process with three.

    Then kernels captured under DDP.
    """
    for precision in here.precisions[:2]:
        four, one = (train(here, f"{count}-{precision}", precision, "--logical-processes", count) for count in "41")
        two = train_over_gloo(here, f"shared-{precision}", precision, "--logical-processes", "4")
        row(
            "--logical-processes 4 of yolov5n, two epochs: on two processes that share the GPU, and against 1",
            precision=precision,
            **{"two processes": same(four, two)},
            **{f"from 1: {name}": value for name, value in gap(four, one).items()},
        )
    precision, eight = here.precision, ("--logical-processes", "8")
    expected = train(here, "eight", precision, *eight)
    actual = train_over_gloo(here, "three", precision, *eight, count=3)
    title = "--logical-processes 8 of yolov5n, two epochs: on one process, and on three that have 3, 3 and 2 of them"
    row(title, bytes=same(expected, actual))
    captured = train_over_gloo(here, "captured", precision)
    launched = train_over_gloo(here, "launched", precision, "--no-cuda-graph")
    title = "Two processes of yolov5n that share the GPU, two epochs: kernels captured, and launched one by one"
    row(title, bytes=same(captured, launched))


def devices(here: Machine, count: int, order: int = 1) -> list[str]:
    """Return flags for one device or two of a pair, or CPU processes. order: -1 exchanges the devices."""
    own = ",".join(here.device.split(",")[:count][::order])
    return ["--device", own, *([] if here.on_gpu else ["--processes", str(count)])]


def curves(here: Machine) -> None:
    """Compare two processes with one: SyncBatchNorm over NCCL, or two CPU processes over gloo."""
    for precision in here.precisions[:2]:
        one, two = (
            train(here, f"{count}-{precision}", precision, "--sync-bn", *devices(here, count)) for count in (1, 2)
        )
        row("Two processes against one, with --sync-bn: largest differences", precision=precision, **gap(one, two))


def algorithms(here: Machine) -> None:
    """Compare the bytes of runs on two devices: NCCL adds in a ring, or in a tree, or the devices are exchanged."""
    precision = here.precision
    for kind, flags in SYNCHRONISED.items():
        folders = {}
        for way, (variables, order) in WAYS.items():
            with patch.dict(os.environ, variables):
                folders[way] = train(here, f"{kind} {way}", precision, *flags, *devices(here, 2, order))
        if "--logical-processes" in flags:
            folders["one device"] = train(here, f"{kind} one", precision, *flags, *devices(here, 1))
        first, *others = folders
        columns = {f"{first} and {way}": same(folders[first], folders[way]) for way in others}
        row("Two devices, two epochs of yolov5n", precision=precision, kind=kind, **columns)


def zero(here: Machine) -> None:
    """Compare DeepSpeed's stages on two devices with two processes without it, if it is installed."""
    if not (find_spec("deepspeed") and find_spec("transformers")):
        row("DeepSpeed ZeRO", note="not measured: deepspeed or transformers is not installed here")
        return
    plain = train(here, "ddp", "no", "--sync-bn", *devices(here, 2))
    for stage in STAGES[:1] if here.quick else STAGES:
        file = ROOT / "accelerate_configs" / f"deepspeed_{stage}.yaml"
        launcher = ("-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2")
        differences_of = gap(plain, train(here, stage, "no", "--sync-bn", launcher=launcher))
        row("ZeRO on two devices against DDP: largest differences", stage=stage, **differences_of)


def scaling(here: Machine) -> None:
    """Train an epoch on one device and on two, with 16 images for each; rates are those that train.py prints."""
    model, (batch, imgsz) = "yolov5n" if here.quick else "yolov5l", here.size(16)
    how = ["--data", str(here.photos(times=16)), "--epochs", "1", "--noval", "--workers", "1" if here.quick else "8"]
    rates: list[float] = []
    for count in (1, 2):
        flags = here.flags(model, imgsz, count * batch, *how, "--sync-bn", *devices(here, count))
        printed = script("train.py", *flags)
        rates.append(float(re.findall(r"([\d.]+) img/s", printed)[-1]))
        about = {"devices": count, "images/s": rates[-1], "times one": rounded(rates[-1] / rates[0])}
        row(f"Training of {model} at {imgsz} px", **about)


if __name__ == "__main__":
    run(determinism, logical, curves, algorithms, zero, scaling)
