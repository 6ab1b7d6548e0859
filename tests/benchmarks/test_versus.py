"""The parts of `benchmarks.versus`: what a row's name says is what its processes are started with."""

from __future__ import annotations

import re

import pytest

from benchmarks.versus import PARTS


@pytest.mark.parametrize("name", PARTS)
def test_the_variables_of_a_part(name: str) -> None:
    """Model, image size and precision of a step; loader processes, processes and size of photos of a loader."""
    variables = PARTS[name].variables
    if model := re.search(r"(yolo\S+) at (\d+)", name):
        named = {"MODEL": model[1], "SIZE": model[2], "PRECISION": "bf16" if "bf16" in name else "no"}
        assert variables == named
    elif name.startswith("loader"):
        workers, processes = re.search(r"(\d) worker", name), re.search(r"(\d) processes", name)
        photos = re.search(r"\d+x\d+", name)
        assert variables.get("WORKERS") == (workers[1] if workers else "0")
        assert variables.get("WORLD_SIZE") == (processes[1] if processes else "1")
        assert variables.get("PHOTOS") == (photos[0] if photos else None)
