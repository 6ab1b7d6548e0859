"""Makefile and requirements: what each target installs, and which versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import not_here
from utils.files import ROOT

TRAINING = ["requirements.txt"]
EVERYTHING = ["requirements.txt", "requirements-dev.txt"]  # the latter includes the other files
# Stands in for python3: writes its arguments into the file `calls`, and makes "environments" with itself.
PYTHON = """#!/bin/sh
echo "$@" >> calls
[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
[ ! -e offline ] || [ "$3" != install ]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What make reads, and a stand-in for Python."""
    if not shutil.which("make"):
        not_here("the command make")
    for file in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy2(file, tmp_path)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)
    return tmp_path


def make(checkout: Path, target: str, fails: bool = False) -> tuple[list[str], list[str]]:
    """Run a target; return the requirement files that it installs, and its last call of Python."""
    calls = checkout / "calls"
    calls.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", target, f"PYTHON={checkout / 'python3'}"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    made = calls.read_text().splitlines()
    installs = [line for line in made if " install " in line]
    return [word for line in installs for word in line.split() if word.endswith(".txt")], made[-1:]


def test_train_installs_what_training_needs(checkout: Path) -> None:
    assert make(checkout, "train") == (TRAINING, ["train.py"])
    assert make(checkout, "train") == ([], ["train.py"])


@pytest.mark.parametrize("target", ["setup", "test", "lint"])
def test_other_targets_install_everything(target: str, checkout: Path) -> None:
    """Before and after `make train`, which then installs nothing more."""
    if target == "lint":
        tools = checkout / ".venv" / "bin"
        tools.mkdir(parents=True)
        for tool in ("ruff", "mypy"):
            shutil.copy2(checkout / "python3", tools / tool)
    assert make(checkout, target)[0] == EVERYTHING
    assert make(checkout, target)[0] == []
    assert make(checkout, "train")[0] == []


def test_setup_after_train_installs_everything(checkout: Path) -> None:
    assert make(checkout, "train")[0] == TRAINING
    assert make(checkout, "setup")[0] == EVERYTHING


def test_a_changed_file_is_installed_again(checkout: Path) -> None:
    make(checkout, "setup")
    os.utime(checkout / "requirements-dev.txt", (2**32, 2**32))
    assert make(checkout, "train")[0] == []
    os.utime(checkout / "requirements.txt", (2**32, 2**32))
    assert make(checkout, "train")[0] == TRAINING


def test_an_interrupted_installation_is_done_again(checkout: Path) -> None:
    (checkout / "offline").touch()
    make(checkout, "train", fails=True)
    (checkout / "offline").unlink()
    assert make(checkout, "train") == (TRAINING, ["train.py"])


# Requirements


def requirements(*files: str) -> list[Requirement]:
    """Return the requirements of files, by default of all, without those of the files that they include."""
    paths = [ROOT / file for file in files] or sorted(ROOT.glob("requirements*.txt"))
    lines = [line.partition("#")[0].strip() for path in paths for line in path.read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def floors(requirement: Requirement) -> list[str]:
    return [limit.version for limit in requirement.specifier if limit.operator in (">=", "==")]


def test_everything_has_a_floor() -> None:
    assert len(requirements()) > 20
    assert [requirement.name for requirement in requirements() if len(floors(requirement)) != 1] == []


def test_deepspeed_has_an_upper_bound() -> None:
    """Its private attributes are used, which any version may change."""
    (deepspeed,) = (requirement for requirement in requirements() if requirement.name == "deepspeed")
    assert "<" in [limit.operator for limit in deepspeed.specifier]


def test_the_constraints_satisfy_the_requirements() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []  # no local paths
    versions = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    wrong = [
        str(requirement)
        for requirement in requirements()
        if not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_the_scripts_start_with_the_packages_of_training_alone() -> None:
    training = requirements(*TRAINING)
    absent = [known.name.replace("-", "_") for known in requirements() if known not in training]
    assert {"deepspeed", "transformers", "onnx", "openvino", "pytest", "tensorboard"} <= set(absent)
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import train, val, detect, export"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
