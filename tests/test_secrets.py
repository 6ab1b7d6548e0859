"""Names, passwords and queries of addresses are nowhere but in the files in which the user has written them."""

from __future__ import annotations

from pathlib import Path

import pytest

import detect
import val
from tests.conftest import RunScript
from tests.making import noise, write_image, write_yaml
from tests.web import serving_folder
from utils.errors import UserError

USER, PASSWORD, QUERY = "b0bby", "s3c@r:et", "t0ken=c0ffee"
SECRETS = (USER, "s3c@r", "s3c%40r", "c0ffee")


def test_secrets_are_nowhere_in_what_is_printed_written_and_logged(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A training with all trackers, of which one fails, a validation and a prediction, each with damaged files."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    served, project = tmp_path / "served", tmp_path / "runs"
    for split, count in (("train", 6), ("val", 3)):
        for k in range(count):
            write_image(served / f"images/{split}/{k}.png", noise(40, 40, k), "0 .5 .5 .5 .5")
        (served / f"images/{split}/bad.png").write_bytes(b"no image")
        (served / f"labels/{split}/0.txt").write_text("0 .5 .5 .5 .5\nwrong\n")
    with serving_folder(served) as server:
        address = server.replace("://", f"://{USER}:{PASSWORD}@")
        data = write_yaml(
            tmp_path / "data.yaml", {"path": address, "train": "images/train", "val": "images/val", "names": ["disc"]}
        )
        flags = ["--data", str(data), "--imgsz", "32", "--device", "cpu", "--project", str(project), "--workers", "1"]
        model = ["--weights", "", "--cfg", "yolov5n.yaml", "--epochs", "1", "--batch-size", "3", "--bbox-interval", "1"]
        trackers = ["--log-with", "wandb,tensorboard,mlflow", "--upload-dataset"]
        environment = {
            "WANDB_MODE": "offline",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "MLFLOW_TRACKING_URI": address.replace(server[-5:], "9"),
        }
        printed = run_script("train.py", *flags, *model, *trackers, "--save-steps", "1", **environment)
        assert "bad.png" in printed
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        how = {"weights": project / "exp" / "weights" / "last.pt", "project": project, "device": "cpu"}
        save = {"save_txt": True, "conf_thres": 0.0}
        val.run(data=data, imgsz=32, workers=0, noplots=True, save_json=True, **how, **save)
        detect.run(source=f"{server}/images/val/1.png?{QUERY}", save_csv=True, **how, **save)
        for source in (f"{server}/images/val/bad.png?{QUERY}", f"{address}/images/val/2.png?{QUERY}"):
            with pytest.raises(UserError, match=r"(bad|2)\.png") as caught:
                detect.run(source=source, save_csv=True, **how, **save)
            printed += str(caught.value)
        for entry in (f"{address}/nowhere?{QUERY}", f"nosuch://{USER}:{PASSWORD}@host/a?{QUERY}"):
            broken = write_yaml(tmp_path / "broken.yaml", {"path": entry, "train": "a", "val": "a", "names": ["disc"]})
            with pytest.raises(UserError) as caught:
                val.run(data=broken, **how)
            printed += str(caught.value)
    in_process = "".join(capfd.readouterr())
    assert "bad.png" in in_process
    printed += in_process
    found = [secret for secret in SECRETS if secret in printed]
    for file in (path for path in project.rglob("*") if path.is_file()):
        found += [f"{secret} in {file}" for secret in SECRETS if secret.encode() in file.read_bytes()]
    assert found == []
    assert len([path for path in project.rglob("*") if path.is_file()]) > 20
