"""The doctor's comparison of the processes, and what it compares; whole runs are in tests/test_doctor.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.making import launched
from utils.config.flags import TrainOptions
from utils.distributed.doctor import MACHINE_FLAGS, findings, fingerprint

COMPARED = {"the code": "91cc", "the data (train)": "28 files 3f2a91bc", "--epochs": "3", "torch": "2.9"}


def facts(rank: int, *errors: str, **changed: str) -> dict[str, Any]:
    """Return the facts of a process, on a host of its own."""
    row = {"host": "ab"[rank], "rank": str(rank)}
    return {"row": row, "compared": {} if errors else {**COMPARED, **changed}, "errors": list(errors)}


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)


@pytest.mark.parametrize("changed", [{}, *({name: "another"} for name in COMPARED)])
def test_a_difference_is_named(changed: dict[str, str]) -> None:
    differences = findings([facts(0), facts(1, **changed)], 1.0)
    assert len(differences) == len(changed)
    for difference, name in zip(differences, changed, strict=True):
        assert all(text in difference for text in (name, COMPARED[name], "host b rank 1", "another"))


def test_processes_that_are_missing_or_have_an_error_are_named() -> None:
    (finding,) = findings([facts(0), facts(1, "x.yaml is not a file")], 1.0)  # it has no data to compare
    assert "host b rank 1: x.yaml" in finding
    (finding,) = findings([facts(0)], 0.1)
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
