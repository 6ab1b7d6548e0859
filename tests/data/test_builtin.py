"""Drawn data sets: the same files by the same seed as in the first version, whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from data import builtin
from data.builtin import NAMES, DrawnSet, shapes, shapes_cls, shapes_seg
from tests.making import contents
from utils.errors import UserError


def drawn(data: DrawnSet, folder: Path, seed: int = 0) -> Path:
    return data.draw_dataset(folder, seed, train=8, val=2)


@pytest.mark.parametrize(
    ("data", "digest", "mean"),
    [(shapes, "28265922", 135.4), (shapes_cls, "bbf25a71", 88.7), (shapes_seg, "10950516", 135.5)],
)
def test_images_and_labels_are_those_of_the_first_version(
    data: DrawnSet, digest: str, mean: float, tmp_path: Path
) -> None:
    """Two drawings have the same bytes."""
    files = contents(drawn(data, tmp_path / "one", 7))
    assert files == contents(drawn(data, tmp_path / "two", 7))
    suffixes = [Path(name).suffix for name in files]
    assert [suffixes.count(suffix) for suffix in (".jpg", ".txt", ".json")] == [10, 10 * (data is not shapes_cls), 1]
    labels = "".join(f"{name}{files[name].decode()}" for name in sorted(files) if not name.endswith(".jpg"))
    assert hashlib.sha256(labels.encode()).hexdigest()[:8] == digest
    pixels = data.draw(np.random.default_rng([7, *data.stream, 1, 1]), 1)[0]
    assert pixels.mean() == pytest.approx(mean, abs=0.1)
    jpeg = files[f"val/{NAMES[1]}/000001.jpg" if data is shapes_cls else "images/val/000001.jpg"]
    stored = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(stored.astype(int) - pixels).mean() < 12  # JPEG at its worst on noise


# Writing: complete or absent, never overwritten


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_drawing_leaves_no_files(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(builtin, "photograph", fail)
        with pytest.raises(error):
            drawn(shapes, tmp_path / "deep/toy")
    assert list((tmp_path / "deep").iterdir()) == []
    assert drawn(shapes, tmp_path / "deep/toy") == tmp_path / "deep/toy"


def test_the_slower_of_two_processes_uses_the_other_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, times = os.rename, []

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        times.append(drawn(shapes, target).stat().st_mtime_ns)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert drawn(shapes, tmp_path / "toy").stat().st_mtime_ns == times[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "toy"]


@pytest.mark.parametrize("content", [None, {"seed": 1}, {"drawing": 0}, {"train": 9}])
def test_another_folder_or_drawing_is_refused(tmp_path: Path, content: dict[str, int] | None) -> None:
    marker = drawn(shapes, tmp_path / "toy") / "shapes.json"
    if content is None:
        marker.unlink()
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), **content}))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"'{tmp_path}/toy'"):
        drawn(shapes, tmp_path / "toy")
    assert contents(tmp_path) == before
