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
TASKS = {"mine": TaskEntry(f"{__name__}%s:Mine", f"{__name__}%s:MyData", "Detect")}
"""


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


def test_a_file(folder: Path) -> None:
    """It can be named again, and imports files beside it."""
    (folder / "own_names.py").write_text("NAME = 'mine'\n")
    (folder / "own_task.py").write_text("from own_names import NAME\n" + CLASSES + ENTRY % ("", ""))
    for place in (folder / "own_task.py", folder / "sub" / ".." / "own_task.py"):
        add_tasks(str(place))
    assert task_of({"task": "mine"}, "its YAML") == "mine"
    entry = TASKS["mine"]
    assert entry.load().metric_names == ("one",)
    assert dataset_class(entry.data).__name__ == "MyData"
    assert entry.yolov5_class == ""
    assert is_users("own_task")
    assert not is_users("data.builtin.shapes")
    assert sorted(file.name for file in folder.iterdir()) == ["own_names.py", "own_task.py"]  # no __pycache__


def test_a_package(folder: Path) -> None:
    """The classes may be in modules of the package, which processes that load data can import too."""
    package = folder / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("from models.tasks import TaskEntry\n" + ENTRY % (".parts", ".parts"))
    (package / "parts.py").write_text(CLASSES)
    add_tasks(str(package))
    assert TASKS["mine"].load().__module__ == "own_package.parts"
    assert is_users("own_package.parts")
    assert sys.path[-1] == str(folder)


def test_a_task_may_draw_its_data(folder: Path) -> None:
    """A data YAML names a module of the package, which is imported only if the user runs the package."""
    package = folder / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text(CLASSES + ENTRY % ("", ""))
    (package / "circles.py").write_text("def draw_dataset(folder, seed):\n    folder.joinpath(str(seed)).touch()\n")
    (package / "broken.py").write_text("1 / 0\n")
    content = {"path": str(package), "train": "images", "names": ["circle"]}
    file = write_yaml(package / "circles.yaml", {**content, "draw": {"own_package.circles": 7}})
    with pytest.raises(UserError, match=r"circles.yaml: `draw` must be .* not \{'own_package.circles': 7\}"):
        read_spec(file)
    add_tasks(str(package))
    read_spec(file)
    assert (package / "7").is_file()
    for name, message in {
        "broken": "broken.py, line 1: ZeroDivisionError",
        "gone": "No module named",
    }.items():
        with pytest.raises(UserError, match=message):
            read_spec(write_yaml(file, {**content, "draw": {f"own_package.{name}": 7}}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.py", "x = 1\n", r"own.py defines no task; write `TASKS = \{\"name\": TaskEntry\(...\)\}`, "),
        ("own.py", "TASKS = {'mine': 3}\n", "own.py defines no task"),
        ("own.py", "class A:\n    x = = 1\n", "own.py, line 2: invalid syntax; fix the Python there"),
        ("own.py", "\n\nimport nothing_of_that_name\n", "own.py, line 3: ModuleNotFoundError: No module named .*; fix"),
        ("own.py", CLASSES + ENTRY.replace("Mine", "Other") % ("", ""), "own.py: AttributeError: .*'Other'; fix it"),
        (
            "own.py",
            CLASSES + ENTRY.replace('"mine"', '"detect"') % ("", ""),
            "own.py defines a task 'detect', but that name is taken; give it another name",
        ),
        (
            "json.py",
            CLASSES + ENTRY % ("", ""),
            "--task-file .*json.py: 'json' is not a valid module name, or another module has it",
        ),
        ("my-task.py", CLASSES + ENTRY % ("", ""), "'my-task' is not a valid module name"),
        ("own.txt", "", "--task-file .*own.txt"),
        ("own/other.py", "", "--task-file .*own: give"),
    ],
)
def test_what_is_no_task(name: str, content: str, message: str, folder: Path) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    tasks, path = dict(TASKS), list(sys.path)
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            add_tasks(str(folder / name.partition("/")[0]))
    assert (tasks, path) == (TASKS, sys.path)
    assert "own" not in sys.modules


def test_a_class_that_is_not_complete(folder: Path) -> None:
    base = "from data.dataset import DataSet\n" + CLASSES.replace("(DetectionData)", "(DataSet)")
    (folder / "own.py").write_text(base + ENTRY % ("", ""))
    with pytest.raises(UserError, match=r"own.py: the class MyData of 'mine' lacks class_names, collate, .*; define"):
        add_tasks(str(folder / "own.py"))


@pytest.mark.parametrize("name", ["own.py", "own"])
def test_what_only_a_run_or_weights_name_is_not_run(name: str, folder: Path) -> None:
    """They may be somebody else's. The same files at the same place are run if this user has run them before."""
    path = folder / name
    files = [path] if path.suffix else [path / "__init__.py", path / "parts.py"]
    files[0].parent.mkdir(exist_ok=True)
    files[-1].write_text(CLASSES)
    with files[0].open("a") as file:
        part = "" if path.suffix else ".parts"
        file.write("from models.tasks import TaskEntry\n" + ENTRY % (part, part))
    message = rf"^best.pt names {path}, a Python file or package that would be run .*trust it add --task-file {path}$"

    def refused() -> bool:
        with pytest.raises(UserError, match=message):
            add_tasks(str(path), is_named=False, named_by="best.pt")
        return "mine" not in TASKS

    assert refused()
    add_tasks(str(path))
    del TASKS["mine"]
    for loaded in [other for other in sys.modules if other.partition(".")[0] == "own"]:
        del sys.modules[loaded]
    content = files[-1].read_text()
    files[-1].write_text(content + "# changed\n")
    assert refused()
    files[-1].write_text(content)
    add_tasks(str(path), is_named=False, named_by="best.pt")
    assert "mine" in TASKS
    with pytest.raises(UserError, match=rf"^best.pt names --task-file {folder}/gone.py"):
        add_tasks(str(folder / "gone.py"), is_named=False, named_by="best.pt")
