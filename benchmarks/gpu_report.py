"""Run the GPU's tests and measure, in parts, and append the results to docs/gpu.md: `make gpu`, `make gpu PART=steps`.

    python -m benchmarks.gpu_report [--part NAME ...] [--pair] [--device 0] [--quick] [--page docs/gpu.md]

Every part is a process of its own with a time limit; its rows are kept if it is stopped or fails. --pair: the parts of
two GPUs. To try the code without a GPU: --device cpu --quick, which writes into .gpu/rehearsal.md. Needs what
requirements.txt lists but for wandb, msgspec and faster-coco-eval, and pytest for the part `tests`.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.files import ROOT

MARKER = "<!-- `make gpu` appends its results below -->\n"
ROW = "ROW "  # begins a printed line of the report
MAX_ERROR_LINES = 8


class Part(NamedTuple):
    """A part of the report: the module that measures it, and its most seconds."""

    module: str
    seconds: int
    purpose: str


# 26 minutes in all
PARTS = {
    "waits": Part("waits", 90, "operations of the loop that wait for the device"),
    "parity": Part("parity", 100, "loss, gradients and mAP against the CPU"),
    "determinism": Part("determinism", 180, "equal runs, and a run that is killed and resumed"),
    "logical": Part("logical", 90, "--logical-processes on one GPU"),
    "tests": Part("tests", 180, "the tests marked gpu"),
    "steps": Part("steps", 150, "training steps of all sizes, and what bounds them"),
    "kernels": Part("kernels", 80, "phases and kernels of a training step"),
    "norms": Part("norms", 70, "BatchNorm and SiLU, fused against torch's kernels"),
    "peers": Part("peers", 110, "YOLOv5 and ultralytics, if they are carried"),
    "validation": Part("validation", 60, "inference and suppression per image"),
    "fitting": Part("fitting", 90, "AutoBatch against what fits"),
    "loader": Part("loader", 80, "images per second of the loader by cores"),
    "exports": Part("exports", 80, "exported files on the device"),
    "recorded": Part("recorded", 100, "CUDA graphs against single launches"),
    "compiled": Part("compiled", 100, "steps of a compiled model"),
}
PAIR_PARTS = {
    "curves": Part("pair_curves", 300, "two processes against one"),
    "zero": Part("pair_zero", 300, "DeepSpeed ZeRO on two devices"),
    "scaling": Part("pair_scaling", 300, "images per second on one and two"),
    "tests": Part("tests", 300, "the tests marked gpu2"),
}


def hardware(device: str) -> str:
    """Return the device, its driver's and torch's versions, and the processor."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    if device == "cpu" or not torch.cuda.is_available():
        return f"no GPU ({platform.machine()}), {versions}"
    named = [torch.cuda.get_device_properties(int(number)) for number in device.split(",")]
    names = ", ".join(f"{one.name} {one.total_memory / 2**30:.0f} GiB" for one in named)
    return f"{names}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {versions}"


def end(process: subprocess.Popen[str]) -> None:
    """End a part and what it has started; a process that is over may have left others in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_part(
    part: Part, flags: Sequence[str], environment: Mapping[str, str], log: Path | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Run a part; return its rows, and '' or what went wrong.

    Args:
        log: file for everything that the part prints
    """
    command = [sys.executable, "-u", "-m", f"benchmarks.gpu_parts.{part.module}", *flags]
    problem = ""
    with tempfile.TemporaryDirectory() as scratch:
        started = subprocess.Popen(
            [*command, "--scratch", scratch],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            printed = started.communicate(timeout=part.seconds)[0]
        except subprocess.TimeoutExpired:
            problem = f"stopped at its limit of {part.seconds} s"
            end(started)
            printed = started.communicate()[0]
        finally:
            end(started)
    if log:
        log.write_text(printed, encoding="utf-8")
    lines = printed.splitlines()
    rows = [json.loads(line.removeprefix(ROW)) for line in lines if line.startswith(ROW)]
    others = [line for line in lines if not line.startswith(ROW)]
    if started.returncode and not problem:
        problem = f"failed: {' / '.join(others[-MAX_ERROR_LINES:])}"
    return rows, problem


def section(name: str, part: Part, when: str, where: str, rows: Sequence[Mapping[str, Any]], problem: str) -> str:
    """Format the results of a part: a heading and its tables."""
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append({key: value for key, value in row.items() if key != "table"})
    lines = [f"\n### {when}: {name}, {part.purpose}\n", f"{where}.\n"]
    for title, content in tables.items():
        columns = list(dict.fromkeys(key for row in content for key in row))
        lines += [f"{title}:\n", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell(row.get(key)) for key in columns)} |" for row in content]
        lines.append("")
    if problem:
        lines.append(f"This part {problem}\n")
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Format a value of a table."""
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ").replace("`", "'")


def append(page: Path, text: str) -> None:
    """Append a section to the page, below its marker; a page without one is begun."""
    before = page.read_text(encoding="utf-8") if page.is_file() else MARKER
    if MARKER not in before:
        raise SystemExit(f"{page} has no line {MARKER.strip()}; add it, or name another --page")
    page.write_text(before.rstrip("\n") + "\n" + text, encoding="utf-8")


def chosen(names: Sequence[str], parts: Mapping[str, Part]) -> Iterator[tuple[str, Part]]:
    """Iterate over the named parts, or over all. Exits if a name is unknown."""
    for name in names:
        if name not in parts:
            raise SystemExit(f"--part {name}: there is none; known are {', '.join(parts)}")
    return ((name, part) for name, part in parts.items() if name in names or not names)


def main() -> None:
    """Run the parts, print and append their results; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=[], help="only these; by default all")
    parser.add_argument("--pair", action="store_true", help="the parts of two GPUs")
    parser.add_argument("--device", default="", help="0 or, with --pair, 0,1; cpu to try the code")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to try the code")
    parser.add_argument("--carried", type=Path, default=ROOT / ".gpu", help="what make gpu-data has gathered")
    parser.add_argument("--page", type=Path, help="to append to; by default docs/gpu.md, for a trial .gpu/rehearsal.md")
    options = parser.parse_args()
    device = options.device or ("0,1" if options.pair else "0")
    rehearsal = options.quick or device == "cpu"
    if device != "cpu" and torch.cuda.device_count() <= max(map(int, device.split(","))):
        raise SystemExit(
            f"--device {device}: torch sees {torch.cuda.device_count()} GPUs here; try --device cpu --quick"
        )
    page = options.page or (options.carried / "rehearsal.md" if rehearsal else ROOT / "docs" / "gpu.md")
    carried = options.carried.resolve()
    carried.mkdir(exist_ok=True)
    where = hardware(device)
    environment = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    if device.isdecimal() and device != "0":
        environment, device = {"CUDA_VISIBLE_DEVICES": device}, "0"  # runs follow each other in a process
    flags = ["--device", device, "--carried", str(carried), *["--quick"] * options.quick]
    failures = 0
    for name, part in chosen(options.part, PAIR_PARTS if options.pair else PARTS):
        when, begun = datetime.datetime.now().strftime("%Y-%m-%d %H:%M"), time.monotonic()
        rows, problem = run_part(part, flags, environment, carried / f"{name}.log")
        text = section(name, part, when, where, rows, problem)
        append(page, text)
        with (carried / "results.jsonl").open("a", encoding="utf-8") as raw:
            about = {"part": name, "when": when, "where": where, "problem": problem}
            raw.writelines(json.dumps({**about, **row}) + "\n" for row in rows or [{}])
        print(f"{text}\n({time.monotonic() - begun:.0f} s; appended to {page})", flush=True)
        failures += bool(problem)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
