"""The doctor's comparison of the processes, and what it compares; whole runs are in tests/test_doctor.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from utils.distributed.doctor import findings, fingerprint


def facts(rank: int, *errors: str) -> dict[str, Any]:
    """Return the facts of a process, on a host of its own."""
    row = {"host": "ab"[rank], "rank": str(rank)}
    return {"row": row, "compared": {} if errors else {"the code": "91cc"}, "errors": list(errors)}


def test_a_process_that_has_an_error_is_named() -> None:
    (finding,) = findings([facts(0), facts(1, "x.yaml is not a file")])  # it has no data to compare
    assert "host b rank 1: x.yaml" in finding


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
