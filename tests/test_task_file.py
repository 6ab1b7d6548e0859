"""A task in a package outside of the checkout: its model, hyperparameters and classes are in the package's folder.

The scripts train, resume, validate, detect and export it. What a run folder or weights name is run again for the user
who has run it, and refused for another one.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import detect
import export
import val
from models.tasks import TASKS
from models.weights import read_weights
from tests.conftest import RunScript
from tests.curves import rows
from tests.faults.fault_points import planted
from utils.files import ROOT
from utils.user_code import trust

PACKAGE = {
    "__init__.py": """
from models.tasks import TaskEntry

TASKS = {"tinted": TaskEntry(f"{__name__}.task:TintedTask", f"{__name__}.data:TintedData", "Detect")}
""",
    "task.py": """
from dataclasses import dataclass
from pathlib import Path

from models.tasks.detect import DetectionTask
from utils.config.hyperparameters import Hyperparameters, Recipes, number
from utils.config.values import SHARE


@dataclass(frozen=True)
class TintedRecipe(Hyperparameters):
    tint: float = number(0.0, SHARE)


class TintedTask(DetectionTask):
    recipe = TintedRecipe
    recipes = Recipes(str(Path(__file__).with_name("hyp.yaml")))
    defaults = {"weights": "", "imgsz": 64}
""",
    "data.py": """
from data.detection import DetectionData


class TintedData(DetectionData):
    pass
""",
    "hyp.yaml": "tint: 0.5\nnbs: 8\n",
    "model.yaml": """
task: tinted
nc: 6
depth_multiple: 1.0
width_multiple: 1.0
anchors: [[10, 13, 16, 30, 33, 23]]
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
head:
  - [[-1], 1, Detect, [nc, anchors]]
""",
}
QUICK = ("--device", "cpu", "--workers", "0")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside") / "tinted"
    folder.mkdir()
    for name, content in PACKAGE.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def trained(package: Path, small_data: Path, run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for an epoch; return the run folder."""
    project = tmp_path_factory.mktemp("runs")
    own = ("--task", str(package), "--cfg", str(package / "model.yaml"), "--data", str(small_data))
    how = ("--epochs", "1", "--batch-size", "8", "--project", str(project))
    run_script("train.py", *own, *how, *QUICK)
    return project / "exp"


def test_training(trained: Path, package: Path) -> None:
    settings = yaml.safe_load((trained / "settings.yaml").read_text())
    assert (settings["task_file"], settings["imgsz"]) == (str(package), 64)
    assert settings["hyperparameters"]["tint"] == 0.5
    weights = read_weights(trained / "weights" / "last.pt")
    assert (weights.task, weights.settings["task_file"]) == ("tinted", str(package))
    assert len(rows(trained)) == 1
    assert not list(package.rglob("__pycache__"))


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_resuming(
    processes: str, trained: Path, package: Path, small_data: Path, run_script: RunScript, tmp_path: Path
) -> None:
    """The hyperparameters are compared with those of the package, and spawned processes import it too."""
    own = ("--task", str(package), "--cfg", str(package / "model.yaml"), "--data", str(small_data))
    how = ("--epochs", "1", "--batch-size", "8", "--project", str(tmp_path), "--save-steps", "1", *QUICK)
    fault = planted("SIGKILL", "optimizer step", 2)
    run_script("train.py", *own, *how, "--processes", processes, **fault, code=-9 if processes == "1" else 1)
    resume = ("--resume", str(tmp_path / "exp"), "--processes", processes, "--hyp", str(package / "hyp.yaml"))
    assert "resuming " in run_script("train.py", *resume, *QUICK)
    if processes == "1":
        assert rows(tmp_path / "exp") == rows(trained)


@contextmanager
def another_process() -> Iterator[None]:
    """Run a block without a trace of the package in this process, before and after it."""
    tasks, path = dict(TASKS), list(sys.path)
    assert "tinted" not in {*tasks, *sys.modules}
    try:
        yield
    finally:
        TASKS.clear()
        TASKS.update(tasks)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == "tinted"]:
            del sys.modules[name]


def test_validation_detection_and_export(
    trained: Path, package: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights name the package, and so does the file that is exported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trust(package, "--task-file", is_named=True, named_by="")  # as the training has done
    weights = Path(shutil.copy(trained / "weights" / "best.pt", tmp_path / "best.pt"))
    how = {"project": tmp_path, "device": "cpu"}
    with another_process():
        (exported,) = export.run(weights=weights)
    with another_process():
        result = val.run(weights=weights, data=small_data, task="train", workers=0, batch_size=1, noplots=True, **how)
    assert "metrics/mAP_0.5" in result
    picture = next((small_data.with_suffix("") / "images" / "val").glob("*.jpg"))
    for file in (weights, exported):
        with another_process():
            result = detect.run(weights=file, source=picture, **how)
        assert Path(result["folder"], picture.name).is_file()


@pytest.mark.long
def test_another_user(trained: Path, package: Path, small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """Their cache folder is another one. A training from these weights must name the package."""
    weights = str(trained / "weights" / "best.pt")
    how = ("--weights", weights, "--project", str(tmp_path), "--device", "cpu")
    user = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    picture = str(next((small_data.with_suffix("") / "images" / "val").glob("*.jpg")))
    for script, flags in {"detect.py": ["--source", picture], "val.py": ["--data", str(small_data)]}.items():
        refusal = run_script(script, *how, *flags, fails=True, **user)
        assert (
            f"best.pt names {package}, a Python file or package that would be run and that you have not run" in refusal
        )
        assert f"if you trust it add --task-file {package}" in refusal
    assert "--task-file" in run_script("train.py", *how, "--data", str(small_data), fails=True, **user)
    assert "settings.yaml names" in run_script("train.py", "--resume", str(trained), "--hyp", "low", fails=True, **user)
    run_script("detect.py", *how, "--source", picture, "--task", str(package), **user)
    run_script("detect.py", *how, "--source", picture, **user)


def test_python(trained: Path, package: Path, small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """Hyperparameters of the package are arguments, as those of other tasks are."""
    code = f"""
import train
from hubconf import custom

result = train.run(task={str(package)!r}, cfg={str(package / "model.yaml")!r}, data={str(small_data)!r}, tint=0.25,
                   epochs=1, device="cpu", workers=0, noplots=True, project={str(tmp_path)!r})
predictor = custom({str(trained / "weights" / "best.pt")!r}, task_file={str(package)!r}, device="cpu")
print(type(predictor.task).__name__, sorted(result)[:2])
"""
    (tmp_path / "code.py").write_text(code)
    printed = run_script(str(tmp_path / "code.py"), PYTHONPATH=str(ROOT))
    assert "TintedTask ['fitness', 'folder']" in printed
    assert yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text())["hyperparameters"]["tint"] == 0.25
