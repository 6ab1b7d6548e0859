"""Where weights are looked for, and what is said where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from models import hub
from models.hub import find_weights
from utils.errors import UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and another folder as the repository."""
    (tmp_path / "work").mkdir()
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(hub, "ROOT", tmp_path / "repository")
    return tmp_path


def test_as_given_first_then_in_the_repository(elsewhere: Path) -> None:
    (elsewhere / "repository" / "a.pt").touch()
    assert find_weights("a.pt") == elsewhere / "repository" / "a.pt"
    (elsewhere / "work" / "a.pt").touch()
    assert find_weights("a.pt").absolute() == elsewhere / "work" / "a.pt"
    assert find_weights(str(elsewhere / "work" / "a.pt")) == elsewhere / "work" / "a.pt"


@pytest.mark.parametrize("name", ["yolov5n.pt", "yolov5x6.pt", "weights/yolov5s.pt"])
def test_official_weights_have_an_address(name: str, elsewhere: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_weights(name)
    file = name.rpartition("/")[2]
    assert f"https://github.com/ultralytics/yolov5/releases/download/v7.0/{file} " in str(caught.value)
    assert f"put it at {elsewhere / 'work' / name}" in str(caught.value)
    assert "--weights ''" in str(caught.value)


@pytest.mark.parametrize("name", ["mine.pt", "yolov5q.pt", "yolov5n.pt.old", "xyolov5n.pt"])
def test_other_weights_have_none(name: str) -> None:
    with pytest.raises(UserError, match=f"^weights {name} are not a file; check the path") as caught:
        find_weights(name)
    assert "https" not in str(caught.value)


def test_a_folder_is_no_weight_file(elsewhere: Path) -> None:
    (elsewhere / "work" / "runs").mkdir()
    with pytest.raises(UserError, match="not a file"):
        find_weights("runs")
