"""Compare the training of two checkouts: results.csv to the byte, and each tensor of the weights to the bit.

    python -m benchmarks.same_results --before ../old-checkout [--after .] [--shared ../shared] [--keep FOLDER]
        [--only builtin photos processes killed zero classify segment yolov9 logical logical2 bf16 json]

Runs these jobs in both checkouts, with this Python, on one thread per process, and prints a line for each:

    builtin     the built-in job, 2 epochs
    photos      yolov5n.pt on data/bccd of --shared at 160 px, 2 epochs, one process
    processes   the same on two processes, with --sync-bn
    killed      the same on one process, killed by SIGKILL in the second epoch and resumed; compared with `photos`
    zero        the same on two processes under ZeRO-2
    classify    resnet18 on the drawn classification set, 2 epochs
    segment     yolov5n-seg on the drawn segmentation set at 96 px, 2 epochs
    yolov9      yolov9t from scratch on the drawn set at 96 px, 2 epochs
    logical     `photos` with --logical-processes 4
    logical2    the same on two processes; compared with `logical`
    bf16        `photos` with --mixed-precision bf16
    json        yolov5n.pt on the COCO annotations of data/coco128 of --shared at 160 px, 2 epochs

--keep: a folder for the runs, in a folder per checkout; existing ones of `before` are reused, by several comparisons at
the same time too. If both checkouts know --hashes, the first different step is named. Exits with 1 if anything differs.
Jobs that need --shared are skipped if that folder is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import yaml
from filelock import FileLock

from utils.compare_runs import HASHES, compare, described
from utils.files import ROOT

CLASSES = ["WBC", "RBC", "Platelets"]  # of data/bccd
KILL_AT = 16  # saved states, one per optimizer step: in the second epoch, which begins after the 13th
START_SECONDS = 300.0  # time limit for a job to reach `KILL_AT`
DRAWN = ("builtin", "classify", "segment", "yolov9")  # jobs that need no --shared
SAME_AS = {"killed": "photos", "logical2": "logical"}  # jobs whose results must be another one's
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file")


class Jobs:
    """The jobs of one checkout, whose runs go to a folder in `keep` that is named after its path."""

    def __init__(self, checkout: Path, keep: Path, shared: Path) -> None:
        self.checkout, self.shared = checkout.resolve(), shared.resolve()
        self.project = keep.resolve() / "-".join(self.checkout.parts[1:])
        self.project.mkdir(parents=True, exist_ok=True)

    def builtin(self) -> Path:
        return self.run("builtin", "--epochs", "2")

    def photos(self) -> Path:
        return self.run("photos", *self._photos())

    def processes(self) -> Path:
        return self.run("processes", *self._photos(), "--processes", "2", "--sync-bn")

    def killed(self) -> Path:
        folder = self.begin_and_kill("killed")
        self.python("train.py", "--resume", str(folder))
        return folder

    def zero(self) -> Path:
        launcher = (*ACCELERATE, "accelerate_configs/deepspeed_zero2.yaml", "train.py")
        return self.run("zero", *self._photos(), "--sync-bn", launcher=launcher)

    def classify(self) -> Path:
        return self.run("classify", "--cfg", "resnet18.yaml", "--data", "data/shapes-cls.yaml", "--epochs", "2")

    def segment(self) -> Path:
        small = ("--imgsz", "96", "--epochs", "2")
        return self.run("segment", "--cfg", "yolov5n-seg.yaml", "--data", "data/shapes-seg.yaml", *small)

    def yolov9(self) -> Path:
        small = ("--imgsz", "96", "--epochs", "2")
        return self.run("yolov9", "--weights", "", "--cfg", "yolov9t.yaml", "--data", "data/shapes.yaml", *small)

    def logical(self) -> Path:
        return self.run("logical", *self._photos(), "--logical-processes", "4")

    def logical2(self) -> Path:
        return self.run("logical2", *self._photos(), "--logical-processes", "4", "--processes", "2")

    def bf16(self) -> Path:
        return self.run("bf16", *self._photos(), "--mixed-precision", "bf16")

    def json(self) -> Path:
        file = "annotations/instances_train2017.json"
        content = {"train": file, "val": file, "images": "images/train"}
        return self.run("json", *self._fine_tuning("coco128", content))

    def begin_and_kill(self, name: str) -> Path:
        """Begin the job `photos` under a name and kill its processes once enough states are saved."""
        folder = self.project / name
        flags = (*self._photos(), *self._common(name), "--save-steps", "1")
        process = self._start("train.py", *flags, alone=True)
        deadline = time.monotonic() + START_SECONDS
        while not any(int(file.name[:8]) >= KILL_AT for file in folder.glob("checkpoint/[0-9]*.pt")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{folder} did not start: {process.stdout and process.stdout.read()}")
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return folder

    def run(self, name: str, *flags: str, launcher: Sequence[str] = ("train.py",)) -> Path:
        self.python(*launcher, *flags, *self._common(name))
        return self.project / name

    def python(self, *words: str) -> None:
        process = self._start(*words)
        printed = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} failed in {self.checkout}:\n{printed}")

    def _start(self, *words: str, alone: bool = False) -> subprocess.Popen[str]:
        """Start a command. alone: in a group of processes of its own, which an interrupt does not reach."""
        quiet = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        own = {"XDG_CACHE_HOME": str(self.project / "cache")}  # of labels: a checkout must not read the other's
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.checkout,
            env={**os.environ, **quiet, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=alone,
        )

    def _common(self, name: str) -> tuple[str, ...]:
        here = ("--project", str(self.project), "--name", name, "--device", "cpu")
        hashes = ("--hashes",) if name != "zero" and (self.checkout / "utils" / "compare_runs.py").is_file() else ()
        return (*here, "--workers", "1", "--noplots", *hashes)

    def _photos(self) -> tuple[str, ...]:
        return self._fine_tuning("bccd", {"train": "images/train", "val": "images/val", "names": CLASSES})

    def _fine_tuning(self, data: str, content: Mapping[str, object]) -> tuple[str, ...]:
        """Return the flags for two epochs of yolov5n.pt on a data set of --shared, for which a YAML is written."""
        file = self.project / f"{data}.yaml"
        file.write_text(yaml.safe_dump({"path": str(self.shared / "data" / data), **content}))
        weights = str(self.shared / "weights" / "yolov5n.pt")
        return ("--data", str(file), "--weights", weights, "--imgsz", "160", "--epochs", "2")


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a hash of results.csv and of each tensor in weights/last.pt."""
    state = torch.load(folder / "weights" / "last.pt", map_location="cpu", weights_only=True)["state"]
    hashes = {"results.csv": hashlib.sha256((folder / "results.csv").read_bytes()).hexdigest()}
    for name, tensor in state.items():
        content = f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.contiguous().numpy().tobytes()
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


