"""The run that --resume continues: which one it is, the flags that may change, and a settings.yaml that was edited."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import OnProcesses
from tests.making import options_of
from tests.utils.test_checkpoint import IDENTITY, NAMES
from tests.utils.test_run import run_in
from utils.checkpoint import STATE_FORMAT, Progress, StateFiles, serialised
from utils.config.flags import TrainOptions, flags_of
from utils.config.hyperparameters import Hyperparameters, Recipe, parse_overrides
from utils.config.parser import given_flags
from utils.config.resume import check_settings, find_run, log_changes, read_saved_state, resumed_options
from utils.config.settings import Settings, read_settings
from utils.distributed.ranks import ranks
from utils.errors import Stopped, UserError
from utils.files import ROOT, read_yaml

LOW = str(ROOT / "data" / "hyps" / "low.yaml")
RUN = Path("runs") / "exp"
SOURCE = RUN / "settings.yaml"
BEGUN = {"epochs": 10, "batch_size": 8, "imgsz": 96, "hyp": LOW, "freeze": (0, 2), "workers": 1, "device": "cpu"}
AUTO = ("--resume", "auto", "--project")
STATE = {
    **{"format": STATE_FORMAT, "names": NAMES, "imgsz": 96, "splits": IDENTITY.splits, "model": {}},
    **{"progress": asdict(Progress(epoch=3, batch=2, step=11)), "rows": ["epoch", "0", "1", "2"]},
}


def saved(hyperparameters: Recipe | None = None, **options: Any) -> dict[str, Any]:
    """Return the settings of a run as read from its settings.yaml."""
    settings = {**vars(TrainOptions()), **BEGUN, **options}
    settings |= {"hyperparameters": vars(hyperparameters or Hyperparameters()), "model": {"task": "detect", "nc": 3}}
    read: dict[str, Any] = yaml.safe_load(yaml.safe_dump(settings))
    return read


# Which run


def begin(run: Path, state: dict[str, Any] | None = None, written: float = 0.0, **settings: Any) -> Path:
    """Make a run folder as train.py does, whose files are `written` at a time in seconds."""
    run.mkdir(parents=True)
    content = saved(**{"project": str(run.parent), "name": run.name, **settings})
    (run / "settings.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    if state:
        StateFiles(run / "checkpoint").write(serialised(state))
    for file in (run / "settings.yaml", *(run / "checkpoint").glob("*.pt")):
        os.utime(file, (written, written))
    return run


def started(*flags: str) -> Settings:
    """Return the settings that train.py starts or continues with."""
    return read_settings(flags, lambda *_: Hyperparameters)


def named(*flags: str) -> Path | None:
    """Return the run folder that --resume names."""
    options: TrainOptions = options_of(TrainOptions, flags)
    return find_run(options.resume, Path(options.project), options.name, options.exist_ok)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 10 epochs that stopped in its fourth, whose results.csv has one row more."""
    run = begin(tmp_path / "runs" / "exp", STATE)
    (run / "results.csv").write_text("epoch\n0\n1\n2\n3\n")
    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of several runs: `exp10` was written last of those that --name exp has started, `other` of all."""
    for name, written in {"exp": 100.0, "exp2": 300.0, "exp10": 400.0}.items():
        begin(tmp_path / name, written=written, name="exp")
    for name, written in {"exp12": 410.0, "other": 500.0, "expert": 450.0}.items():
        begin(tmp_path / name, written=written)
    (tmp_path / "exp13").mkdir()
    (tmp_path / "exp13" / "settings.yaml").write_text("name: exp\n")  # of val.py
    (tmp_path / "exp11").mkdir()  # of a run that had not begun
    return tmp_path


def test_the_newest_run_is_the_last_written_one(project: Path) -> None:
    newest, auto = ("--project", str(project), "--resume"), (*AUTO, str(project))
    assert [named(*newest), named(*auto)] == [project / "other", project / "exp10"]
    assert [named(*auto, "--exist-ok"), named(*auto, "--name", "other")] == [project / "exp", project / "other"]
    os.utime(project / "exp" / "settings.yaml", (600, 600))
    assert [named(*newest), named(*auto)] == [project / "exp"] * 2
    for number, file in enumerate(("exp2/results.csv", "exp10/checkpoint/00000001-0123456789abcdef.pt")):
        (project / file).parent.mkdir(exist_ok=True)
        (project / file).touch()
        os.utime(project / file, (700 + number, 700 + number))
        assert named(*newest) == project / Path(file).parts[0]


def test_auto_takes_a_name_literally_and_may_find_nothing(tmp_path: Path) -> None:
    begin(tmp_path / "axb")
    assert named(*AUTO, str(tmp_path), "--name", "a.b") is None
    assert begin(tmp_path / "a.b2", name="a.b") == named(*AUTO, str(tmp_path), "--name", "a.b")
    assert not started(*AUTO, str(tmp_path / "none")).is_fixed
    with pytest.raises(UserError, match=str(tmp_path / "none")):
        named("--project", str(tmp_path / "none"), "--resume")


@pytest.mark.parametrize("inside", ["", "settings.yaml", "checkpoint", "weights/last.pt", "checkpoint/1-a.pt"])
def test_a_path_to_a_run_or_into_it(project: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "exp2" / inside
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert named("--resume", str(path)) == project / "exp2"
    monkeypatch.chdir(project)
    assert named("--resume", str(path.relative_to(project))) == project / "exp2"
    monkeypatch.chdir(project / "exp2")
    assert named("--resume", ".") == project / "exp2"


def test_settings_that_are_not_of_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("epochs: 3\n")
    with pytest.raises(UserError, match=str(tmp_path)):
        started("--resume", str(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"nosave": True}])
def test_a_run_that_never_saved_starts_anew_in_its_folder(settings: dict[str, bool], tmp_path: Path) -> None:
    run = begin(tmp_path / "exp", **settings)
    if settings:
        (run / "results.csv").touch()  # with --nosave there are rows before there is a state
    with pytest.raises(UserError, match=f"{run}/checkpoint"):
        started("--resume", str(run))
    resuming = started(*AUTO, str(tmp_path))
    assert (resuming.saved, resuming.is_fixed) == (None, True)  # its settings contain all defaults
    options = resuming.options
    assert (options.project, options.name, options.exist_ok, options.epochs) == (str(tmp_path), "exp", True, 10)
    assert read_saved_state(run_in(tmp_path, exist_ok=True), resuming, IDENTITY) is None


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_run_whose_states_are_all_lost(damage: str, auto: bool, run: Path) -> None:
    """Nothing is overwritten, and the error names the files."""
    (state,) = StateFiles(run / "checkpoint").files()
    state.unlink() if damage == "removed" else state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(UserError, match=f"{run}/checkpoint" if damage == "removed" else state.name):
        started(*((*AUTO, str(run.parent)) if auto else ("--resume", str(run))))


def test_edited_settings(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp")
    settings = read_yaml(run / "settings.yaml")
    StateFiles(run / "checkpoint").write(serialised({**STATE, "settings": {**settings, "freeze": (0, 2)}}))
    assert started("--resume", str(run)).options.freeze == (0, 2)
    (run / "settings.yaml").write_text(yaml.safe_dump({**settings, "batch_size": 16}))
    with pytest.raises(UserError, match="batch_size"):
        started("--resume", str(run))


def test_a_finished_run(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = begin(tmp_path / "exp", {**STATE, "progress": asdict(Progress(epoch=10, finished=True))})
    name, fewer = ("--resume", str(finished)), ("--epochs", "3")
    newest, auto = ("--project", str(tmp_path), "--resume"), (*AUTO, str(tmp_path))
    for flags in (name, (*name, *fewer), newest, auto, ("--resume", str(run), *fewer)):
        with pytest.raises(Stopped) as stopped:
            started(*flags)
        assert stopped.value.code == 0
        assert str(tmp_path) in capsys.readouterr().out
    with pytest.raises(UserError, match="--epochs 11"):
        started(*name, "--epochs", "11")
    assert started("--resume", str(run), "--epochs", "4").options.epochs == 4


def decided(project: str) -> list[Any]:
    """Return the settings of a process; other processes than the main one have no such project, as on a machine."""
    project = project if ranks().rank == 0 else "nowhere"
    settings = started("--project", project, "--resume", "--epochs", "12", "--device", "cpu")
    return [vars(settings.options), settings.saved, settings.is_fixed]


def test_the_main_process_decides_for_all(run: Path, on_processes: OnProcesses) -> None:
    """tests/utils/distributed/test_ranks.py tests its errors."""
    expected = started("--project", str(run.parent), "--resume", "--epochs", "12", "--device", "cpu")
    assert on_processes(2, decided, str(run.parent)) == [[vars(expected.options), expected.saved, True]] * 2


# Its settings, and flags


def resumed(settings: Mapping[str, Any], *flags: str, launched: bool = False) -> TrainOptions:
    return resumed_options(given_flags(TrainOptions, flags), RUN, settings, lambda *_: Hyperparameters, launched)


def test_flags_take_precedence_over_the_settings() -> None:
    flags = ("--project", "elsewhere", "--name", "other", "--workers", "3", "--epochs", "20", "--data", "moved.yaml")
    options = resumed(saved(), *flags)
    assert (options.workers, options.epochs, options.data) == (3, 20, "moved.yaml")
    assert (options.project, options.name, options.exist_ok) == ("runs", "exp", True)  # its folder does not change
    assert resumed(saved(), "--imgsz", "90").imgsz == 90  # the settings have the rounded size
    assert resumed(saved(), "--batch-size", "-1").batch_size == 8  # as it was measured
    assert resumed(saved(), "--hyp", "auto").hyp == LOW  # what auto chose
    assert (resumed(saved()).device, resumed(saved(), launched=True).device) == ("cpu", "")


@pytest.mark.parametrize("option", [option for option in flags_of(TrainOptions) if option.metadata["curve"]])
def test_a_flag_that_the_curve_depends_on(option: Any) -> None:
    then = saved()[option.name]
    choices = [choice for choice in option.metadata["choices"] if choice != then]
    now = choices[:1] or {bool: [], str: ["other"], int: ["3"], float: ["0.5"], list: ["7"]}[type(then)]
    flag = f"--{option.name.replace('_', '-')}"
    with pytest.raises(UserError, match=flag):
        resumed(saved(), flag, *now)
    if not isinstance(then, (bool, list)) and option.name != "logical_processes":  # 0 is not a value to give
        assert resumed(saved(), f"{flag}={then}") == resumed(saved())


def test_hyperparameters_that_have_changed(tmp_path: Path) -> None:
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("lr0: 0.01\nmosaic: 1\n")  # the same values, written differently
    assert resumed(saved(), "--hyp", str(hyp)).hyp == str(hyp)
    assert resumed(saved(), "--hyp.lr0", "0.01").overrides == {"lr0": "0.01"}
    hyp.write_text("lr0: 0.02\n")
    for flags in (("--hyp", str(hyp)), ("--hyp.lr0", "0.02"), ("--hyp", LOW, "--hyp.mosaic", "0.5")):
        with pytest.raises(UserError, match=r"lr0|mosaic"):
            resumed(saved(), *flags)
    assert resumed(saved(hyp="gone.yaml")).hyp == "gone.yaml"  # only read if it is given


@pytest.mark.parametrize(("now", "warns"), [(2, True), (4, False), (0, False)])
def test_another_number_of_threads_is_named(now: int, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log_changes(TrainOptions(), {"threads": 4}, now)
    assert ("CPU threads: 2, was 4; the same bytes need OMP_NUM_THREADS=4" in capsys.readouterr().out) == warns


def test_overrides_are_taken_from_the_settings() -> None:
    overrides = {"lr0": "2e-2", "mosaic": "0.5"}
    faster = saved(Hyperparameters(**parse_overrides(Hyperparameters, overrides)), overrides=overrides)
    assert resumed(faster).overrides == overrides
    assert resumed(faster, "--hyp", LOW, "--hyp.lr0", "0.02").overrides == {**overrides, "lr0": "0.02"}
    with pytest.raises(UserError, match=r"--hyp\.box"):
        resumed(faster, "--hyp.box", "7")


# A settings.yaml that was edited


def test_settings_as_they_were_written() -> None:
    """All defaults are valid values; flags that may change on resume may be edited."""
    check_settings(saved(), saved(), SOURCE)
    check_settings(saved(epochs=20, workers=4, processes=2, cache="ram", time_limit=3), saved(), SOURCE)
    old = saved(gone=1)
    old["hyperparameters"] = {"lr0": 0.01}
    check_settings(saved(gone=1), old, SOURCE)  # of another version


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epochs": "three"}, "epochs"),
        ({"freeze": [1.5]}, "freeze"),
        ({"model": [1]}, "model"),
        ({"overrides": 3}, "overrides"),
        ({"batch_size": 16}, "batch_size"),
        ({"hyperparameters": {**vars(Hyperparameters()), "lr0": 1}}, "hyperparameters: lr0"),
        ({"model": {"task": "detect", "nc": 4}}, "model: nc"),
        ({"epoch": 3}, "epoch"),
    ],
)
def test_wrong_changes(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"settings\.yaml.*{named}|{named}.*settings\.yaml"):
        check_settings({**saved(), **changes}, saved(), SOURCE)
