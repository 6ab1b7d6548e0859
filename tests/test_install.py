"""Requirements: which versions, and what training alone needs; the wheel, and its command in another folder."""

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

from utils.distributed.deepspeed import FLOOR
from utils.files import ROOT, VERSION

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
SHORT = ("--imgsz", "64", "--device", "cpu", "--workers", "1", "--project", "runs", "--noplots")


def requirements(*files: str) -> list[Requirement]:
    """Return the requirements of files, by default of all, without those of the files that they include."""
    paths = [ROOT / file for file in files] or sorted(ROOT.glob("requirements*.txt"))
    lines = [line.partition("#")[0].strip() for path in paths for line in path.read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def test_everything_has_a_floor() -> None:
    assert len(requirements()) > 20
    assert [
        each.name for each in requirements() if sum(one.operator in (">=", "==") for one in each.specifier) != 1
    ] == []


def test_deepspeed_has_the_floor_of_the_code_and_an_upper_bound() -> None:
    """Its private attributes are used, which any version may change."""
    (deepspeed,) = (requirement for requirement in requirements() if requirement.name == "deepspeed")
    lowest, highest = sorted(map(str, deepspeed.specifier), reverse=True)
    assert (lowest, highest[0]) == (f">={FLOOR}", "<")


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


def packaged(file: str) -> bool:
    """Return whether the wheel must have a file of the repository."""
    folder, _, name = file.rpartition("/")
    if not folder:
        return name == "sweep.yaml" or (name.endswith(".py") and name != "setup.py")
    if folder.startswith("docs"):
        return file.endswith(".md")
    return file.startswith(("accelerate_configs/", "data/", "models/", "utils/"))


@pytest.fixture(scope="module")
def repository_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [file for file in listed if (ROOT / file).is_file()]


@pytest.fixture(scope="module")
def site(repository_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel of a copy of the repository: a build writes beside its files."""
    folder = tmp_path_factory.mktemp("wheel")
    for file in repository_files:
        (copy := folder / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, copy)
    offline = ("--no-index", "--no-deps")
    build = [*PIP, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "copy")]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("lockstep-*.whl")
    subprocess.run([*PIP, "install", *offline, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.fixture(scope="module")
def elsewhere(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with packages of a user that are called as the repository's are."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("data", "models", "utils", "lockstep"):
        (folder / name).mkdir()
        (folder / name / "own.py").touch()
        if name != "lockstep":  # which may be a clone of the repository
            (folder / name / "__init__.py").touch()
    return folder


def lockstep(site: Path, folder: Path, *words: str, command: tuple[str, ...] = ()) -> str:
    """Run the installed command in a folder; return what it printed. command: before `words`, instead of it."""
    where = {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = (*(command or (sys.executable, str(site / "bin" / "lockstep"))), *words)
    done = subprocess.run(words, cwd=folder, env={**os.environ, **where}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_wheel_has_one_name_and_every_file(site: Path, repository_files: list[str]) -> None:
    assert {path.name for path in site.iterdir()} == {"bin", "lockstep", f"lockstep-{VERSION}.dist-info"}
    installed = {path.relative_to(site / "lockstep").as_posix() for path in (site / "lockstep").rglob("*.*")}
    installed -= {name for name in installed if "__pycache__" in name}
    assert installed == {"__init__.py", *filter(packaged, repository_files)}


def test_the_wheel_requires_what_training_needs(site: Path) -> None:
    lines = (site / f"lockstep-{VERSION}.dist-info" / "METADATA").read_text().splitlines()
    required = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    assert {str(each) for each in required if not each.marker} == set(map(str, requirements("requirements.txt")))
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == {"deepspeed", "export", "tune"}


def test_an_installed_command_trains_in_another_folder(site: Path, elsewhere: Path, small_data: Path) -> None:
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--epochs", "1")
    printed = lockstep(site, elsewhere, "train", *what, *SHORT)
    assert "results in runs/exp" in printed
    assert len((elsewhere / "runs" / "exp" / "results.csv").read_text().splitlines()) == 2
    assert lockstep(site, elsewhere, "--version") == f"lockstep {VERSION}\n"
    assert lockstep(site, elsewhere, "--folder") == f"{site / 'lockstep'}\n"


@pytest.mark.long
def test_all_installed_commands(site: Path, elsewhere: Path) -> None:
    """With processes of their own, by a launcher, and the built-in data, drawn into the working folder."""
    job = ("train", "--epochs", "1", *SHORT)
    lockstep(site, elsewhere, *job, "--name", "spawned", "--processes", "2")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "lockstep")
    lockstep(site, elsewhere, *job, "--name", "launched", command=launcher)
    first, second = ((elsewhere / "runs" / name / "results.csv").read_text() for name in ("spawned", "launched"))
    assert first == second
    images, weights = (
        elsewhere / "datasets" / "shapes" / "images" / "val",
        ("--weights", "runs/spawned/weights/best.pt"),
    )
    assert "mAP50" in lockstep(site, elsewhere, "val", "--data", "shapes.yaml", *weights, *SHORT)
    detect = ("detect", "--source", str(images), *weights, "--project", "detected", "--device", "cpu")
    assert "160 images" in lockstep(site, elsewhere, *detect)
    lockstep(site, elsewhere, "export", *weights, "--include", "torchscript")
    assert (elsewhere / "runs" / "spawned" / "weights" / "best.torchscript").is_file()
    lockstep(site, elsewhere, "data.split", str(site / "lockstep" / "data" / "shapes.yaml"), "--val", "0.2")
    assert (elsewhere / "shapes-split" / "data.yaml").is_file()
    lockstep(site, elsewhere, "utils.plots.pictures", "runs/spawned")
    assert (elsewhere / "runs" / "spawned" / "results.png").is_file()
