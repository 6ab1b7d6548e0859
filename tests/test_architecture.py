"""Rules of the project that no linter checks: who knows the rank, who names a task, what a start imports.

The directions of imports are contracts in pyproject.toml, which `make lint` checks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from models.tasks import TASKS
from utils.files import ROOT

SCRIPTS = sorted(ROOT.glob("*.py"))
PROJECT = [*SCRIPTS, *(file for part in ("models", "data", "utils") for file in sorted((ROOT / part).rglob("*.py")))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_packages_re_export_nothing() -> None:
    """An import names the module that defines the thing, and loads no more than that."""
    filled = [relative(path) for path in PROJECT if path.name == "__init__.py" and path.read_text()]
    assert filled == ["models/tasks/__init__.py"]  # the table of the tasks


def runtime_imports(node: ast.AST) -> set[str]:
    """Return the modules that code imports when it runs, in functions too, and the names that it takes from them."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return set()
    source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    names = {source + alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)}
    return names.union([source.rstrip(".")], *map(runtime_imports, ast.iter_child_nodes(node)))


def test_no_circle_of_imports() -> None:
    modules = {re.sub("(/__init__)?[.]py", "", relative(path)).replace("/", "."): path for path in PROJECT}
    graph = {name: runtime_imports(ast.parse(path.read_text())) & modules.keys() for name, path in modules.items()}
    assert {"models.ensemble", "models.weights"} <= graph["models.tasks.classify"]  # in a function, and above
    TopologicalSorter(graph).prepare()  # raises CycleError


ASKING_FOR_RANK = {
    *("rank", "local_rank", "process_index", "local_process_index", "is_main_process", "is_local_main_process"),
    *("main_process_first", "local_main_process_first", "on_main_process", "on_local_main_process"),
    *("get_rank", "get_node_local_rank", "ranks", "Ranks", "is_local_main"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
}


def rank_questions(source: str) -> list[str]:
    """Return the lines of a source that ask which process it is."""
    questions = []
    for node in ast.walk(ast.parse(source)):
        names: set[Any] = set()
        if isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and any(word in ast.unparse(node.func) for word in ("attr", "environ", "env")):
            names = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names = {node.slice.value} if "environ" in ast.unparse(node.value) else set()
        questions += [f"{node.lineno}: {name}" for name in names & ASKING_FOR_RANK]
    return questions


def test_only_the_run_and_its_processes_know_the_rank() -> None:
    known = [path for path in PROJECT if rank_questions(path.read_text())]
    assert {"utils/run.py", "utils/distributed/ranks.py"} <= {relative(path) for path in known}
    wrong = {relative(path): rank_questions(path.read_text()) for path in known}
    assert {name for name in wrong if name != "utils/run.py" and not name.startswith("utils/distributed/")} == set()


def task_names(source: str) -> list[str]:
    """Return the words of a source that name a task; the script detect.py is not the task `detect`."""
    entries = TASKS.values()
    classes = {path.partition(":")[2] for entry in entries for path in (entry.task, entry.data)}
    modules = {entry.task.partition(":")[0] for entry in entries}
    words = {*map(re.escape, classes | modules), "detector", "classif", *(f'"{name}"' for name in TASKS)}
    return re.findall("|".join(words), source, re.IGNORECASE)


def test_scripts_and_utils_name_no_task() -> None:
    """Flags and hyperparameters that only one task knows stand with the others, in utils/config/.

    `__main__.py` lists the scripts, of which one is `detect`.
    """
    assert task_names('from models.tasks.detect import DetectionTask\nif name == "detect": ...')
    files = [path for path in PROJECT if path in SCRIPTS or relative(path).startswith("utils/")]
    files.remove(ROOT / "__main__.py")
    wrong = {relative(path): task_names(path.read_text()) for path in files}
    assert {name: found for name, found in wrong.items() if found and not name.startswith("utils/config/")} == {}


def optional_packages() -> set[str]:
    """Return the packages of all requirements files but that of training, as modules are named."""
    files = {path.name: path.read_text() for path in ROOT.glob("requirements*.txt")}
    listed = {name: set(re.findall(r"^\w[\w-]*", text, re.MULTILINE)) for name, text in files.items()}
    training = listed.pop("requirements.txt")
    return {name.replace("-", "_") for name in set().union(*listed.values()) - training} - {"opt_einsum"}  # by torch


def test_a_start_does_not_import_what_it_may_not_need() -> None:
    """Slow packages, without which a wrong flag is reported and a run begins sooner, and those that may be absent."""
    absent = optional_packages()
    assert {"deepspeed", "transformers", "onnx", "openvino", "pytest", "tensorboard"} <= absent
    trackers = ["wandb", "mlflow"]
    of_one_command = ["matplotlib", "faster_coco_eval", "fsspec"]
    of_torch = ["torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "torchvision", "models.triton_kernels"]
    unneeded = [*trackers, *of_one_command, *of_torch, "pandas", "scipy", *sorted(absent)]
    script = f"import sys, train, val, detect, export; print([name for name in {unneeded} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
