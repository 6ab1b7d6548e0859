"""Run the GPU's tests and measure, in parts, and append the results to docs/gpu.md: `make gpu`, `make gpu PART=steps`.

    python -m benchmarks.gpu_report [--part NAME ...] [--pair] [--device cpu] [--quick] [--page docs/gpu.md]

Every part is a process of its own with a time limit; its rows are kept if it is stopped or fails. --pair: the parts of
two GPUs. To try the code without a GPU: --device cpu --quick, which writes into .gpu/rehearsal.md. Needs what
requirements.txt lists but for wandb, msgspec and faster-coco-eval, and pytest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.files import ROOT

MARKER = "<!-- `make gpu` appends its results below -->\n"
ROW = "ROW "  # begins a printed line of the report
MAX_ERROR_LINES = 8
REHEARSAL_PATIENCE = 4  # times the limit of a part, on a CPU that others may use too


class Part(NamedTuple):
    """A part of the report: the module that has a function of the part's name, and its most seconds."""

    module: str
    seconds: int
    purpose: str


# 30 minutes in all
PARTS = {
    "waits": Part("steps", 90, "operations of the loop that wait for the device"),
    "parity": Part("parity", 100, "loss, gradients and mAP against the CPU"),
    "determinism": Part("runs", 180, "equal runs, and a run that is killed and resumed"),
    "logical": Part("runs", 150, "--logical-processes on one GPU"),
    "cost": Part("steps", 40, "a step of --logical-processes 4 against a plain one: at most 1.25 times as long"),
    "tests": Part("tests", 180, "the tests marked gpu"),
    "steps": Part("steps", 150, "training steps of all sizes"),
    "kernels": Part("kernels", 80, "kernels of a training step"),
    "dfine": Part("dfine", 120, "D-FINE: equal runs, and its steps"),
    "norms": Part("kernels", 70, "BatchNorm and SiLU, fused against torch's kernels"),
    "peers": Part("peers", 110, "YOLOv5 and ultralytics, if they are carried"),
    "validation": Part("rates", 60, "inference and suppression per image"),
    "fitting": Part("steps", 90, "AutoBatch against what fits"),
    "loader": Part("rates", 80, "images per second of the loader by cores"),
    "exports": Part("rates", 80, "exported files on the device"),
    "recorded": Part("steps", 100, "CUDA graphs against single launches"),
    "compiled": Part("steps", 100, "steps of a compiled model"),
}
PAIR_PARTS = {
    "curves": Part("runs", 300, "two processes against one"),
    "algorithms": Part("runs", 300, "two processes by NCCL's ring and tree, and with the devices exchanged"),
    "zero": Part("runs", 300, "DeepSpeed ZeRO on two devices"),
    "scaling": Part("runs", 300, "images per second on one and two"),
    "tests": Part("tests", 300, "the tests marked gpu2"),
}


def hardware(device: str) -> str:
    """Return the devices, torch's version and its CUDA's, and the number of cores."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    if device == "cpu":
        return f"no GPU ({platform.machine()}), {versions}"
    gpus = [torch.cuda.get_device_properties(int(number)) for number in device.split(",")]
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    return f"{names}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {versions}"


def run_part(name: str, part: Part, flags: Sequence[str], seconds: float, log: Path) -> tuple[list[Any], str]:
    """Run a part for `seconds` at most, and write what it prints into `log`; return its rows, and what went wrong."""
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", f"benchmarks.gpu_parts.{part.module}", name, *flags, "--scratch", scratch],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        problem = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            problem = f"stopped at its limit of {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):  # what the part has started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [json.loads(line.removeprefix(ROW)) for line in lines if line.startswith(ROW)]
    if process.returncode and not problem:
        problem = f"failed: {' / '.join([line for line in lines if not line.startswith(ROW)][-MAX_ERROR_LINES:])}"
    return rows, problem


def section(title: str, where: str, rows: Sequence[Mapping[str, Any]], problem: str) -> str:
    """Format the results of a part: a heading, and a table for each `table` that its rows name."""
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append({key: value for key, value in row.items() if key != "table"})
    lines = [f"\n### {title}\n", f"{where}.\n"]
    for name, content in tables.items():
        columns = list(dict.fromkeys(key for row in content for key in row))
        lines += [f"{name}:\n", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell(row.get(key)) for key in columns)} |" for row in content]
        lines.append("")
    return "\n".join([*lines, *[f"This part {problem}\n"] * bool(problem)])


def cell(value: Any) -> str:
    """Format a value of a table."""
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ").replace("`", "'")


def append(page: Path, text: str) -> None:
    """Append a section to the page, which must have the marker; a page that does not exist is begun."""
    before = page.read_text(encoding="utf-8") if page.is_file() else MARKER
    if MARKER not in before:
        raise SystemExit(f"error: {page} has no line {MARKER.strip()}; add it, or name another --page")
    page.write_text(before.rstrip("\n") + "\n" + text, encoding="utf-8")


def main() -> None:
    """Run the parts, print and append their results; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=[], help="only these; by default all")
    parser.add_argument("--pair", action="store_true", help="the parts of two GPUs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the code")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to try the code")
    parser.add_argument("--carried", type=Path, default=ROOT / ".gpu", help="what make gpu-data has gathered")
    parser.add_argument("--page", type=Path, help="to append to; by default docs/gpu.md, for a trial .gpu/rehearsal.md")
    options = parser.parse_args()
    parts = PAIR_PARTS if options.pair else PARTS
    if unknown := sorted(set(options.part) - set(parts)):
        raise SystemExit(f"error: --part {', '.join(unknown)}: there is none; known are {', '.join(parts)}")
    device = "cpu" if options.device == "cpu" else "0,1" if options.pair else "0"
    if device != "cpu" and torch.cuda.device_count() < 1 + options.pair:
        raise SystemExit(f"error: torch sees {torch.cuda.device_count()} GPUs here; try --device cpu --quick")
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    rehearsal = options.quick or device == "cpu"
    page = options.page or (options.carried / "rehearsal.md" if rehearsal else ROOT / "docs" / "gpu.md")
    carried, where, failed = options.carried.resolve(), hardware(device), False
    carried.mkdir(exist_ok=True)
    flags = ["--device", device, "--carried", str(carried), *["--quick"] * options.quick]
    for name in [name for name in parts if name in options.part or not options.part]:
        part, when = parts[name], f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        seconds = part.seconds * (REHEARSAL_PATIENCE if rehearsal else 1)
        rows, problem = run_part(name, part, flags, seconds, carried / f"{name}.log")
        text = section(f"{when}: {name}, {part.purpose}", where, rows, problem)
        append(page, text)
        with (carried / "results.jsonl").open("a", encoding="utf-8") as file:
            about = {"part": name, "when": when, "where": where, "problem": problem}
            file.writelines(json.dumps({**about, **row}) + "\n" for row in rows or [{}])
        print(f"{text}\n(appended to {page})", flush=True)
        failed = failed or bool(problem)
    sys.exit(failed)


if __name__ == "__main__":
    main()
