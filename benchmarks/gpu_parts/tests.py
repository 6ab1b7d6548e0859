"""The tests that need a GPU, or two with --device 0,1: a row for each. Files without such tests are not imported."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.gpu_parts.measuring import Machine, machine, row
from utils.files import ROOT

PROCESSES = 4  # at a time, if pytest-xdist is installed; starting takes longer than the tests' work on the device
OUTCOME = re.compile(
    r"(?:\[gw\d+\] \[ *\d+%\] )?(?:(PASSED|FAILED|ERROR|SKIPPED) )?(tests/\S*)(?: (PASSED|FAILED|ERROR|SKIPPED).*)? *$"
)


def run_marked(here: Machine, marker: str) -> None:
    """Run the tests with a marker, and print a row for each; exit with 1 if one failed."""
    needed = [
        str(file) for file in (ROOT / "tests").rglob("test_*.py") if f"@pytest.mark.{marker}\n" in file.read_text()
    ]
    quick = ["--collect-only"] if here.quick or not here.on_gpu else ["-vv", "--tb=short", "--durations=0"]
    parallel = ["-n", str(PROCESSES), "--dist", "loadfile"] if find_spec("xdist") and "-vv" in quick else []
    command = [sys.executable, "-m", "pytest", "-m", marker, *quick, *parallel, *sorted(needed)]
    started = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert started.stdout is not None
    collected = 0
    for line in started.stdout:
        print(line, end="", flush=True)
        collected += bool(re.match(r"tests/\S+::", line))
        if (found := OUTCOME.match(line.rstrip())) and (outcome := found[1] or found[3]):
            row(f"Tests marked {marker}", test=found[2], outcome=outcome.lower())
    if quick[0] == "--collect-only":
        row(f"Tests marked {marker}, collected only", tests=collected, files=len(needed))
    sys.exit(started.wait())


if __name__ == "__main__":
    here = machine()
    run_marked(here, "gpu2" if "," in here.device else "gpu")