def differences(before: Path, after: Path) -> list[str]:
    """Return the names of the file and tensors that differ between two run folders."""
    one, two = fingerprint(before), fingerprint(after)
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["builtin", "photos", "processes", "killed", "zero", "classify", "segment", "yolov9", "logical", "logical2"]
    names += ["bf16", "json"]
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        before, after = (Jobs(checkout, folder, options.shared) for checkout in (options.before, options.after))
        wrong = 0
        for name in options.only:
            if name not in DRAWN and not options.shared.is_dir():
                print(f"{name:<10} skipped: {options.shared} does not exist", flush=True)
                continue
            start = time.monotonic()
            folders = _both(name, before, after)
            different = differences(*folders)
            wrong += bool(different)
            result = f"differs in {', '.join(different[:5])}" if different else "identical"
            print(f"{name:<10} {result} ({time.monotonic() - start:.0f} s)", flush=True)
            if different and all((folder / HASHES).is_file() for folder in folders):
                print(*described(compare(*folders)), sep="\n")
    sys.exit(bool(wrong))


def _both(name: str, before: Jobs, after: Jobs) -> tuple[Path, Path]:
    """Run a job in both checkouts and return their run folders."""
    return _run_once(SAME_AS.get(name, name), before), _run(name, after)


def _run_once(name: str, jobs: Jobs) -> Path:
    """Return the folder of a job's finished run, if there is one, or run it."""
    folder = jobs.project / name
    with FileLock(jobs.project / ".lock"):  # of several comparisons that share --keep one runs it
        if not (folder / "done").is_file():
            _run(name, jobs)
            (folder / "done").touch()
    return folder


def _run(name: str, jobs: Jobs) -> Path:
    """Run a job without what its earlier runs have left behind."""
    shutil.rmtree(jobs.project / name, ignore_errors=True)
    shutil.rmtree(jobs.project / "cache" / "lockstep", ignore_errors=True)
    job: Callable[[], Path] = getattr(jobs, name)
    return job()


if __name__ == "__main__":
    main()
