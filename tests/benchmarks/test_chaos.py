"""The soak of faults: four rounds of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, not_here


@pytest.mark.long
def test_four_rounds(tmp_path: Path) -> None:
    """One after another: a machine is killed, the newest state is damaged, the cable is cut, a machine is away."""
    faults = ("SIGKILL to a whole machine", "a byte of the newest state is flipped")
    faults = (*faults, "the cable is cut", "a machine leaves and comes back")
    command = ["-m", "benchmarks.chaos", "--rounds", "4", "--epochs", "3", "--folder", str(tmp_path / "soak"), "--only"]
    soak = subprocess.run([sys.executable, *command, *faults], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "cannot be mounted" in soak.stderr or "network namespaces" in soak.stderr:
        not_here(soak.stderr.strip())
    assert soak.returncode == 0, soak.stdout + soak.stderr
    rounds = [line for line in soak.stdout.splitlines() if line.startswith("round ")]  # a warning may be in between
    assert all(fault in line for fault, line in zip(faults, rounds, strict=True)), soak.stdout
