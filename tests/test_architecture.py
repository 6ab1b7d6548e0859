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
from data.sources import DATA_KEYS
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
        "utils/distributed/collectives.py",
        "utils/distributed/rendezvous.py",
        "utils/tracking/tracker.py",
    }


def imported_modules(source: str) -> set[str]:
    """The modules that a source imports, anywhere in it, with all their packages: utils, utils.config, ..."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}


def test_imported_modules_are_seen() -> None:
    text = "import a.b\nfrom c.d import e\ndef f():\n    from utils.config import g\n"
    assert imported_modules(text) == {"a", "a.b", "c", "c.d", "c.d.e", "utils", "utils.config", "utils.config.g"}


UPPER = ("checkpoint", "plots", "tracking", "training")


@pytest.mark.parametrize(
    ("part", "above"),
    [
        ("config", ("distributed", "run", *UPPER)),
        ("distributed", ("run", *UPPER)),
        ("checkpoint", ("run",)),
        ("plots", ("run",)),
        ("training", ("run",)),
    ],
)
def test_imports_inside_utils_point_one_way(part: str, above: tuple[str, ...]) -> None:
    for path in sources(f"utils/{part}"):
        wrong = imported_modules(path.read_text(encoding="utf-8")) & {f"utils.{name}" for name in above}
        assert not wrong, f"{relative(path)} imports {wrong}"


# Who may ask for the rank

ASKING_FOR_RANK = {
    *("rank", "local_rank", "node_rank", "group_rank", "process_index", "local_process_index"),
    *("is_main_process", "is_local_main_process", "is_last_process", "main_process_first", "local_main_process_first"),
    *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"),
    *("get_rank", "get_node_local_rank", "get_global_rank", "get_group_rank", "ranks", "Ranks", "speaks_for_machine"),
}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"}


def rank_questions(source: str) -> list[str]:
    """The lines of a source that ask which process it is, and by what; to define a name is not to ask."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: set[str] = set()
        if isinstance(node, ast.Attribute):
            asked = {node.attr} & ASKING_FOR_RANK
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            asked = {node.id} & (ASKING_FOR_RANK - {"rank"})  # a local variable, such as a loop's
        elif isinstance(node, ast.ImportFrom):
            asked = {alias.name for alias in node.names} & ASKING_FOR_RANK
        elif isinstance(node, ast.Import):
            asked = {alias.name for alias in node.names} & {"utils.distributed.ranks"}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            asked = {node.value} & RANK_VARIABLES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            asked = {value.value for value in node.args[1:2] if isinstance(value, ast.Constant)} & ASKING_FOR_RANK
        found += [f"{node.lineno}: {name}" for name in sorted(asked)]
    return found


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("if accelerator.is_main_process:\n    pass\n", True),
        ("n = run.accelerator.process_index\n", True),
        ("@accelerator.on_main_process\ndef f():\n    pass\n", True),
        ("with accelerator.main_process_first():\n    pass\n", True),
        ("getattr(accelerator, 'is_main_process')\n", True),
        ("from torch import distributed\nif distributed.get_rank() == 0:\n    pass\n", True),
        ("from torch.distributed import get_rank\n", True),
        ("from utils.distributed.ranks import ranks\n", True),
        ("from utils.distributed.ranks import ranks as position\n", True),
        ("from utils.distributed.ranks import speaks_for_machine\n", True),
        ("from utils.distributed import ranks\n", True),
        ("import utils.distributed.ranks\n", True),
        ("import utils.distributed.ranks as r\n", True),
        ("def f(here):\n    return here.local_rank == 0\n", True),
        ("if ranks().rank == 0:\n    pass\n", True),
        ("rank, *_ = ranks()\n", True),
        ("if speaks_for_machine():\n    pass\n", True),
        ("import os\nif os.environ['RANK'] == '0':\n    pass\n", True),
        ("import os\nmain = os.getenv('LOCAL_RANK', '0') == '0'\n", True),
        ("from utils.distributed.ranks import launched, local_world_size, print_on_main, world_size\n", False),
        ("n = accelerator.num_processes\n", False),
        ("class Options:\n    local_rank: int = -1\n", False),
        ("names = ('local_rank', 'device')\n", False),
        ("lines = [f'process {rank}' for rank, line in enumerate(lines)]\n", False),
        ("run.on_main(work)\n", False),
    ],
)
def test_questions_for_the_rank_are_seen(source: str, asks: bool) -> None:
    assert bool(rank_questions(source)) == asks


def test_nobody_asks_which_process_it_is() -> None:
    for path in OWN:
        if relative(path) != "utils/run.py" and not relative(path).startswith("utils/distributed/"):
            found = rank_questions(path.read_text(encoding="utf-8"))
            assert not found, f"{relative(path)} asks in line {', '.join(found)}"


def test_one_module_reads_and_writes_torchs_stores() -> None:
    """The rendezvous makes them, and spawn hosts one."""
    known = re.compile(r"\b(TCPStore|PrefixStore|HashStore|FileStore|_get_default_store|underlying_store|store_key)\b")
    users = {relative(path) for path in OWN if known.search(path.read_text(encoding="utf-8"))}
    modules = ("store", "rendezvous", "spawn")
    assert users == {f"utils/distributed/{name}.py" for name in modules}


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
