"""Which run --resume means, what it continues with, when it is finished, and that all processes do the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import distributed

from tests.conftest import OnProcesses
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import Settled, check_same, find_run, settle
from utils.checkpoint.state_files import STATE_FORMAT, StateFiles
from utils.checkpoint.weight_files import serialised
from utils.config.hyperparameters import Hyperparameters, Recipe
from utils.config.options import TrainOptions
from utils.config.parser import parse_options
from utils.distributed.exit import Stopped
from utils.distributed.ranks import ranks
from utils.errors import UserError
from utils.files import ROOT, read_yaml
from utils.summary import Summary

LOW = str(ROOT / "data" / "hyps" / "low.yaml")
BEGUN = {"epochs": 10, "batch_size": 8, "imgsz": 96, "hyp": LOW, "freeze": (0, 2), "workers": 1, "device": "cpu"}


def begin(run: Path, progress: Progress | None = None, written: float = 0.0, **settings: Any) -> Path:
    """A run folder as train.py leaves it, with a state where `progress` says how far it came.

    written: when, in seconds; later than that stands nothing.
    """
    run.mkdir(parents=True)
    saved = {**vars(TrainOptions()), "project": str(run.parent), "name": run.name, **BEGUN, **settings}
    saved |= {"hyperparameters": vars(Hyperparameters()), "model": {"task": "detect", "nc": 3}}
    (run / "settings.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    if progress:
        StateFiles(run / "checkpoint").write(serialised({"format": STATE_FORMAT, "progress": progress.state()}))
    for file in (run / "settings.yaml", *(run / "checkpoint").glob("*.pt")):
        os.utime(file, (written, written))
    return run


def resumed(*flags: str) -> Settled[TrainOptions]:
    """What train.py continues with."""
    return settle(parse_options(TrainOptions, flags), flags, lambda yaml: Hyperparameters)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 epochs that ended in its fourth, in a project of its own."""
    return begin(tmp_path / "runs" / "exp", Progress(epoch=3, batch=2, step=11))


# Which run


