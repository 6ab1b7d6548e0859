"""The doctor's comparison of the processes, and what it compares; whole runs are in tests/test_doctor.py."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.making import launched
from utils.config.flags import TrainOptions
from utils.distributed.doctor import MACHINE_FLAGS, findings, fingerprint

A: dict[str, Any] = {
    "row": {"host": "a", "rank": "0"},
    "compared": {
        **{"the code": "91cc", "the data (train)": "28 files 3f2a91bc", "the data (val)": "8 files 00000000"},
        **{"--epochs": "3", "lr0": "0.01", "torch": "2.9", "accelerate": "1.2", "the kind of device": "cpu"},
    },
    "errors": [],
}


def b(**changed: str) -> dict[str, Any]:
    """Return the facts of another process, with other values."""
    other = copy.deepcopy(A)
    other["row"] = {"host": "b", "rank": "1"}
    other["compared"] |= changed
    return other


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({}, []),
        ({"the code": "3f2a"}, ["the code", "91cc", "3f2a"]),
        ({"the data (train)": "27 files 7"}, ["the data (train)"]),
        ({"--epochs": "4"}, ["--epochs", "host b rank 1"]),
        ({"torch": "2.8"}, ["torch"]),
        ({"the kind of device": "cuda"}, ["kind of device"]),
    ],
)
def test_a_difference_is_named(changed: dict[str, str], parts: list[str]) -> None:
    differences = findings([A, b(**changed)], 1.0)
    assert len(differences) == len(changed)
    assert all(part in difference for difference in differences for part in parts)


def test_processes_that_are_missing_or_have_an_error_are_named() -> None:
    failed = {**b(), "errors": ["x.yaml is not a file"], "compared": {}}  # it has no data to compare
    assert findings([A, failed], 1.0) == ["error: on host b rank 1: x.yaml is not a file"]
    (finding,) = findings([A], 0.1)
    assert "rank 1 " in finding


def test_machine_flags_exist() -> None:
    assert set(MACHINE_FLAGS) <= {option.name for option in dataclasses.fields(TrainOptions)}


def test_a_fingerprint_depends_on_relative_names_and_sizes(tmp_path: Path) -> None:
    prints = {}
    for root, names in {"one": "ab", "other": "ab", "less": "a", "named": "ac"}.items():
        files = [tmp_path / root / "deep" / f"{name}.jpg" for name in ("x/1", *(f"y/{name}" for name in names))]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("12345")
        prints[root] = fingerprint(files)
    assert prints["one"] == prints["other"]
    assert prints["one"].startswith("3 files ")
    assert len({prints[root] for root in ("one", "less", "named")}) == 3
    files[0].write_text("1234")
    assert fingerprint(files) != prints["named"]
