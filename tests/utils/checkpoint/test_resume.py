"""Which run --resume means, what it goes on with, and which changes it refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import distributed

from tests.conftest import OnProcesses
from utils.checkpoint.progress import Progress
from utils.checkpoint.resume import Settled, changes, check_same, find_run, settle
from utils.checkpoint.state_files import STATE_FORMAT, States, serialised
from utils.config.hyperparameters import Hyperparameters, Recipe, number, overriding
from utils.config.options import TrainOptions, flags_of
from utils.config.parser import parse_options
from utils.config.ranges import Range
from utils.distributed.exit import Stopped
from utils.distributed.ranks import place
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
        States(run / "checkpoint").write(serialised({"format": STATE_FORMAT, "progress": progress.plain()}))
    for file in (run / "settings.yaml", *(run / "checkpoint").glob("*.pt")):
        os.utime(file, (written, written))
    return run


@dataclass(frozen=True)
class OtherRecipe(Recipe):
    """The hyperparameters of another task than a detector's."""

    stripes: float = number(3.0, Range(0))


def recipe_of(yaml: Mapping[str, Any]) -> type[Recipe]:
    return {"detect": Hyperparameters, "other": OtherRecipe}[yaml["task"]]


def resumed(*flags: str) -> Settled:
    """What train.py goes on with."""
    return settle(parse_options(TrainOptions, flags), flags, recipe_of)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 epochs that ended in its fourth, in a project of its own."""
    return begin(tmp_path / "runs" / "exp", Progress(epoch=3, batch=2, step=11))


# Which run


def found(*flags: str) -> Path | None:
    return find_run(parse_options(TrainOptions, flags))


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
    with pytest.raises(UserError, match=rf"--resume {project}: neither this nor .*settings\.yaml"):
        found("--resume", str(project))
    deep = project / "exp" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    with pytest.raises(UserError, match="neither this nor"):
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


def test_given_flags_go_before_the_settings(run: Path) -> None:
    flags = ("--project", "elsewhere", "--name", "other", "--workers", "3", "--epochs", "20", "--data", "moved.yaml")
    options = resumed("--resume", str(run), *flags).options
    assert (options.workers, options.epochs, options.data) == (3, 20, "moved.yaml")
    assert (options.project, options.name, options.exist_ok) == (str(run.parent), "exp", True)  # where it was


def test_a_launcher_decides_on_devices_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path / "exp", Progress(epoch=1), device="0,1", processes=2)
    options = resumed("--resume", str(run)).options
    assert (options.device, options.processes) == ("0,1", 2)
    monkeypatch.setattr("utils.checkpoint.resume.launched", lambda: True)
    options = resumed("--resume", str(run)).options
    assert (options.device, options.processes) == ("", 0)


def test_settings_of_another_version(tmp_path: Path) -> None:
    """A flag that is no more is left out, and one that was not yet has its default."""
    run = begin(tmp_path / "exp", Progress(epoch=1), gone=1)
    settings = read_yaml(run / "settings.yaml")
    del settings["max_skips"], settings["seed"]
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    options = resumed("--resume", str(run), "--seed", "0").options
    assert (options.max_skips, options.seed) == (TrainOptions.max_skips, 0)


def test_a_run_without_a_state_begins_anew_where_it_was(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp")
    options, begun, fixed = resumed("--resume", str(run))
    assert begun is None
    assert fixed  # by its settings, which know all defaults
    assert (options.project, options.name, options.exist_ok, options.epochs) == (str(tmp_path), "exp", True, 10)


def test_a_run_whose_only_state_cannot_be_read(run: Path) -> None:
    """It is not looked into here: the one who reads it says what is wrong."""
    (state,) = States(run / "checkpoint").files()
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
    said = f"{run} is finished: nothing to resume; --epochs with a larger number makes it longer\n"
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


# What it refuses

FIXED = {
    "weights": ("other.pt", "yolov5s.pt"),
    "cfg": ("yolov5n.yaml", ""),
    "batch_size": (16, 8),
    "rect": (True, False),
    "noautoanchor": (True, False),
    "scale_lr": (True, False),
    "multi_scale": (True, False),
    "image_weights": (True, False),
    "repeat_factor": (0.001, 0.0),
    "close_mosaic": (10, 0),
    "partners": ("near", "any"),
    "single_cls": (True, False),
    "optimizer": ("AdamW", "SGD"),
    "cos_lr": (True, False),
    "label_smoothing": (0.1, 0.0),
    "freeze": ((3,), [0, 2]),
    "seed": (1, 0),
}


def flags(name: str, value: Any) -> tuple[str, ...]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return (flag,)
    return (flag, *map(str, value if isinstance(value, (tuple, list)) else (value,)))


def test_the_table_has_every_fixed_flag() -> None:
    fixed = {field.name for field in flags_of(TrainOptions) if field.metadata["fixed"]}
    assert fixed == {*FIXED, "imgsz"}


@pytest.mark.parametrize("name", FIXED)
def test_a_flag_that_the_curve_depends_on(run: Path, name: str) -> None:
    now, then = FIXED[name]
    with pytest.raises(UserError) as caught:
        resumed("--resume", str(run), *flags(name, now))
    assert str(caught.value) == (
        f"{flags(name, now)[0]} is {now!r} now, and {run} was begun with {then!r}: it cannot go on like that; leave it "
        f"out, or start a new run from {run / 'weights' / 'last.pt'}"
    )
    if then not in (False, True):
        assert resumed("--resume", str(run), *flags(name, then)).begun is not None  # the same is none


def test_the_image_size_is_left_to_the_script(run: Path) -> None:
    """Its settings hold the rounded one, and this is not yet."""
    assert resumed("--resume", str(run), "--imgsz", "90").options.imgsz == 90


def test_a_batch_size_that_was_found_stays(run: Path) -> None:
    assert resumed("--resume", str(run), "--batch-size", "-1").options.batch_size == 8


def test_hyperparameters_that_have_changed(run: Path, tmp_path: Path) -> None:
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("lr0: 0.01\nmosaic: 1\n")  # what it was begun with, otherwise written
    assert resumed("--resume", str(run), "--hyp", str(hyp)).options.hyp == str(hyp)
    hyp.write_text("lr0: 0.02\nmosaic: 0.5\n")
    with pytest.raises(UserError) as caught:
        resumed("--resume", str(run), "--hyp", str(hyp))
    assert str(caught.value) == (
        f"--hyp {hyp} has changed since {run} was begun: lr0 is 0.02 and was 0.01, mosaic is 0.5 and was 1.0; leave it "
        f"out, or start a new run from {run / 'weights' / 'last.pt'}"
    )


def test_hyperparameters_are_read_as_those_of_the_runs_task(run: Path, tmp_path: Path) -> None:
    settings = read_yaml(run / "settings.yaml")
    settings |= {"hyperparameters": vars(OtherRecipe()), "model": {"task": "other", "nc": 3}}
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("stripes: 3\n")
    assert resumed("--resume", str(run), "--hyp", str(hyp)).begun == settings
    hyp.write_text("stripes: 4\n")
    with pytest.raises(UserError, match=r"stripes is 4\.0 and was 3\.0"):
        resumed("--resume", str(run), "--hyp", str(hyp))
    hyp.write_text("mosaic: 1\n")
    with pytest.raises(UserError, match="unknown key 'mosaic'"):
        resumed("--resume", str(run), "--hyp", str(hyp))


def test_hyperparameters_that_are_not_given_are_not_read(tmp_path: Path) -> None:
    run = begin(tmp_path / "exp", Progress(epoch=1), hyp="gone.yaml")
    assert resumed("--resume", str(run)).begun is not None


# Single hyperparameters


@pytest.fixture
def faster(tmp_path: Path) -> Path:
    """A run that was begun with flags for single hyperparameters, and ended in its fourth epoch."""
    overrides = {"lr0": "2e-2", "mosaic": "0.5"}
    run = begin(tmp_path / "runs" / "exp", Progress(epoch=3, batch=2, step=11), overrides=overrides)
    settings = read_yaml(run / "settings.yaml")
    settings["hyperparameters"] |= overriding(Hyperparameters, overrides)
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_overrides_are_those_of_the_run(faster: Path) -> None:
    options, begun, _ = resumed("--resume", str(faster))
    assert options.overrides == {"lr0": "2e-2", "mosaic": "0.5"}
    assert begun is not None
    assert changes(begun, options) == []


@pytest.mark.parametrize("state", [True, False])
def test_an_override_that_is_the_same(faster: Path, state: bool) -> None:
    if not state:
        shutil.rmtree(faster / "checkpoint")  # it begins anew, and reads the file again
    same = ("--hyp.lr0", "0.02", "--hyp.box=0.05")
    for flags in (same, (*same, "--hyp", LOW), ("--hyp", LOW)):
        options, begun, _ = resumed("--resume", str(faster), *flags)
        assert overriding(Hyperparameters, options.overrides).items() >= {"lr0": 0.02, "mosaic": 0.5}.items()
        assert (begun is None) != state


@pytest.mark.parametrize(("key", "now", "then"), [("lr0", 0.03, 0.02), ("box", 7.0, 0.05)])
def test_an_override_that_has_changed(faster: Path, key: str, now: float, then: float) -> None:
    with pytest.raises(UserError) as caught:
        resumed("--resume", str(faster), f"--hyp.{key}", str(now), "--hyp", LOW)
    assert str(caught.value) == (
        f"--hyp.{key} is {now} now, and {faster} was begun with {then}: it cannot go on like that; leave it out, or "
        f"start a new run from {faster / 'weights' / 'last.pt'}"
    )


def test_a_file_that_has_changed_below_overrides(faster: Path, tmp_path: Path) -> None:
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("lr0: 0.5\nbox: 7\n")  # lr0 is overridden, as it was
    with pytest.raises(UserError, match=r"mine\.yaml has changed since .*: box is 7\.0 and was 0\.05; leave it out"):
        resumed("--resume", str(faster), "--hyp", str(hyp))


def test_overrides_are_checked_as_the_runs_tasks(faster: Path) -> None:
    with pytest.raises(UserError, match=r"^unknown flag --hyp\.mosiac \(did you mean '--hyp\.mosaic'\?\)$"):
        resumed("--resume", str(faster), "--hyp.mosiac", "1")
    with pytest.raises(UserError, match=r"^--hyp\.mosaic is 2\.0; give 0 to 1$"):
        resumed("--resume", str(faster), "--hyp.mosaic", "2")


def test_a_run_of_a_version_without_overrides(run: Path) -> None:
    settings = read_yaml(run / "settings.yaml")
    del settings["overrides"]
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert resumed("--resume", str(run)).options.overrides == {}
    assert resumed("--resume", str(run), "--hyp.lr0", "0.01", "--hyp", LOW).options.overrides == {"lr0": "0.01"}


# What is said of the rest


def test_changes(run: Path) -> None:
    options, begun, _ = resumed("--resume", str(run))
    assert begun is not None
    assert changes(begun, options) == []
    longer = ("--epochs", "20", "--workers", "3", "--device", "0", "--project", "elsewhere", "--dist-timeout", "9")
    options, begun, _ = resumed("--resume", str(run), *longer)
    assert begun is not None
    assert changes(begun, options) == [
        "--epochs is 20 and was 10",
        "--dist-timeout is 9.0 and was 1800.0",
        "--workers is 3 and was 1",
        "the learning rate from here on is that of a run of 20 epochs",
    ]


def test_several_words_that_have_changed(tmp_path: Path) -> None:
    """A YAML has lists, and options have tuples."""
    run = begin(tmp_path / "exp", Progress(epoch=1), wandb_tags=["a", "b"])
    options, begun, _ = resumed("--resume", str(run))
    assert begun is not None
    assert options.wandb_tags == ("a", "b")
    assert changes(begun, options) == []
    options, begun, _ = resumed("--resume", str(run), "--wandb-tags", "c")
    assert begun is not None
    assert changes(begun, options) == ["--wandb-tags is ('c',) and was ['a', 'b']"]


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
        ({"names": {0: "disc", 1: "ring"}}, r"\(3 then, 2 now: class 2 was bar and is none\); mend names: in the data"),
        ({"names": {0: "disc", 1: "bar", 2: "ring"}}, r"\(3 then, 3 now: class 1 was ring and is bar\)"),
        ({"names": {**IDENTITY["names"], 3: "dot"}}, r"\(3 then, 4 now: class 3 was none and is dot\)"),  # type: ignore[dict-item]
        ({"imgsz": 128}, "--imgsz is 128 now, and the run was begun with 96; leave it out"),
        (
            {"images": {"count": "27", "files": "dddd", "labels": "eeee"}},
            r"the training images have changed since the run began \(28 then, 27 now\); bring back the same",
        ),
    ],
)
def test_other_classes_sizes_and_images_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_same(IDENTITY, {**IDENTITY, **changed})


# Many processes: the main one decides


def settled(project: str, *flags: str) -> str:
    """What a process is told; those that are not the main one find another project, as on another machine."""
    own = project if place().rank == 0 else "nowhere"
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
    assert one.startswith(f"error: --seed is 1 now, and {run} was begun with 0")
    assert other == one


def test_all_processes_stop_at_a_finished_run(
    tmp_path: Path, on_processes: OnProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "runs" / "exp", Progress(epoch=10, finished=True))
    assert on_processes(2, settled, str(run.parent), "--resume") == ["stopped 0"] * 2
    assert capfd.readouterr().out.count("is finished") == 1