def found(*flags: str) -> Path | None:
    options = parse_options(TrainOptions, flags)
    return find_run(options.resume, Path(options.project), options.name, options.exist_ok)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Runs exp, exp2, exp10, other and expert; of those named exp..., exp10 was written last; of all, other."""
    for name, written in {"exp": 100.0, "exp2": 300.0, "exp10": 400.0, "other": 500.0, "expert": 450.0}.items():
        begin(tmp_path / name, written=written)
    (tmp_path / "exp11").mkdir()  # a run that had not begun
    return tmp_path


def test_the_newest_is_the_one_that_was_written_last(project: Path) -> None:
    assert found("--project", str(project), "--resume") == project / "other"
    os.utime(project / "exp" / "settings.yaml", (600, 600))
    assert found("--project", str(project), "--resume") == project / "exp"


@pytest.mark.parametrize("name", ["results.csv", "checkpoint/00000001-0123456789abcdef.pt"])
def test_what_a_run_writes_on_its_way_counts(project: Path, name: str) -> None:
    file = project / "exp2" / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.utime(file, (700, 700))
    assert found("--project", str(project), "--resume") == project / "exp2"


def test_auto_takes_the_newest_of_its_name(project: Path) -> None:
    flags = ("--project", str(project), "--resume", "auto")
    assert found(*flags) == project / "exp10"
    assert found(*flags, "--exist-ok") == project / "exp"
    assert found(*flags, "--name", "other") == project / "other"
    os.utime(project / "exp2" / "settings.yaml", (410, 410))
    assert found(*flags) == project / "exp2"


def test_auto_takes_a_name_as_it_stands(tmp_path: Path) -> None:
    begin(tmp_path / "axb")
    assert found("--project", str(tmp_path), "--resume", "auto", "--name", "a.b") is None
    begin(tmp_path / "a.b2")
    assert found("--project", str(tmp_path), "--resume", "auto", "--name", "a.b") == tmp_path / "a.b2"


@pytest.mark.parametrize("there", [True, False])
def test_nothing_to_resume(tmp_path: Path, there: bool) -> None:
    project = tmp_path / "runs"
    if there:
        (project / "exp").mkdir(parents=True)
    flags = ("--project", str(project), "--resume")
    assert found(*flags, "auto") is None
    assert resumed(*flags, "auto") == (parse_options(TrainOptions, (*flags, "auto")), None, False)
    with pytest.raises(UserError, match=rf"there is no run to resume in {project}; .* without --resume"):
        found(*flags)


@pytest.mark.parametrize("inside", ["", "settings.yaml", "checkpoint", "weights/last.pt", "checkpoint/1-a.pt"])
def test_a_path_to_a_run_or_into_it(
    project: Path, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "exp2" / inside
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert found("--resume", str(path)) == project / "exp2"
    monkeypatch.chdir(tmp_path)
    relative = found("--resume", str(path.relative_to(tmp_path)))
    assert relative is not None
    assert relative.absolute() == project / "exp2"


def test_a_run_that_one_stands_in(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    options = resumed("--resume", ".").options
    assert (Path(options.project) / options.name).resolve() == run


def test_a_run_of_yolov5(project: Path) -> None:
    weights = project / "theirs" / "weights" / "last.pt"
    weights.parent.mkdir(parents=True)
    weights.touch()
    (project / "theirs" / "opt.yaml").touch()
    for path in (weights, project / "theirs"):
        with pytest.raises(
            UserError, match=rf"is a run of YOLOv5.* --weights {weights} --hyp {project}/theirs/hyp.yaml"
        ):
            found("--resume", str(path))


def test_a_path_that_is_no_run(project: Path) -> None:
    with pytest.raises(UserError, match=rf"--resume {project}: neither it nor .*settings\.yaml"):
        found("--resume", str(project))
    deep = project / "exp" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    with pytest.raises(UserError, match="neither it nor"):
        found("--resume", str(deep))


def test_a_path_that_is_not_there(project: Path) -> None:
    with pytest.raises(UserError, match=rf"--resume {project}/exp3: there is no such file or folder"):
        found("--resume", str(project / "exp3"))


@pytest.mark.parametrize("content", ["epochs: 3\n", "hyperparameters: {}\n", "names: [a]\n"])
def test_settings_of_something_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.yaml").write_text(content)
    with pytest.raises(UserError, match=rf"{tmp_path} is not the folder of a training run"):
        resumed("--resume", str(tmp_path))


# What it goes on with


def test_without_resume_nothing_is_asked(run: Path) -> None:
    flags = ("--project", str(run.parent), "--epochs", "3")
    assert resumed(*flags) == (parse_options(TrainOptions, flags), None, False)


def test_a_run_goes_on_with_its_own_settings(run: Path) -> None:
    options, begun, fixed = resumed("--resume", str(run))
    assert begun == read_yaml(run / "settings.yaml")
    assert fixed
    assert options == TrainOptions(
        **BEGUN,
        project=str(run.parent),
        name="exp",
        exist_ok=True,
        resume=str(run),  # type: ignore[arg-type]
    )


def test_flags_and_settings_are_merged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = resumed("--resume", str(run), "--workers", "3", "--epochs", "20").options
    assert (options.workers, options.epochs, options.device, options.name) == (3, 20, "cpu", "exp")
    monkeypatch.setattr("utils.checkpoint.resume.launched", lambda: True)
    assert resumed("--resume", str(run)).options.device == ""
    with pytest.raises(UserError, match=rf"^--seed is 1 now, and {run} was started with 0, which"):
        resumed("--resume", str(run), "--seed", "1")


def test_the_kind_of_hyperparameters_is_that_of_the_runs_model(run: Path) -> None:
    models = []

    def recipe_of(model: Mapping[str, Any]) -> type[Recipe]:
        models.append(model)
        return Hyperparameters

    flags = ("--resume", str(run), "--hyp", LOW)
    assert settle(parse_options(TrainOptions, flags), flags, recipe_of).begun is not None
    assert models == [{"task": "detect", "nc": 3}]


def test_a_run_without_a_state_begins_anew_where_it_was(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp")
    options, begun, fixed = resumed("--resume", str(run))
    assert begun is None
    assert fixed  # by its settings, which know all defaults
    assert (options.project, options.name, options.exist_ok, options.epochs) == (str(tmp_path), "exp", True, 10)


def test_a_run_whose_only_state_cannot_be_read(run: Path) -> None:
    """It is not looked into here: the one who reads it says what is wrong."""
    (state,) = StateFiles(run / "checkpoint").files()
    state.write_bytes(state.read_bytes()[:100])
    assert resumed("--resume", str(run)).options.resume == str(run)


# A run that is over


def ended(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said, once, where there is nothing left to do."""
    with pytest.raises(Stopped) as stopped:
        resumed(*flags)
    assert stopped.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    return printed.out


