"""What holds the house up: which part may know which, and what may stand where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.dataset import dataset_class
from data.sources import KEYS as DATA_KEYS
from models.tasks import TASKS
from models.tasks.classification.torchvision_models import CLASSIFIER_KEYS
from models.yolo import MODEL_KEYS
from utils.config.options import TrainOptions, flags_of
from utils.files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("models", "data", "utils")
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))


def sources(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


OWN = [*(ROOT / f"{name}.py" for name in SCRIPTS), *sources(*PARTS)]
ALL = [*OWN, *sources("tests", "benchmarks")]


def imported(source: str) -> set[str]:
    """The top-level packages that a source imports, anywhere in it; relative imports as `.`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else str(node.module).partition(".")[0])
    return found


def test_imports_are_seen() -> None:
    text = "import a.b, c\nfrom d.e import f\ndef g():\n    from h import i\nfrom . import j\nfrom .k import l\n"
    assert imported(text) == {"a", "c", "d", "h", "."}


def test_there_is_something_to_look_at() -> None:
    assert {"train", "val"} <= set(SCRIPTS)
    assert all(len(sources(part)) > 3 for part in PARTS)


# Who may know whom


@pytest.mark.parametrize(
    ("part", "strangers"), [("models", {"data"}), ("data", {"models"}), ("utils", {"models", "data"})]
)
def test_imports_point_one_way(part: str, strangers: set[str]) -> None:
    for path in sources(part):
        wrong = imported(path.read_text(encoding="utf-8")) & (strangers | set(SCRIPTS) | {"tests", "."})
        assert not wrong, f"{relative(path)} imports {wrong}"


def test_accelerate_is_known_to_those_whose_business_it_is() -> None:
    knowing = {relative(path) for path in OWN if "accelerate" in imported(path.read_text(encoding="utf-8"))}
    assert knowing <= {
        *(f"{name}.py" for name in SCRIPTS),
        "utils/run.py",
        "utils/distributed/accelerator.py",
        "utils/tracking/tracker.py",
    }


def test_nobody_asks_which_process_it_is() -> None:
    allowed = {
        "utils/run.py",
        "utils/distributed/accelerator.py",
        "utils/distributed/ranks.py",
        "utils/distributed/spawn.py",
    }
    question = re.compile(r"\b(is_(local_)?main_process|(local_)?process_index|on_main_process|get_rank|LOCAL_RANK)\b")
    for path in OWN:
        if relative(path) not in allowed:
            found = question.search(path.read_text(encoding="utf-8"))
            assert not found, f"{relative(path)} asks for {found and found[0]}"


@pytest.mark.parametrize("name", ["train.py", "val.py", "utils/run.py"])
def test_the_loop_knows_no_task(name: str) -> None:
    words = "|".join(sorted({*TASKS, "detect", "box"}))
    for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
        found = re.search(rf"(?<![a-z])({words})", line, re.IGNORECASE)
        assert not found, f"{name}:{number} names a task: {line.strip()}"


@pytest.mark.parametrize("name", ["detect.py", "export.py"])
def test_no_script_is_for_one_task(name: str) -> None:
    source = (ROOT / name).read_text(encoding="utf-8")
    named = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    assert not set(named) & set(TASKS)
    assert not re.search(r"classif|detector|DetectionTask", source, re.IGNORECASE)


def test_tasks_have_data() -> None:
    for entry in TASKS.values():
        assert not entry.load().__abstractmethods__
        assert not dataset_class(entry.data).__abstractmethods__


# What happens at import


class AtImport(ast.NodeVisitor):
    """Finds reads of the environment that happen when a module is imported: not those inside functions."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for early in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(early)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for early in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(early)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("environ", "environb", "getenv"):
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ("environ", "environb", "getenv"):
            self.lines.append(node.lineno)


def environment_reads(source: str) -> list[int]:
    visitor = AtImport()
    visitor.visit(ast.parse(source))
    return visitor.lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nA = os.environ.get('A')\n", [2]),
        ("import os\nif os.getenv('A'):\n    pass\n", [2]),
        ("from os import environ\nA = environ['A']\n", [2]),
        ("import os\nclass C:\n    a = os.environ\n", [3]),
        ("import os\ndef f(a=os.environ):\n    pass\n", [2]),
        ("import os\nf = lambda a=os.environ: a\n", [2]),
        ("import os\nA = [x for x in os.environ]\n", [2]),
        ("import os\ndef f():\n    return os.environ\nclass C:\n    def g(self):\n        os.getenv('A')\n", []),
        ("import os\nf = lambda: os.environ\n", []),
    ],
)
def test_reads_at_import_are_seen(source: str, lines: list[int]) -> None:
    assert environment_reads(source) == lines


def test_no_module_reads_the_environment_at_import() -> None:
    for path in OWN:
        lines = environment_reads(path.read_text(encoding="utf-8"))
        assert not lines, f"{relative(path)} reads the environment in lines {lines}"


# Names and shipped files


def test_no_file_is_named_for_nothing_in_particular() -> None:
    vague = re.compile(r"(test_)?(common|helpers?|misc|general|util|utils|stuff)")
    wrong = [relative(path) for path in ALL if vague.fullmatch(path.stem)]
    assert not wrong


def shipped(folder: str) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted((ROOT / folder).glob("*.yaml"))]


@pytest.mark.parametrize("path", shipped("models"))
def test_model_yamls(path: Path) -> None:
    """That they build what they should is for tests/models."""
    content = read_yaml(path)
    task = content.get("task", "detect")
    assert task in TASKS
    if "architecture" in content:
        assert set(content) <= set(CLASSIFIER_KEYS)
        return
    needed = {"nc", "depth_multiple", "width_multiple", "backbone", "head"} | (
        {"anchors"} if task == "detect" else set()
    )
    assert needed <= set(content) <= set(MODEL_KEYS)
    assert all(len(row) == 4 for row in [*content["backbone"], *content["head"]])


@pytest.mark.parametrize("path", shipped("data"))
def test_data_yamls(path: Path) -> None:
    content = read_yaml(path)
    assert {"path"} <= set(content) <= set(DATA_KEYS)
    if "names" not in content:  # folders are named like classes
        assert "split" in content or {"train", "val"} <= set(content)
        return
    assert {"train", "val"} <= set(content)
    assert list(content["names"]) == list(range(len(content["names"])))
    assert all(isinstance(name, str) for name in content["names"].values())
    assert len(set(content["names"].values())) == len(content["names"])


@pytest.mark.parametrize("name", ["coco", "coco128"])
def test_cocos_names_end_the_file_in_block_style(name: str) -> None:
    """So that other programs, which read them line by line, find them too."""
    path = ROOT / "data" / f"{name}.yaml"
    names = read_yaml(path)["names"]
    assert list(read_yaml(path))[-1] == "names"
    assert path.read_text().rstrip().splitlines()[-81:] == ["names:", *(f"  {k}: {v}" for k, v in names.items())]
    assert (len(names), names[0], names[79]) == (80, "person", "toothbrush")


def test_the_readme_names_every_flag() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for option in flags_of(TrainOptions):
        names = [option.name.replace("_", "-"), *option.metadata["aliases"]]
        missing = [name for name in names if f"`--{name}`" not in readme]
        assert not missing, f"README.md does not name --{missing[0]}"


def test_a_start_does_not_import_what_it_may_not_need() -> None:
    """Each takes a second or more: a wrong flag is told sooner, and a run begins sooner."""
    slow = ["torchvision", "matplotlib", "deepspeed", "transformers", "wandb", "pandas", "scipy"]
    script = f"import sys, train, val; print([name for name in {slow} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
