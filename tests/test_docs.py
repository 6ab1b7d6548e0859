"""README.md, docs/ and the pages for contributors: links, commands and tables of flags agree with the repository."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.making import options_of
from utils.config.flags import DetectOptions, ExportOptions, TrainOptions, ValOptions, flags_of
from utils.errors import UserError
from utils.files import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTRIBUTORS_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
SCRIPTS = {"train.py": TrainOptions, "val.py": ValOptions, "detect.py": DetectOptions, "export.py": ExportOptions}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table of a page, without the line below its head."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    rows = [[line for line in block.splitlines() if not re.fullmatch(r"[|-]+", line)] for block in blocks]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table] for table in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, target: str) -> bool:
    """Return whether a relative link of a page leads nowhere."""
    file, _, anchor = target.partition("#")
    goal = (page.parent / file).resolve() if file else page
    return not goal.exists() or bool(anchor and anchor not in anchors(goal))


@pytest.mark.parametrize("page", [*PAGES, *CONTRIBUTORS_PAGES], ids=lambda page: page.name)
def test_links_of_a_page_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    relative = [link for link in links if "://" not in link]
    assert [link for link in relative if broken(page, link)] == []


def test_pages_named_in_code_exist() -> None:
    """In comments, messages and other files, with their anchors."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".yaml", ".toml", ".json", ".sbatch", ".sh", "Makefile", "Dockerfile")
    files = [name for name in tracked if name.endswith(kinds) and name != "tests/test_docs.py"]
    mentions = [
        (name, link)
        for name in files
        if (ROOT / name).exists()
        for link in re.findall(r"\bdocs/[\w-]+\.md(?:#[\w-]+)?", text_of(ROOT / name))
    ]
    assert mentions
    assert [mention for mention in mentions if broken(ROOT / "README.md", mention[1])] == []


def test_the_readme_links_to_every_page() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(re.findall(r"\]\(([^)#]+)", text_of(PAGES[0])))


COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:\$ )?((?:python|accelerate launch|accelerate_configs/start\.sh|sbatch|kubectl|sky) [^#]*)"
)


def commands(page: Path) -> list[str]:
    """Return the commands in the code blocks and inline code of a page that start one of our programs.

    Left out are a heredoc's lines, a launcher's flags without a script, and YOLOv5's own commands: the first column of
    the tables in migrating.md.
    """
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    if page.name == "migrating.md":
        prose = re.sub(r"^\|[^|]*\|", "|", prose, flags=re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [inline.replace("\n", " ") for inline in re.findall(r"`([^`]+)`", prose)]
    matches = [match[1].strip() for match in map(COMMAND.match, lines) if match]
    return [
        match for match in matches if match != "python -" and (".py" in match or not match.startswith("accelerate"))
    ]


def check(program: str, *words: str) -> None:
    """Raise UserError or AssertionError if a script or module of ours does not exist, or does not take the flags."""
    script = next((number for number, word in enumerate(words) if word in SCRIPTS), None)
    if program == "sbatch":
        script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
    if script is not None:  # a launcher's own flags come before it
        options_of(SCRIPTS.get(words[script], TrainOptions), words[script + 1 :])
    elif program == "python" and words[0] != "-m":
        assert (ROOT / words[0]).is_file(), f"{words[0]} does not exist"
    elif program == "python" and words[1].partition(".")[0] in ("utils", "data", "models", "benchmarks"):
        stem = ROOT.joinpath(*words[1].split("."))
        file = next((file for file in (stem.with_suffix(".py"), stem / "__main__.py") if file.is_file()), None)
        assert file, f"{words[1]} does not exist"
        unknown = [flag for flag in words[2:] if flag.startswith("--") and f'"{flag}"' not in text_of(file)]
        assert not unknown, f"{words[1]} has no {unknown}"


def command_errors(command: str) -> list[str]:
    """Return what is wrong with a command; the files of the repository that it names exist."""
    words = ["0" if word == "R" else word for word in shlex.split(command) if word != "..."]  # R: the machine's rank
    paths = [word for word in words if word.startswith(("data/", "models/", "accelerate_configs/")) and "." in word]
    errors = [f"{path} does not exist" for path in paths if not (ROOT / path).is_file()]
    try:
        check(*words)
    except (UserError, AssertionError) as error:
        errors.append(str(error))
    return errors


@pytest.mark.parametrize("page", [*PAGES, *CONTRIBUTORS_PAGES], ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """Scripts, modules, configuration files and flags."""
    wrong = {command: errors for command in commands(page) if (errors := command_errors(command))}
    assert wrong == {}


# The table of flags


def default_of(value: object) -> str:
    """Return a default as docs/flags.md writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_of_flags_agrees_with_the_parser(script: str) -> None:
    """Every flag with its other names, in its group of --help, with its default."""
    section = text_of(ROOT / "docs" / "flags.md").partition(f"\n## {script}\n")[2].partition("\n## ")[0]
    (table,) = tables(section)
    group, listed = "", {}
    for first, default, _ in table[1:]:
        if first.startswith("**"):
            group = first.strip("*")
        else:
            listed[tuple(names(first))] = (group, default)
    parsed = {
        tuple(f"--{name.replace('_', '-')}" for name in (option.name, *option.metadata["aliases"])): (
            option.metadata["group"],
            default_of(option.default),
        )
        for option in flags_of(SCRIPTS[script])
    }
    assert listed == parsed


def test_files_that_the_architecture_names_exist() -> None:
    page = text_of(ROOT / "docs" / "architecture.md")
    paths = re.findall(r"`((?:models|data|utils|tests|docs|benchmarks)/[\w./]+\.(?:py|yaml|md))`", page)
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
