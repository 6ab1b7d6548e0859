"""The last logged position of a run, for later processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.tracking.log_position import LogPosition


def test_positions_of_earlier_processes(tmp_path: Path) -> None:
    first = LogPosition(tmp_path / "position.json", "a")
    assert not first.logged_before("step", 0)
    first.advance("step", 3)
    first.advance("epoch", 0)
    assert not first.logged_before("step", 3)  # there may be more values at a position of this process
    second = LogPosition(tmp_path / "position.json", "a")
    assert [second.logged_before("step", position) for position in (2, 3, 4)] == [True, True, False]
    assert [second.logged_before("epoch", position) for position in (0, 1)] == [True, False]
    second.advance("step", 4)
    third = LogPosition(tmp_path / "position.json", "a")
    assert third.logged_before("step", 4)
    assert third.logged_before("epoch", 0)


def test_positions_of_another_run_are_ignored(tmp_path: Path) -> None:
    LogPosition(tmp_path / "position.json", "a").advance("step", 3)
    assert not LogPosition(tmp_path / "position.json", "b").logged_before("step", 1)


def test_the_end_of_a_log_file_that_was_not_stored_is_removed(tmp_path: Path) -> None:
    first, log_file = LogPosition(tmp_path / "position.json", "a"), tmp_path / "log"
    first.log_file = log_file
    log_file.write_text("1,2,")
    first.advance("step", 2)
    log_file.write_text("1,2,3")
    for run, expected in (("b", "1,2,3"), ("a", "1,2,"), ("a", "1,2,")):
        LogPosition(tmp_path / "position.json", run).cut_log_file()
        assert log_file.read_text() == expected
    log_file.unlink()
    LogPosition(tmp_path / "position.json", "a").cut_log_file()
    assert not log_file.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "a"}', '{"name": "a", "last": 3}'])
def test_a_damaged_file_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / "position.json").write_text(content)
    assert not LogPosition(tmp_path / "position.json", "a").logged_before("step", 0)
