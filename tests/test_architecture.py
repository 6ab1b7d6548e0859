"""The rules of the project: what may import what, where ranks and tasks are known, sizes, and names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from data.dataset import dataset_class
from data.sources import DATA_KEYS
from models.tasks import TASKS
from models.tasks.classification.torchvision_models import CLASSIFIER_KEYS
from models.yolo import MODEL_KEYS
from utils.files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("models", "data", "utils")
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))


def sources(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


SCRIPT_FILES = [ROOT / f"{name}.py" for name in SCRIPTS]
PROJECT = [*SCRIPT_FILES, *sources(*PARTS)]
EVERYTHING = [*PROJECT, *sources("tests", "benchmarks")]


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_name(path): path for path in PROJECT}


def test_there_is_something_to_look_at() -> None:
    assert {"train", "val", "detect", "export"} <= set(SCRIPTS)
    assert all(len(sources(part)) > 3 for part in PARTS)
    assert {"train", "models.tasks", "models.tasks.contract", "utils.config.settings"} <= set(MODULES)


# Imports


class Imports(ast.NodeVisitor):
    """The imports of a source, by dotted names; relative ones as "."; those of `from a import b` as a.b.

    runtime: anywhere but under `if TYPE_CHECKING:`. typing: under it.
    """

    def __init__(self, source: str) -> None:
        self.runtime: set[str] = set()
        self.typing: set[str] = set()
        self._for_types = False
        self.visit(ast.parse(source))

    def _add(self, *names: str) -> None:
        (self.typing if self._for_types else self.runtime).update(names)

    def visit_Import(self, node: ast.Import) -> None:
        self._add(*(alias.name for alias in node.names))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add(*("." if node.level else f"{node.module}.{alias.name}" for alias in node.names))

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            self._add(*(word.value for word in node.args[:1] if isinstance(word, ast.Constant)))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        before = self._for_types
        self._for_types = before or ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.body:
            self.visit(child)
        self._for_types = before
        for child in node.orelse:
            self.visit(child)


def top_level(names: set[str]) -> set[str]:
    """Return the packages of dotted names: those before the first dot."""
    return {name.partition(".")[0] or "." for name in names}


def modules_in(names: set[str]) -> set[str]:
    """Return the modules of the project that dotted names mean: utils.files for utils.files.ROOT."""
    known = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return known & set(MODULES)


def test_imports_are_seen() -> None:
    text = """
import a.b, c
from d.e import f, g
def function():
    from h import i
    importlib.import_module("j.k")
from . import l
from .m import n
if TYPE_CHECKING:
    import o.p
    if sys.version_info >= (3, 11):
        from q import r
else:
    import s
if typing.TYPE_CHECKING:
    from t import u
if sys.platform == "win32":
    import v
