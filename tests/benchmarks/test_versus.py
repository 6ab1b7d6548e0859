"""The parts of `benchmarks.versus`: what a row's name says is what its processes are started with."""

from __future__ import annotations

import pytest

from benchmarks.versus import PARTS


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("step in bf16, yolov5s at 640", {"MODEL": "yolov5s", "SIZE": "640", "PRECISION": "bf16"}),
        ("step, yolov5n at 320", {"MODEL": "yolov5n", "SIZE": "320", "PRECISION": "no"}),
        ("loader, 2 processes of 1 worker", {"WORKERS": "1", "WORLD_SIZE": "2", "PHOTOS": ""}),
        ("loader, photos of 4000x3000", {"WORKERS": "0", "WORLD_SIZE": "1", "PHOTOS": "4000x3000"}),
    ],
)
def test_the_variables_of_a_part(name: str, variables: dict[str, str]) -> None:
    assert PARTS[name].variables == variables
