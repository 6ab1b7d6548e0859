"""Names, passwords and queries of addresses are nowhere but in the files in which the user has written them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunScript
from tests.making import noise, write_image, write_yaml
from tests.object_server import serving_objects

USER, PASSWORD, QUERY = "b0bby", "s3c@r:et", "t0ken=c0ffee"
SECRETS = (USER, "s3c@r", "s3c%40r", "c0ffee")


def test_secrets_are_nowhere_in_what_is_printed_written_and_logged(run_script: RunScript, tmp_path: Path) -> None:
    """A training with all trackers, of which one fails, a validation and a prediction, each with damaged files."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    served, project = tmp_path / "served", tmp_path / "runs"
    for split, count in (("train", 6), ("val", 3)):
        for k in range(count):
            write_image(served / f"images/{split}/{k}.png", noise(40, 40, k), "0 .5 .5 .5 .5")
        (served / f"images/{split}/bad.png").write_bytes(b"no image")
        (served / f"labels/{split}/0.txt").write_text("0 .5 .5 .5 .5\nwrong\n")
    with serving_objects(served) as server:
        address = server.address.replace("://", f"://{USER}:{PASSWORD}@")
        data = write_yaml(
            tmp_path / "data.yaml", {"path": address, "train": "images/train", "val": "images/val", "names": ["disc"]}
        )
        flags = ["--data", str(data), "--imgsz", "32", "--device", "cpu", "--project", str(project), "--workers", "1"]
        model = ["--weights", "", "--cfg", "yolov5n.yaml", "--epochs", "1", "--batch-size", "3", "--bbox-interval", "1"]
        trackers = ["--log-with", "wandb,tensorboard,mlflow", "--upload-dataset"]
        environment = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": address.replace(server.address[-5:], "9")}
        printed = run_script("train.py", *flags, *model, *trackers, "--save-steps", "1", **environment)
        assert "bad.png" in printed
        weights = str(project / "exp" / "weights" / "last.pt")
        printed += run_script("val.py", *flags, "--weights", weights, "--save-txt", "--save-json", "--conf-thres", "0")
        source = f"{address}/images/val/1.png?{QUERY}"
        predict = ["--weights", weights, "--project", str(project), "--save-txt", "--save-csv", "--conf-thres", "0"]
        printed += run_script("detect.py", *predict, "--device", "cpu", "--source", source)
        damaged = source.replace("1.png", "bad.png")
        printed += run_script("detect.py", *predict, "--device", "cpu", "--source", damaged, fails=True)
        for entry in (f"{address}/nowhere?{QUERY}", f"nosuch://{USER}:{PASSWORD}@host/a?{QUERY}"):
            broken = write_yaml(tmp_path / "broken.yaml", {"train": entry, "val": entry, "names": ["disc"]})
            printed += run_script("val.py", "--data", str(broken), "--weights", weights, fails=True)
    found = [secret for secret in SECRETS if secret in printed]
    for file in (path for path in project.rglob("*") if path.is_file()):
        found += [f"{secret} in {file}" for secret in SECRETS if secret.encode() in file.read_bytes()]
    assert found == []
    assert len([path for path in project.rglob("*") if path.is_file()]) > 20
