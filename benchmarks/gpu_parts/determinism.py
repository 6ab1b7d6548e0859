"""Two runs with one seed, and a run that is killed and resumed: results.csv and the weights must be the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_parts.measuring import Machine, machine, row, run_flags, script
from benchmarks.same_results import fingerprint
from utils.files import ROOT

KILL_AFTER_STATES = 3
START_SECONDS = 120.0


def killed(here: Machine, name: str, precision: str) -> None:
    """Start a run that saves every step, kill it, and resume it."""
    folder = here.scratch / "runs" / name
    flags = run_flags(here, name, precision, 2, "--device", here.device, "--save-steps", "1")
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + START_SECONDS
    while not any(int(file.name[:8]) >= KILL_AFTER_STATES for file in folder.glob("checkpoint/[0-9]*.pt")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{folder} did not save {KILL_AFTER_STATES} states")
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    script("train.py", "--resume", str(folder))


def same(first: Path, second: Path) -> str:
    """Say whether two run folders have the same results."""
    one, two = fingerprint(first), fingerprint(second)
    different = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    return f"{len(different)} of {len(one)} differ: {', '.join(different[:3])}" if different else "identical"


def main() -> None:
    """Compare in float32, and in bf16 or fp16 on a GPU."""
    here = machine()
    for precision in ("no", "bf16", "fp16") if here.on_gpu else ("no",):
        for name in ("first", "second"):
            script("train.py", *run_flags(here, f"{name}-{precision}", precision, 2, "--device", here.device))
        runs = here.scratch / "runs"
        killed(here, f"killed-{precision}", precision)
        row(
            "Results.csv and the tensors of weights/last.pt, two epochs of yolov5n",
            precision=precision,
            **{
                "a second run": same(runs / f"first-{precision}", runs / f"second-{precision}"),
                "killed and resumed": same(runs / f"first-{precision}", runs / f"killed-{precision}"),
            },
        )


if __name__ == "__main__":
    main()
