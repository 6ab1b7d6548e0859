"""Compare the training of two checkouts: results.csv to the byte, and each tensor of the weights to the bit.

    python -m benchmarks.same_results --before ../old-checkout [--after .] [--shared ../shared] [--keep FOLDER]
        [--only JOB ...]

Runs the jobs of FLAGS in both checkouts, with this Python, on one thread per process, and prints a line for each.
`zero` runs on two processes under ZeRO-2. `killed` is killed by SIGKILL in the second epoch, resumed, and compared with
`photos`; `logical2` is compared with `logical`. Both fine-tune by the recipe of `before`.

--keep: a folder for the runs, in a folder per checkout; existing ones of `before` are reused, by several comparisons at
the same time too. If both checkouts know --hashes, the first different step is named. Exits with 1 if anything differs.
`make numerics` compares with a revision, for CHANGELOG.md.
Jobs that need --shared are skipped if that folder is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import yaml
from filelock import FileLock

from utils.compare_runs import COUNTERS, HASHES, read_hashes
from utils.errors import UserError
from utils.files import ROOT

KILL_AT = 16  # optimizer step, each with a saved state: in the second epoch, which begins after the 13th
START_SECONDS = 300.0  # time limit for a job to reach a saved state
CELLS = {"train": "images/train", "val": "images/val", "names": ["WBC", "RBC", "Platelets"]}
ANNOTATIONS = "annotations/instances_train2017.json"
# YAMLs of data sets of --shared, without `path`
DATA = {"bccd": CELLS, "coco128": {"train": ANNOTATIONS, "val": ANNOTATIONS, "images": "images/train"}}
FINE_TUNING = "--weights {shared}/weights/yolov5n.pt --hyp {recipe} --imgsz 160 --epochs 2"
PHOTOS = f"--data {{project}}/bccd.yaml {FINE_TUNING}"
FLAGS = {
    "builtin": "--epochs 2",
    "photos": PHOTOS,
    "processes": f"{PHOTOS} --processes 2 --sync-bn",
    "killed": f"{PHOTOS} --save-steps 1",
    "zero": f"{PHOTOS} --sync-bn",
    "classify": "--cfg resnet18.yaml --data data/shapes-cls.yaml --epochs 2",
    "segment": "--cfg yolov5n-seg.yaml --data data/shapes-seg.yaml --imgsz 96 --epochs 2",
    "yolov9": "--weights '' --cfg yolov9t.yaml --data data/shapes.yaml --imgsz 96 --epochs 2",
    "logical": f"{PHOTOS} --logical-processes 4",
    "logical2": f"{PHOTOS} --logical-processes 4 --processes 2",
    "bf16": f"{PHOTOS} --mixed-precision bf16",
    "json": f"--data {{project}}/coco128.yaml {FINE_TUNING}",
}
SAME_AS = {"killed": "photos", "logical2": "logical"}  # jobs whose results must be another one's
ZERO = ("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/deepspeed_zero2.yaml", "train.py")


class Jobs:
    """The jobs of a checkout, fine-tuned by `recipe`; runs go to a folder in `keep` that is named after its path."""

    def __init__(self, checkout: Path, keep: Path, shared: Path, recipe: Path) -> None:
        self.checkout, self.shared, self.recipe = checkout.resolve(), shared.resolve(), recipe.resolve()
        self.project = keep.resolve() / "-".join(self.checkout.parts[1:])
        self.project.mkdir(parents=True, exist_ok=True)
        for data, content in DATA.items():
            (self.project / f"{data}.yaml").write_text(
                yaml.safe_dump({"path": f"{self.shared}/data/{data}", **content})
            )

    def run(self, name: str) -> Path:
        """Run a job without what its earlier runs have left behind, and return its run folder."""
        folder = self.project / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.project / "cache" / "lockstep", ignore_errors=True)
        launcher = ZERO if name == "zero" else ("train.py",)
        flags = [word.format(**vars(self)) for word in shlex.split(FLAGS[name])]
        flags += ["--project", str(self.project), "--name", name, "--device", "cpu", "--workers", "1", "--noplots"]
        if name != "zero" and (self.checkout / "utils" / "compare_runs.py").is_file():
            flags.append("--hashes")
        process = self._start(*launcher, *flags, alone=name == "killed")
        if name == "killed":
            kill_at(process, folder, KILL_AT)
            process = self._start("train.py", "--resume", str(folder))
        printed = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{name} failed in {self.checkout}:\n{printed}")
        return folder

    def run_once(self, name: str) -> Path:
        """Return the folder of a job's finished run, if there is one, or run it."""
        folder = self.project / name
        with FileLock(self.project / ".lock"):  # of several comparisons that share --keep one runs it
            if not (folder / "done").is_file():
                self.run(name)
                (folder / "done").touch()
        return folder

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


def kill_at(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Kill a run's group of processes once it has saved its state after an optimizer step."""
    deadline = time.monotonic() + START_SECONDS
    while not any(int(file.name[:8]) >= step for file in folder.glob("checkpoint/[0-9]*.pt")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{folder} has not saved step {step}")
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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


def first_change(*folders: Path) -> str:
    """Return the first optimizer step whose hashes differ, and what differs in it; '' if it is not known."""
    with suppress(UserError):  # an older checkout may compute hashes in another way
        for rows in zip(*map(read_hashes, folders), strict=False):
            if names := [name for name in rows[0] if rows[0][name] != rows[1].get(name)]:
                kinds = dict.fromkeys(name.partition(" ")[0] for name in names if name not in COUNTERS)
                return f" from step {rows[0]['step']}: {', '.join(kinds)}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="+", choices=FLAGS, default=list(FLAGS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, recipe = options.keep or Path(temporary), options.before / "data" / "hyps" / "finetune.yaml"
        checkouts, wrong = (options.before, options.after), 0
        before, after = (Jobs(checkout, folder, options.shared, recipe) for checkout in checkouts)
        for name in options.only:
            if "{shared}" in FLAGS[name] and not options.shared.is_dir():
                print(f"{name:<10} skipped: {options.shared} does not exist", flush=True)
                continue
            start = time.monotonic()
            folders = before.run_once(SAME_AS.get(name, name)), after.run(name)
            different = differences(*folders)
            wrong += bool(different)
            change = first_change(*folders) if all((folder / HASHES).is_file() for folder in folders) else ""
            first = f" in {', '.join(different[:5])}"
            result = f"changed{change or first}" if different else "unchanged"
            print(f"{name:<10} {result} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