"""
    imports = Imports(text)
    assert imports.runtime == {"a.b", "c", "d.e.f", "d.e.g", "h.i", "j.k", ".", "s", "v"}
    assert imports.typing == {"o.p", "q.r", "t.u"}
    assert top_level(imports.runtime) == {"a", "c", "d", "h", "j", ".", "s", "v"}
    assert modules_in({"utils.files.ROOT", "utils.errors", "torch.nn"}) == {"utils.files", "utils.errors"}


CONTRACT = "models.tasks.contract"


def forbidden_imports(path: str, source: str) -> set[str]:
    """Return what a module of a part must not import: the other parts that are not below it, scripts and tests."""
    part = path.partition("/")[0]
    refused = {"models": {"data"}, "data": {"models"}, "utils": {"models", "data"}}[part]
    refused |= {*SCRIPTS, "tests", "benchmarks", "."}
    imports = Imports(source)
    typing = {name for name in imports.typing if not name.startswith(f"{CONTRACT}.")}
    return {name for name in imports.runtime | typing if name.partition(".")[0] in refused or name == "."}


@pytest.mark.parametrize(
    ("path", "line", "refused"),
    [
        ("models/yolo.py", "import data.images", True),
        ("models/yolo.py", "from data.images import read_image", True),
        ("models/tasks/detection/task.py", "    from data.detection import DetectionData", True),
        ("data/images.py", "from models.tasks import TASKS", True),
        ("data/images.py", "from models.tasks.contract import Batch", True),
        ("data/images.py", "if TYPE_CHECKING:\n    from models.tasks.contract import Batch", False),
        ("data/images.py", "if TYPE_CHECKING:\n    from models.yolo import YoloModel", True),
        ("utils/run.py", "if TYPE_CHECKING:\n    from models.tasks.contract import Batch", False),
        ("utils/run.py", "if TYPE_CHECKING:\n    from data.images import Item", True),
        ("utils/run.py", "def f():\n    import models.yolo", True),
        ("utils/run.py", "import val", True),
        ("utils/run.py", "from tests.conftest import ROOT", True),
        ("models/yolo.py", "from . import layers", True),
        ("models/yolo.py", "from models.layers import Conv", False),
        ("data/images.py", "from utils.files import ROOT", False),
    ],
)
def test_wrong_directions_are_seen(path: str, line: str, refused: bool) -> None:
    indented = "def f():\n" + line if line.startswith(" ") else line
    assert bool(forbidden_imports(path, f"{indented}\n")) == refused


def test_imports_point_one_way() -> None:
    for path in sources(*PARTS):
        wrong = forbidden_imports(relative(path), text_of(path))
        assert not wrong, f"{relative(path)} imports {', '.join(sorted(wrong))}"


# Inside utils/, from the bottom; the modules beside the packages that are not named are below all of them.
LAYERS = (
    ("config",),
    ("distributed",),
    ("checkpoint", "plots", "tracking"),
    ("training", "run_folder"),
    ("run", "python_api"),
)


def layer(module: str) -> int:
    name = module.split(".")[1]
    return next((number for number, names in enumerate(LAYERS, 1) if name in names), 0)


def higher_imports(module: str, source: str) -> set[str]:
    """Return what a module of utils/ must not import at run time: what is not below its folder."""
    wrong = set()
    for name in modules_in(Imports(source).runtime):
        same_folder = name.split(".")[:2] == module.split(".")[:2]
        if name.startswith("utils.") and not same_folder and layer(name) >= max(layer(module), 1):
            wrong.add(name)
    return wrong


@pytest.mark.parametrize(
    ("module", "line", "refused"),
    [
        ("utils.files", "from utils.errors import UserError", False),
        ("utils.files", "from utils.config.options import flag", True),
        ("utils.config.parser", "from utils.console import show", False),
        ("utils.config.parser", "from utils.distributed.ranks import world_size", True),
        ("utils.distributed.exit", "from utils.config import options", False),
        ("utils.distributed.exit", "from utils.checkpoint.progress import Progress", True),
        ("utils.checkpoint.resume", "from utils.training.ema import ModelEMA", True),
        ("utils.checkpoint.resume", "if TYPE_CHECKING:\n    from utils.training.ema import ModelEMA", False),
        ("utils.checkpoint.resume", "from utils.tracking import run_log", True),
        ("utils.checkpoint.resume", "from utils.run import Run", True),
        ("utils.checkpoint.resume", "from utils.checkpoint.progress import Progress", False),
        ("utils.training.report", "from utils.checkpoint.progress import Progress", False),
        ("utils.training.report", "import utils.run", True),
        ("utils.run", "from utils.training.ema import ModelEMA", False),
    ],
)
def test_imports_of_what_is_above_are_seen(module: str, line: str, refused: bool) -> None:
    assert bool(higher_imports(module, f"{line}\n")) == refused


def test_imports_inside_utils_point_one_way() -> None:
    for module, path in MODULES.items():
        if module.startswith("utils."):
            wrong = higher_imports(module, text_of(path))
            assert not wrong, f"{relative(path)} imports {', '.join(sorted(wrong))}"


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a cycle of imports, [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """Not inside functions either, where an import may hide a cycle."""
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not cycle({"a": {"b", "c"}, "b": {"c"}})
    graph = {module: modules_in(Imports(text_of(path)).runtime) - {module} for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 300
    assert not cycle(graph)


IMPORT_EACH = """
import importlib, os, sys
import accelerate
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in ("deepspeed", "onnx", "wandb"):
                raise
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be imported first")
"""


def test_each_module_can_be_imported_first() -> None:
    """In a process that has imported nothing else of the project."""
    names = [name for name in MODULES if not name.endswith("__main__")]
    ended = subprocess.run([sys.executable, "-c", IMPORT_EACH, *names], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_packages_re_export_nothing() -> None:
    """An import names the module that defines the thing, and loads no more than that."""
    for path in PROJECT:
        if path.name == "__init__.py":
            imports = modules_in(Imports(text_of(path)).runtime)
            inside = {name for name in imports if name.startswith(module_name(path))}
            assert not inside, f"{relative(path)} imports {', '.join(sorted(inside))}"
            assert "__all__" not in text_of(path)
    filled = [relative(path) for path in PROJECT if path.name == "__init__.py" and text_of(path)]
    assert filled == ["models/tasks/__init__.py"]  # the table of the tasks


def test_accelerate_is_imported_by_those_that_need_it() -> None:
    users = {relative(path) for path in PROJECT if "accelerate" in top_level(Imports(text_of(path)).runtime)}
    assert users <= {
        *(f"{name}.py" for name in SCRIPTS),
        "utils/run.py",
        "utils/distributed/accelerator.py",
        "utils/distributed/collectives.py",
        "utils/distributed/launcher.py",
        "utils/distributed/prepare.py",
        "utils/tracking/accelerate_process.py",
        "utils/tracking/tracker.py",
        "utils/training/profiler.py",
    }


# Where the rank is known

ASKING_FOR_RANK = {
    *("rank", "local_rank", "node_rank", "group_rank", "process_index", "local_process_index"),
    *("is_main_process", "is_local_main_process", "is_last_process", "main_process_first", "local_main_process_first"),
    *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"),
    *("get_rank", "get_node_local_rank", "get_global_rank", "get_group_rank", "ranks", "Ranks", "speaks_for_machine"),
}
READING_ATTRIBUTES = {"getattr", "hasattr", "attrgetter", "methodcaller"}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"}


def unparsed(call: ast.Call) -> str:
    """Return what is called, as source."""
    return ast.unparse(call.func)


def rank_questions(source: str) -> list[str]:
    """Return the lines of a source that ask which process it is, and by what; to define a name is not to ask."""
    questions = []
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
        elif isinstance(node, ast.Call) and unparsed(node).rpartition(".")[2] in READING_ATTRIBUTES:
            asked = {value.value for value in node.args if isinstance(value, ast.Constant)} & ASKING_FOR_RANK
        questions += [f"{node.lineno}: {name}" for name in sorted(asked)]
    return questions


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
        ("from utils.distributed.ranks import launched, local_world_size, world_size\n", False),
        ("n = accelerator.num_processes\n", False),
        ("class Options:\n    local_rank: int = -1\n", False),
        ("names = ('local_rank', 'device')\n", False),
        ("lines = [f'process {rank}' for rank, line in enumerate(lines)]\n", False),
        ("run.on_main(work)\n", False),
    ],
)
def test_questions_for_the_rank_are_seen(source: str, asks: bool) -> None:
    assert bool(rank_questions(source)) == asks


def asked_outside(path: str, source: str) -> list[str]:
    """Return the questions for the rank in a module that must not ask."""
    allowed = path == "utils/run.py" or path.startswith("utils/distributed/")
    return [] if allowed else rank_questions(source)


def test_only_the_run_and_its_processes_know_the_rank() -> None:
    for path in PROJECT:
        questions = asked_outside(relative(path), text_of(path))
        assert not questions, f"{relative(path)} asks in line {', '.join(questions)}"


@pytest.mark.parametrize(
    "mistake",
    [
        "if run.accelerator.is_main_process: pass",
        "first = accelerator.process_index == 0",
        "here = ranks()",
        "if options.local_rank < 1: pass",
        "if speaks_for_machine(): print()",
        "from utils.distributed.ranks import ranks as position",
        "import operator; main = operator.attrgetter('is_main_process')(accelerator)",
        "import torch.distributed as dist; rank = dist.get_rank()",
        "import os; rank = int(os.environ.get('RANK', 0))",
    ],
)
@pytest.mark.parametrize("name", ["train.py", "models/yolo.py", "data/sampler.py", "utils/training/ema.py"])
def test_a_planted_question_for_the_rank_is_seen(name: str, mistake: str) -> None:
    source = text_of(ROOT / name)
    line = source.count("\n") + 1
    assert {question.partition(":")[0] for question in asked_outside(name, f"{source}{mistake}\n")} == {str(line)}
    assert not asked_outside("utils/distributed/store.py", mistake)


def test_one_module_reads_and_writes_torchs_stores() -> None:
    """The rendezvous makes them, and spawn hosts one."""
    known = re.compile(r"\b(TCPStore|PrefixStore|HashStore|FileStore|_get_default_store|underlying_store|store_key)\b")
    users = {relative(path) for path in PROJECT if known.search(text_of(path))}
    modules = ("store", "rendezvous", "spawn")
    assert users == {f"utils/distributed/{name}.py" for name in modules}


# Where tasks and options are known


@pytest.mark.parametrize("name", ["train.py", "val.py", "utils/run.py"])
def test_the_loop_knows_no_task(name: str) -> None:
    words = "|".join(sorted({*TASKS, "detect", "box"}))
    for number, line in enumerate(text_of(ROOT / name).splitlines(), 1):
        match = re.search(rf"(?<![a-z])({words})", line, re.IGNORECASE)
        assert not match, f"{name}:{number} names a task: {line.strip()}"


def task_names(source: str) -> list[str]:
    """Return the lines of a source that name a task, and the names; the script detect.py is not the task `detect`."""
    entries = TASKS.values()
    places = {place for entry in entries for place in (entry.task, entry.data)}  # module:class
    words = {*(place.partition(":")[2] for place in places), *(entry.yolov5_class for entry in entries)}
    modules = {place.partition(":")[0] for place in places} | {entry.task.rpartition(".")[0] for entry in entries}
    known = re.compile("|".join([*map(re.escape, words | modules), "detector", "classif"]), re.IGNORECASE)
    names = []
    for number, line in enumerate(source.splitlines(), 1):
        names += [f"{number}: {match[0]}" for match in known.finditer(line)]
    constants = {*TASKS, *(entry.head for entry in entries)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in constants:
            names.append(f"{node.lineno}: {node.value}")
    return names


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("if entry.name == 'detect': pass", 1),
        ("if model.head == 'Classify': pass", 1),
        ("from models.tasks.detection.task import DetectionTask", 2),
        ("import data.classification", 1),
        ("# of a detector", 1),
        ("def is_classifier(model): pass", 1),
        ("options = DetectOptions()  # the flags of detect.py", 0),
        ("from detect import Predictor", 0),
        ("task = TASKS[name].load()", 0),
    ],
)
def test_names_of_tasks_are_seen(line: str, names: int) -> None:
    assert len(task_names(line)) >= names
    assert bool(task_names(line)) == bool(names)


def test_scripts_and_utils_name_no_task() -> None:
    """Flags and hyperparameters that only one task knows stand with the others, in utils/config/."""
    for path in (*SCRIPT_FILES, *sources("utils")):
        if not relative(path).startswith("utils/config/"):
            names = task_names(text_of(path))
            assert not names, f"{relative(path)} names a task in line {', '.join(names)}"


def test_only_the_configuration_names_the_options_of_training() -> None:
    """Other modules get a slice of them."""
    users = {relative(path) for path in PROJECT if re.search(r"\bTrainOptions\b", text_of(path))}
    assert users
    assert all(user.startswith("utils/config/") for user in users)


def test_tasks_have_data() -> None:
    for entry in TASKS.values():
        assert not entry.load().__abstractmethods__
        assert not dataset_class(entry.data).__abstractmethods__


# What happens at import


class AtImport(ast.NodeVisitor):
    """Find reads of the environment that happen when a module is imported: not those inside functions."""

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
    for path in PROJECT:
        lines = environment_reads(text_of(path))
        assert not lines, f"{relative(path)} reads the environment in lines {lines}"


# Sizes

SCRIPT_MODULES, SCRIPT_NAMES = 16, 40  # of the project that a script imports, at most
TRAIN_LINES, MAIN_LINES, FUNCTION_LINES = 420, 45, 60
POSITIONAL_ARGUMENTS = 8
UTILS_MODULES = 12  # beside the packages


def functions(source: str) -> dict[str, int]:
    """Return the lines of each function, its decorators apart, by name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes}


