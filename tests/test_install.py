"""Requirements: which versions, and what training alone needs."""

from __future__ import annotations

import re
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from utils.files import ROOT


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
    training = requirements("requirements.txt")
    absent = [known.name.replace("-", "_") for known in requirements() if known not in training]
    assert {"deepspeed", "transformers", "onnx", "openvino", "pytest", "tensorboard"} <= set(absent)
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import train, val, detect, export"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
