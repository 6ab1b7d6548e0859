"""The tests that need a GPU, or two with --device 0,1: a row for each. Files without such tests are not imported."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.gpu_parts.measuring import Machine, row, run
from utils.files import ROOT

PARALLEL = ["-n", "4", "--dist", "loadfile"]  # starting takes longer than the tests' work on the device
OUTCOME = re.compile(r"(?:\[gw\d+\] \[ *\d+%\] )?(PASSED|FAILED|ERROR|SKIPPED)? ?(tests/\S+)(?: ([A-Z]+)\b.*)? *$")


def tests(here: Machine) -> None:
    """Run the tests, or collect them only without a GPU; exit with 1 if one failed."""
    marker = "gpu2" if "," in here.device else "gpu"
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if f"mark.{marker}\n" in file.read_text()]
    how = ["-vv", "--tb=short", *(PARALLEL if find_spec("xdist") else [])] if here.on_gpu else ["--collect-only"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-m", marker, *how, *sorted(files)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    collected = 0
    for line in process.stdout:
        print(line, end="", flush=True)
        collected += bool(re.match(r"tests/\S+::", line))
        if (found := OUTCOME.match(line)) and (outcome := found[1] or found[3]):
            row(f"Tests marked {marker}", test=found[2], outcome=outcome.lower())
    if not here.on_gpu:
        row(f"Tests marked {marker}, collected only", tests=collected, files=len(files))
    sys.exit(process.wait())


if __name__ == "__main__":
    run(tests)
