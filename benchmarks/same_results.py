"""Compare the training of two checkouts: results.csv to the byte, and each tensor of the weights to the bit.

    python -m benchmarks.same_results --before ../old-checkout [--after .] [--shared ../shared] [--keep FOLDER]
        [--only builtin photos processes killed resumed zero classify]

Runs these jobs in both checkouts, with this Python, on one thread per process, and prints a line for each:

    builtin     the built-in job, 2 epochs
    photos      yolov5n.pt on data/bccd of --shared at 160 px, 2 epochs, --hyp low, one process
    processes   the same on two processes, with --sync-bn
    killed      the same on one process, killed by SIGKILL in the second epoch and resumed
    resumed     the same, begun and killed in `before`, resumed in `after`
    zero        the same on two processes under ZeRO-2
    classify    resnet18 on the drawn classification set, 2 epochs

--keep: a folder for the runs; existing ones of `before` are reused. Exits with 1 if anything differs. Jobs that need
--shared are skipped if that folder is missing.
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
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import yaml

from utils.files import ROOT

CLASSES = ["WBC", "RBC", "Platelets"]  # of data/bccd
KILL_AT = 6  # saved states, one per optimizer step: in the second epoch, which begins after the fourth
START_SECONDS = 300.0  # time limit for a job to reach `KILL_AT`
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file")


class Jobs:
    """The jobs of one checkout, whose runs go to `project`."""

    def __init__(self, checkout: Path, project: Path, shared: Path) -> None:
        self.checkout, self.project, self.shared = checkout.resolve(), project.resolve(), shared.resolve()

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

    def resumed(self) -> Path:
        """Resume the run that the other checkout has begun; see `_both`."""
        folder = self.project / "resumed"
        self.python("train.py", "--resume", str(folder))
        return folder

    def zero(self) -> Path:
        launcher = (*ACCELERATE, "accelerate_configs/deepspeed_zero2.yaml", "train.py")
        return self.run("zero", *self._photos(), "--sync-bn", launcher=launcher)

    def classify(self) -> Path:
        return self.run("classify", "--cfg", "resnet18.yaml", "--data", "data/shapes-cls.yaml", "--epochs", "2")

    def begin_and_kill(self, name: str) -> Path:
        """Begin the job `photos` under a name and kill its processes once enough states are saved."""
        folder = self.project / name
        flags = (*self._photos(), *self._common(name), "--save-steps", "1")
        process = self._start("train.py", *flags)
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

    def _start(self, *words: str) -> subprocess.Popen[str]:
        quiet = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.checkout,
            env={**os.environ, **quiet},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _common(self, name: str) -> tuple[str, ...]:
        here = ("--project", str(self.project), "--name", name, "--device", "cpu")
        return (*here, "--workers", "1", "--noplots", "--partners", "any")

    def _photos(self) -> tuple[str, ...]:
        file = self.project / "bccd.yaml"
        content = {"path": str(self.shared / "data" / "bccd"), "train": "images/train", "val": "images/val"}
        self.project.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump({**content, "names": CLASSES}))
        weights = str(self.shared / "weights" / "yolov5n.pt")
        low = ("--hyp", "data/hyps/low.yaml")  # the default of older checkouts
        return ("--data", str(file), "--weights", weights, "--imgsz", "160", "--epochs", "2", *low)


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
    names = ["builtin", "photos", "processes", "killed", "resumed", "zero", "classify"]
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        before = Jobs(options.before, folder / "before", options.shared)
        after = Jobs(options.after, folder / "after", options.shared)
        wrong = 0
        for name in options.only:
            if name not in ("builtin", "classify") and not options.shared.is_dir():
                print(f"{name:<10} skipped: {options.shared} does not exist", flush=True)
                continue
            start = time.monotonic()
            different = differences(*_both(name, before, after))
            wrong += bool(different)
            result = f"differs in {', '.join(different[:5])}" if different else "identical"
            print(f"{name:<10} {result} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(bool(wrong))


def _both(name: str, before: Jobs, after: Jobs) -> tuple[Path, Path]:
    """Run a job in both checkouts and return their run folders."""
    shutil.rmtree(after.project / name, ignore_errors=True)
    if name == "resumed":
        begun = before.project / "begun"
        if not begun.is_dir():
            before.begin_and_kill("begun")
        after.project.mkdir(parents=True, exist_ok=True)
        shutil.copytree(begun, after.project / name)
        after.resumed()
        return _run_once(before, "killed", before.killed), after.project / name
    job: Callable[[], Path] = getattr(before, name)
    return _run_once(before, name, job), getattr(after, name)()


def _run_once(jobs: Jobs, name: str, job: Callable[[], Path]) -> Path:
    folder = jobs.project / name
    if not (folder / "done").is_file():
        job()
        (folder / "done").touch()
    return folder


if __name__ == "__main__":
    main()
