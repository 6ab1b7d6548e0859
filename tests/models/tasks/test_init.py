"""The registry: a user's task in a file or a package, and the flags and keys that apply to a task's models."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from data.data_yaml import read_spec
from models.ensemble import Members
from models.tasks import TASKS, add_tasks, describe_model, task_name
from models.tasks.contract import Task
from models.tasks.detect import DetectionTask
from models.weights import Weights
from tests.making import CLASS_NAMES, tiny_anchor_free, tiny_detector, write_yaml
from tests.models.tasks.mask_batches import tiny_segmenter
from utils.config.flags import DetectOptions, ExportOptions, TrainOptions, ValOptions, flags_of
from utils.config.hyperparameters import Augmentation, Hyperparameters, Recipe, keys_of
from utils.config.settings import refuse_flags
from utils.errors import UserError
from utils.user_code import class_named, load

# Flags and hyperparameters

YAMLS: dict[str, dict[str, Any]] = {
    "detect with the head Detect": tiny_detector(),
    "detect with the head DetectDFL": tiny_anchor_free(),
    "segment with the head Segment": tiny_segmenter(),
    "classify": {"task": "classify", "architecture": "resnet18", "nc": 2},
}


class LaterTask(Task):
    """A task that says nothing about flags."""


SCRIPTS = (TrainOptions, ValOptions, DetectOptions, ExportOptions)


def features_of(yaml: Mapping[str, Any]) -> frozenset[str]:
    return TASKS[describe_model(yaml).split()[0]].load().features_of(yaml)


def test_a_task_has_only_features_that_a_flag_needs() -> None:
    needed = {option.metadata["needs"] for kind in SCRIPTS for option in flags_of(kind)}
    for name, entry in TASKS.items():
        kind = entry.load()
        assert kind.features, name
        assert kind.features <= needed
    assert all(features_of(yaml) <= needed for yaml in YAMLS.values())


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_task_that_says_nothing_takes_the_universal_flags_alone(kind: type[Any]) -> None:
    for option in flags_of(kind):
        subject, flag = option.metadata["needs"], f"--{option.name.replace('_', '-')}"
        with pytest.raises(UserError, match=f"{flag} .*later") if subject else nullcontext():
            refuse_flags(kind(), {option.name: option.default or 1}, LaterTask.features_of({}), "later")
        refuse_flags(kind(), {option.name: option.default or 1}, {subject}, "later")


@pytest.mark.parametrize(
    ("flag", "models"),
    [
        ("noautoanchor", {"detect with the head Detect", "segment with the head Segment"}),
        ("mask_ratio", {"segment with the head Segment"}),
        ("label_smoothing", {"detect with the head Detect", "segment with the head Segment", "classify"}),
        ("rect", set(YAMLS) - {"classify"}),
        ("close_mosaic", set(YAMLS)),
        ("multi_scale", set(YAMLS)),
    ],
)
def test_which_models_take_a_flag_of_training(flag: str, models: set[str]) -> None:
    for name, yaml in YAMLS.items():
        assert describe_model(yaml) == name
        expected = nullcontext() if name in models else pytest.raises(UserError, match=name)
        with expected:
            refuse_flags(TrainOptions(), {flag: 1}, features_of(yaml), name)
        refuse_flags(TrainOptions(), {flag: 0}, features_of(yaml), name)  # off


def test_an_ensemble_takes_a_flag_that_applies_to_one_of_its_models() -> None:
    """The heads of its models may differ, not their task."""
    both = {
        name: Weights({}, yaml, {}, "detect", {}, "lockstep")
        for name, yaml in (("a.pt", tiny_anchor_free()), ("b.pt", tiny_detector()))
    }
    together = Members({name: Path(name) for name in both}, both, TASKS["detect"])
    together.refuse_flags(TrainOptions(), {"noautoanchor": True})
    alone = Members({"a.pt": Path("a.pt")}, {"a.pt": both["a.pt"]}, TASKS["detect"])
    with pytest.raises(UserError, match="detect with the head DetectDFL"):
        alone.refuse_flags(TrainOptions(), {"noautoanchor": True})
    with pytest.raises(UserError, match="--retina-masks"):
        alone.refuse_flags(DetectOptions(), {"retina_masks": True})


def test_the_keys_that_nothing_reads_depend_on_the_head() -> None:
    classify = TASKS["classify"].load()
    assert classify({0: "a", 1: "b"}, classify.recipe()).unused_keys(YAMLS["classify"]) == ()
    task = DetectionTask(CLASS_NAMES, Hyperparameters())
    gains = {"tal_box", "tal_cls", "tal_dfl", "tal_aux"}
    assert set(task.unused_keys(tiny_detector())) == {"iou_t"} | gains
    loss = {"box", "obj", "cls", "obj_pw", "cls_pw", "anchor_t", "anchors", "anchor_recall", "fl_gamma", "fit_classes"}
    assert set(task.unused_keys(tiny_anchor_free())) == {"iou_t"} | loss
    assert task.unused_keys({**tiny_detector(), "head": []}) == ()  # which building the model reports


def test_every_key_of_a_detector_is_read_by_augmentation_a_head_or_the_run() -> None:
    read = {"iou_t", "keep_head"} | keys_of(Recipe) | keys_of(Augmentation)
    assert read.union(*(head.hyperparameters for head in DetectionTask.heads)) == keys_of(Hyperparameters)


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
    assert task_name({"task": "mine"}, "its YAML") == "mine"
    entry = TASKS["mine"]
    assert (entry.load().metric_names, entry.load().__module__, entry.yolov5_class) == (("one",), module, "")
    assert class_named(entry.data).__name__ == "MyData"
    assert (load(module), load("data.builtin"), sys.path[-1]) == (sys.modules[module], None, str(folder))


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
        ("own.py", "TASKS = {'mine': 3}\n", "own.py"),
        ("own.py", "class A:\n    x = = 1\n", "own.py, line 2"),
        ("own.py", "\n\nimport nothing_of_that_name\n", "own.py, line 3"),
        ("own.py", COMPLETE.replace(":Mine", ":Other"), "'Other'"),
        ("own.py", COMPLETE.replace('"mine"', '"detect"'), "'detect'"),
        ("own.py", "from data.dataset import DataSet\n" + COMPLETE.replace("(DetectionData)", "(DataSet)"), "collate"),
        ("my-task.py", COMPLETE, "'my-task'"),
        ("own.txt", "", "own.txt"),
        ("own/other.py", "", "own"),
    ],
)
def test_what_is_no_task(name: str, content: str, named: str, folder: Path) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    tasks = dict(TASKS)
    for _ in range(2):
        with pytest.raises(UserError, match=named):
            add_tasks(str(folder / name.partition("/")[0]))
    assert tasks == TASKS
    assert "own" not in sys.modules


@pytest.mark.parametrize("name", ["own.py", "own"])
def test_what_only_a_run_or_weights_name_is_not_run(name: str, folder: Path) -> None:
    """They may be somebody else's. The same files at the same place are run if this user has run them before."""
    path = write_task(folder, name)
    changed = path if path.suffix else path / "parts.py"

    def refused() -> bool:
        with pytest.raises(UserError, match=rf"^best.pt names --task-file {path}.* --task-file {path}$"):
            add_tasks(str(path), named_by_user=False, named_by="best.pt")
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
    add_tasks(str(path), named_by_user=False, named_by="best.pt")
    assert "mine" in TASKS
    with pytest.raises(UserError, match=r"gone.py"):
        add_tasks(str(folder / "gone.py"), named_by_user=False, named_by="best.pt")