def crowded_calls(source: str) -> list[str]:
    """Return the calls with too many positional arguments."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"{call.lineno}: {unparsed(call)}" for call in calls if len(call.args) > POSITIONAL_ARGUMENTS]


def imported_by_script(source: str) -> tuple[int, int]:
    """Return how many modules of the project a script imports, and how many names from them."""
    names = {name for name in Imports(source).runtime if name.partition(".")[0] in (*PARTS, *SCRIPTS)}
    return len(modules_in(names)), len(names)


def test_sizes_are_measured() -> None:
    source = "@cached\ndef a():\n    def b():\n        pass\n    return b\nasync def c(): pass\n"
    assert functions(source) == {"a": 4, "b": 2, "c": 1}
    assert crowded_calls("f(1, 2, 3, 4, 5, 6, 7, 8, i=9)\nx.f(1, 2, 3, 4,\n  5, 6, 7, 8, 9)") == ["2: x.f"]
    text = "import torch\nfrom utils import coco\nfrom utils.files import ROOT, read_yaml\nfrom val import Evaluator\n"
    assert imported_by_script(text) == (3, 4)


def test_train_is_short() -> None:
    source = text_of(ROOT / "train.py")
    assert len(source.splitlines()) <= TRAIN_LINES


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_a_table_of_contents(name: str) -> None:
    source = text_of(ROOT / f"{name}.py")
    modules, names = imported_by_script(source)
    assert modules <= SCRIPT_MODULES
    assert names <= SCRIPT_NAMES
    assert functions(source).get("main", 0) <= MAIN_LINES  # predictor.py and hubconf.py have none


def test_functions_can_be_read() -> None:
    for path in EVERYTHING:
        long = {name: lines for name, lines in functions(text_of(path)).items() if lines > FUNCTION_LINES}
        assert not long, relative(path)


def test_calls_can_be_read() -> None:
    for path in PROJECT:
        crowded = crowded_calls(text_of(path))
        assert not crowded, f"{relative(path)} has too many positional arguments in line {', '.join(crowded)}"


def test_utils_is_packages() -> None:
    modules = [path for path in (ROOT / "utils").glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= UTILS_MODULES


# Names and shipped files

VAGUE = {
    *("common", "general", "helper", "helpers", "misc", "stuff", "util", "utils"),
    *("board", "calls", "finite", "kept", "meeting", "panel", "place", "stages"),  # known to their author only
}


def is_vague(path: str) -> bool:
    *folders, name = path.removesuffix(".py").removeprefix("utils/").removeprefix("tests/utils/").split("/")
    words = [word for part in (*folders, name.removeprefix("test_")) for word in part.split("_")]
    return bool(VAGUE & set(words))


def test_modules_have_names_of_the_field() -> None:
    assert is_vague("utils/distributed/kept.py")
    assert is_vague("models/tasks/detection/loss_helpers.py")
    assert is_vague("tests/test_common.py")
    assert is_vague("data/misc/images.py")
    assert not is_vague("utils/training/nonfinite_steps.py")
    assert not is_vague("tests/utils/tracking/test_tensorboard.py")
    wrong = [relative(path) for path in EVERYTHING if is_vague(relative(path))]
    assert not wrong


def constants(source: str) -> dict[str, str]:
    """Return the constants that a module defines, with their values as source; type variables apart."""
    values = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Tuple):
                parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
                named = list(zip(target.elts, parts, strict=False))
            else:
                named = [(target, value)]
            for name, part in named:
                if isinstance(name, ast.Name) and name.id.isupper() and "TypeVar" not in ast.unparse(part):
                    values[name.id] = ast.unparse(part)
    return values


def test_constants_are_seen() -> None:
    text = "A = 1\nB, C = 2, (3, 4)\nD: int = 5\nE, F = range(2)\nT = TypeVar('T')\nfrom g import G\nlower = 1\n"
    assert constants(text) == {"A": "1", "B": "2", "C": "(3, 4)", "D": "5", "E": "range(2)", "F": "range(2)"}


def conflicts(sources: Mapping[str, str]) -> list[str]:
    """Return the constants that two modules define with different values, in sources by path.

    Two tasks may each have their own value of what every task has, such as METRIC_NAMES.
    """
    definitions = defaultdict(list)
    for path, source in sources.items():
        task = re.match(r"models/tasks/(\w+)/", path)
        for name, value in constants(source).items():
            definitions[name].append((path, value, task[1] if task else ""))
    wrong = []
    for name, places in definitions.items():
        for (path, value, task), (other_path, other_value, other_task) in combinations(places, 2):
            of_two_tasks = task and other_task and task != other_task
            if value != other_value and not of_two_tasks:
                wrong.append(f"{name} in {path} and {other_path}")
    return wrong


def test_constants_of_one_name_are_compared() -> None:
    detection, classification = "models/tasks/detection/a.py", "models/tasks/classification/a.py"
    assert conflicts({"utils/a.py": "SIDE = 1", "data/b.py": "SIDE = 2"}) == ["SIDE in utils/a.py and data/b.py"]
    assert conflicts({"utils/a.py": "SIDE = 1", detection: "SIDE = 2"})
    assert conflicts({detection: "SIDE = 1", "models/tasks/detection/b.py": "SIDE = 2"})
    assert not conflicts({detection: "NAMES = ('a',)", classification: "NAMES = ('b',)"})
    assert not conflicts({"utils/a.py": "SIDE = 1", "data/b.py": "SIDE = 1"})


def test_a_constant_has_one_meaning() -> None:
    assert not conflicts({relative(path): text_of(path) for path in PROJECT})


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
    """Other programs read them line by line."""
    path = ROOT / "data" / f"{name}.yaml"
    names = read_yaml(path)["names"]
    assert list(read_yaml(path))[-1] == "names"
    assert path.read_text().rstrip().splitlines()[-81:] == ["names:", *(f"  {k}: {v}" for k, v in names.items())]
    assert (len(names), names[0], names[79]) == (80, "person", "toothbrush")


def test_a_start_does_not_import_what_it_may_not_need() -> None:
    """Each takes a second or more: without them a wrong flag is reported sooner, and a run begins sooner."""
    trackers = ["wandb", "tensorboard", "mlflow"]
    of_one_command = ["deepspeed", "matplotlib", "onnx", "onnxruntime", "openvino", "faster_coco_eval", "fsspec"]
    of_torch = ["torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "torchvision", "transformers"]
    slow = [*trackers, *of_one_command, *of_torch, "pandas", "scipy"]
    script = f"import sys, train, val; print([name for name in {slow} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
