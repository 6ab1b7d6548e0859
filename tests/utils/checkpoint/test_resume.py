"""--resume: the run that it names, its options and state, and the decision for all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator

from tests.conftest import OnProcesses
from utils.checkpoint import (
    STATE_FORMAT,
    Identity,
    Progress,
    StateFiles,
    find_run,
    read_saved_state,
    resolve_settings,
    serialised,
)
from utils.config.flags import BUILT_IN_JOB, TrainOptions
from utils.config.hyperparameters import Hyperparameters
from utils.config.parser import given_flags, over_defaults
from utils.config.settings import Settings
from utils.distributed.launch import Precision
from utils.distributed.ranks import SPAWNED, ranks
from utils.errors import Stopped, UserError
from utils.files import ROOT, read_yaml
from utils.run import Run

LOW = str(ROOT / "data" / "hyps" / "low.yaml")
BEGUN = {"epochs": 10, "batch_size": 8, "imgsz": 96, "hyp": LOW, "freeze": (0, 2), "workers": 1, "device": "cpu"}


def begin(run: Path, progress: Progress | None = None, written: float = 0.0, **settings: Any) -> Path:
    """Make a run folder as train.py does, with a state if there is a `progress`.

    written: time of its files, s
    """
    run.mkdir(parents=True)
    saved = {**vars(TrainOptions()), "project": str(run.parent), "name": run.name, **BEGUN, **settings}
    saved |= {"hyperparameters": vars(Hyperparameters()), "model": {"task": "detect", "nc": 3}}
    (run / "settings.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    if progress:
        state = {"format": STATE_FORMAT, "progress": progress.state(), "model": {}}
        StateFiles(run / "checkpoint").write(serialised(state))
    for file in (run / "settings.yaml", *(run / "checkpoint").glob("*.pt")):
        os.utime(file, (written, written))
    return run


def resumed(*flags: str) -> Settings:
    """Return the settings that train.py starts or continues with."""
    return resolve_settings(given_flags(TrainOptions, flags), lambda yaml: Hyperparameters)


def new(*flags: str) -> Settings:
    """Return the settings of a run that resumes nothing."""
    given = given_flags(TrainOptions, flags)
    return Settings(over_defaults(TrainOptions, given, BUILT_IN_JOB), given)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of 10 epochs that ended in its fourth, the only one of its project."""
    return begin(tmp_path / "runs" / "exp", Progress(epoch=3, batch=2, step=11))


# The run folder


