"""A task outside of the checkout: a Python file, or a package, that --task-file names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.data_yaml import read_spec
from data.dataset import dataset_class
from models.tasks import TASKS, add_tasks, task_of
from tests.making import write_yaml
from utils.errors import UserError
from utils.user_code import is_users

CLASSES = """
from data.detection import DetectionData
from models.tasks import TaskEntry
from models.tasks.detect import DetectionTask


class Mine(DetectionTask):
    metric_names = ("one",)


class MyData(DetectionData):
    pass
"""
ENTRY = """
from models.tasks import TaskEntry

TASKS = {"mine": TaskEntry(f"{__name__}%s:Mine", f"{__name__}%s:MyData", "Detect")}
"""
COMPLETE = CLASSES + ENTRY % ("", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the user's files; what they add is removed after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tasks, path, modules = dict(TASKS), list(sys.path), set(sys.modules)
    (tmp_path / "own").mkdir()
    yield tmp_path / "own"
    TASKS.clear()
    TASKS.update(tasks)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write_task(folder: Path, name: str) -> Path:
    """Write a file, or a package whose classes are in a module of it; return its path."""
    path = folder / name
    if path.suffix:
        path.write_text(COMPLETE)
    else:
        path.mkdir()
        (path / "__init__.py").write_text(ENTRY % (".parts", ".parts"))
        (path / "parts.py").write_text(CLASSES)
    return path


@pytest.mark.parametrize(("name", "module"), [("own_task.py", "own_task"), ("own_package", "own_package.parts")])
def test_files_and_packages(name: str, module: str, folder: Path) -> None:
    """They can be named again, and import files beside them; processes that load data can import their modules."""
    path = write_task(folder, name)
    (folder / "own_names.py").write_text("NAME = 'mine'\n")
    with (path if path.suffix else path / "__init__.py").open("a") as file:
        file.write("from own_names import NAME\n")
    for place in (path, folder / "sub" / ".." / name):
        add_tasks(str(place))
    assert task_of({"task": "mine"}, "its YAML") == "mine"
    entry = TASKS["mine"]
    assert (entry.load().metric_names, entry.load().__module__, entry.yolov5_class) == (("one",), module, "")
    assert dataset_class(entry.data).__name__ == "MyData"
    assert (is_users(module), is_users("data.builtin.shapes"), sys.path[-1]) == (True, False, str(folder))
    assert not list(folder.rglob("__pycache__"))


def test_a_task_may_draw_its_data(folder: Path) -> None:
    """A data YAML names a module of the package, which is imported only if the user runs the package."""
    package = write_task(folder, "own_package")
    (package / "circles.py").write_text("def draw_dataset(folder, seed):\n    folder.joinpath(str(seed)).touch()\n")
    (package / "broken.py").write_text("1 / 0\n")
    content = {"path": str(package), "train": "images", "names": ["circle"]}
    file = write_yaml(package / "circles.yaml", {**content, "draw": {"own_package.circles": 7}})
    with pytest.raises(UserError, match=r"circles.yaml: `draw`"):
        read_spec(file)
    add_tasks(str(package))
    read_spec(file)
    assert (package / "7").is_file()
    for name, message in {"broken": "broken.py, line 1", "gone": "own_package.gone"}.items():
        with pytest.raises(UserError, match=message):
            read_spec(write_yaml(file, {**content, "draw": {f"own_package.{name}": 7}}))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("own.py", "x = 1\n", "own.py"),
        ("own.py", "TASKS = {'mine': 3}\n", "own.py"),
        ("own.py", "class A:\n    x = = 1\n", "own.py, line 2"),
        ("own.py", "\n\nimport nothing_of_that_name\n", "own.py, line 3"),
        ("own.py", COMPLETE.replace(":Mine", ":Other"), "'Other'"),
        ("own.py", COMPLETE.replace('"mine"', '"detect"'), "'detect'"),
        ("own.py", "from data.dataset import DataSet\n" + COMPLETE.replace("(DetectionData)", "(DataSet)"), "collate"),
        ("json.py", COMPLETE, "'json'"),
        ("my-task.py", COMPLETE, "'my-task'"),
        ("own.txt", "", "own.txt"),
        ("own/other.py", "", "own"),
    ],
)
def test_what_is_no_task(name: str, content: str, named: str, folder: Path) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    tasks, path = dict(TASKS), list(sys.path)
    for _ in range(2):
        with pytest.raises(UserError, match=named):
            add_tasks(str(folder / name.partition("/")[0]))
    assert (tasks, path) == (TASKS, sys.path)
    assert "own" not in sys.modules


@pytest.mark.parametrize("name", ["own.py", "own"])
def test_what_only_a_run_or_weights_name_is_not_run(name: str, folder: Path) -> None:
    """They may be somebody else's. The same files at the same place are run if this user has run them before."""
    path = write_task(folder, name)
    changed = path if path.suffix else path / "parts.py"

    def refused() -> bool:
        with pytest.raises(UserError, match=rf"^best.pt names {path}.* --task-file {path}$"):
            add_tasks(str(path), is_named=False, named_by="best.pt")
        return "mine" not in TASKS

    assert refused()
    add_tasks(str(path))
    del TASKS["mine"]
    for loaded in [other for other in sys.modules if other.partition(".")[0] == "own"]:
        del sys.modules[loaded]
    content = changed.read_text()
    changed.write_text(content + "# changed\n")
    assert refused()
    changed.write_text(content)
    add_tasks(str(path), is_named=False, named_by="best.pt")
    assert "mine" in TASKS
    with pytest.raises(UserError, match=r"gone.py"):
        add_tasks(str(folder / "gone.py"), is_named=False, named_by="best.pt")