def test_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path / "exp", Progress(epoch=10, finished=True))
    said = f"{run} is finished: nothing to resume; a larger number of --epochs continues it\n"
    assert ended(capsys, "--resume", str(run)) == said
    assert ended(capsys, "--resume", str(run), "--epochs", "10") == said
    assert ended(capsys, "--resume", str(run), "--epochs", "5") == said
    assert ended(capsys, "--resume", "--project", str(tmp_path)) == said
    assert ended(capsys, "--resume", "auto", "--project", str(tmp_path)) == said
    options, begun, _ = resumed("--resume", str(run), "--epochs", "11")
    assert options.epochs == 11
    assert begun is not None


def test_a_run_that_gave_up_is_finished_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path / "exp", Progress(epoch=6, finished=True))
    assert "is finished" in ended(capsys, "--resume", str(run), "--epochs", "8")
    assert resumed("--resume", str(run), "--epochs", "12").begun is not None


def test_fewer_epochs_than_are_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"{run} has trained 3 epochs; --epochs 3 leaves nothing to do\n"
    assert ended(capsys, "--resume", str(run), "--epochs", "3") == said
    assert "--epochs 2 leaves" in ended(capsys, "--resume", str(run), "--epochs", "2")
    assert resumed("--resume", str(run), "--epochs", "4").options.epochs == 4


def test_the_best_of_a_run_comes_with_its_progress(tmp_path: Path) -> None:
    """The state of a run that was validated holds the best summary, as plain values."""
    summary = Summary({"metrics/mAP_0.5": 0.5}, 0.5, ["head", "all"], [])
    run = begin(tmp_path / "exp", Progress(epoch=2, best=0.5, best_epoch=1, summary=summary))
    assert resumed("--resume", str(run)).begun is not None


# The same classes and images


IDENTITY = {
    "names": {0: "disc", 1: "ring", 2: "bar"},
    "imgsz": 96,
    "images": {"count": "28", "files": "aaaa", "labels": "bbbb"},
}


def test_the_same_images() -> None:
    assert check_same({**IDENTITY, "rows": []}, IDENTITY) == []


def test_other_labels_are_a_warning() -> None:
    changed = {**IDENTITY, "images": {**IDENTITY["images"], "labels": "cccc"}}  # type: ignore[dict-item]
    assert check_same(IDENTITY, changed) == [
        "warning: the labels of the training images have changed since the run began"
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"names": {0: "disc", 1: "ring"}},
            r"\(3 then, 2 now: class 2 was bar and is none\); correct `names:`",
        ),
        ({"names": {0: "disc", 1: "bar", 2: "ring"}}, r"\(3 then, 3 now: class 1 was ring and is bar\)"),
        ({"names": {**IDENTITY["names"], 3: "dot"}}, r"\(3 then, 4 now: class 3 was none and is dot\)"),  # type: ignore[dict-item]
        ({"imgsz": 128}, "--imgsz is 128 now, and the run was started with 96; leave it out"),
        (
            {"images": {"count": "27", "files": "dddd", "labels": "eeee"}},
            r"the training images have changed since the run began \(28 then, 27 now\); restore them",
        ),
    ],
)
def test_other_classes_sizes_and_images_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_same(IDENTITY, {**IDENTITY, **changed})


# Many processes: the main one decides


def settled(project: str, *flags: str) -> str:
    """What a process is told; those that are not the main one find another project, as on another machine."""
    own = project if ranks().rank == 0 else "nowhere"
    try:
        options, begun, fixed = resumed("--project", own, *flags)
        said = f"{options.project} {options.epochs} {begun is not None} {fixed}"
    except UserError as error:
        said = f"error: {error}"
    except Stopped as stopped:
        said = f"stopped {stopped.code}"
    distributed.init_process_group("gloo")  # what comes next finds the store as it should be
    distributed.barrier()
    return said


def test_all_processes_do_what_the_main_one_decides(run: Path, on_processes: OnProcesses) -> None:
    told = on_processes(2, settled, str(run.parent), "--resume", "--epochs", "12")
    assert told == [f"{run.parent} 12 True True"] * 2


def test_all_processes_refuse_alike(run: Path, on_processes: OnProcesses) -> None:
    one, other = on_processes(2, settled, str(run.parent), "--resume", "--seed", "1")
    assert one.startswith(f"error: --seed is 1 now, and {run} was started with 0")
    assert other == one


def test_all_processes_stop_at_a_finished_run(
    tmp_path: Path, on_processes: OnProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "runs" / "exp", Progress(epoch=10, finished=True))
    assert on_processes(2, settled, str(run.parent), "--resume") == ["stopped 0"] * 2
    assert capfd.readouterr().out.count("is finished") == 1
