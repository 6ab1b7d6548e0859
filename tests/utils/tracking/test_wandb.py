"""The tracker of W&B: resumed runs, artifacts, the key, pictures; tests/test_tracking.py has whole runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.making import noise, write_image
from tests.wandb_files import read, runs
from utils.summary import Box, Example
from utils.tracking.wandb import WandbTracker, example_images, has_key, picture_table

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make wandb read its settings anew."""
    wandb.teardown()
    yield
    wandb.teardown()


def test_nothing_is_logged_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run repeats steps and an epoch, its pictures too."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    grey = np.zeros((4, 4, 3), np.uint8)
    for first, last in ((1, 3), (2, 4)):
        tracker = WandbTracker(tmp_path, "p", "abc", "train")
        tracker.store_init_configuration({"epochs": 3})
        for epoch in range(first, last):
            tracker.log({"step": 10 * epoch, "step/a.b": 0.5}, step=10 * epoch)
            tracker.log({"epoch": epoch, "val/box_loss": epoch / 10}, step=10 * epoch)
            tracker.log_media(lambda: {"pictures/grey": wandb.Image(grey)}, 10 * epoch)
        assert isinstance(tracker.tracker, wandb.Run)
        tracker.finish()
        wandb.teardown()
        time.sleep(1.1)  # W&B names folders by the second
    rows = [row for file in runs(tmp_path) for row in read(file).rows]
    expected = [(10 * epoch, epoch, epoch / 10) for epoch in (1, 2, 3)]
    assert [(row["step"], row["epoch"], row["val/box_loss"]) for row in rows] == expected
    assert all("pictures/grey/path" in row for row in rows)


def test_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(tmp_path, "p", "abc", "train")
    tracker.store_init_configuration({})
    tracker.finish(60.0, exit_code=1)  # on a busy machine W&B may take more than 3 s
    wandb.teardown()  # its service may write the end of the file a moment later
    (file,) = runs(tmp_path)
    assert read(file).code == 1


@pytest.mark.parametrize(("host", "found"), [("", False), ("elsewhere.org", False), ("127.0.0.1:9", True)])
def test_the_key_is_found(host: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is wandb that looks for it, without asking anybody."""
    (tmp_path / "netrc").write_text(f"machine {host} login user password {'0123456789' * 4}\n" if host else "")
    (tmp_path / "netrc").chmod(0o600)
    for name, value in {"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    assert has_key() == found


def test_images_are_padded_to_one_size() -> None:
    """Boxes and masks stay where they were; pixels are BGR as everywhere, and W&B takes RGB."""
    sizes = [(20, 10), (25, 40)]
    outline = (0, 0, 1, 0, 1, 1, 0, 1)
    labels, predicted = [Box(1, None, (0, 0, 1, 1), outline)], [Box(0, 0.5, (0, 0, 0.5, 1), outline)]
    examples = [Example(f"{k}.png", k, size, labels, predicted) for k, size in enumerate(sizes)]
    blue = lambda image, _: np.full((*sizes[image][::-1], 3), (255, 0, 0), np.uint8)  # noqa: E731
    image, _ = example_images(examples, blue, ["disc", "ring"])
    pixels = np.asarray(image.image).astype(int)
    mask = np.asarray(image._masks["ground_truth"]._val["mask_data"]) == 2
    assert mask.shape == pixels.shape[:2] == (40, 25)
    assert mask[:10, :20].all()
    assert mask.sum() == 200
    assert (pixels[..., 2] > 128).sum() == pytest.approx(200, abs=4)  # a JPEG
    assert pixels[5, 5, :2].max() < 50
    (truth,), (guess,) = (image._boxes[title]._val for title in ("ground_truth", "predictions"))
    assert truth["position"] == {"minX": 0, "minY": 0, "maxX": 0.8, "maxY": 0.25}
    assert (truth["box_caption"], guess["box_caption"], guess["scores"]) == ("ring", "disc 0.50", {"confidence": 0.5})


def test_a_table_with_pictures(tmp_path: Path) -> None:
    write_image(tmp_path / "1.jpg", noise(6, 4))
    table = picture_table(("image", "rank"), [["a.jpg", 1]], [tmp_path / "1.jpg"])
    assert (table.columns, table.data[0][:2]) == (["image", "rank", "picture"], ["a.jpg", 1])
    assert isinstance(table.data[0][2], wandb.Image)