def named(*flags: str) -> Path | None:
    """Return the run folder that --resume names."""
    options = over_defaults(TrainOptions, given_flags(TrainOptions, flags))
    return find_run(options.resume, Path(options.project), options.name, options.exist_ok)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the runs exp, exp2, exp10, other and expert.

    exp10 was written last of those named exp and a number, `other` of all.
    """
    for name, written in {"exp": 100.0, "exp2": 300.0, "exp10": 400.0, "other": 500.0, "expert": 450.0}.items():
        begin(tmp_path / name, written=written)
    (tmp_path / "exp11").mkdir()  # of a run that had not begun
    return tmp_path


def test_the_newest_run_is_the_last_written_one(project: Path) -> None:
    newest = ("--project", str(project), "--resume")
    auto = (*newest, "auto")
    assert [named(*newest), named(*auto)] == [project / "other", project / "exp10"]
    assert [named(*auto, "--exist-ok"), named(*auto, "--name", "other")] == [project / "exp", project / "other"]
    os.utime(project / "exp" / "settings.yaml", (600, 600))
    assert [named(*newest), named(*auto)] == [project / "exp"] * 2
    for number, file in enumerate(("exp2/results.csv", "exp10/checkpoint/00000001-0123456789abcdef.pt")):
        (project / file).parent.mkdir(exist_ok=True)
        (project / file).touch()
        os.utime(project / file, (700 + number, 700 + number))
        assert named(*newest) == project / Path(file).parts[0]


def test_auto_takes_a_name_literally(tmp_path: Path) -> None:
    begin(tmp_path / "axb")
    assert named("--project", str(tmp_path), "--resume", "auto", "--name", "a.b") is None
    begin(tmp_path / "a.b2")
    assert named("--project", str(tmp_path), "--resume", "auto", "--name", "a.b") == tmp_path / "a.b2"


def test_nothing_to_resume(tmp_path: Path) -> None:
    flags = ("--project", str(tmp_path / "runs"), "--resume")
    assert named(*flags, "auto") is None
    assert resumed(*flags, "auto") == new(*flags, "auto")
    with pytest.raises(UserError, match=str(tmp_path / "runs")):
        named(*flags)


@pytest.mark.parametrize("inside", ["", "settings.yaml", "checkpoint", "weights/last.pt", "checkpoint/1-a.pt"])
def test_a_path_to_a_run_or_into_it(project: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "exp2" / inside
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert named("--resume", str(path)) == project / "exp2"
    monkeypatch.chdir(project)
    relative = named("--resume", str(path.relative_to(project)))
    assert relative is not None
    assert relative.absolute() == project / "exp2"


@pytest.mark.parametrize("path", ["", "exp3", "exp/a/b/c"])
def test_a_path_that_is_not_a_run(path: str, project: Path) -> None:
    (project / "exp" / "a" / "b" / "c").mkdir(parents=True)
    with pytest.raises(UserError, match=f"--resume {project / path}: "):
        named("--resume", str(project / path))


@pytest.mark.parametrize("content", ["epochs: 3\n", "hyperparameters: {}\n"])
def test_settings_that_are_not_of_a_training_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.yaml").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        resumed("--resume", str(tmp_path))


# The settings of a resumed run


def test_a_run_continues_with_its_settings(run: Path) -> None:
    settings = resumed("--resume", str(run))
    assert settings.saved == read_yaml(run / "settings.yaml")
    assert settings.is_fixed
    assert settings.given == {"resume": str(run)}
    assert settings.options == TrainOptions(
        **BEGUN,
        project=str(run.parent),
        name="exp",
        exist_ok=True,
        resume=str(run),  # type: ignore[arg-type]
    )


def test_flags_and_settings_are_merged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = resumed("--resume", str(run), "--workers", "3", "--epochs", "20").options
    assert (options.workers, options.epochs, options.device, options.name) == (3, 20, "cpu", "exp")
    monkeypatch.setattr("utils.checkpoint.launched", lambda: True)
    assert resumed("--resume", str(run)).options.device == ""
    with pytest.raises(UserError, match="--seed is 1"):
        resumed("--resume", str(run), "--seed", "1")


AUTO = ("--resume", "auto", "--project")


@pytest.mark.parametrize("settings", [{}, {"nosave": True}])
def test_a_run_that_never_saved_starts_anew_in_its_folder(settings: dict[str, bool], tmp_path: Path) -> None:
    run = begin(tmp_path / "exp", **settings)
    if settings:
        (run / "results.csv").touch()  # with --nosave there are rows before there is a state
    with pytest.raises(UserError, match=f"{run}/checkpoint"):
        resumed("--resume", str(run))
    resuming = resumed(*AUTO, str(tmp_path))
    assert resuming.saved is None
    assert resuming.is_fixed  # its settings contain all defaults
    options = resuming.options
    assert (options.project, options.name, options.exist_ok, options.epochs) == (str(tmp_path), "exp", True, 10)
    assert read_saved_state(opened(resuming), resuming, IDENTITY) is None


@pytest.mark.parametrize("how", ["named", "auto"])
@pytest.mark.parametrize("damage", ["cut", "empty", "removed"])
def test_a_run_whose_states_are_all_lost(damage: str, how: str, run: Path) -> None:
    """Nothing is overwritten, and the error names the files."""
    (state,) = StateFiles(run / "checkpoint").files()
    (run / "results.csv").write_text("epoch\n0\n")
    if damage == "removed":
        state.unlink()
    else:
        state.write_bytes(state.read_bytes()[:100] if damage == "cut" else b"")
    names = "no state is in" if damage == "removed" else rf"damaged \({state.name}\)"
    with pytest.raises(UserError, match=names):
        resumed(*(("--resume", str(run)) if how == "named" else (*AUTO, str(run.parent))))


# A settings.yaml that was edited; test_resumed.py tests the check


def test_edited_settings(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp")
    settings = read_yaml(run / "settings.yaml")
    recorded = {**settings, "freeze": (0, 2)}  # as a state has them
    state = {"format": STATE_FORMAT, "progress": Progress(epoch=3).state(), "model": {}, "settings": recorded}
    StateFiles(run / "checkpoint").write(serialised(state))
    assert resumed("--resume", str(run)).options.freeze == (0, 2)
    (run / "settings.yaml").write_text(yaml.safe_dump({**settings, "batch_size": 16}))
    with pytest.raises(UserError, match=r"`batch_size`"):
        resumed("--resume", str(run))


# Finished runs


def ended(*flags: str) -> bool:
    """Return whether there is nothing to resume."""
    with pytest.raises(Stopped) as stopped:
        resumed(*flags)
    return stopped.value.code == 0


def test_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path / "exp", Progress(epoch=10, finished=True))
    assert ended("--resume", str(run))
    assert ended("--resume", str(run), "--epochs", "5")
    assert ended("--resume", "--project", str(tmp_path))
    assert ended("--resume", "auto", "--project", str(tmp_path))
    assert all(line.startswith(f"{run} ") for line in capsys.readouterr().out.splitlines())
    with pytest.raises(UserError, match="--epochs 11"):
        resumed("--resume", str(run), "--epochs", "11")


def test_fewer_epochs_than_are_trained(run: Path) -> None:
    assert ended("--resume", str(run), "--epochs", "3")
    assert resumed("--resume", str(run), "--epochs", "4").options.epochs == 4


# The saved state; test_training_state.py tests the check of classes and images

NAMES = {0: "disc", 1: "ring", 2: "bar"}
SPLITS = {split: {"count": "28", "files": "aaaa", "labels": "bbbb"} for split in ("train", "val")}
IDENTITY = Identity(NAMES, 96, SPLITS)
STATE = {
    "format": STATE_FORMAT,
    "names": NAMES,
    "imgsz": 96,
    "splits": SPLITS,
    "progress": Progress(epoch=3, batch=2, step=11).state(),
    "model": {},
    "rows": ["epoch", "0", "1", "2"],
}


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """Return the folder of a run of 10 epochs whose state is `STATE`, and whose results.csv has one row more."""
    run = begin(tmp_path / "runs" / "exp")
    StateFiles(run / "checkpoint").write(serialised(STATE))
    (run / "results.csv").write_text("epoch\n0\n1\n2\n3\n")
    return run


def opened(settings: Settings) -> Run:
    run = Run(Accelerator(cpu=True), Precision("no", "the default on the CPU"))
    run.open_folder(settings.options.project, settings.options.name, settings.options.exist_ok)
    return run


def test_the_state_that_a_run_continues_from(stopped_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = resumed("--resume", str(stopped_run), "--epochs", "12")
    run = opened(settings)
    capsys.readouterr()
    assert read_saved_state(run, settings, IDENTITY) == STATE
    printed = capsys.readouterr().out
    assert "--epochs is 12 and was 10" in printed
    assert f"resuming {stopped_run} in epoch 4, after batch 2" in printed
    assert (stopped_run / "results.csv").read_text() == "epoch\n0\n1\n2\n"  # of the state


def test_the_folder_is_unchanged_if_the_data_differ(stopped_run: Path) -> None:
    settings = resumed("--resume", str(stopped_run))
    run = opened(settings)
    with pytest.raises(UserError, match="--imgsz"):
        read_saved_state(run, settings, Identity(NAMES, 128, SPLITS))
    assert (stopped_run / "results.csv").read_text() == "epoch\n0\n1\n2\n3\n"
    assert StateFiles(stopped_run / "checkpoint").read() == STATE


def test_a_new_run_has_no_state_and_removes_that_of_an_earlier_one(stopped_run: Path) -> None:
    settings = resumed("--project", str(stopped_run.parent), "--exist-ok")
    run = opened(settings)
    assert run.path == stopped_run
    assert read_saved_state(run, settings, IDENTITY) is None
    assert StateFiles(stopped_run / "checkpoint").files() == []


# Several processes: the main one decides; tests/utils/distributed/test_ranks.py tests its errors


def decided(project: str) -> list[Any]:
    """Return the settings of a process; other processes than the main one have no such project, as on a machine."""
    del os.environ[SPAWNED]  # as under a launcher
    project = project if ranks().rank == 0 else "nowhere"
    settings = resumed("--project", project, "--resume", "--epochs", "12", "--device", "cpu")
    return [vars(settings.options), settings.saved, settings.is_fixed]


def test_all_processes_have_the_settings_of_the_main_one(run: Path, on_processes: OnProcesses) -> None:
    expected = resumed("--project", str(run.parent), "--resume", "--epochs", "12", "--device", "cpu")
    assert on_processes(2, decided, str(run.parent)) == [[vars(expected.options), expected.saved, True]] * 2
