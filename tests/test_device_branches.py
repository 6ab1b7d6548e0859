"""docs/gpu.md lists every place of the code that asks for the kind of a device, with the tests that cover it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import names, tables, text_of
from utils.files import ROOT

PAGE = ROOT / "docs" / "gpu.md"
KINDS = {"cpu", "cuda", "mps"}
QUERIES = ("torch.cuda.", "torch.accelerator.", "torch.backends.mps.", "torch.backends.cuda.", "torch.backends.cudnn.")
ATTRIBUTES = {"is_cuda", "is_mps", "is_cpu"}
SCOPES = (ast.FunctionDef, ast.ClassDef)


def questions(source: str) -> Iterator[tuple[str, str]]:
    """Iterate over what a module asks of devices: the function, with its class, and the comparison or the query."""

    def visit(node: ast.AST, scope: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = f"{scope}.{child.name}".lstrip(".") if isinstance(child, SCOPES) else scope
            text = ast.unparse(child) if isinstance(child, (ast.Compare, ast.Attribute)) else ""
            constants = {part.value for part in ast.walk(child) if isinstance(part, ast.Constant)} if text else set()
            if isinstance(child, ast.Compare) and constants & KINDS:
                yield name, text.replace("'", '"')
            elif isinstance(child, ast.Attribute) and text.startswith(QUERIES):
                yield name, text
                continue  # not its parts
            elif isinstance(child, ast.Attribute) and child.attr in ATTRIBUTES:
                yield name, text
            yield from visit(child, name)

    return visit(ast.parse(source), "")


def branches() -> dict[tuple[str, str], set[str]]:
    """Return the questions of all modules, by file and function."""
    files = [
        *ROOT.glob("*.py"),
        *(file for part in ("data", "models", "utils") for file in (ROOT / part).rglob("*.py")),
    ]
    found: dict[tuple[str, str], set[str]] = {}
    for file in sorted(files):
        for function, question in questions(text_of(file)):
            found.setdefault((file.relative_to(ROOT).as_posix(), function), set()).add(question)
    return found


def stated() -> dict[tuple[str, str], tuple[set[str], list[str]]]:
    """Return the rows of the page's table: questions and tests by file and function."""
    (table,) = (table for table in tables(text_of(PAGE)) if table[0][:2] == ["file", "function"])
    return {
        (names(file)[0], names(function)[0]): (set(names(asks)), names(tests))
        for file, function, asks, tests in table[1:]
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f(d):\n    return d.type == "cuda"', [("f", 'd.type == "cuda"')]),
        ("class A:\n    def f(self, x):\n        return x.data.is_cuda", [("A.f", "x.data.is_cuda")]),
        ("def f():\n    torch.cuda.nccl.version()", [("f", "torch.cuda.nccl.version")]),
        ('device = torch.device("cuda")', []),
        ('x = d.type in ("cpu", "cuda")', [("", 'd.type in ("cpu", "cuda")')]),
    ],
)
def test_questions_are_seen(source: str, expected: list[tuple[str, str]]) -> None:
    assert list(questions(source)) == expected


def test_the_table_lists_every_branch_on_a_device() -> None:
    """Both ways: nothing is missing, and nothing is listed that the code does not ask any more."""
    assert {place: asks for place, (asks, _) in stated().items()} == branches()


def test_the_tests_of_the_table_exist() -> None:
    missing = []
    for place, (_, tests) in stated().items():
        assert tests, place
        for test in tests:
            file, _, name = test.partition("::")
            path = Path(ROOT / file)
            if not (path.is_file() and re.search(rf"^def {name}\(", text_of(path), re.MULTILINE)):
                missing.append((place, test))
    assert missing == []
