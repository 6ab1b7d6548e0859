"""How far a run is logged survives its process, and is of one run only."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.tracking.log_position import Kept


def test_what_an_earlier_process_has_logged(tmp_path: Path) -> None:
    first = Kept(tmp_path / "kept.json", "a")
    assert not first.has("step", 0)
    first.note("step", 3)
    first.note("epoch", 0)
    assert not first.has("step", 3)  # its own, which may have more values at the same place
    second = Kept(tmp_path / "kept.json", "a")
    assert [second.has("step", place) for place in (2, 3, 4)] == [True, True, False]
    assert [second.has("epoch", place) for place in (0, 1)] == [True, False]
    second.note("step", 4)
    third = Kept(tmp_path / "kept.json", "a")
    assert third.has("step", 4)
    assert third.has("epoch", 0)


def test_another_run_begins_anew(tmp_path: Path) -> None:
    Kept(tmp_path / "kept.json", "a").note("step", 3)
    assert not Kept(tmp_path / "kept.json", "b").has("step", 1)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "a"}', '{"name": "a", "last": 3}'])
def test_a_damaged_file_counts_for_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(content)
    assert not Kept(tmp_path / "kept.json", "a").has("step", 0)
